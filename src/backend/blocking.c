/*
 * See blocking.h. Invariant: there are as many threads that wait, or are about to, as calls in the
 * list, reservations and `unreserved` threads together; so each reservation and each call has one.
 * All state is the process's; a forked child starts without any.
 */
#include "backend/blocking.h"

#include "base/base.h"

enum { STACK_BYTES = 2 << 20 }; /* of a device's library, say */

int64_t tddp_blocking_idle_ms = 1000;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wake; /* a call is in the list */
    bool ready;          /* `wake` is initialized */
    size_t unreserved;
    tddp_blocking_call *head;
    tddp_blocking_call *tail;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void before_fork(void)
{
    pthread_mutex_lock(&pool.mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&pool.mutex);
}

/* The threads and their calls are the parent's. */
static void after_fork_in_child(void)
{
    pool.head = pool.tail = NULL;
    pool.unreserved = 0;
    pool.ready = tddp_cond_init(&pool.wake) == TDDP_OK;
    pthread_mutex_unlock(&pool.mutex);
}

static bool registered; /* for fork() */

/* Before anything takes the lock. */
static void register_fork(void)
{
    registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

/* With the lock held. */
static tddp_status prepare(void)
{
    tddp_status status = pool.ready ? TDDP_OK : tddp_cond_init(&pool.wake);
    pool.ready = status == TDDP_OK;
    return !registered ? TDDP_OUT_OF_MEMORY : status;
}

/* Waits for a call, which is taken out of the list; NULL: this thread is not needed, and not
 * counted any more. With the lock held. */
static tddp_blocking_call *next_call(void)
{
    int64_t until = tddp_deadline_after_ms(tddp_blocking_idle_ms);
    while (!pool.head) {
        if (!tddp_cond_wait_until(&pool.wake, &pool.mutex, until) && !pool.head) {
            if (pool.unreserved > 0) {
                pool.unreserved--;
                return NULL;
            }
            until = tddp_deadline_after_ms(tddp_blocking_idle_ms);
        }
    }
    tddp_blocking_call *call = pool.head;
    pool.head = call->next;
    pool.tail = pool.head ? pool.tail : NULL;
    return call;
}

static void *body(void *nothing)
{
    (void)nothing;
    tddp_blocking_call *call;
    pthread_mutex_lock(&pool.mutex);
    while ((call = next_call())) {
        const tddp_blocking_call taken = *call;
        pthread_mutex_unlock(&pool.mutex);
        taken.run(taken.context, taken.data);
        pthread_mutex_lock(&pool.mutex);
        pool.unreserved++;
    }
    pthread_mutex_unlock(&pool.mutex);
    return NULL;
}

tddp_status tddp_blocking_reserve(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_t thread;
    (void)pthread_once(&once, register_fork);
    pthread_mutex_lock(&pool.mutex);
    tddp_status status = prepare();
    const bool found = status == TDDP_OK && pool.unreserved > 0;
    pool.unreserved -= found;
    pthread_mutex_unlock(&pool.mutex);
    if (status == TDDP_OK && !found) {
        status = tddp_thread_start_sized(&thread, "tddp-blocking", body, NULL, STACK_BYTES);
        if (status == TDDP_OK) {
            (void)pthread_detach(thread); /* of a new thread, which is never joined */
        }
    }
    return status;
}

void tddp_blocking_release(void)
{
    pthread_mutex_lock(&pool.mutex);
    pool.unreserved++;
    pthread_mutex_unlock(&pool.mutex);
}

void tddp_blocking_start(tddp_blocking_call *call)
{
    call->next = NULL;
    pthread_mutex_lock(&pool.mutex);
    if (pool.tail) {
        pool.tail->next = call;
    } else {
        pool.head = call;
    }
    pool.tail = call;
    pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.mutex);
}
