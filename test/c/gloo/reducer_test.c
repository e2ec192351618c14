/* Gradient buckets over Gloo: unused parameters, static graphs, joins and the hooks that come with
 * the library, on one to four ranks. */
#include <stdbool.h>

#include <tddp/hooks.h>

#include "world.h"

enum { COUNT = 6, STEPS = 3 };

/* Matrices of odd sizes and a vector; number 2 is left out by even ranks, number 4 by all. */
static const int64_t dims[COUNT][2] = {{7, 3}, {13, 1}, {5, 11}, {1, 1}, {3, 3}, {9, 17}};

static tddp_reducer *make(tddp_group *group, const tddp_reducer_opts *opts)
{
    static const char *const names[COUNT] = {"a", "b", "c", "d", "e", "f"};
    tddp_param params[COUNT];
    tddp_reducer *reducer = NULL;
    for (size_t i = 0; i < COUNT; i++) {
        size_t count = (size_t)(dims[i][0] * dims[i][1]);
        params[i] = (tddp_param){names[i], count, TDDP_FLOAT32, TDDP_CPU, 0, dims[i], 2, 0};
    }
    CHECK_OK(tddp_reducer_create(group, params, COUNT, opts, NULL, &reducer));
    return reducer;
}

static double value(int rank, int step, size_t param, size_t k)
{
    return (rank + 1) * 0.25 + step + (double)((param * 5 + k) % 7) * 0.5;
}

static bool uses(bool partly, int rank, size_t param)
{
    return !partly || (param != 4 && !(param == 2 && rank % 2 == 0));
}

static size_t elements(size_t param)
{
    return (size_t)(dims[param][0] * dims[param][1]);
}

static void fill(tddp_reducer *reducer, bool partly, int rank, int step)
{
    for (size_t i = 0; i < COUNT; i++) {
        float *gradient = tddp_reducer_gradient(reducer, i);
        for (size_t k = 0; k < elements(i); k++) {
            gradient[k] = uses(partly, rank, i) ? (float)value(rank, step, i, k) : 0.0f;
        }
    }
}

static void check_values(tddp_reducer *reducer, bool partly, int world_size, int active,
                         int divisor, int step, double tolerance)
{
    for (size_t i = 0; i < COUNT; i++) {
        const float *gradient = tddp_reducer_gradient(reducer, i);
        bool used = false;
        for (size_t k = 0; k < elements(i); k++) {
            double sum = 0;
            for (int r = world_size - active; r < world_size; r++) {
                used = used || uses(partly, r, i);
                sum += uses(partly, r, i) ? value(r, step, i, k) : 0;
            }
            CHECK_DOUBLE(gradient[k], sum / divisor, tolerance);
        }
        CHECK_INT(tddp_reducer_used(reducer, i), used);
    }
}

typedef struct form {
    tddp_reducer_opts opts;
    tddp_comm_hook *hook; /* taken over */
    bool join;            /* rank r has r + 1 steps, and sums are divided by those that work */
    double tolerance;
} form;

static void open_step(tddp_reducer *reducer, const form *how, int active)
{
    int rebuilt = 0;
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
    if (how->join) {
        CHECK_OK(tddp_reducer_set_divisor(reducer, active));
    }
    CHECK_OK(tddp_reducer_prepare(reducer));
}

static void work_on(tddp_reducer *reducer, const form *how, int rank, int step)
{
    bool partly = how->opts.find_unused || how->opts.static_graph;
    size_t unused[COUNT];
    size_t count = 0;
    for (size_t i = 0; i < COUNT; i++) {
        if (!uses(partly, rank, i)) {
            unused[count++] = i;
        }
    }
    if (partly) {
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, count, NULL));
    }
    fill(reducer, partly, rank, step);
    for (size_t n = 0; n < COUNT; n++) {
        int all = 0;
        size_t i = (n * 5 + (size_t)rank) % COUNT;
        if (uses(partly, rank, i)) {
            CHECK_OK(tddp_reducer_mark_ready(reducer, i, &all));
        }
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
}

static void train(int rank, int world_size, int port, form how)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    static const size_t limits[] = {100, 200};
    how.opts.limits = limits;
    how.opts.limit_count = 2;
    tddp_reducer *reducer = make(group, &how.opts);
    if (how.hook) {
        CHECK_OK(tddp_reducer_set_hook(reducer, how.hook));
        tddp_comm_hook_release(how.hook);
    }
    bool partly = how.opts.find_unused || how.opts.static_graph;
    for (int step = 0; step < (how.join ? world_size : STEPS); step++) {
        int active = how.join ? world_size - step : world_size;
        open_step(reducer, &how, active);
        if (rank >= world_size - active) {
            work_on(reducer, &how, rank, step);
        } else {
            CHECK_OK(tddp_reducer_shadow(reducer, NULL));
        }
        check_values(reducer, partly, world_size, active, active, step, how.tolerance);
    }
    tddp_reducer_free(reducer);
    leave(group, store);
}

static form plain(void)
{
    return (form){.opts = TDDP_REDUCER_OPTS_INIT, .tolerance = 1e-5};
}

MULTI_TEST(unused_parameters_on_four_ranks, 4, 60)
{
    form how = plain();
    how.opts.find_unused = 1;
    train(rank, world_size, port, how);
}

MULTI_TEST(unused_buckets_are_skipped_on_three_ranks, 3, 60)
{
    form how = plain();
    how.opts.find_unused = how.opts.skip_unused = 1;
    train(rank, world_size, port, how);
}

MULTI_TEST(three_ranks_with_a_static_graph, 3, 60)
{
    form how = plain();
    how.opts.static_graph = how.opts.skip_unused = 1;
    train(rank, world_size, port, how);
}

MULTI_TEST(three_ranks_end_one_after_the_other, 3, 60)
{
    form how = plain();
    how.join = true;
    train(rank, world_size, port, how);
}

MULTI_TEST(two_ranks_end_one_after_the_other_and_leave_parameters_out, 2, 60)
{
    form how = plain();
    how.join = true;
    how.opts.find_unused = how.opts.describe = 1;
    train(rank, world_size, port, how);
}

MULTI_TEST(one_rank_compresses, 1, 30)
{
    form how = plain();
    how.tolerance = 0.05;
    CHECK_OK(tddp_hook_compress(TDDP_BFLOAT16, NULL, &how.hook));
    train(rank, world_size, port, how);
}

MULTI_TEST(three_ranks_compress, 3, 60)
{
    form how = plain();
    how.tolerance = 0.01;
    how.opts.find_unused = 1;
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, NULL, &how.hook));
    train(rank, world_size, port, how);
}

MULTI_TEST(two_ranks_quantize, 2, 60)
{
    form how = plain();
    how.tolerance = 0.05;
    how.opts.describe = 1;
    CHECK_OK(tddp_hook_quantize(1, 64, &how.hook));
    train(rank, world_size, port, how);
}

/* Of full rank, so that nothing is lost: its three stages alternate between the buckets. */
MULTI_TEST(two_ranks_approximate, 2, 60)
{
    form how = plain();
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    opts.rank = 9;
    opts.start_iteration = 0;
    opts.min_compression_rate = 0.1;
    how.tolerance = 1e-3;
    how.opts.static_graph = 1;
    CHECK_OK(tddp_hook_power_sgd(&opts, &how.hook));
    train(rank, world_size, port, how);
}
