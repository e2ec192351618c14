/*
 * The copies of an operation on other memory: put on a stream, and waited for. Copies of CUDA
 * memory go on the streams that the buffers name, so that they come after what the program put
 * there before; an event tells that they are over, and is looked at until the operation's time is
 * over, its group is aborted, or whoever waits is called away. Entered as staging.c is.
 *
 * Invariant: a block says that it is copied from or to until the event has told otherwise; where
 * the event cannot tell, the block is lost.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "group/staging.h"

enum {
    QUICK_LOOKS = 200, /* most copies are over by then */
    SLEEP_NS = 50 * 1000,
    MOST_SLEEP_NS = 1000 * 1000,
};

typedef struct tddp_group_staged staged;

static tddp_status copy_piece(staged *self, const tddp_group_piece *piece, bool inwards,
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

static tddp_cuda_stream stream_of(const staged *self, const tddp_group_piece *piece)
{
    return self->block->stream ? self->block->stream : piece->stream;
}

/* Puts the event behind the copies of all pieces before `end`. */
static tddp_status mark(staged *self, bool inwards, size_t end)
{
    const tddp_cuda *cuda = self->cuda;
    tddp_cuda_stream first = NULL;
    size_t marked = 0;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < end && status == TDDP_OK; i++) {
        const tddp_group_piece *piece = &self->layout.pieces[i];
        if (!(inwards ? piece->in : piece->out)) {
            continue;
        }
        tddp_cuda_stream stream = stream_of(self, piece);
        first = marked++ == 0 ? stream : first;
        if (stream != first) {
            status = tddp_cuda_follow(cuda, self->block->event, first, stream);
        }
    }
    if (status == TDDP_OK && marked > 0) {
        status = tddp_cuda_check(cuda, cuda->cudaEventRecord(self->block->event, first),
                                 "cudaEventRecord");
    }
    return status;
}

/* Copies may be under way all the same: what tells their end may be had by a second try. */
static tddp_status fail_begun(staged *self, bool inwards, size_t end, tddp_status status)
{
    char text[1024];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    self->block->lost = mark(self, inwards, end) != TDDP_OK;
    return tddp_fail(status, "%s", text);
}

tddp_status tddp_group_copies_begin(staged *self, bool inwards)
{
    size_t end = 0;
    tddp_status status = TDDP_OK;
    for (; end < self->layout.count && status == TDDP_OK; end++) {
        const tddp_group_piece *piece = &self->layout.pieces[end];
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

static tddp_status late(const staged *self, const tddp_work *work)
{
    bool of_cuda = self->type == TDDP_CPU;
    bool to_host = (self->stage == TDDP_STAGE_COPYING_IN) == of_cuda;
    return tddp_fail(TDDP_TIMEOUT, "the copy %s cuda:%d has not ended within %" PRId64 " ms: %s",
                     to_host ? "to the host from" : "from the host to", self->device,
                     work->op.timeout_ms,
                     of_cuda ? "what its stream was given before lasts longer, or the device hangs"
                             : "the device hangs");
}

tddp_status tddp_group_copies_await(tddp_group *group, tddp_work *work)
{
    staged *self = work->staged;
    tddp_cancel *cancel = work->op.cancel;
    long nap = SLEEP_NS;
    for (int looks = 0; self->block && self->block->copying; looks++) {
        tddp_cuda_error error = self->cuda->cudaEventQuery(self->block->event);
        if (error != TDDP_CUDA_NOT_READY) {
            self->block->copying = error != TDDP_CUDA_SUCCESS;
            return tddp_cuda_check(self->cuda, error, "cudaEventQuery");
        }
        (void)self->cuda->cudaGetLastError();
        if (atomic_load(&group->aborted)) {
            return tddp_fail(TDDP_GROUP_FAILED, "aborted while memory of cuda:%d was copied",
                             self->device);
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted while memory of cuda:%d was copied",
                             self->device);
        }
        if (tddp_now_ns() >= self->deadline) {
            return late(self, work);
        }
        if (looks < QUICK_LOOKS) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&(struct timespec){0, nap}, NULL);
            nap = 2 * nap < MOST_SLEEP_NS ? 2 * nap : MOST_SLEEP_NS;
        }
    }
    return TDDP_OK;
}
