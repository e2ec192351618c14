/*
 * Handles on operations. Completed once by the thread that executed the operation, waited for by
 * any thread: a waiter tries the group's operations up to its own (progress.c), then sleeps until
 * that is done, and looks at its cancel token now and then.
 */
#include <inttypes.h>
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
    pthread_mutex_unlock(&work->mutex);
    tddp_eventcount_notify(&work->waiters);
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

static tddp_status interrupted(const tddp_work *work)
{
    return tddp_fail(TDDP_CANCELED,
                     "the wait for %s %" PRIu64
                     " was interrupted; it goes on and its buffers are still in use",
                     tddp_op_name(work->op.kind), work->op.sequence);
}

static tddp_status await_done(tddp_work *work, const waiting *self, const tddp_cancel *cancel)
{
    const int64_t longest =
        cancel ? TDDP_GROUP_TOKEN_CHECK_MS * TDDP_NS_PER_MS : TDDP_NS_PER_S; /* for `expiry` */
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK) {
        const uint32_t seen = tddp_eventcount_read(&work->waiters);
        if (atomic_load(&work->done)) {
            return outcome(work);
        }
        const int64_t left = self->deadline - tddp_now_ns();
        status =
            cancel && tddp_cancel_triggered(cancel) ? interrupted(work) : check_time(work, self);
        if (status == TDDP_OK) {
            tddp_eventcount_wait(&work->waiters, seen, 0, left < longest ? left : longest);
        }
    }
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
    return await_done(work, &self, cancel);
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
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&work->mutex);
    if (work->event_fd < 0) {
        work->event_fd = eventfd(atomic_load(&work->done), EFD_CLOEXEC | EFD_NONBLOCK);
        status = work->event_fd < 0 ? tddp_fail_errno("eventfd") : TDDP_OK;
    }
    if (status == TDDP_OK) {
        *fd = work->event_fd;
    }
    pthread_mutex_unlock(&work->mutex);
    return status;
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
        pthread_mutex_destroy(&work->mutex);
    }
    tddp_group_work_clear(work);
    free(work);
}
