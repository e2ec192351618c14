/*
 * The copies of a staged operation: enqueued on a stream, and waited for. Copies of CUDA memory go
 * on the buffers' own streams, so that they follow the work that the program enqueued there before.
 * An event marks their end; it is polled until the operation times out, the context is aborted, or
 * the wait is canceled: then an alarm tells of it. Runs on the operation's thread.
 *
 * Invariant: a block is marked as being copied until the event has completed; if the event can't
 * be recorded, the block is lost.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "backend/staging/staging.h"

enum {
    QUICK_POLLS = 200, /* most copies complete within these */
    SLEEP_NS = 50 * 1000,
    MAX_SLEEP_NS = 1000 * 1000,
};

static tddp_status copy_piece(tddp_staged *self, const tddp_staging_piece *piece, bool inwards,
                              tddp_cuda_stream stream)
{
    char *place = self->block->data + piece->at;
    void *into = inwards ? place : piece->data;
    const void *from = inwards ? piece->data : place;
    return tddp_cuda_check(
        self->cuda,
        self->cuda->cudaMemcpyAsync(into, from, piece->bytes, TDDP_CUDA_COPY_ANY, stream),
        "cudaMemcpyAsync");
}

static tddp_cuda_stream stream_of(const tddp_staged *self, const tddp_staging_piece *piece)
{
    return self->block->stream ? self->block->stream : piece->stream;
}

/* Records the event after the copies of all pieces before `end`. */
static tddp_status mark(tddp_staged *self, bool inwards, size_t end)
{
    const tddp_cuda *cuda = self->cuda;
    tddp_cuda_stream first = NULL;
    size_t marked = 0;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < end && status == TDDP_OK; i++) {
        const tddp_staging_piece *piece = &self->layout.pieces[i];
        if (!(inwards ? piece->in : piece->out)) {
            continue;
        }
        tddp_cuda_stream stream = stream_of(self, piece);
        first = marked++ == 0 ? stream : first;
        if (stream != first) {
            status = tddp_cuda_follow(cuda, self->block->event, first, stream);
        }
    }
    self->last = first;
    self->alarmed = marked == 0;
    if (status == TDDP_OK && marked > 0) {
        status = tddp_cuda_check(cuda, cuda->cudaEventRecord(self->block->event, first),
                                 "cudaEventRecord");
    }
    return status;
}

/* Earlier copies may be in flight: tries once more to record the event that marks their end. */
static tddp_status fail_begun(tddp_staged *self, bool inwards, size_t end, tddp_status status)
{
    char text[1024];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    self->block->lost = mark(self, inwards, end) != TDDP_OK;
    return tddp_fail(status, "%s", text);
}

tddp_status tddp_staging_copies_begin(tddp_staged *self, bool inwards)
{
    size_t end = 0;
    tddp_status status = TDDP_OK;
    for (; end < self->layout.count && status == TDDP_OK; end++) {
        const tddp_staging_piece *piece = &self->layout.pieces[end];
        if (inwards ? piece->in : piece->out) {
            self->block->copying = true;
            status = copy_piece(self, piece, inwards, stream_of(self, piece));
        }
    }
    if (status == TDDP_OK) {
        status = mark(self, inwards, end);
    }
    return status ? fail_begun(self, inwards, end, status) : TDDP_OK;
}

static tddp_status fail_timeout(const tddp_staged *self)
{
    bool of_cuda = self->type == TDDP_CPU;
    bool to_host = (self->stage == TDDP_STAGING_COPYING_IN) == of_cuda;
    return tddp_fail(TDDP_TIMEOUT, "the copy %s cuda:%d has not ended within %" PRId64 " ms: %s",
                     to_host ? "to the host from" : "from the host to", self->device,
                     self->requested->timeout_ms,
                     of_cuda ? "what its stream was given before lasts longer, or the device hangs"
                             : "the device hangs");
}

/* Nobody waits for the copies any more, for the time being. */
static void set_alarm(tddp_staged *self)
{
    if (!self->alarmed) {
        self->alarmed = true;
        tddp_staging_alarm_set(self->owner->alarm, self->cuda, self->last);
    }
}

tddp_status tddp_staging_copies_await(tddp_staged *self)
{
    const tddp_cancel *cancel = self->cancel;
    long sleep_ns = SLEEP_NS;
    for (int polls = 0; self->block && self->block->copying; polls++) {
        tddp_cuda_error error = self->cuda->cudaEventQuery(self->block->event);
        if (error != TDDP_CUDA_NOT_READY) {
            self->block->copying = error != TDDP_CUDA_SUCCESS;
            return tddp_cuda_check(self->cuda, error, "cudaEventQuery");
        }
        (void)self->cuda->cudaGetLastError();
        if (atomic_load(&self->owner->aborted)) {
            return tddp_fail(TDDP_GROUP_FAILED, "aborted while memory of cuda:%d was copied",
                             self->device);
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            set_alarm(self);
            return tddp_fail(TDDP_CANCELED, "interrupted while memory of cuda:%d was copied",
                             self->device);
        }
        if (tddp_now_ns() >= self->deadline) {
            return fail_timeout(self);
        }
        if (polls < QUICK_POLLS) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&(struct timespec){0, sleep_ns}, NULL);
            sleep_ns = 2 * sleep_ns < MAX_SLEEP_NS ? 2 * sleep_ns : MAX_SLEEP_NS;
        }
    }
    return TDDP_OK;
}
