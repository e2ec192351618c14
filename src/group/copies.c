/*
 * The copies of an operation on other memory: put on a stream, and waited for. Copies of CUDA
 * memory go on the streams that the buffers name, so that they come after what the program put
 * there before; an event tells that they are over, and is looked at until the operation's time is
 * over, its group is aborted, or whoever waits is called away. Entered as staging.c is.
 *
 * Invariant: a block says that it is copied from or to until the event has told otherwise. The
 * thread of a caller is on the same device afterwards as before.
 */
#include <inttypes.h>
#include <sched.h>

#include "group/staging.h"

enum {
    QUICK_LOOKS = 200, /* most copies are over by then */
    SLEEP_NS = 50 * 1000,
    MOST_SLEEP_NS = 1000 * 1000,
};

typedef struct tddp_group_staged staged;

/* --- a thread on a device -------------------------------------------------------------------- */

/* A graph that is captured elsewhere does not forbid what is done here meanwhile. Threads of the
 * group's stay on the device: to go back would make a context on another one. */
tddp_status tddp_group_visit_begin(tddp_group_visit *self, const tddp_group *group,
                                   const tddp_cuda *cuda, int device)
{
    int before = device;
    *self = (tddp_group_visit){.cuda = cuda, .before = -1, .mode = TDDP_CUDA_CAPTURE_RELAXED};
    (void)cuda->cudaThreadExchangeStreamCaptureMode(&self->mode);
    if (!tddp_group_on_progress_thread(group)) {
        tddp_cuda_error error = cuda->cudaGetDevice(&before);
        self->before = error == TDDP_CUDA_SUCCESS && before != device ? before : -1;
    }
    return tddp_cuda_check(cuda, cuda->cudaSetDevice(device), "cudaSetDevice");
}

void tddp_group_visit_end(tddp_group_visit *self)
{
    (void)self->cuda->cudaThreadExchangeStreamCaptureMode(&self->mode);
    if (self->before >= 0 && self->cuda->cudaSetDevice(self->before)) {
        (void)self->cuda->cudaGetLastError();
    }
}

/* --- copies ---------------------------------------------------------------------------------- */

static tddp_status mark(staged *self, tddp_cuda_stream stream)
{
    self->block->copying = true;
    return tddp_cuda_check(self->cuda, self->cuda->cudaEventRecord(self->block->event, stream),
                           "cudaEventRecord");
}

/* What `stream` has been given so far comes before what `first` is given from now on. */
static tddp_status follow(staged *self, tddp_cuda_stream stream, tddp_cuda_stream first)
{
    tddp_status status = mark(self, stream);
    if (status == TDDP_OK) {
        status = tddp_cuda_check(self->cuda,
                                 self->cuda->cudaStreamWaitEvent(first, self->block->event, 0),
                                 "cudaStreamWaitEvent");
    }
    return status;
}

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

/* The event stands behind them all. */
tddp_status tddp_group_copies_begin(staged *self, bool inwards)
{
    tddp_cuda_stream first = NULL;
    size_t begun = 0;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < self->places.count && status == TDDP_OK; i++) {
        const tddp_group_piece *piece = &self->places.pieces[i];
        if (!(inwards ? piece->in : piece->out)) {
            continue;
        }
        tddp_cuda_stream stream = self->block->stream ? self->block->stream : piece->stream;
        first = begun++ == 0 ? stream : first;
        status = copy_piece(self, piece, inwards, stream);
        if (status == TDDP_OK && stream != first) {
            status = follow(self, stream, first);
        }
    }
    if (begun == 0) {
        return TDDP_OK;
    }
    if (status == TDDP_OK) {
        status = mark(self, first);
    }
    if (status) {
        /* For those that have begun: so that somebody knows when they are over. */
        self->block->copying = true;
        if (self->cuda->cudaEventRecord(self->block->event, first)) {
            (void)self->cuda->cudaGetLastError();
        }
    }
    return status;
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
