/*
 * The fair lock of a store's connection: a caller that waits for a key in short slices would
 * otherwise acquire it again before any other thread wakes. Acquiring has a deadline and a cancel
 * token. Any thread. Invariant: while a thread waits, the lock is held; the holder passes it to the
 * first.
 */
#include <errno.h>
#include <poll.h>

#include "store/tcp/tcp.h"

/* On the stack of the thread that waits. */
struct tddp_tcp_waiter {
    tddp_cancel *event; /* a cancel token, used as an event that can be polled */
    bool granted;
    struct tddp_tcp_waiter *next;
};

tddp_status tddp_tcp_lock_init(tddp_tcp_lock *lock)
{
    int error = pthread_mutex_init(&lock->mutex, NULL);
    if (error) {
        errno = error;
        return tddp_fail_errno("pthread_mutex_init");
    }
    lock->ready = true;
    return TDDP_OK;
}

void tddp_tcp_lock_destroy(tddp_tcp_lock *lock)
{
    if (lock->ready) {
        (void)pthread_mutex_destroy(&lock->mutex);
    }
}

/* With the mutex held. */
static tddp_status enqueue(tddp_tcp_lock *lock, struct tddp_tcp_waiter *self)
{
    tddp_status status = tddp_cancel_create(&self->event);
    if (status) {
        return status;
    }
    struct tddp_tcp_waiter **end = &lock->waiters;
    while (*end) {
        end = &(*end)->next;
    }
    *end = self;
    return TDDP_OK;
}

static void dequeue(tddp_tcp_lock *lock, const struct tddp_tcp_waiter *self)
{
    struct tddp_tcp_waiter **at = &lock->waiters;
    while (*at != self) {
        at = &(*at)->next;
    }
    *at = self->next;
}

/* A lock that is granted at the last moment is taken all the same. */
static tddp_status await_grant(tddp_tcp_lock *lock, struct tddp_tcp_waiter *self,
                               const tddp_store_call *call)
{
    bool granted;
    tddp_status status;
    do {
        status = tddp_net_poll(tddp_cancel_fd(self->event), POLLIN, call->deadline_ns,
                               tddp_store_call_cancel_fd(call));
        pthread_mutex_lock(&lock->mutex);
        granted = self->granted;
        if (!granted && status) {
            dequeue(lock, self);
        }
        pthread_mutex_unlock(&lock->mutex);
    } while (!granted && status == TDDP_OK);
    tddp_cancel_free(self->event);
    return granted ? TDDP_OK : status;
}

tddp_status tddp_tcp_lock_acquire(tddp_tcp_lock *lock, const tddp_store_call *call)
{
    struct tddp_tcp_waiter self = {.granted = false};
    pthread_mutex_lock(&lock->mutex);
    bool is_free = !lock->held;
    lock->held = true;
    tddp_status status = is_free ? TDDP_OK : enqueue(lock, &self);
    pthread_mutex_unlock(&lock->mutex);
    return is_free || status ? status : await_grant(lock, &self, call);
}

void tddp_tcp_lock_release(tddp_tcp_lock *lock)
{
    pthread_mutex_lock(&lock->mutex);
    struct tddp_tcp_waiter *first = lock->waiters;
    lock->held = first != NULL;
    if (first) {
        lock->waiters = first->next;
        first->granted = true;
        tddp_cancel_trigger(first->event); /* with the mutex, since the waiter frees it then */
    }
    pthread_mutex_unlock(&lock->mutex);
}
