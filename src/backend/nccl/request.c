/*
 * An operation's events: what its caller's stream had to do before, and its own end, by which it is
 * waited for on the host and on other streams. Made on its caller's thread, launched by
 * operations.c, awaited and freed on a thread of the group's.
 */
#include <stdlib.h>
#include <string.h>

#include <tddp/trace.h>

#include "backend/nccl/operations.h"

/* The one whose stream is the caller's: roots of gather and others have one of both alone. */
static const tddp_buffer *main_buffer(const tddp_op *op)
{
    return op->input.device_type == TDDP_CUDA ? &op->input : &op->output;
}

static bool wants_times(const tddp_op *op)
{
    const char *asked = getenv("TORCH_NCCL_ENABLE_TIMING");
    return op->device_ns && (tddp_trace_enabled() || (asked && strcmp(asked, "1") == 0));
}

/* What is put on a stream that is being captured runs when its graph does: maybe never, or often,
 * and nothing of ours would know. */
static tddp_status check_capture(const tddp_cuda *cuda, tddp_cuda_stream stream)
{
    int capturing = TDDP_CUDA_NO_CAPTURE;
    tddp_status status = tddp_cuda_check(cuda, cuda->cudaStreamIsCapturing(stream, &capturing),
                                         "cudaStreamIsCapturing");
    if (status || capturing == TDDP_CUDA_NO_CAPTURE) {
        return status;
    }
    return tddp_fail(TDDP_UNSUPPORTED, "this stream is being captured in a CUDA graph: call "
                                       "collectives before or after what is captured");
}

static tddp_status make_event(const tddp_cuda *cuda, unsigned flags, tddp_cuda_event *out)
{
    return tddp_cuda_check(cuda, cuda->cudaEventCreateWithFlags(out, flags),
                           "cudaEventCreateWithFlags");
}

static tddp_status make_events(tddp_nccl_request *self, tddp_cuda_stream stream)
{
    const tddp_cuda *cuda = self->libraries->cuda;
    const bool timed = wants_times(self->op);
    const unsigned flags = timed ? 0 : TDDP_CUDA_NO_TIMING;
    tddp_status status = check_capture(cuda, stream);
    status = status ? status : make_event(cuda, TDDP_CUDA_NO_TIMING, &self->ready);
    status = status ? status : make_event(cuda, flags, &self->done);
    if (status == TDDP_OK && timed) {
        status = make_event(cuda, flags, &self->begun);
    }
    if (status == TDDP_OK) {
        status =
            tddp_cuda_check(cuda, cuda->cudaEventRecord(self->ready, stream), "cudaEventRecord");
    }
    return status;
}

tddp_status tddp_nccl_request_create(const tddp_nccl_libraries *libraries, const tddp_op *op,
                                     int device, tddp_nccl_request **out)
{
    tddp_nccl_request *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->libraries = libraries;
    self->op = op;
    self->device = device;
    self->deadline_ns = tddp_nccl_deadline(op->timeout_ms);
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(libraries->cuda, device, &place);
    if (status == TDDP_OK) {
        status = make_events(self, main_buffer(op)->stream);
        tddp_cuda_leave(libraries->cuda, &place);
    }
    if (status) {
        tddp_nccl_request_free(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

tddp_status tddp_nccl_request_await(tddp_nccl_request *self)
{
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, self->device, &place);
    if (status == TDDP_OK) {
        status = tddp_nccl_await(self->channel, self->done, self->deadline_ns);
        tddp_cuda_leave(cuda, &place);
    }
    return status;
}

tddp_status tddp_nccl_request_order(tddp_nccl_request *self, tddp_cuda_stream stream)
{
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, self->device, &place);
    if (status == TDDP_OK) {
        status = tddp_cuda_check(cuda, cuda->cudaStreamWaitEvent(stream, self->done, 0),
                                 "cudaStreamWaitEvent");
        tddp_cuda_leave(cuda, &place);
    }
    return status;
}

int64_t tddp_nccl_request_ns(const tddp_nccl_request *self)
{
    float ms = 0;
    const tddp_cuda *cuda = self->libraries->cuda;
    if (!self->begun || cuda->cudaEventElapsedTime(&ms, self->begun, self->done)) {
        (void)cuda->cudaGetLastError();
        return 0;
    }
    return (int64_t)((double)ms * 1e6);
}

void tddp_nccl_request_free(tddp_nccl_request *self)
{
    if (!self) {
        return;
    }
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_event events[] = {self->ready, self->begun, self->done};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (events[i]) {
            (void)cuda->cudaEventDestroy(events[i]);
        }
    }
    free(self);
}
