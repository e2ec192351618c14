/* Helpers of PowerSGD's tests: options, and gradients that have exactly a low rank. */
#ifndef TDDP_TEST_HOOKS_LOW_RANK_H
#define TDDP_TEST_HOOKS_LOW_RANK_H

#include "driver.h"

/* A vector and a small matrix, which are not compressed, and others that are: with rows longer than
 * a block, with short rows, with three dimensions. */
static const shape shapes[] = {{{37}}, {{3, 2}}, {{19, 2100}}, {{1030, 5}}, {{24, 5, 7}}};

enum { GRADIENTS = 5, FIRST_MATRIX = 2 };

typedef struct setting {
    tddp_power_sgd_opts opts;
    int terms; /* the rank of the gradients */
    tddp_dtype dtype;
    double tolerance;
} setting;

static inline tddp_power_sgd_opts options(int rank)
{
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    opts.rank = rank;
    opts.start_iteration = 0;
    return opts;
}

static inline size_t columns_of(const test_bucket *bucket, size_t i)
{
    return bucket->gradients[i].count / (size_t)bucket->gradients[i].dims[0];
}

/* Matrices of rank `terms`, each rank's a multiple of the same one, so that the average has that
 * rank too; integers in uncompressed gradients. */
static inline double low_rank(const test_bucket *bucket, int rank, int terms, size_t i, size_t k)
{
    if (i < FIRST_MATRIX) {
        return (double)(k % 5) + 2 * rank;
    }
    size_t row = k / columns_of(bucket, i);
    size_t column = k % columns_of(bucket, i);
    double sum = 0;
    for (uint64_t t = 0; t < (uint64_t)terms; t++) {
        sum += noise(t + 10 * i, row) * noise(t + 10 * i + 5, column);
    }
    return sum * (rank + 1);
}

static inline void fill_low_rank(test_bucket *bucket, int rank, int terms)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, low_rank(bucket, rank, terms, i, k));
        }
    }
}

static inline void check_low_rank(const test_bucket *bucket, int world_size, int terms,
                                  double tolerance)
{
    double middle = (world_size - 1) / 2.0;
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            double expected = low_rank(bucket, 0, terms, i, k);
            if (i < FIRST_MATRIX) {
                CHECK_DOUBLE(value_of(bucket, i, k), expected + 2 * middle, 0.0);
            } else {
                CHECK_DOUBLE(value_of(bucket, i, k), expected * (middle + 1), tolerance);
            }
        }
    }
}

#endif
