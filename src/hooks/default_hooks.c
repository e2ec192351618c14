/*
 * Hooks with at most one operation, on the bucket itself: allreduce, noop and post-local SGD. They
 * have no state per bucket. Any thread. Also the helpers of all hooks: creation, reduction, and
 * checks of a bucket.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "hooks/hooks.h"

tddp_status tddp_hooks_make(const tddp_comm_hook_ops *ops, void *state, tddp_comm_hook **out)
{
    tddp_status status = tddp_comm_hook_make(ops, state, out);
    if (status != TDDP_OK && ops->free) {
        ops->free(state);
    }
    return status;
}

tddp_status tddp_hooks_reduce(tddp_group *group, const tddp_bucket *bucket, tddp_buffer buffer,
                              tddp_reduce_op op, tddp_work **work)
{
    const tddp_op_args args = {.size = sizeof args,
                               .kind = TDDP_OP_ALL_REDUCE,
                               .output = buffer,
                               .reduce = op,
                               .description = bucket->description};
    return tddp_submit(group, &args, work);
}

tddp_status tddp_hooks_average(tddp_group *group, const tddp_bucket *bucket, tddp_buffer buffer,
                               tddp_work **work)
{
    return tddp_hooks_reduce(group, bucket, buffer, TDDP_REDUCE_AVG, work);
}

size_t tddp_hooks_byte_count(size_t count, size_t bytes_each)
{
    return count > 0 ? count * bytes_each : 1;
}

tddp_status tddp_hooks_check_host(const char *hook, const tddp_bucket *bucket)
{
    if (bucket->buffer.device_type != TDDP_CPU) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "the hook %s computes in the CPU's memory, but bucket %zu is on %s: use "
                         "allreduce there",
                         hook, bucket->index, tddp_device_type_name(bucket->buffer.device_type));
    }
    return tddp_hooks_check(hook, bucket);
}

tddp_status tddp_hooks_check(const char *hook, const tddp_bucket *bucket)
{
    tddp_dtype dtype = bucket->buffer.dtype;
    if (dtype != TDDP_FLOAT16 && dtype != TDDP_BFLOAT16 && dtype != TDDP_FLOAT32 &&
        dtype != TDDP_FLOAT64) {
        return tddp_fail(TDDP_UNSUPPORTED,
                         "the hook %s got bucket %zu of %s: expected float16, bfloat16, float32 or "
                         "float64",
                         hook, bucket->index, tddp_dtype_name(dtype));
    }
    return TDDP_OK;
}

/* --- allreduce ------------------------------------------------------------------------------- */

static tddp_status run_allreduce(void *state, tddp_group *group, const tddp_bucket *bucket,
                                 int stage, tddp_work **work, int *again)
{
    (void)state;
    (void)stage;
    (void)again;
    return tddp_hooks_average(group, bucket, bucket->buffer, work);
}

tddp_status tddp_hook_allreduce(tddp_comm_hook **out)
{
    static const tddp_comm_hook_ops ops = {sizeof ops, "allreduce",          0, run_allreduce, NULL,
                                           NULL,       TDDP_HOOKS_ANY_MEMORY};
    return tddp_hooks_make(&ops, NULL, out);
}

/* --- noop ------------------------------------------------------------------------------------ */

static tddp_status run_noop(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                            tddp_work **work, int *again)
{
    (void)state;
    (void)group;
    (void)bucket;
    (void)stage;
    (void)work;
    (void)again;
    return TDDP_OK;
}

tddp_status tddp_hook_noop(tddp_comm_hook **out)
{
    static const tddp_comm_hook_ops ops = {sizeof ops,           "noop", 0, run_noop, NULL, NULL,
                                           TDDP_HOOKS_ANY_MEMORY};
    return tddp_hooks_make(&ops, NULL, out);
}

/* --- post-local SGD -------------------------------------------------------------------------- */

typedef struct post_local {
    tddp_group *subgroup; /* NULL: no average from `start` on */
    uint64_t start;
} post_local;

static tddp_status run_post_local(void *state, tddp_group *group, const tddp_bucket *bucket,
                                  int stage, tddp_work **work, int *again)
{
    const post_local *self = state;
    (void)stage;
    (void)again;
    tddp_group *among = bucket->iteration < self->start ? group : self->subgroup;
    return among ? tddp_hooks_average(among, bucket, bucket->buffer, work) : TDDP_OK;
}

static void free_post_local(void *state)
{
    post_local *self = state;
    tddp_group_release_async(self->subgroup);
    free(self);
}

tddp_status tddp_hook_post_local_sgd(tddp_group *subgroup, int64_t start_iteration,
                                     int post_local_gradient_allreduce, tddp_comm_hook **out)
{
    if (start_iteration < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "start_iteration %" PRId64 ": expected 0 or more",
                         start_iteration);
    }
    if (post_local_gradient_allreduce && !subgroup) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "post_local_sgd without a subgroup: expected one to average over from "
                         "iteration %" PRId64 " on, or post_local_gradient_allreduce 0",
                         start_iteration);
    }
    post_local *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->subgroup = post_local_gradient_allreduce ? tddp_group_retain(subgroup) : NULL;
    self->start = (uint64_t)start_iteration;
    char settings[64];
    (void)snprintf(settings, sizeof settings, "start %" PRId64 ", then %s", start_iteration,
                   self->subgroup ? "in subgroups" : "no average");
    tddp_comm_hook_ops ops = {sizeof ops, "post_local_sgd",     0, run_post_local, free_post_local,
                              settings,   TDDP_HOOKS_ANY_MEMORY};
    return tddp_hooks_make(&ops, self, out);
}
