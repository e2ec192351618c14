/*
 * See on_demand.h. Invariant: `state` only grows, up to READY or FAILED.
 */
#include "backend/on_demand.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/blocking.h"
#include "base/base.h"

typedef enum stage {
    IDLE,
    ASKED,   /* all ranks are being asked, by this one */
    STARTED, /* a thread connects */
    READY,
    FAILED,
} stage;

typedef struct part {
    tddp_on_demand_connect *connect;
    void *context;
    tddp_eventcount *events;
} part;

struct tddp_on_demand {
    pid_t pid;
    int64_t timeout_ms;
    tddp_on_demand_ask *ask;
    void *data;
    _Atomic stage state;   /* changes with the lock held */
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    part *parts; /* constant once the group is made */
    size_t count;
    bool stopped;
    tddp_cancel *cancel; /* of connecting; NULL: it has not started */
    tddp_cancel *given_up;
    tddp_blocking_call connect;
    tddp_status failure;
    char *failure_text; /* NULL: no memory for it */
};

tddp_status tddp_on_demand_create(int64_t timeout_ms, tddp_on_demand_ask *ask, void *data,
                                  tddp_on_demand **out)
{
    tddp_on_demand *self = tddp_alloc(sizeof *self);
    tddp_status status = self ? tddp_cond_init(&self->changed) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(self);
        return status;
    }
    pthread_mutex_init(&self->mutex, NULL);
    self->pid = tddp_process_id();
    self->timeout_ms = timeout_ms;
    self->ask = ask;
    self->data = data;
    *out = self;
    return TDDP_OK;
}

void tddp_on_demand_free(tddp_on_demand *self)
{
    if (!self) {
        return;
    }
    if (self->pid == tddp_process_id()) {
        pthread_cond_destroy(&self->changed);
        pthread_mutex_destroy(&self->mutex);
    }
    tddp_cancel_free(self->cancel);
    tddp_cancel_free(self->given_up);
    free(self->failure_text);
    free(self->parts);
    free(self);
}

/* --- for backends ---------------------------------------------------------------------------- */

tddp_status tddp_on_demand_add(tddp_on_demand *self, tddp_on_demand_connect *connect, void *context,
                               tddp_eventcount *events)
{
    part *more = tddp_grow(self->parts, self->count, sizeof *more);
    if (!more) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->parts = more;
    self->parts[self->count++] = (part){connect, context, events};
    return TDDP_OK;
}

/* Of who waits no longer. With the lock held. */
static tddp_status outcome(const tddp_on_demand *self)
{
    if (self->stopped) {
        return tddp_fail(TDDP_GROUP_FAILED,
                         "aborted while the ranks of several hosts were connecting");
    }
    if (self->state == FAILED) {
        return tddp_fail(self->failure, "%s",
                         self->failure_text ? self->failure_text : tddp_status_text(self->failure));
    }
    if (self->state != READY) {
        return tddp_fail(TDDP_TIMEOUT, "the ranks of several hosts have not connected to each "
                                       "other in the time given: do all of them live and run?");
    }
    return TDDP_OK;
}

/* With the lock held. */
static void notify(tddp_on_demand *self)
{
    pthread_cond_broadcast(&self->changed);
    for (size_t i = 0; i < self->count; i++) {
        tddp_eventcount_notify(self->parts[i].events);
    }
}

tddp_status tddp_on_demand_check(tddp_on_demand *self, int64_t deadline)
{
    if (atomic_load_explicit(&self->state, memory_order_acquire) == READY) {
        return TDDP_OK;
    }
    pthread_mutex_lock(&self->mutex);
    const bool asks = self->state == IDLE && !self->stopped;
    const bool waits = self->state < READY && !self->stopped && tddp_now_ns() < deadline;
    self->state = asks ? ASKED : self->state;
    const tddp_status status = asks || waits ? TDDP_CANCELED : outcome(self);
    pthread_mutex_unlock(&self->mutex);
    if (asks) {
        self->ask(self->data);
    }
    return status;
}

void tddp_on_demand_stop(tddp_on_demand *self)
{
    pthread_mutex_lock(&self->mutex);
    self->stopped = true;
    if (self->cancel) {
        tddp_cancel_trigger(self->cancel);
    }
    notify(self);
    pthread_mutex_unlock(&self->mutex);
}

/* --- for the group --------------------------------------------------------------------------- */

/* With the lock held. */
static void set_outcome(tddp_on_demand *self, tddp_status status, const char *text)
{
    self->failure = status;
    self->failure_text = status ? tddp_copy_string(text) : NULL;
    self->state = status ? FAILED : READY;
    notify(self);
}

void tddp_on_demand_fail(tddp_on_demand *self, tddp_status status, const char *text)
{
    pthread_mutex_lock(&self->mutex);
    if (self->state < STARTED) {
        set_outcome(self, status, text);
    }
    pthread_mutex_unlock(&self->mutex);
}

static void connect_all(void *data, void *nothing)
{
    tddp_on_demand *self = data;
    (void)nothing;
    const int64_t deadline = tddp_deadline_after_ms(self->timeout_ms);
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < self->count && status == TDDP_OK; i++) {
        const tddp_wait wait = {tddp_deadline_poll_ms(deadline), self->cancel};
        status = self->parts[i].connect(self->parts[i].context, &wait, self->given_up);
    }
    pthread_mutex_lock(&self->mutex);
    set_outcome(self, status, tddp_error_message());
    pthread_mutex_unlock(&self->mutex);
}

void tddp_on_demand_start(tddp_on_demand *self)
{
    pthread_mutex_lock(&self->mutex);
    if (self->state < STARTED && self->count > 0 && !self->stopped) {
        self->state = STARTED;
        tddp_status status = tddp_cancel_create(&self->cancel);
        status = status ? status : tddp_cancel_create(&self->given_up);
        status = status ? status : tddp_blocking_reserve();
        if (status) {
            set_outcome(self, status, tddp_error_message());
        } else {
            self->connect = (tddp_blocking_call){.run = connect_all, .context = self};
            tddp_blocking_start(&self->connect);
        }
    }
    pthread_mutex_unlock(&self->mutex);
}

void tddp_on_demand_end(tddp_on_demand *self, int64_t timeout_ms)
{
    if (!self) {
        return;
    }
    const int64_t deadline = tddp_deadline_after_ms(timeout_ms);
    pthread_mutex_lock(&self->mutex);
    while (self->state == STARTED && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&self->changed, &self->mutex, deadline);
    }
    if (self->given_up) {
        tddp_cancel_trigger(self->given_up);
    }
    pthread_mutex_unlock(&self->mutex);
    tddp_on_demand_stop(self);
    pthread_mutex_lock(&self->mutex);
    while (self->state == STARTED) {
        pthread_cond_wait(&self->changed, &self->mutex);
    }
    pthread_mutex_unlock(&self->mutex);
}
