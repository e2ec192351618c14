/*
 * Handles on operations. Finished once by the thread that executes the operation, waited for by any
 * thread.
 *
 * A waiter without a cancel token sleeps on the condition variable; one with a token polls that and
 * an eventfd, which the first such waiter opens. The last one closes it, unless the caller polls it
 * too: programs keep thousands of handles. A waiter may execute queued operations of the group
 * (progress.c).
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "group/group.h"

/* A backend ends its operation at the deadline; waiters give up on it only so much later. */
#define GRACE_NS (10 * TDDP_NS_PER_S)

void tddp_group_work_init(tddp_work *work, const tddp_op *op)
{
    *work = (tddp_work){.op = *op, .steps = 1, .source = TDDP_ANY_SOURCE, .event_fd = -1};
}

void tddp_group_work_clear(tddp_work *work)
{
    free(work->parts);
    tddp_group_bundle_free(work->bundle);
    free(work->description);
    free(work->pending_text);
    free(work->text);
}

tddp_status tddp_group_work_move(tddp_work *here, tddp_work **out)
{
    tddp_work *work = tddp_alloc(sizeof *work);
    if (!work) {
        return TDDP_OUT_OF_MEMORY;
    }
    *work = *here;
    tddp_status status = tddp_cond_init(&work->cond);
    if (status) {
        free(work);
        return status;
    }
    pthread_mutex_init(&work->mutex, NULL);
    atomic_init(&work->references, 2);
    work->pid = tddp_process_id();
    tddp_group_work_init(here, &work->op); /* what it owned is the new one's */
    *out = work;
    return TDDP_OK;
}

void tddp_group_work_finish(tddp_work *work, tddp_status status, const char *text)
{
    pthread_mutex_lock(&work->mutex);
    work->status = status;
    work->text = status ? tddp_copy_string(text) : NULL;
    void (*callback)(void *) = work->callback;
    atomic_store(&work->done, true);
    if (work->event_fd >= 0) {
        uint64_t one = 1;
        ssize_t ignored = write(work->event_fd, &one, sizeof one);
        (void)ignored;
    }
    pthread_cond_broadcast(&work->cond);
    pthread_mutex_unlock(&work->mutex);
    if (callback) {
        callback(work->callback_data);
    }
}

/* Returns the outcome of a work that is done, with its text on this thread. */
static tddp_status outcome(const tddp_work *work)
{
    if (work->status == TDDP_OK) {
        return TDDP_OK;
    }
    return tddp_fail(work->status, "%s", work->text ? work->text : tddp_status_text(work->status));
}

static tddp_status made_before_fork(const tddp_work *work)
{
    return tddp_fail(TDDP_FORKED,
                     "%s %" PRIu64 " was started by process %d, this is its child %d: wait for it "
                     "there",
                     tddp_op_name(work->op.kind), work->op.sequence, (int)work->pid,
                     (int)tddp_process_id());
}

/* One wait: when it has to check again, and by whose deadline it ends. */
typedef struct waiting {
    int64_t start;
    int64_t deadline; /* INT64_MAX: until the operation's deadline */
    bool limited;     /* by the caller's timeout */
} waiting;

static int64_t next_check(const waiting *self)
{
    /* Without a timeout of the caller's, checks once a second whether the backend is overdue. */
    int64_t check = self->limited ? self->deadline : tddp_now_ns() + TDDP_NS_PER_S;
    return check < self->deadline ? check : self->deadline;
}

static tddp_status check_time(const tddp_work *work, const waiting *self)
{
    int64_t now = tddp_now_ns();
    if (self->limited && now >= self->deadline) {
        return tddp_fail(TDDP_TIMEOUT,
                         "%s %" PRIu64 " is not done after waiting %" PRId64
                         " ms; it goes on and its buffers are still in use",
                         tddp_op_name(work->op.kind), work->op.sequence,
                         (now - self->start) / TDDP_NS_PER_MS);
    }
    int64_t expiry = atomic_load(&work->expiry);
    if (!self->limited && expiry > 0 && expiry < INT64_MAX - GRACE_NS && now >= expiry + GRACE_NS) {
        return tddp_fail(TDDP_TIMEOUT,
                         "%s %" PRIu64 " should have ended after its %" PRId64
                         " ms, but the backend has not returned",
                         tddp_op_name(work->op.kind), work->op.sequence, work->op.timeout_ms);
    }
    return TDDP_OK;
}

