/*
 * Stand-ins for the CUDA runtime and NCCL, for the logic of the nccl backend alone: streams are
 * threads, devices are this host's memory, ranks meet in a file. What they show of speed or of GPUs
 * is nothing.
 */
#ifndef TDDP_TEST_STANDIN_H
#define TDDP_TEST_STANDIN_H

#include "backend/nccl/nccl_api.h"

#define STANDIN_API __attribute__((visibility("default")))

/* Has the stream's thread call it, after what was put there before; `data` is the callee's. */
STANDIN_API void standin_put(tddp_cuda_stream stream, void (*call)(void *data), void *data);

/* What is put on any stream from now on takes so much longer. */
STANDIN_API void standin_set_delay_ms(int ms);

/* With 1 the host does not wait for what the default stream waits for, as with CUDA, where nothing
 * follows on that stream; else a call on the default stream does its work at once. */
STANDIN_API void standin_set_default_detached(int detached);

/* The next calls of this name give `error`, so many times; NULL: none does. The next one alone. */
STANDIN_API void standin_fail_times(const char *name, int error, int times);
STANDIN_API void standin_fail_next(const char *name, int error);
STANDIN_API int standin_failure_of(const char *name);

/* Streams, events and pieces of device memory that there are: what a test must not leave. */
STANDIN_API int standin_alive(void);

/* With 1 a device carries out NCCL's operations one at a time, in the order of their launches on
 * any stream, as a GPU may. */
STANDIN_API void standin_set_serial(int serial);

/* With 1 ncclCommAbort() never returns. */
STANDIN_API void standin_set_abort_hangs(int hangs);

/* Bit (1 << device) for each device with a context of this process: one that was current in a call
 * that needs one. */
STANDIN_API unsigned standin_contexts(void);

/* NCCL's operations that were launched on a device by this process and have not ended. */
STANDIN_API int standin_kernels(int device);

/* Communicators that this process has made so far with this configuration. */
STANDIN_API int standin_communicators(int blocking);

/* Whether the thread that calls this launched NCCL's last operation in this process. */
STANDIN_API int standin_launched_here(void);

/* cudaStreamCaptureStatus of all streams from now on. */
STANDIN_API void standin_set_capture(int status);

#endif
