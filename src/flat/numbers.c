/*
 * Numbers that ranks exchange and the host computes with: in plain memory, or, for a group that has
 * no backend for the CPU, in pinned memory, which a device reads and writes where it lies. Any
 * thread.
 *
 * Invariant: the host reads and writes them, and frees them, only while no operation uses them.
 */
#include <stdlib.h>
#include <string.h>

#include "flat/flat.h"

static tddp_status make_pinned(tddp_flat_numbers *self, const char *group, int device)
{
    tddp_cuda_stream stream = NULL;
    tddp_cuda_place before;
    const size_t bytes = tddp_buffer_bytes(&self->buffer);
    if (device < 0) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "backend %s takes no cpu memory, and no parameter is on a GPU: expected "
                         "one, or a group with \"cpu:gloo,cuda:nccl\"",
                         group);
    }
    tddp_status status = tddp_cuda_get(&self->cuda);
    status = status ? status : tddp_cuda_enter(self->cuda, device, &before);
    if (status) {
        return status;
    }
    status = tddp_cuda_check(
        self->cuda, self->cuda->cudaStreamCreateWithPriority(&stream, TDDP_CUDA_NON_BLOCKING, 0),
        "cudaStreamCreateWithPriority");
    self->buffer.device_type = TDDP_CUDA;
    self->buffer.device_index = device;
    self->buffer.stream = stream; /* of its own: it follows no work of the program */
    if (status == TDDP_OK) {
        status = tddp_cuda_check(
            self->cuda, self->cuda->cudaHostAlloc(&self->buffer.data, bytes, TDDP_CUDA_PORTABLE),
            "cudaHostAlloc");
    }
    tddp_cuda_leave(self->cuda, &before);
    if (status == TDDP_OK) {
        memset(self->buffer.data, 0, bytes);
    }
    return status;
}

tddp_status tddp_flat_numbers_make(const tddp_group *group, const tddp_param *params,
                                   size_t param_count, tddp_dtype dtype, size_t count,
                                   tddp_flat_numbers **out)
{
    int device = -1;
    tddp_flat_numbers *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->buffer = (tddp_buffer){.count = count, .dtype = dtype, .device_type = TDDP_CPU};
    for (size_t i = 0; i < param_count && device < 0; i++) {
        device = params[i].device_type == TDDP_CUDA ? params[i].device_index : -1;
    }
    tddp_status status = TDDP_OK;
    if (tddp_group_takes(group, TDDP_CPU)) {
        self->buffer.data = tddp_alloc_array(count, tddp_dtype_size(dtype));
        status = self->buffer.data ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    } else {
        status = make_pinned(self, tddp_group_backend(group), device);
    }
    if (status) {
        tddp_flat_numbers_free(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_flat_numbers_free(void *numbers)
{
    tddp_flat_numbers *self = numbers;
    tddp_cuda_place before;
    if (self && !self->cuda) {
        free(self->buffer.data);
    } else if (self && !tddp_cuda_enter(self->cuda, self->buffer.device_index, &before)) {
        (void)self->cuda->cudaFreeHost(self->buffer.data);
        if (self->buffer.stream) {
            (void)self->cuda->cudaStreamDestroy(self->buffer.stream);
        }
        tddp_cuda_leave(self->cuda, &before);
    }
    free(self);
}
