/*
 * Device memory for tests: allocated, written and read by the CUDA runtime that libtddp found, a
 * GPU's or the stand-in's.
 */
#ifndef TDDP_TEST_NCCL_DEVICE_MEMORY_H
#define TDDP_TEST_NCCL_DEVICE_MEMORY_H

#include <sched.h>

#include <tddp/buffer.h>
#include <tddp/cuda.h>

#include "check.h"

static inline const tddp_cuda *runtime(void)
{
    const tddp_cuda *cuda;
    CHECK_OK(tddp_cuda_get(&cuda));
    return cuda;
}

#define CHECK_CUDA(name, ...)                                              \
    do {                                                                   \
        const tddp_cuda *cuda_ = runtime();                                \
        tddp_cuda_error error_ = cuda_->name(__VA_ARGS__);                 \
        if (error_) {                                                      \
            check_failed(__FILE__, __LINE__, #name ": %s (CUDA error %d)", \
                         cuda_->cudaGetErrorString(error_), error_);       \
        }                                                                  \
    } while (0)

/* Waits for the stream. */
static inline void synchronize(tddp_cuda_stream stream)
{
    tddp_cuda_event event;
    tddp_cuda_error state;
    CHECK_CUDA(cudaEventCreateWithFlags, &event, TDDP_CUDA_NO_TIMING);
    CHECK_CUDA(cudaEventRecord, event, stream);
    while ((state = runtime()->cudaEventQuery(event)) == TDDP_CUDA_NOT_READY) {
        sched_yield();
    }
    (void)runtime()->cudaGetLastError();
    CHECK_INT(state, TDDP_CUDA_SUCCESS);
    CHECK_CUDA(cudaEventDestroy, event);
}

static inline void copy(void *into, const void *from, size_t bytes)
{
    CHECK_CUDA(cudaMemcpyAsync, into, from, bytes, TDDP_CUDA_COPY_ANY, NULL);
    synchronize(NULL);
}

/* Allocates memory on device 0 with the contents of `host`; from_device() frees it. */
static inline tddp_buffer to_device(const void *host, size_t count, tddp_dtype dtype)
{
    void *data = NULL;
    if (count > 0) {
        CHECK_CUDA(cudaMalloc, &data, count * tddp_dtype_size(dtype));
        copy(data, host, count * tddp_dtype_size(dtype));
    }
    return (tddp_buffer){data, count, dtype, TDDP_CUDA, 0, NULL};
}

/* Copies the memory of to_device() back to `host` and frees it. */
static inline void from_device(void *host, tddp_buffer buffer)
{
    if (buffer.count > 0) {
        copy(host, buffer.data, buffer.count * tddp_dtype_size(buffer.dtype));
        CHECK_CUDA(cudaFree, buffer.data);
    }
}

#endif
