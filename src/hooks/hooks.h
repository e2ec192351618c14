/*
 * The built-in hooks' internal interface.
 *
 *     default_hooks.c  allreduce, noop and post-local SGD, which keep no state per bucket
 *     bucket_state.c   a hook's state per bucket
 *     cast.c           casts arrays between floating-point dtypes
 *     compress.c       compression to float16 and bfloat16, alone or around another hook
 *     quantize.c       quantization to eight bits; affine.c: its arithmetic
 *     power_sgd.c      PowerSGD's stages; power_plan.c: which gradients are compressed, and memory;
 *                      power_steps.c: the computation between operations; matrix.c: linear algebra
 */
#ifndef TDDP_HOOKS_HOOKS_H
#define TDDP_HOOKS_HOOKS_H

#include <stdbool.h>

#include <tddp/hooks.h>

#include "base/base.h"

static inline size_t tddp_hooks_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* --- default_hooks.c ------------------------------------------------------------------------- */

/* device_types of hooks that don't access a bucket's contents. */
enum { TDDP_HOOKS_ANY_MEMORY = 1u << TDDP_CPU | 1u << TDDP_CUDA };

/* Makes a hook; frees `state` with ops->free if that fails. */
TDDP_NODISCARD tddp_status tddp_hooks_make(const tddp_comm_hook_ops *ops, void *state,
                                           tddp_comm_hook **out);

/* Starts an all_reduce of the buffer, with the bucket's description: a sum or the average. */
TDDP_NODISCARD tddp_status tddp_hooks_reduce(tddp_group *group, const tddp_bucket *bucket,
                                             tddp_buffer buffer, tddp_reduce_op op,
                                             tddp_work **work);
TDDP_NODISCARD tddp_status tddp_hooks_average(tddp_group *group, const tddp_bucket *bucket,
                                              tddp_buffer buffer, tddp_work **work);

/* The bytes of `count` elements, but at least one byte. */
size_t tddp_hooks_byte_count(size_t count, size_t bytes_each);

/* Checks that the bucket's dtype is a floating-point one; _host: and that it is on the CPU. */
TDDP_NODISCARD tddp_status tddp_hooks_check(const char *hook, const tddp_bucket *bucket);
TDDP_NODISCARD tddp_status tddp_hooks_check_host(const char *hook, const tddp_bucket *bucket);

/* --- bucket_state.c -------------------------------------------------------------------------- */

/* A state for each bucket of a layout. All zero: empty. */
typedef struct tddp_hooks_states {
    uint64_t layout;
    size_t count;
    struct tddp_hooks_state *entries;
} tddp_hooks_states;

/* Makes a hook's state of a bucket. */
typedef tddp_status (*tddp_hooks_make_state)(void *state, tddp_group *group,
                                             const tddp_bucket *bucket, void **out);

/* At stage 0: the bucket's state, which is made if there is none, or if the layout, the bucket or
 * the number of ranks has changed. `release` frees states of an old layout; none of their works is
 * pending, because a reducer rebuilds its buckets only between iterations. */
TDDP_NODISCARD tddp_status tddp_hooks_require_state(tddp_hooks_states *states, tddp_group *group,
                                                    const tddp_bucket *bucket,
                                                    tddp_hooks_make_state make,
                                                    void (*release)(void *memory), void *state,
                                                    void **out);

/* At later stages: the bucket's state. */
TDDP_NODISCARD tddp_status tddp_hooks_find_state(const tddp_hooks_states *states,
                                                 const tddp_bucket *bucket, void **out);

void tddp_hooks_free_states(tddp_hooks_states *states, void (*release)(void *memory));

/* --- cast.c ---------------------------------------------------------------------------------- */

/* to[i] = from[i] / divisor, rounded to the dtype of `to`; through float32, so float64 to float64
 * is not supported. The buffers must not overlap. */
void tddp_hooks_cast(tddp_buffer from, tddp_buffer to, double divisor);

/* The address of element `start`. */
char *tddp_hooks_at(const tddp_buffer *buffer, size_t start);

/* `count` elements from element `start` on as float32: the buffer's own, or cast to `scratch`. */
const float *tddp_hooks_floats(const tddp_buffer *buffer, size_t start, size_t count,
                               float *scratch);
void tddp_hooks_store_floats(const float *from, const tddp_buffer *buffer, size_t start,
                             size_t count);

#endif
