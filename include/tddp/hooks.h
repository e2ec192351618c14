/**
 * @file hooks.h
 * @brief The built-in communication hooks, for tddp_reducer_set_hook().
 *
 * Each function makes a hook; caller: tddp_comm_hook_release(). Hooks run on any thread and support
 * float16, bfloat16, float32 and float64 buckets on the CPU (tddp_hook_compress() also on devices;
 * tddp_hook_allreduce(), tddp_hook_noop() and tddp_hook_post_local_sgd() everything that the group
 * supports). After a bucket's first iteration they allocate nothing for it. All ranks get bitwise
 * equal results, on machines of one kind.
 *
 * compress, quantize and power_sgd keep state for each bucket, by its index, until `layout`
 * changes: such a hook can belong to one reducer only. Works use that state, so the caller of a
 * hook holds a reference to it until its works have completed; reducers do.
 *
 * Common errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY. Running a hook on a bucket that it
 * doesn't support is TDDP_UNSUPPORTED.
 */
#ifndef TDDP_HOOKS_H
#define TDDP_HOOKS_H

#include <tddp/comm_hook.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Averages over the ranks, as without a hook. */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_allreduce(tddp_comm_hook **out);

/** Does nothing: each rank keeps its local gradients. For measuring the cost of communication. */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_noop(tddp_comm_hook **out);

/**
 * Compresses the bucket to TDDP_FLOAT16 or TDDP_BFLOAT16. With `inner` NULL it is divided by the
 * number of ranks, rounded once, summed in that dtype and cast back: a sum overflows only if the
 * average does. Else `inner` runs on the bucket rounded to that dtype, and its result is cast back
 * (`inner` is retained). Buckets that have the dtype already are not cast.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_compress(tddp_dtype dtype, tddp_comm_hook *inner,
                                                       tddp_comm_hook **out);

/** PyTorch's default number of elements in a channel. */
#define TDDP_QUANTIZE_BUCKET_SIZE 512

/**
 * Quantizes each element to a byte, x = scale * (byte - zero point), with a scale and zero point
 * from the minimum and maximum of the bucket, or with `per_channel` of each `bucket_size` elements,
 * such that zero is exact. The ranks gather all bytes, dequantize and average. As PyTorch's
 * quantization hooks, computed in float32; unlike theirs, gradients with a range below 3e-5 keep
 * eight bits of precision, and scale and zero point are sent with the bytes. If an element isn't
 * finite, its channel becomes NaN on all ranks.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_quantize(int per_channel, size_t bucket_size,
                                                       tddp_comm_hook **out);

/** Options of tddp_hook_power_sgd(). Begin with TDDP_POWER_SGD_OPTS_INIT. */
typedef struct tddp_power_sgd_opts {
    size_t size;                      /**< sizeof(tddp_power_sgd_opts) */
    int rank;                         /**< of the approximation, from 1 */
    int64_t start_iteration;          /**< earlier iterations are averaged uncompressed */
    double min_compression_rate;      /**< a matrix of n x m is compressed if
                                       * (n + m) * rank * min_compression_rate < n * m */
    int error_feedback;               /**< add an iteration's error to the next gradients */
    int warm_start;                   /**< start with the last iteration's Q, not a random one */
    double orthogonalization_epsilon; /**< added to the columns' norms, against division by 0 */
    uint64_t seed;                    /**< of random matrices; the same on every rank */
    int batched;                      /**< compress the bucket as one square matrix */
} tddp_power_sgd_opts;

/** PyTorch's defaults. */
#define TDDP_POWER_SGD_OPTS_INIT                                             \
    {                                                                        \
        sizeof(tddp_power_sgd_opts), 1, 1000, 2.0, 1, 1, 0.0, UINT64_C(0), 0 \
    }

/** As TDDP_POWER_SGD_OPTS_INIT, for languages without C's macros. `size`: of the caller's struct.
 */
TDDP_API void tddp_power_sgd_opts_init(tddp_power_sgd_opts *opts, size_t size);

/**
 * PowerSGD: for each gradient's matrix M (first dimension by the product of the others) the ranks
 * average P = M Q, orthonormalize P, average Q = M^T P, and use P Q^T. Gradients that compression
 * wouldn't shrink enough, and those with fewer than two dimensions, are averaged uncompressed, in
 * the same operation as P. With `batched` the bucket's gradients, concatenated, are one square
 * matrix that is always compressed. The operations use the bucket's dtype; float16 and bfloat16 are
 * computed in float32.
 *
 * The bucket's `iteration` is counted from 0. Matrices and errors are reset when `layout` changes,
 * so `start_iteration` may also be 0. A linearly dependent column is 0, and random in the next
 * iteration's Q. If a gradient isn't finite, its matrix becomes NaN on all ranks in that iteration,
 * and the matrix's error is cleared.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_power_sgd(const tddp_power_sgd_opts *opts,
                                                        tddp_comm_hook **out);

/** PyTorch's default. */
#define TDDP_POST_LOCAL_SGD_START 100

/**
 * Averages over the hook's group before iteration `start_iteration`; from then on over `subgroup`,
 * or not at all if `post_local_gradient_allreduce` is 0. The caller averages the parameters
 * periodically. Retains the subgroup (NULL only if it is not used): the hook's last reference must
 * not be released on a thread that runs a work's callback if that may release the subgroup's last
 * one too. Errors of an iteration: those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_post_local_sgd(tddp_group *subgroup,
                                                             int64_t start_iteration,
                                                             int post_local_gradient_allreduce,
                                                             tddp_comm_hook **out);

#ifdef __cplusplus
}
#endif

#endif