static tddp_status wait_on_condition(tddp_work *work, const waiting *self)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&work->mutex);
    while (!atomic_load(&work->done) && status == TDDP_OK) {
        if (!tddp_cond_wait_until(&work->cond, &work->mutex, next_check(self)) &&
            !atomic_load(&work->done)) {
            status = check_time(work, self);
        }
    }
    pthread_mutex_unlock(&work->mutex);
    return status;
}

static tddp_status open_event(tddp_work *work, int *fd)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&work->mutex);
    if (work->event_fd < 0) {
        work->event_fd = eventfd(atomic_load(&work->done), EFD_CLOEXEC | EFD_NONBLOCK);
        if (work->event_fd < 0) {
            status = tddp_fail_errno("eventfd");
        }
    }
    work->event_waiters += status == TDDP_OK;
    *fd = work->event_fd;
    pthread_mutex_unlock(&work->mutex);
    return status;
}

static void leave_event(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    if (--work->event_waiters == 0 && !work->event_kept) {
        tddp_close(work->event_fd);
        work->event_fd = -1;
    }
    pthread_mutex_unlock(&work->mutex);
}

static tddp_status wait_cancelable(tddp_work *work, const waiting *self, tddp_cancel *cancel)
{
    int fd;
    tddp_status status = open_event(work, &fd);
    if (status) {
        return status;
    }
    while (status == TDDP_OK && !atomic_load(&work->done)) {
        struct pollfd entries[2] = {{.fd = fd, .events = POLLIN},
                                    {.fd = tddp_cancel_fd(cancel), .events = POLLIN}};
        int ready = poll(entries, 2, tddp_deadline_poll_ms(next_check(self)));
        if (ready < 0 && errno != EINTR) {
            status = tddp_fail_errno("poll");
        } else if (atomic_load(&work->done)) {
            break;
        } else if (ready > 0 && entries[1].revents) {
            status = tddp_fail(TDDP_CANCELED,
                               "the wait for %s %" PRIu64
                               " was interrupted; it goes on and its buffers are still in use",
                               tddp_op_name(work->op.kind), work->op.sequence);
        } else if (ready == 0) {
            status = check_time(work, self);
        }
    }
    leave_event(work);
    return status;
}

/* Executes queued operations up to this one, unless another thread does so. */
static void make_progress(tddp_work *work, const waiting *self, tddp_cancel *cancel)
{
    if (work->group && self->deadline > self->start) {
        tddp_cancel bounded = {
            .fd = tddp_cancel_fd(cancel), .also = cancel, .deadline = self->deadline};
        tddp_group_make_progress(work, self->limited ? &bounded : cancel);
    }
}

tddp_status tddp_work_wait(tddp_work *work, const tddp_wait *wait)
{
    if (!work) {
        return TDDP_OK;
    }
    if (atomic_load(&work->done)) {
        return outcome(work);
    }
    if (work->pid != tddp_process_id()) {
        return made_before_fork(work);
    }
    waiting self = {.start = tddp_now_ns(), .deadline = INT64_MAX};
    self.limited = wait && wait->timeout_ms >= 0;
    if (self.limited) {
        self.deadline = tddp_deadline_from(self.start, wait->timeout_ms);
    }
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    make_progress(work, &self, cancel);
    if (atomic_load(&work->done)) {
        return outcome(work);
    }
    tddp_status status =
        cancel ? wait_cancelable(work, &self, cancel) : wait_on_condition(work, &self);
    return status ? status : outcome(work);
}

