/**
 * @file cuda.h
 * @brief The CUDA runtime's C API, loaded on first use: libtddp does not link it.
 *
 * The declarations are the project's own, after CUDA's documentation from 11.2 on, so that
 * everything compiles without CUDA. They keep CUDA's names, so its documentation applies. With
 * CUDA's headers, src/backend/nccl/check_api.c compares them.
 */
#ifndef TDDP_CUDA_H
#define TDDP_CUDA_H

#include <stddef.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** cudaError_t. */
enum { TDDP_CUDA_SUCCESS = 0, TDDP_CUDA_NOT_READY = 600 };

/** cudaStreamNonBlocking; cudaEventDisableTiming; cudaMemcpyDefault; cudaHostAllocPortable. */
enum {
    TDDP_CUDA_NON_BLOCKING = 1,
    TDDP_CUDA_NO_TIMING = 2,
    TDDP_CUDA_COPY_ANY = 4,
    TDDP_CUDA_PORTABLE = 1,
};

/** cudaStreamCaptureStatus; cudaStreamCaptureMode. */
enum { TDDP_CUDA_NO_CAPTURE = 0, TDDP_CUDA_CAPTURE_RELAXED = 2 };

/** cudaError_t. */
typedef int tddp_cuda_error;
/** cudaStream_t. */
typedef struct CUstream_st *tddp_cuda_stream;
/** cudaEvent_t. */
typedef struct CUevent_st *tddp_cuda_event;

/** X(result, name, arguments) */
#define TDDP_CUDA_CALLS(X)                                                                    \
    X(tddp_cuda_error, cudaRuntimeGetVersion, (int *version))                                 \
    X(tddp_cuda_error, cudaGetDeviceCount, (int *count))                                      \
    X(tddp_cuda_error, cudaGetDevice, (int *device))                                          \
    X(tddp_cuda_error, cudaSetDevice, (int device))                                           \
    X(const char *, cudaGetErrorString, (tddp_cuda_error error))                              \
    X(tddp_cuda_error, cudaGetLastError, (void))                                              \
    X(tddp_cuda_error, cudaDeviceGetStreamPriorityRange, (int *least, int *greatest))         \
    X(tddp_cuda_error, cudaStreamCreateWithPriority,                                          \
      (tddp_cuda_stream * stream, unsigned flags, int priority))                              \
    X(tddp_cuda_error, cudaStreamDestroy, (tddp_cuda_stream stream))                          \
    X(tddp_cuda_error, cudaStreamWaitEvent,                                                   \
      (tddp_cuda_stream stream, tddp_cuda_event event, unsigned flags))                       \
    X(tddp_cuda_error, cudaStreamIsCapturing, (tddp_cuda_stream stream, int *status))         \
    X(tddp_cuda_error, cudaThreadExchangeStreamCaptureMode, (int *mode))                      \
    X(tddp_cuda_error, cudaEventCreateWithFlags, (tddp_cuda_event * event, unsigned flags))   \
    X(tddp_cuda_error, cudaEventDestroy, (tddp_cuda_event event))                             \
    X(tddp_cuda_error, cudaEventRecord, (tddp_cuda_event event, tddp_cuda_stream stream))     \
    X(tddp_cuda_error, cudaEventQuery, (tddp_cuda_event event))                               \
    X(tddp_cuda_error, cudaEventElapsedTime,                                                  \
      (float *ms, tddp_cuda_event start, tddp_cuda_event end))                                \
    X(tddp_cuda_error, cudaMalloc, (void **data, size_t bytes))                               \
    X(tddp_cuda_error, cudaFree, (void *data))                                                \
    X(tddp_cuda_error, cudaMallocAsync, (void **data, size_t bytes, tddp_cuda_stream stream)) \
    X(tddp_cuda_error, cudaFreeAsync, (void *data, tddp_cuda_stream stream))                  \
    X(tddp_cuda_error, cudaHostAlloc, (void **data, size_t bytes, unsigned flags))            \
    X(tddp_cuda_error, cudaFreeHost, (void *data))                                            \
    X(tddp_cuda_error, cudaMemcpyAsync,                                                       \
      (void *into, const void *from, size_t bytes, int kind, tddp_cuda_stream stream))        \
    X(tddp_cuda_error, cudaLaunchHostFunc,                                                    \
      (tddp_cuda_stream stream, void (*function)(void *data), void *data))

