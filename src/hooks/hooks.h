/*
 * What the hooks' files share.
 *
 *     plain.c     allreduce, noop, post-local SGD: no memory of their own
 *     table.c     memory kept by bucket
 *     cast.c      arrays from one floating-point dtype to another
 *     compress.c  float16 and bfloat16, alone or around another hook
 *     quantize.c  eight bits; affine.c: its arithmetic
 *     power_sgd.c low-rank matrices: the stages; power_plan.c: which gradients, and their memory;
 *                 power_steps.c: what is computed between operations; matrix.c: the linear algebra
 */
#ifndef TDDP_REDUCER_HOOKS_HOOKS_H
#define TDDP_REDUCER_HOOKS_HOOKS_H

#include <stdbool.h>

#include <tddp/hooks.h>

#include "base/base.h"

/* --- plain.c --------------------------------------------------------------------------------- */

/* Of hooks that do not look at what is in a bucket. */
enum { TDDP_HOOKS_ANY_MEMORY = 1u << TDDP_CPU | 1u << TDDP_CUDA };

/* Makes a hook; frees `state` with ops->free if that fails. */
TDDP_NODISCARD tddp_status tddp_hooks_make(const tddp_comm_hook_ops *ops, void *state,
                                           tddp_comm_hook **out);

/* Starts the bucket's operation on the buffer, with the bucket's description: a sum or the average
 * over the group. */
TDDP_NODISCARD tddp_status tddp_hooks_reduce(tddp_group *group, const tddp_bucket *bucket,
                                             tddp_buffer buffer, tddp_reduce_op op,
                                             tddp_work **work);
TDDP_NODISCARD tddp_status tddp_hooks_average(tddp_group *group, const tddp_bucket *bucket,
                                              tddp_buffer buffer, tddp_work **work);

/* Bytes of the group's memory for so many elements: at least one. */
size_t tddp_hooks_room(size_t count, size_t bytes_each);

/* Whether `hook` can compute on this bucket: floating-point numbers; in the CPU's memory. */
TDDP_NODISCARD tddp_status tddp_hooks_check(const char *hook, const tddp_bucket *bucket);
TDDP_NODISCARD tddp_status tddp_hooks_check_host(const char *hook, const tddp_bucket *bucket);

/* --- table.c --------------------------------------------------------------------------------- */

/* One piece of memory for each bucket of a layout. All zero is an empty one. */
typedef struct tddp_hooks_table {
    uint64_t layout;
    size_t count;
    struct tddp_hooks_entry *entries;
} tddp_hooks_table;

/* Makes what a hook keeps for a bucket; it is freed with `release`. */
typedef tddp_status (*tddp_hooks_maker)(void *state, tddp_group *group, const tddp_bucket *bucket,
                                        void **out);

/* At stage 0: what is kept for the bucket, made if it is new or not what it was. Nothing of an
 * older layout is under way then: a reducer plans anew between its rounds only. */
TDDP_NODISCARD tddp_status tddp_hooks_enter(tddp_hooks_table *table, tddp_group *group,
                                            const tddp_bucket *bucket, tddp_hooks_maker make,
                                            void (*release)(void *memory), void *state, void **out);

/* At later stages: what was entered. */
TDDP_NODISCARD tddp_status tddp_hooks_entered(const tddp_hooks_table *table,
                                              const tddp_bucket *bucket, void **out);

void tddp_hooks_clear(tddp_hooks_table *table, void (*release)(void *memory));

/* --- cast.c ---------------------------------------------------------------------------------- */

/* to[i] = from[i] / divisor, rounded to the dtype of `to`. float64 goes through float32 on its way
 * to the half ones. Of two that are wide and equal only float32 may be cast. Nothing overlaps. */
void tddp_hooks_cast(tddp_buffer from, tddp_buffer to, double divisor);

/* Where element `start` lies. */
char *tddp_hooks_at(const tddp_buffer *buffer, size_t start);

/* `count` elements from element `start` on as float32: where they lie, or cast to `scratch`. */
const float *tddp_hooks_floats(const tddp_buffer *buffer, size_t start, size_t count,
                               float *scratch);
void tddp_hooks_store_floats(const float *from, const tddp_buffer *buffer, size_t start,
                             size_t count);

#endif