/* --- devices --------------------------------------------------------------------------------- */

tddp_status tddp_work_order(tddp_work *work, void *stream, const tddp_wait *wait)
{
    int32_t index;
    if (!work || tddp_work_device(work, &index) == TDDP_CPU || atomic_load(&work->done)) {
        return tddp_work_wait(work, wait);
    }
    if (work->pid != tddp_process_id()) {
        return made_before_fork(work);
    }
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&work->mutex);
    /* A work with a request is not done, so its group exists. */
    const bool orders = atomic_load(&work->launched) && work->request;
    if (orders) {
        const tddp_inner *device = tddp_group_backend_for(work->on_device, &work->op);
        status = device->backend->order(device->context, work->request, stream);
    }
    pthread_mutex_unlock(&work->mutex);
    /* Otherwise the work is about to be done, or its launch was interrupted. */
    return orders ? status : tddp_work_wait(work, wait);
}

tddp_device_type tddp_work_device(const tddp_work *work, int32_t *index)
{
    if (!work) {
        *index = 0;
        return TDDP_CPU;
    }
    const tddp_op *op = &work->op;
    const tddp_buffer *buffer = op->input.device_type == TDDP_CPU ? &op->output : &op->input;
    *index = work->on_device ? buffer->device_index : 0;
    return work->on_device ? buffer->device_type : TDDP_CPU;
}

int tddp_work_completed(const tddp_work *work)
{
    return !work || atomic_load(&work->done);
}

tddp_status tddp_work_status(const tddp_work *work)
{
    return work && atomic_load(&work->done) ? outcome(work) : TDDP_OK;
}

tddp_op_kind tddp_work_kind(const tddp_work *work)
{
    return work->op.kind;
}

uint64_t tddp_work_sequence(const tddp_work *work)
{
    return work->op.sequence;
}

int tddp_work_source(const tddp_work *work)
{
    return work && tddp_work_completed(work) ? work->source : TDDP_ANY_SOURCE;
}

tddp_status tddp_work_on_done(tddp_work *work, void (*callback)(void *data), void *data)
{
    if (!callback) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "callback is NULL");
    }
    if (!work) {
        callback(data);
        return TDDP_OK;
    }
    if (work->pid != tddp_process_id()) {
        return made_before_fork(work);
    }
    pthread_mutex_lock(&work->mutex);
    bool has_one = work->has_callback;
    bool now = atomic_load(&work->done);
    if (!has_one) {
        work->has_callback = true;
        work->callback = now ? NULL : callback;
        work->callback_data = data;
    }
    pthread_mutex_unlock(&work->mutex);
    if (has_one) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s %" PRIu64 " has a callback already",
                         tddp_op_name(work->op.kind), work->op.sequence);
    }
    if (now) {
        callback(data);
    }
    return TDDP_OK;
}

tddp_status tddp_work_fd(tddp_work *work, int *fd)
{
    if (!work || !fd) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s is NULL", work ? "fd" : "work");
    }
    if (work->pid != tddp_process_id()) {
        return made_before_fork(work);
    }
    int event;
    tddp_status status = open_event(work, &event);
    if (status) {
        return status;
    }
    pthread_mutex_lock(&work->mutex);
    work->event_kept = true;
    work->event_waiters--;
    pthread_mutex_unlock(&work->mutex);
    *fd = event;
    return TDDP_OK;
}

void tddp_work_set_user(tddp_work *work, void *user)
{
    atomic_store(&work->user, user);
}

void *tddp_work_user(const tddp_work *work)
{
    return atomic_load(&work->user);
}

void tddp_work_release(tddp_work *work)
{
    if (!work || atomic_fetch_sub(&work->references, 1) != 1) {
        return;
    }
    tddp_close(work->event_fd);
    if (work->pid == tddp_process_id()) {
        pthread_cond_destroy(&work->cond);
        pthread_mutex_destroy(&work->mutex);
    }
    tddp_group_work_clear(work);
    free(work);
}
