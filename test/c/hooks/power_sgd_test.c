/* PowerSGD: exact averages, errors and error feedback, and equal results on all ranks. */
#include "low_rank.h"

/* --- exactness ------------------------------------------------------------------------------- */

static void exact_body(int rank, int world_size, tddp_store *store, void *data)
{
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket buckets[2];
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&buckets[0], 0, 2, self->dtype, shapes, GRADIENTS);
    make_bucket(&buckets[1], 1, 2, self->dtype, shapes, FIRST_MATRIX);
    for (uint64_t iteration = 0; iteration < 3; iteration++) {
        fill_low_rank(&buckets[0], rank, self->terms);
        fill_low_rank(&buckets[1], rank, self->terms);
        CHECK_INT(run_iteration(hook, group, buckets, 2, iteration), 3);
        check_low_rank(&buckets[0], world_size, self->terms, self->tolerance);
        check_low_rank(&buckets[1], world_size, self->terms, 0.0);
        check_same_everywhere(group, buckets[0].bucket.buffer);
    }
    free_bucket(&buckets[0]);
    free_bucket(&buckets[1]);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(matrices_of_the_rank_are_averaged_exactly)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        setting self = {options(2), 2, TDDP_FLOAT32, 2e-5};
        run_ranks(ranks, exact_body, &self);
    }
}

TEST(every_dtype_is_supported)
{
    double tolerances[FLOATING] = {0.03, 0.25, 1e-5, 1e-12};
    for (size_t d = 0; d < FLOATING; d++) {
        setting self = {options(1), 1, floating[d], tolerances[d]};
        run_ranks(2, exact_body, &self);
    }
}

/* More columns than the matrix's rank: the surplus ones are linearly dependent. */
TEST(matrices_of_a_lower_rank_are_averaged_exactly)
{
    for (int terms = 0; terms <= 2; terms++) {
        setting self = {options(3), terms, TDDP_FLOAT32, 5e-5};
        self.opts.min_compression_rate = 1.0;
        run_ranks(2, exact_body, &self);
        self.opts.orthogonalization_epsilon = 1e-8;
        run_ranks(2, exact_body, &self);
    }
}

TEST(without_error_feedback_and_warm_start)
{
    for (size_t d = 0; d < FLOATING; d++) {
        double tolerances[FLOATING] = {0.03, 0.25, 1e-5, 1e-12};
        setting self = {options(1), 1, floating[d], tolerances[d]};
        self.opts.error_feedback = 0;
        self.opts.warm_start = 0;
        run_ranks(2, exact_body, &self);
    }
}

/* --- errors ---------------------------------------------------------------------------------- */

static double full_rank(int rank, size_t i, size_t k)
{
    return noise((uint64_t)(rank + 1) * 7919 + i, k);
}

static const shape matrices[] = {{{12, 40}}, {{30, 9}}, {{5}}};

static void fill_full_rank(test_bucket *bucket, int rank)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, full_rank(rank, i, k));
        }
    }
}

typedef struct sums {
    double of[3][480];
} sums;

/* The maximum distance between the mean over the iterations and the average of the gradients. */
static double distance(const test_bucket *bucket, const sums *total, int world_size, double rounds)
{
    double most = 0;
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            double average = 0;
            for (int rank = 0; rank < world_size; rank++) {
                average += full_rank(rank, i, k) / world_size;
            }
            most = fmax(most, fabs(total->of[i][k] / rounds - average));
        }
    }
    return most;
}

/* The same gradients in each iteration: with error feedback the mean converges to the average. */
static void feedback_body(int rank, int world_size, tddp_store *store, void *data)
{
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    double first = 0;
    sums *total = calloc(1, sizeof *total);
    CHECK(total);
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&bucket, 0, 1, self->dtype, matrices, 3);
    for (uint64_t iteration = 0; iteration < 150; iteration++) {
        fill_full_rank(&bucket, rank);
        (void)run_iteration(hook, group, &bucket, 1, iteration);
        for (size_t i = 0; i < 3; i++) {
            for (size_t k = 0; k < bucket.gradients[i].count; k++) {
                total->of[i][k] += value_of(&bucket, i, k);
            }
        }
        if (iteration == 0) {
            first = distance(&bucket, total, world_size, 1);
        }
        check_same_everywhere(group, bucket.bucket.buffer);
    }
    double last = distance(&bucket, total, world_size, 150);
    if (self->opts.error_feedback) {
        CHECK(last < self->tolerance && last < first / 8);
    } else {
        CHECK(last > 0.2);
    }
    free(total);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(error_feedback_adds_the_error_in_later_iterations)
{
    for (int warm = 0; warm <= 1; warm++) {
        setting self = {options(1), 0, TDDP_FLOAT32, 0.1};
        self.opts.warm_start = warm;
        self.opts.min_compression_rate = 0.5;
        run_ranks(2, feedback_body, &self);
    }
    setting batched = {options(2), 0, TDDP_FLOAT32, 0.1};
    batched.opts.batched = 1;
    run_ranks(3, feedback_body, &batched);
    setting halves = {options(2), 0, TDDP_FLOAT16, 0.1};
    halves.opts.min_compression_rate = 0.5;
    run_ranks(2, feedback_body, &halves);
}