/** The calls, by CUDA's names. */
typedef struct tddp_cuda {
#define TDDP_CUDA_FIELD(result, name, arguments) result(*name) arguments;
    TDDP_CUDA_CALLS(TDDP_CUDA_FIELD)
#undef TDDP_CUDA_FIELD
    int version; /**< of the runtime: 12040 is 12.4 */
    /** The driver's cuDevicePrimaryCtxGetState; NULL: not found. */
    int (*context_state)(int device, unsigned *flags, int *active);
} tddp_cuda;

/**
 * The runtime: the one that the process has loaded, else by name, else beside libtorch, where
 * its wheels install it. TDDP_CUDART_LIBRARY names the only file to try. Any thread. A loaded
 * runtime stays for the life of the process; after a failure the next call tries again. Success
 * doesn't mean that there is a GPU: see cudaGetDeviceCount(). Errors: TDDP_UNAVAILABLE, with
 * what was tried and what to install.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_get(const tddp_cuda **out);

/** A CUDA call's result as a status, TDDP_SYSTEM with CUDA's text; `what` names the call. Clears
 * the error, so that the thread's next call does not fail with it. */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_check(const tddp_cuda *cuda, tddp_cuda_error error,
                                                    const char *what);

/** The calling thread's state before tddp_cuda_enter(). */
typedef struct tddp_cuda_place {
    int device; /**< -1: not restored */
    int capture_mode;
} tddp_cuda_place;

/**
 * Makes `device` current on the calling thread until tddp_cuda_leave(). Meanwhile its calls don't
 * invalidate a graph capture on another thread, as some would (querying events, allocating memory).
 * Errors: TDDP_SYSTEM with CUDA's text; tddp_cuda_leave() isn't needed then.
 *
 * A device that was current before but has no context stays as it is, since a switch back to it
 * would make one, of some hundred MiB for each process: every thread starts on device 0. After
 * tddp_cuda_keep_device(), for a thread that needs no device of its own, none is switched back to.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_enter(const tddp_cuda *cuda, int device,
                                                    tddp_cuda_place *place);
/** Restores what tddp_cuda_enter() found. */
TDDP_API void tddp_cuda_leave(const tddp_cuda *cuda, const tddp_cuda_place *place);
/** From now on tddp_cuda_leave() leaves the calling thread on its last device. */
TDDP_API void tddp_cuda_keep_device(void);

/** Orders later work on `stream` after the work that is on `earlier` now. Records `event` on the
 * latter. All three belong to the current device. Errors: TDDP_SYSTEM. */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_follow(const tddp_cuda *cuda, tddp_cuda_event event,
                                                     tddp_cuda_stream stream,
                                                     tddp_cuda_stream earlier);

/** Where memory on devices comes from that libtddp needs for a moment: libtorch's caching allocator
 * in a program that has loaded libtddp_torch with CUDA, so that no second pool lies beside it. */
typedef struct tddp_cuda_allocator {
    /** On the current device, for use on `stream` alone. Errors: TDDP_OUT_OF_MEMORY. */
    tddp_status (*allocate)(size_t bytes, tddp_cuda_stream stream, void **data);
    /** Once all uses are on that stream. */
    void (*release)(void *data);
} tddp_cuda_allocator;

/** A piece of such memory, with what it came from. */
typedef struct tddp_cuda_memory {
    void *data;
    const tddp_cuda_allocator *allocator; /**< NULL: CUDA's own pool */
} tddp_cuda_memory;

/** Replaces the allocator of the process; NULL: CUDA's own pool. It must stay. Any thread. */
TDDP_API void tddp_cuda_set_allocator(const tddp_cuda_allocator *replacement);

/** Memory on the current device for work on `stream` alone, to be released with
 * tddp_cuda_release() once that work is on the stream. Errors: the allocator's, TDDP_SYSTEM. */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_allocate(const tddp_cuda *cuda, size_t bytes,
                                                       tddp_cuda_stream stream,
                                                       tddp_cuda_memory *out);
/** Errors: TDDP_SYSTEM. */
TDDP_API TDDP_NODISCARD tddp_status tddp_cuda_release(const tddp_cuda *cuda,
                                                      tddp_cuda_stream stream,
                                                      const tddp_cuda_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
