/*
 * Compares the declarations in this folder with the libraries' own headers. Compiled only in a
 * build that has them (-DTDDP_NCCL_HEADERS=ON), otherwise empty.
 */
#ifdef TDDP_NCCL_HEADERS

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "backend/nccl/nccl_api.h"

/* Enumerations are passed as int, and handles are pointers to the same structs. */
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours)

SAME(TDDP_CUDA_SUCCESS, cudaSuccess);
SAME(TDDP_CUDA_NOT_READY, cudaErrorNotReady);
SAME(TDDP_CUDA_NON_BLOCKING, cudaStreamNonBlocking);
SAME(TDDP_CUDA_NO_TIMING, cudaEventDisableTiming);
SAME(TDDP_CUDA_COPY_ANY, cudaMemcpyDefault);
SAME(TDDP_CUDA_PORTABLE, cudaHostAllocPortable);
SAME(TDDP_CUDA_NO_CAPTURE, cudaStreamCaptureStatusNone);
SAME(TDDP_CUDA_CAPTURE_RELAXED, cudaStreamCaptureModeRelaxed);

SAME(TDDP_NCCL_SUCCESS, ncclSuccess);
SAME(TDDP_NCCL_CUDA_ERROR, ncclUnhandledCudaError);
SAME(TDDP_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(TDDP_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(TDDP_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(TDDP_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(TDDP_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(TDDP_NCCL_IN_PROGRESS, ncclInProgress);
SAME(TDDP_NCCL_INT8, ncclInt8);
SAME(TDDP_NCCL_UINT8, ncclUint8);
SAME(TDDP_NCCL_INT32, ncclInt32);
SAME(TDDP_NCCL_INT64, ncclInt64);
SAME(TDDP_NCCL_FLOAT16, ncclFloat16);
SAME(TDDP_NCCL_FLOAT32, ncclFloat32);
SAME(TDDP_NCCL_FLOAT64, ncclFloat64);
SAME(TDDP_NCCL_BFLOAT16, ncclBfloat16);
#if NCCL_VERSION_CODE >= 22400
SAME(TDDP_NCCL_FLOAT8_E4M3, ncclFloat8e4m3);
SAME(TDDP_NCCL_FLOAT8_E5M2, ncclFloat8e5m2);
#endif
SAME(TDDP_NCCL_SUM, ncclSum);
SAME(TDDP_NCCL_PROD, ncclProd);
SAME(TDDP_NCCL_MAX, ncclMax);
SAME(TDDP_NCCL_MIN, ncclMin);
SAME(TDDP_NCCL_AVG, ncclAvg);
SAME(TDDP_NCCL_HOST_SCALAR, ncclScalarHostImmediate);
SAME(TDDP_NCCL_NO_COLOR, NCCL_SPLIT_NOCOLOR);

_Static_assert(sizeof(tddp_nccl_id) == sizeof(ncclUniqueId), "ncclUniqueId");
_Static_assert(sizeof(ncclResult_t) == sizeof(tddp_nccl_result), "ncclResult_t");
_Static_assert(sizeof(cudaError_t) == sizeof(tddp_cuda_error), "cudaError_t");
_Static_assert(offsetof(ncclConfig_t, size) == offsetof(tddp_nccl_config, size), "size");
_Static_assert(offsetof(ncclConfig_t, magic) == offsetof(tddp_nccl_config, magic), "magic");
_Static_assert(offsetof(ncclConfig_t, version) == offsetof(tddp_nccl_config, version), "version");
_Static_assert(offsetof(ncclConfig_t, blocking) == offsetof(tddp_nccl_config, blocking),
               "blocking");
_Static_assert(offsetof(ncclConfig_t, splitShare) == offsetof(tddp_nccl_config, split_share),
               "splitShare");

#else

/* ISO C requires a declaration in each file. */
typedef int tddp_nccl_headers_are_not_here;

#endif