TEST(without_error_feedback_the_error_is_lost)
{
    setting self = {options(1), 0, TDDP_FLOAT32, 0.0};
    self.opts.error_feedback = 0;
    run_ranks(2, feedback_body, &self);
}

/* --- batched --------------------------------------------------------------------------------- */

/* All gradients, concatenated, are this matrix of 16 x 16, of rank 1. */
static double square(size_t k)
{
    return noise(1, k / 16) * noise(2, k % 16);
}

static void square_body(int rank, int world_size, tddp_store *store, void *data)
{
    static const shape parts[] = {{{100}}, {{7, 8}}, {{10, 10}}};
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&bucket, 0, 1, self->dtype, parts, 3);
    for (uint64_t iteration = 0; iteration < 2; iteration++) {
        for (int check = 0; check <= 1; check++) {
            size_t at = 0;
            for (size_t i = 0; i < 3; i++) {
                for (size_t k = 0; k < bucket.gradients[i].count; k++, at++) {
                    if (check) {
                        double expected = square(at) * (world_size + 1) / 2;
                        CHECK_DOUBLE(value_of(&bucket, i, k), expected, self->tolerance);
                    } else {
                        set_value(&bucket, i, k, square(at) * (rank + 1));
                    }
                }
            }
            if (!check) {
                CHECK_INT(run_iteration(hook, group, &bucket, 1, iteration), 3);
            }
        }
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(batched_compresses_one_square_matrix)
{
    double tolerances[FLOATING] = {0.02, 0.1, 1e-5, 1e-12};
    for (size_t d = 0; d < FLOATING; d++) {
        for (int feedback = 0; feedback <= 1; feedback++) {
            setting self = {options(1), 0, floating[d], tolerances[d]};
            self.opts.batched = 1;
            self.opts.error_feedback = feedback;
            run_ranks(3, square_body, &self);
        }
    }
}

/* --- start iteration and layouts ------------------------------------------------------------- */

static void start_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_power_sgd_opts opts = options(1);
    tddp_comm_hook *hook;
    test_bucket bucket;
    opts.start_iteration = 2;
    CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, matrices, 3);
    for (uint64_t iteration = 0; iteration < 4; iteration++) {
        fill_full_rank(&bucket, rank);
        CHECK_INT(run_iteration(hook, group, &bucket, 1, iteration), iteration < 2 ? 2 : 3);
        double worst = 0;
        for (size_t k = 0; k < 480; k++) {
            double sum = 0;
            for (int r = 0; r < world_size; r++) {
                sum += full_rank(r, 0, k);
            }
            worst = fmax(worst, fabs(value_of(&bucket, 0, k) - sum / world_size));
        }
        CHECK(iteration < 2 ? worst < 1e-6 : worst > 0.1);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(iterations_before_the_start_are_uncompressed)
{
    run_ranks(3, start_body, NULL);
}

/* Another layout clears the errors, and has other matrices. */
static void layout_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_power_sgd_opts opts = options(2);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, matrices, 3);
    fill_full_rank(&bucket, rank);
    (void)run_iteration(hook, group, &bucket, 1, 0);
    free_bucket(&bucket);
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    bucket.bucket.layout = 2;
    fill_low_rank(&bucket, rank, 2);
    (void)run_iteration(hook, group, &bucket, 1, 1);
    check_low_rank(&bucket, world_size, 2, 2e-5);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(a_new_layout_resets_the_state)
{
    run_ranks(2, layout_body, NULL);
}
