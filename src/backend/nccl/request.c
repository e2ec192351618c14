/*
 * The events of a request: the preceding work on the caller's stream, and the end of the operation,
 * for which the host and other streams wait. Created on the caller's thread, launched by
 * operations.c, tested and freed on a thread of libtddp's.
 */
#include <stdlib.h>
#include <string.h>

#include <tddp/trace.h>

#include "backend/nccl/operations.h"

enum { TESTS_PER_CHECK = 8 }; /* of a request, for each check of its communicator */

/* The buffer whose stream is the caller's: some ranks have only an input or an output. */
static const tddp_buffer *main_buffer(const tddp_op *op)
{
    return op->input.device_type == TDDP_CUDA ? &op->input : &op->output;
}

static bool wants_times(const tddp_op *op)
{
    const char *asked = getenv("TORCH_NCCL_ENABLE_TIMING");
    return op->device_ns && (tddp_trace_enabled() || (asked && strcmp(asked, "1") == 0));
}

/* Work on a stream that is being captured runs with the graph, never or several times, without
 * this backend knowing. */
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
        status = make_event(cuda, flags, &self->started);
    }
    if (status == TDDP_OK) {
        status =
            tddp_cuda_check(cuda, cuda->cudaEventRecord(self->ready, stream), "cudaEventRecord");
    }
    return status;
}

tddp_status tddp_nccl_request_create(tddp_nccl_communicator *communicator, const tddp_op *op,
                                     tddp_nccl_request **out)
{
    tddp_nccl_request *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    self->libraries = communicator->libraries;
    self->communicator = communicator;
    self->op = op;
    self->deadline_ns = tddp_deadline_after_ms(op->timeout_ms);
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, communicator->opts.device, &place);
    if (status == TDDP_OK) {
        status = make_events(self, main_buffer(op)->stream);
        tddp_cuda_leave(cuda, &place);
    }
    if (status) {
        tddp_nccl_request_free(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

/* With the device current. An event tells nothing of a dead peer: NCCL's state does. */
static tddp_status test_event(tddp_nccl_request *self, int *complete)
{
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_error error = cuda->cudaEventQuery(self->done);
    /* After an abort the operation isn't complete, whatever the event says. */
    if (atomic_load(&self->communicator->aborted)) {
        return tddp_nccl_fail_aborted("waiting for the device");
    }
    if (error != TDDP_CUDA_NOT_READY) {
        *complete = error == TDDP_CUDA_SUCCESS;
        return tddp_cuda_check(cuda, error, "cudaEventQuery");
    }
    (void)cuda->cudaGetLastError();
    *complete = 0;
    return self->tests++ % TESTS_PER_CHECK == 0 ? tddp_nccl_check(self->communicator) : TDDP_OK;
}

tddp_status tddp_nccl_request_test(void *context, void *request, int *complete)
{
    tddp_nccl_request *self = request;
    (void)context;
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, self->communicator->opts.device, &place);
    if (status == TDDP_OK) {
        status = test_event(self, complete);
        tddp_cuda_leave(cuda, &place);
    }
    return status;
}

tddp_status tddp_nccl_request_order(void *context, void *request, void *stream)
{
    const tddp_nccl_request *self = request;
    (void)context;
    const tddp_cuda *cuda = self->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, self->communicator->opts.device, &place);
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
    if (!self->launched || !self->started ||
        cuda->cudaEventElapsedTime(&ms, self->started, self->done)) {
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
    tddp_cuda_event events[] = {self->ready, self->started, self->done};
    tddp_cuda_place place;
    const bool entered = tddp_cuda_enter(cuda, self->communicator->opts.device, &place) == TDDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (events[i]) {
            (void)cuda->cudaEventDestroy(events[i]);
        }
    }
    if (entered) {
        tddp_cuda_leave(cuda, &place);
    }
    free(self);
}
