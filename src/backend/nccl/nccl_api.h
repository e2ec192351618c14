/*
 * The part of NCCL's API in use, after its documentation from 2.18 on. Declared here, so that it
 * compiles without NCCL, which is loaded at run time. With NCCL's header, check_api.c compares
 * them.
 */
#ifndef TDDP_NCCL_NCCL_API_H
#define TDDP_NCCL_NCCL_API_H

#include <limits.h>
#include <stddef.h>

#include <tddp/cuda.h>

/* The oldest version with all functions below. */
enum { TDDP_NCCL_LEAST_VERSION = 21800, TDDP_NCCL_CONFIG_VERSION = 21801 };

/* The first version that reduces 8-bit floating-point numbers. */
enum { TDDP_NCCL_FLOAT8_VERSION = 22400 };

/* ncclResult_t */
enum {
    TDDP_NCCL_SUCCESS = 0,
    TDDP_NCCL_CUDA_ERROR = 1,
    TDDP_NCCL_SYSTEM_ERROR = 2,
    TDDP_NCCL_INTERNAL_ERROR = 3,
    TDDP_NCCL_INVALID_ARGUMENT = 4,
    TDDP_NCCL_INVALID_USAGE = 5,
    TDDP_NCCL_REMOTE_ERROR = 6,
    TDDP_NCCL_IN_PROGRESS = 7,
};

/* ncclDataType_t */
enum {
    TDDP_NCCL_INT8 = 0,
    TDDP_NCCL_UINT8 = 1,
    TDDP_NCCL_INT32 = 2,
    TDDP_NCCL_INT64 = 4,
    TDDP_NCCL_FLOAT16 = 6,
    TDDP_NCCL_FLOAT32 = 7,
    TDDP_NCCL_FLOAT64 = 8,
    TDDP_NCCL_BFLOAT16 = 9,
    TDDP_NCCL_FLOAT8_E4M3 = 10, /* these two since 2.24 */
    TDDP_NCCL_FLOAT8_E5M2 = 11,
};

/* ncclRedOp_t */
enum {
    TDDP_NCCL_SUM = 0,
    TDDP_NCCL_PROD = 1,
    TDDP_NCCL_MAX = 2,
    TDDP_NCCL_MIN = 3,
    TDDP_NCCL_AVG = 4,
};

/* ncclScalarResidence_t: ncclScalarHostImmediate */
enum { TDDP_NCCL_HOST_SCALAR = 1 };

typedef struct ncclComm *tddp_nccl_comm;
typedef int tddp_nccl_result;

/* ncclUniqueId */
typedef struct tddp_nccl_id {
    char internal[128];
} tddp_nccl_id;

/* ncclConfig_t of 2.18; newer versions go by its size and version. */
typedef struct tddp_nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char *net_name;
    int split_share;
} tddp_nccl_config;

/* NCCL_SPLIT_NOCOLOR */
enum { TDDP_NCCL_NO_COLOR = -1 };

enum { TDDP_NCCL_CONFIG_MAGIC = (int)0xcafebeef, TDDP_NCCL_UNSET = INT_MIN };

/* X(result, name, arguments) */
#define TDDP_NCCL_CALLS(X)                                                                       \
    X(tddp_nccl_result, ncclGetVersion, (int *version))                                          \
    X(const char *, ncclGetErrorString, (tddp_nccl_result result))                               \
    X(const char *, ncclGetLastError, (tddp_nccl_comm comm))                                     \
    X(tddp_nccl_result, ncclGetUniqueId, (tddp_nccl_id * id))                                    \
    X(tddp_nccl_result, ncclCommInitRankConfig,                                                  \
      (tddp_nccl_comm * comm, int ranks, tddp_nccl_id id, int rank, tddp_nccl_config *config))   \
    X(tddp_nccl_result, ncclCommSplit,                                                           \
      (tddp_nccl_comm comm, int color, int key, tddp_nccl_comm *made, tddp_nccl_config *config)) \
    X(tddp_nccl_result, ncclCommFinalize, (tddp_nccl_comm comm))                                 \
    X(tddp_nccl_result, ncclCommDestroy, (tddp_nccl_comm comm))                                  \
    X(tddp_nccl_result, ncclCommAbort, (tddp_nccl_comm comm))                                    \
    X(tddp_nccl_result, ncclCommGetAsyncError, (tddp_nccl_comm comm, tddp_nccl_result * result)) \
    X(tddp_nccl_result, ncclGroupStart, (void))                                                  \
    X(tddp_nccl_result, ncclGroupEnd, (void))                                                    \
    X(tddp_nccl_result, ncclRedOpCreatePreMulSum,                                                \
      (int *op, void *factor, int dtype, int residence, tddp_nccl_comm comm))                    \
    X(tddp_nccl_result, ncclRedOpDestroy, (int op, tddp_nccl_comm comm))                         \
    X(tddp_nccl_result, ncclAllReduce,                                                           \
      (const void *input, void *output, size_t count, int dtype, int op, tddp_nccl_comm comm,    \
       tddp_cuda_stream stream))                                                                 \
    X(tddp_nccl_result, ncclBroadcast,                                                           \
      (const void *input, void *output, size_t count, int dtype, int root, tddp_nccl_comm comm,  \
       tddp_cuda_stream stream))                                                                 \
    X(tddp_nccl_result, ncclReduce,                                                              \
      (const void *input, void *output, size_t count, int dtype, int op, int root,               \
       tddp_nccl_comm comm, tddp_cuda_stream stream))                                            \
    X(tddp_nccl_result, ncclAllGather,                                                           \
      (const void *input, void *output, size_t count, int dtype, tddp_nccl_comm comm,            \
       tddp_cuda_stream stream))                                                                 \
    X(tddp_nccl_result, ncclReduceScatter,                                                       \
      (const void *input, void *output, size_t count, int dtype, int op, tddp_nccl_comm comm,    \
       tddp_cuda_stream stream))                                                                 \
    X(tddp_nccl_result, ncclSend,                                                                \
      (const void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,                 \
       tddp_cuda_stream stream))                                                                 \
    X(tddp_nccl_result, ncclRecv,                                                                \
      (void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,                       \
       tddp_cuda_stream stream))

typedef struct tddp_nccl {
#define TDDP_NCCL_FIELD(result, name, arguments) result(*name) arguments;
    TDDP_NCCL_CALLS(TDDP_NCCL_FIELD)
#undef TDDP_NCCL_FIELD
} tddp_nccl;

#endif
