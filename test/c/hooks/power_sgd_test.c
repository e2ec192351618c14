/* PowerSGD: what it does exactly, what it loses and gives back, and that ranks agree. */
#include "base/base.h"
#include "driver.h"

/* A vector, a small matrix, and others that are worth compressing: one whose rows are longer than a
 * block, one whose rows are short, one of three dimensions. */
static const shape shapes[] = {{{37}}, {{3, 2}}, {{19, 2100}}, {{1030, 5}}, {{24, 5, 7}}};

enum { GRADIENTS = 5, FIRST_MATRIX = 2 };

static tddp_power_sgd_opts options(int rank)
{
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    opts.rank = rank;
    opts.start_iteration = 0;
    return opts;
}

static size_t columns_of(const test_bucket *bucket, size_t i)
{
    return bucket->gradients[i].count / (size_t)bucket->gradients[i].dims[0];
}

/* Matrices of rank `terms`, a multiple of one for all ranks, so that the average is of it too;
 * whole numbers elsewhere. */
static double low_rank(const test_bucket *bucket, int rank, int terms, size_t i, size_t k)
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

static void fill_low_rank(test_bucket *bucket, int rank, int terms)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, low_rank(bucket, rank, terms, i, k));
        }
    }
}

static void check_low_rank(const test_bucket *bucket, int world_size, int terms, double tolerance)
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

/* --- exactness ------------------------------------------------------------------------------- */

typedef struct setting {
    tddp_power_sgd_opts opts;
    int terms; /* the rank of the gradients */
    tddp_dtype dtype;
    double tolerance;
} setting;

static void exact_body(int rank, int world_size, tddp_store *store, void *data)
{
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket buckets[2];
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&buckets[0], 0, 2, self->dtype, shapes, GRADIENTS);
    make_bucket(&buckets[1], 1, 2, self->dtype, shapes, FIRST_MATRIX);
    for (uint64_t round = 0; round < 3; round++) {
        fill_low_rank(&buckets[0], rank, self->terms);
        fill_low_rank(&buckets[1], rank, self->terms);
        CHECK_INT(run_round(hook, group, buckets, 2, round), 3);
        check_low_rank(&buckets[0], world_size, self->terms, self->tolerance);
        check_low_rank(&buckets[1], world_size, self->terms, 0.0);
        check_same_everywhere(group, buckets[0].bucket.buffer);
    }
    free_bucket(&buckets[0]);
    free_bucket(&buckets[1]);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(matrices_of_that_rank_are_averaged_exactly)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        setting self = {options(2), 2, TDDP_FLOAT32, 2e-5};
        run_ranks(ranks, exact_body, &self);
    }
}

TEST(in_every_dtype)
{
    double tolerances[FLOATING] = {0.03, 0.25, 1e-5, 1e-12};
    for (size_t d = 0; d < FLOATING; d++) {
        setting self = {options(1), 1, floating[d], tolerances[d]};
        run_ranks(2, exact_body, &self);
    }
}

/* More columns than directions: what is left of the surplus ones is rounding, or nothing. */
TEST(matrices_of_a_lower_rank_too)
{
    for (int terms = 0; terms <= 2; terms++) {
        setting self = {options(3), terms, TDDP_FLOAT32, 5e-5};
        self.opts.min_compression_rate = 1.0;
        run_ranks(2, exact_body, &self);
        self.opts.orthogonalization_epsilon = 1e-8;
        run_ranks(2, exact_body, &self);
    }
}

TEST(without_memory_from_round_to_round)
{
    for (size_t d = 0; d < FLOATING; d++) {
        double tolerances[FLOATING] = {0.03, 0.25, 1e-5, 1e-12};
        setting self = {options(1), 1, floating[d], tolerances[d]};
        self.opts.error_feedback = 0;
        self.opts.warm_start = 0;
        run_ranks(2, exact_body, &self);
    }
}

/* --- losses ---------------------------------------------------------------------------------- */

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

/* The greatest distance between the mean of the rounds so far and the average of the gradients. */
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

