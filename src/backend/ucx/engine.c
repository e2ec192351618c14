/*
 * The thread that moves messages while no caller does: one for the process, as long as there is a
 * group over UCX. It sleeps until the descriptor of a worker becomes readable.
 *
 * Callers that spin move messages themselves and need no thread, which would only take their core.
 * So a worker wakes it once (EPOLLONESHOT), and is armed again only if no caller has spun since;
 * else the thread looks again after RECHECK_MS. A caller that is about to sleep arms it at once
 * (transport.h's arm()).
 *
 * Invariant: a worker that is not armed, and that no caller polls, is one that the thread will arm
 * within RECHECK_MS. `engine.lock` guards the list, and is taken before any rank's mutex.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"

/* Messages may arrive faster than they are moved: others get the mutex after so many rounds. */
enum { RECHECK_MS = 5, MAX_EVENTS = 16, MAX_ROUNDS = 64 };

/* What a thread waits on. The thread that removes the last worker ends it. */
typedef struct loop {
    int epoll;
    int wake;
    pthread_t thread;
    bool stop;
} loop;

/* Process-wide: one thread serves all groups. */
static struct {
    pthread_mutex_t lock;
    tddp_ucx *first;
    loop *loop; /* NULL: no thread */
} engine = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- arming ---------------------------------------------------------------------------------- */

/* With the mutex held: moves what has arrived, and then has the next event wake the thread. */
static void arm(tddp_ucx *self)
{
    if (self->armed || self->epoll < 0 || !self->worker) {
        return;
    }
    ucs_status_t status = UCS_ERR_BUSY;
    for (int i = 0; i < MAX_ROUNDS && status == UCS_ERR_BUSY; i++) {
        tddp_ucx_progress(self);
        status = ucp_worker_arm(self->worker);
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = self};
    self->armed =
        status == UCS_OK && epoll_ctl(self->epoll, EPOLL_CTL_MOD, self->descriptor, &event) == 0;
}

void tddp_ucx_arm(void *context)
{
    tddp_ucx *self = context;
    pthread_mutex_lock(&self->mutex);
    self->polled = false;
    arm(self);
    pthread_mutex_unlock(&self->mutex);
}

void tddp_ucx_poll(void *context)
{
    tddp_ucx *self = context;
    if (pthread_mutex_trylock(&self->mutex) != 0) {
        return; /* another thread moves the messages */
    }
    self->polled = true;
    tddp_ucx_progress(self);
    pthread_mutex_unlock(&self->mutex);
}

/* --- the thread ------------------------------------------------------------------------------ */

/* The event of a worker, or a look at one that was polled. */
static void serve(tddp_ucx *self, bool event)
{
    pthread_mutex_lock(&self->mutex);
    self->armed = self->armed && !event;
    if (self->polled) {
        self->recheck_ms = RECHECK_MS;
    } else {
        arm(self);
        self->recheck_ms = self->armed ? -1 : 0;
    }
    self->polled = false;
    pthread_mutex_unlock(&self->mutex);
}

/* Returns when to look again, for epoll_wait(2). */
static int serve_all(const struct epoll_event *events, int count)
{
    int soonest = -1;
    for (tddp_ucx *each = engine.first; each; each = each->next) {
        bool event = false;
        for (int i = 0; i < count; i++) {
            event = event || events[i].data.ptr == each;
        }
        if (event || each->recheck_ms >= 0) {
            serve(each, event);
        }
        if (soonest < 0 || (each->recheck_ms >= 0 && each->recheck_ms < soonest)) {
            soonest = each->recheck_ms;
        }
    }
    return soonest;
}

static void *run(void *data)
{
    loop *it = data;
    struct epoll_event events[MAX_EVENTS];
    int recheck_ms = -1;
    for (;;) {
        const int count = epoll_wait(it->epoll, events, MAX_EVENTS, recheck_ms);
        pthread_mutex_lock(&engine.lock);
        const bool stop = it->stop;
        recheck_ms = stop ? -1 : serve_all(events, count);
        pthread_mutex_unlock(&engine.lock);
        if (stop) {
            return NULL;
        }
    }
}

static void free_loop(loop *it)
{
    tddp_close(it->epoll);
    tddp_close(it->wake);
    free(it);
}

static tddp_status start(loop **out)
{
    loop *it = calloc(1, sizeof *it);
    if (!it) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    it->epoll = epoll_create1(EPOLL_CLOEXEC);
    it->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    tddp_status status = TDDP_OK;
    if (it->epoll < 0 || it->wake < 0 ||
        epoll_ctl(it->epoll, EPOLL_CTL_ADD, it->wake, &event) != 0) {
        status = tddp_fail_errno("UCX's thread");
    }
    status = status ? status : tddp_thread_start(&it->thread, "tddp-ucx", run, it);
    if (status) {
        free_loop(it);
        return status;
    }
    *out = it;
    return TDDP_OK;
}

/* --- its workers ----------------------------------------------------------------------------- */

tddp_status tddp_ucx_engine_add(tddp_ucx *self)
{
    struct epoll_event event = {.events = 0, .data.ptr = self};
    pthread_mutex_lock(&engine.lock);
    tddp_status status = engine.loop ? TDDP_OK : start(&engine.loop);
    if (status == TDDP_OK &&
        epoll_ctl(engine.loop->epoll, EPOLL_CTL_ADD, self->descriptor, &event) != 0) {
        status = tddp_fail_errno("epoll_ctl");
    }
    if (status == TDDP_OK) {
        self->next = engine.first;
        engine.first = self;
        pthread_mutex_lock(&self->mutex);
        self->epoll = engine.loop->epoll;
        self->recheck_ms = -1;
        arm(self);
        pthread_mutex_unlock(&self->mutex);
    }
    pthread_mutex_unlock(&engine.lock);
    return status;
}

void tddp_ucx_engine_forget(tddp_ucx *self)
{
    if (self->epoll >= 0) {
        (void)epoll_ctl(self->epoll, EPOLL_CTL_DEL, self->descriptor, NULL);
        self->epoll = -1;
    }
}

void tddp_ucx_engine_remove(tddp_ucx *self)
{
    loop *ended = NULL;
    pthread_mutex_lock(&engine.lock);
    tddp_ucx **link = &engine.first;
    while (*link && *link != self) {
        link = &(*link)->next;
    }
    if (*link) {
        *link = self->next;
    }
    if (!engine.first && engine.loop) {
        const uint64_t one = 1;
        ended = engine.loop;
        engine.loop = NULL;
        ended->stop = true;
        (void)!write(ended->wake, &one, sizeof one);
    }
    pthread_mutex_unlock(&engine.lock);
    if (ended) {
        (void)pthread_join(ended->thread, NULL);
        free_loop(ended);
    }
}
