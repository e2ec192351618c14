/*
 * The PowerSGD hook: its stages and options. Called by one thread of a reducer at a time.
 *
 *     stage 0   P = M Q of each matrix               -> average P and the uncompressed gradients
 *     stage 1   orthonormalize P, then Q = M^T P     -> average Q
 *     stage 2   store P Q^T in the bucket
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/options.h"
#include "hooks/power.h"

typedef struct power_sgd {
    tddp_power_sgd_opts opts;
    const char *name;
    tddp_hooks_states states;
} power_sgd;

static tddp_status make_plan(void *state, tddp_group *group, const tddp_bucket *bucket, void **out)
{
    const power_sgd *self = state;
    tddp_power_plan *plan;
    tddp_status status = tddp_power_plan_make(&self->opts, group, bucket, &plan);
    if (status == TDDP_OK) {
        *out = plan;
    }
    return status;
}

static tddp_status run_first_stage(power_sgd *self, tddp_group *group, const tddp_bucket *bucket,
                                   tddp_work **work, int *again)
{
    void *found = NULL;
    tddp_status status = tddp_hooks_check_host(self->name, bucket);
    if (status != TDDP_OK) {
        return status;
    }
    if (bucket->iteration < (uint64_t)self->opts.start_iteration) {
        return tddp_hooks_average(group, bucket, bucket->buffer, work);
    }
    status = tddp_hooks_require_state(&self->states, group, bucket, make_plan, tddp_power_plan_free,
                                      self, &found);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_power_plan *plan = found;
    if (plan->matrix_count == 0) {
        return tddp_hooks_average(group, bucket, bucket->buffer, work);
    }
    tddp_power_compute_p(&self->opts, plan, bucket);
    *again = 1;
    return tddp_hooks_average(group, bucket, plan->first, work);
}

static tddp_status run(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again)
{
    power_sgd *self = state;
    void *found = NULL;
    if (stage == 0) {
        return run_first_stage(self, group, bucket, work, again);
    }
    tddp_status status = tddp_hooks_find_state(&self->states, bucket, &found);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_power_plan *plan = found;
    if (stage == 1) {
        tddp_power_compute_q(&self->opts, plan, bucket);
        *again = 1;
        return tddp_hooks_average(group, bucket, plan->second, work);
    }
    tddp_power_decompress(&self->opts, plan, bucket);
    return TDDP_OK;
}

static void free_power_sgd(void *state)
{
    power_sgd *self = state;
    tddp_hooks_free_states(&self->states, tddp_power_plan_free);
    free(self);
}

static tddp_status check(const tddp_power_sgd_opts *opts)
{
    if (opts->rank < 1) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "rank %d of power_sgd's matrices: expected 1 or more", opts->rank);
    }
    if (opts->start_iteration < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "start_iteration %" PRId64 ": expected 0 or more",
                         opts->start_iteration);
    }
    if (!(opts->min_compression_rate >= 0)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "min_compression_rate %g: expected 0 or more",
                         opts->min_compression_rate);
    }
    if (!(opts->orthogonalization_epsilon >= 0) || isinf(opts->orthogonalization_epsilon)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "orthogonalization_epsilon %g: expected 0, or a small number",
                         opts->orthogonalization_epsilon);
    }
    return TDDP_OK;
}

enum { SETTINGS_BYTES = 256 };

static void write_settings(const tddp_power_sgd_opts *opts, char text[SETTINGS_BYTES])
{
    (void)snprintf(text, SETTINGS_BYTES,
                   "rank %d, start %" PRId64 ", seed %" PRIu64 ", min compression rate %.9g, "
                   "error feedback %s, warm start %s, epsilon %.9g",
                   opts->rank, opts->start_iteration, opts->seed, opts->min_compression_rate,
                   opts->error_feedback ? "on" : "off", opts->warm_start ? "on" : "off",
                   opts->orthogonalization_epsilon);
}

void tddp_power_sgd_opts_init(tddp_power_sgd_opts *opts, size_t size)
{
    const tddp_power_sgd_opts defaults = TDDP_POWER_SGD_OPTS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, opts, size);
}

tddp_status tddp_hook_power_sgd(const tddp_power_sgd_opts *opts, tddp_comm_hook **out)
{
    tddp_power_sgd_opts all = TDDP_POWER_SGD_OPTS_INIT;
    tddp_status status =
        tddp_opts_read("TDDP_POWER_SGD_OPTS_INIT", opts,
                       TDDP_OPTS_UNTIL(tddp_power_sgd_opts, batched), &all, sizeof all);
    status = status ? status : check(&all);
    if (status != TDDP_OK) {
        return status;
    }
    opts = &all;
    power_sgd *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->opts = *opts;
    self->name = opts->batched ? "batched_power_sgd" : "power_sgd";
    char settings[SETTINGS_BYTES];
    write_settings(opts, settings);
    tddp_comm_hook_ops ops = {sizeof ops, self->name, 0, run, free_power_sgd, settings, 0};
    return tddp_hooks_make(&ops, self, out);
}
