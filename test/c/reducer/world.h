/* Helpers of the reducer's tests: parameters, and iterations. */
#ifndef TDDP_TEST_REDUCER_WORLD_H
#define TDDP_TEST_REDUCER_WORLD_H

#include <stdio.h>
#include <string.h>

#include "hosted_group.h"
#include "reducer/reducer.h"

static const char *const names[] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                    "i", "j", "k", "l", "m", "n", "o", "p"};

/* Parameter number `i`, of one dimension; borrows `dim`. */
static inline tddp_param vector_param(size_t i, const int64_t *dim, tddp_dtype dtype)
{
    return (tddp_param){names[i], (size_t)*dim, dtype, TDDP_CPU, 0, dim, 1, 0};
}

/* Options with the limits of the first bucket and of the others; valid until the next call. */
static inline tddp_reducer_opts buckets_of(size_t first, size_t others)
{
    static size_t limits[2];
    tddp_reducer_opts opts = TDDP_REDUCER_OPTS_INIT;
    limits[0] = first;
    limits[1] = others;
    opts.limits = limits;
    opts.limit_count = 2;
    return opts;
}

/* `count` float32 vectors of 1, 2, ... elements. */
static inline tddp_reducer *make_vectors(tddp_group *group, size_t count,
                                         const tddp_reducer_opts *opts)
{
    static int64_t dims[16];
    tddp_param params[16];
    tddp_reducer *reducer = NULL;
    for (size_t i = 0; i < count; i++) {
        dims[i] = (int64_t)i + 1;
        params[i] = vector_param(i, &dims[i], TDDP_FLOAT32);
    }
    CHECK_OK(tddp_reducer_create(group, params, count, opts, NULL, &reducer));
    return reducer;
}

static inline void fill(tddp_reducer *reducer, size_t index, float value)
{
    float *gradient = tddp_reducer_gradient(reducer, index);
    for (size_t k = 0; k <= index; k++) {
        gradient[k] = value + (float)k;
    }
}

static inline void check_filled(tddp_reducer *reducer, size_t index, float value)
{
    const float *gradient = tddp_reducer_gradient(reducer, index);
    for (size_t k = 0; k <= index; k++) {
        CHECK_DOUBLE(gradient[k], value + (float)k, 1e-5);
    }
}

/* Sets all elements of a gradient. */
static inline void fill_with(tddp_reducer *reducer, size_t index, float value)
{
    float *gradient = tddp_reducer_gradient(reducer, index);
    for (size_t k = 0; k <= index; k++) {
        gradient[k] = value;
    }
}

static inline void check_all(tddp_reducer *reducer, size_t index, double value)
{
    const float *gradient = tddp_reducer_gradient(reducer, index);
    for (size_t k = 0; k <= index; k++) {
        CHECK_DOUBLE(gradient[k], value, 1e-5);
    }
}

/* Marks a parameter ready, and checks `all_ready`. */
static inline void mark(tddp_reducer *reducer, size_t index, int expected_all)
{
    int all = -1;
    CHECK_OK(tddp_reducer_mark_ready(reducer, index, &all));
    CHECK_INT(all, expected_all);
}

/* An iteration in the order given; parameter i has the value base + 10 i. */
static inline void run_iteration(tddp_reducer *reducer, const size_t *order, size_t count,
                                 float base)
{
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t k = 0; k < count; k++) {
        int all = -1;
        fill(reducer, order[k], base + 10.0f * (float)order[k]);
        CHECK_OK(tddp_reducer_mark_ready(reducer, order[k], &all));
        CHECK_INT(all, k + 1 == count);
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
}

#endif
