/**
 * @file hooks.h
 * @brief The communication hooks that come with the library, for tddp_reducer_set_hook().
 *
 * Each call makes one; caller: tddp_comm_hook_release(). They run on any thread, take float16,
 * bfloat16, float32 and float64 buckets in the CPU's memory (tddp_hook_compress() on devices too;
 * tddp_hook_allreduce(), tddp_hook_noop() and tddp_hook_post_local_sgd() whatever the group takes),
 * and after a bucket's first round allocate nothing for it. Whatever a rank computes by itself from
 * what all ranks have is computed alike on all, to the last bit, on machines of one kind.
 *
 * Hooks with memory of their own (compress, quantize, power_sgd) keep it for each bucket, by its
 * index, until `layout` changes: such a hook serves one reducer. Works use that memory, so whoever
 * runs a hook keeps a reference to it until the works it started are done; reducers do.
 *
 * Common errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY. A bucket that a hook cannot take is
 * TDDP_UNSUPPORTED when it is run.
 */
#ifndef TDDP_HOOKS_H
#define TDDP_HOOKS_H

#include <tddp/comm_hook.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The average over the ranks: what happens without a hook. */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_allreduce(tddp_comm_hook **out);

/** Leaves each rank its own gradients and sends nothing: to see what communication costs. */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_noop(tddp_comm_hook **out);

/**
 * Sends the bucket as TDDP_FLOAT16 or TDDP_BFLOAT16. With `inner` NULL it is divided by the number
 * of ranks, rounded once, summed in that dtype and cast back: no sum overflows whose average does
 * not. Else `inner` gets it rounded to that dtype, does what it does, and its result is cast back
 * (`inner` is retained). Buckets that have the dtype already go to `inner`, or are averaged, as
 * they are.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_compress(tddp_dtype dtype, tddp_comm_hook *inner,
                                                       tddp_comm_hook **out);

/** PyTorch's default number of elements in a channel. */
#define TDDP_QUANTIZE_BUCKET_SIZE 512

/**
 * Sends each element as a byte: scale * (byte - zero point), where scale and zero point follow from
 * the least and greatest of the bucket, or with `per_channel` of each `bucket_size` elements in
 * turn, such that zero is exact. All ranks gather all of them and average. As PyTorch's
 * quantization hooks, computed in float32; unlike theirs, gradients whose range is below 3e-5 keep
 * their eight bits, and both numbers travel with the bytes. An element that is not finite makes NaN
 * of its channel on all ranks.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_quantize(int per_channel, size_t bucket_size,
                                                       tddp_comm_hook **out);

typedef struct tddp_power_sgd_opts {
    size_t size;                      /**< sizeof(tddp_power_sgd_opts) */
    int rank;                         /**< of the approximation, from 1 */
    int64_t start_iteration;          /**< rounds before this one are averaged as they are */
    double min_compression_rate;      /**< a matrix of n x m is compressed where
                                       * (n + m) * rank * min_compression_rate < n * m */
    int error_feedback;               /**< what a round lost is added to the next one's gradients */
    int warm_start;                   /**< begin with the last round's Q, not a random one */
    double orthogonalization_epsilon; /**< added to the columns' norms; they may be 0 without it */
    uint64_t seed;                    /**< of random matrices; the same on every rank */
    int batched;                      /**< the bucket as one square matrix */
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
 * PowerSGD: of each gradient's matrix M (first dimension by the others) the ranks average
 * P = M Q, make its columns orthonormal, average Q = M^T P, and take P Q^T. Gradients that are not
 * worth it, those without a second dimension among them, are averaged together as they are. With
 * `batched` the bucket's gradients in a row are one square matrix, always compressed. The
 * operations carry the bucket's dtype; float16 and bfloat16 are computed in float32.
 *
 * Rounds are counted by the bucket's `round`. Matrices and what they remember begin afresh when
 * `layout` changes, so `start_iteration` may also be 0. A column without a direction of its own is
 * 0, and random again in the next round's Q. A gradient that is not finite makes NaN of its matrix
 * on all ranks, in that round alone: what was to be fed back to that matrix is forgotten.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_power_sgd(const tddp_power_sgd_opts *opts,
                                                        tddp_comm_hook **out);

/** PyTorch's default. */
#define TDDP_POST_LOCAL_SGD_START 100

/**
 * The average over the group that the hook runs with, before round `start_iteration`; from then on
 * over `subgroup`, or over nobody if `post_local_gradient_allreduce` is 0. The parameters are to be
 * averaged now and then by the caller. Retains the subgroup (NULL only if it is not used): the
 * hook's last reference must not go on a thread that runs a work's callback if it may be the
 * subgroup's last one too. Errors of a round: those of tddp_all_reduce().
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_hook_post_local_sgd(tddp_group *subgroup,
                                                             int64_t start_iteration,
                                                             int post_local_gradient_allreduce,
                                                             tddp_comm_hook **out);

#ifdef __cplusplus
}
#endif

#endif