/* The same gradients in each round: with error feedback all that is lost comes in the end. */
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
    for (uint64_t round = 0; round < 150; round++) {
        fill_full_rank(&bucket, rank);
        (void)run_round(hook, group, &bucket, 1, round);
        for (size_t i = 0; i < 3; i++) {
            for (size_t k = 0; k < bucket.gradients[i].count; k++) {
                total->of[i][k] += value_of(&bucket, i, k);
            }
        }
        if (round == 0) {
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

TEST(what_a_round_loses_comes_in_later_ones)
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

TEST(without_feedback_it_stays_lost)
{
    setting self = {options(1), 0, TDDP_FLOAT32, 0.0};
    self.opts.error_feedback = 0;
    run_ranks(2, feedback_body, &self);
}

/* --- the square ------------------------------------------------------------------------------ */

/* All gradients in a row are this matrix of 16 x 16, of rank 1. */
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
    for (uint64_t round = 0; round < 2; round++) {
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
                CHECK_INT(run_round(hook, group, &bucket, 1, round), 3);
            }
        }
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(all_gradients_as_one_square)
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

/* --- beginnings and ends --------------------------------------------------------------------- */

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
    for (uint64_t round = 0; round < 4; round++) {
        fill_full_rank(&bucket, rank);
        CHECK_INT(run_round(hook, group, &bucket, 1, round), round < 2 ? 2 : 3);
        double worst = 0;
        for (size_t k = 0; k < 480; k++) {
            double sum = 0;
            for (int r = 0; r < world_size; r++) {
                sum += full_rank(r, 0, k);
            }
            worst = fmax(worst, fabs(value_of(&bucket, 0, k) - sum / world_size));
        }
        CHECK(round < 2 ? worst < 1e-6 : worst > 0.1);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(the_first_rounds_are_averaged_as_they_are)
{
    run_ranks(3, start_body, NULL);
}

/* Another layout forgets what was lost, and finds its own matrices. */
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
    (void)run_round(hook, group, &bucket, 1, 0);
    free_bucket(&bucket);
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    bucket.bucket.layout = 2;
    fill_low_rank(&bucket, rank, 2);
    (void)run_round(hook, group, &bucket, 1, 1);
    check_low_rank(&bucket, world_size, 2, 2e-5);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(another_layout_begins_afresh)
{
    run_ranks(2, layout_body, NULL);
}

/* --- what gradients may be ------------------------------------------------------------------- */

static void odd_body(int rank, int world_size, tddp_store *store, void *data)
{
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&bucket, 0, 1, self->dtype, shapes, GRADIENTS);
    for (uint64_t round = 0; round < 4; round++) {
        fill_low_rank(&bucket, rank, 1);
        if (round == 1 && rank == 1) {
            set_value(&bucket, FIRST_MATRIX + 1, 1234, (double)INFINITY);
        }
        (void)run_round(hook, group, &bucket, 1, round);
        if (round != 1) {
            check_low_rank(&bucket, world_size, 1, self->tolerance);
            continue;
        }
        for (size_t i = 0; i < GRADIENTS; i++) {
            for (size_t k = 0; k < bucket.gradients[i].count; k++) {
                CHECK_INT(isnan(value_of(&bucket, i, k)) != 0, i == FIRST_MATRIX + 1);
            }
        }
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(what_is_not_finite_is_nan_on_all_for_one_round)
{
    setting wide = {options(1), 1, TDDP_FLOAT32, 2e-5};
    setting half = {options(1), 1, TDDP_BFLOAT16, 0.25};
    run_ranks(2, odd_body, &wide);
    run_ranks(3, odd_body, &half);
    wide.opts.error_feedback = 0;
    run_ranks(2, odd_body, &wide);
}

/* Zero gradients, then others: the warm Q had no direction to keep. */
static void zero_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_power_sgd_opts opts = options(2);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    for (uint64_t round = 0; round < 6; round++) {
        int terms = round % 3 == 0 ? 0 : 2;
        fill_low_rank(&bucket, rank, terms);
        (void)run_round(hook, group, &bucket, 1, round);
        check_low_rank(&bucket, world_size, terms, 2e-4);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(zeros_stay_zeros_and_do_not_stick)
{
    run_ranks(2, zero_body, NULL);
}

static void wrapped_body(int rank, int world_size, tddp_store *store, void *data)
{
    tddp_dtype sent = *(tddp_dtype *)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_power_sgd_opts opts = options(1);
    tddp_comm_hook *inner;
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&opts, &inner));
    CHECK_OK(tddp_hook_compress(sent, inner, &hook));
    tddp_comm_hook_release(inner);
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    for (uint64_t round = 0; round < 3; round++) {
        fill_low_rank(&bucket, rank, 1);
        CHECK_INT(run_round(hook, group, &bucket, 1, round), 3);
        check_low_rank(&bucket, world_size, 1, sent == TDDP_FLOAT16 ? 0.03 : 0.25);
        check_same_everywhere(group, bucket.bucket.buffer);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(it_works_on_halves_of_a_wide_bucket)
{
    tddp_dtype sent[] = {TDDP_FLOAT16, TDDP_BFLOAT16};
    run_ranks(2, wrapped_body, &sent[0]);
    run_ranks(3, wrapped_body, &sent[1]);
}

/* Every allocation of hooks and their first round fails in turn; nothing is lost (ASan looks). */
TEST(memory_that_is_not_there_is_told)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    test_bucket bucket;
    make_bucket(&bucket, 0, 1, TDDP_FLOAT16, matrices, 3);
    fill_full_rank(&bucket, 0);
    for (int which = 0; which < 3; which++) {
        tddp_status status = TDDP_OUT_OF_MEMORY;
        for (long nth = 1; status == TDDP_OUT_OF_MEMORY; nth++) {
            tddp_power_sgd_opts opts = options(1);
            tddp_comm_hook *hook = NULL;
            tddp_work *work = NULL;
            int again = 0;
            opts.min_compression_rate = 0.5;
            CHECK(nth < 40);
            tddp_fail_allocation(nth);
            status = which == 0   ? tddp_hook_power_sgd(&opts, &hook)
                     : which == 1 ? tddp_hook_quantize(1, 8, &hook)
                                  : tddp_hook_compress(TDDP_BFLOAT16, NULL, &hook);
            if (status == TDDP_OK) {
                status = tddp_comm_hook_run(hook, group, &bucket.bucket, 0, &work, &again);
            }
            tddp_fail_allocation(0);
            if (status == TDDP_OK) {
                CHECK_OK(tddp_work_wait(work, NULL));
                tddp_work_release(work);
                CHECK(nth > 3);
            }
            tddp_comm_hook_release(hook);
        }
        CHECK_OK(status);
    }
    free_bucket(&bucket);
    drop(group, store);
}
