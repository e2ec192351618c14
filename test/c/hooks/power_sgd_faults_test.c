/* PowerSGD with nonfinite, zero and half-precision gradients, and with failed allocations. */
#include "base/base.h"
#include "low_rank.h"

static void odd_body(int rank, int world_size, tddp_store *store, void *data)
{
    const setting *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&self->opts, &hook));
    make_bucket(&bucket, 0, 1, self->dtype, shapes, GRADIENTS);
    for (uint64_t iteration = 0; iteration < 4; iteration++) {
        fill_low_rank(&bucket, rank, 1);
        if (iteration == 1 && rank == 1) {
            set_value(&bucket, FIRST_MATRIX + 1, 1234, (double)INFINITY);
        }
        (void)run_iteration(hook, group, &bucket, 1, iteration);
        if (iteration != 1) {
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

TEST(nonfinite_gradients_are_nan_on_all_ranks_for_one_iteration)
{
    setting wide = {options(1), 1, TDDP_FLOAT32, 2e-5};
    setting half = {options(1), 1, TDDP_BFLOAT16, 0.25};
    run_ranks(2, odd_body, &wide);
    run_ranks(3, odd_body, &half);
    wide.opts.error_feedback = 0;
    run_ranks(2, odd_body, &wide);
}

/* Zero gradients, then others: the warm-started Q is zero. */
static void zero_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_power_sgd_opts opts = options(2);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, shapes, GRADIENTS);
    for (uint64_t iteration = 0; iteration < 6; iteration++) {
        int terms = iteration % 3 == 0 ? 0 : 2;
        fill_low_rank(&bucket, rank, terms);
        (void)run_iteration(hook, group, &bucket, 1, iteration);
        check_low_rank(&bucket, world_size, terms, 2e-4);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(zero_gradients_stay_zero_and_recover)
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
    for (uint64_t iteration = 0; iteration < 3; iteration++) {
        fill_low_rank(&bucket, rank, 1);
        CHECK_INT(run_iteration(hook, group, &bucket, 1, iteration), 3);
        check_low_rank(&bucket, world_size, 1, sent == TDDP_FLOAT16 ? 0.03 : 0.25);
        check_same_everywhere(group, bucket.bucket.buffer);
    }
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(it_runs_on_a_compressed_bucket)
{
    tddp_dtype sent[] = {TDDP_FLOAT16, TDDP_BFLOAT16};
    run_ranks(2, wrapped_body, &sent[0]);
    run_ranks(3, wrapped_body, &sent[1]);
}

/* Makes allocation number `nth` of a hook and its first operation fail. In a separate group,
 * because a failed operation makes the group unusable. */
static tddp_status run_short_of_memory(int which, const test_bucket *bucket, long nth)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_power_sgd_opts opts = options(1);
    tddp_comm_hook *hook = NULL;
    tddp_work *work = NULL;
    int again = 0;
    tddp_fail_allocation(nth);
    tddp_status status = which == 0   ? tddp_hook_power_sgd(&opts, &hook)
                         : which == 1 ? tddp_hook_quantize(1, 8, &hook)
                                      : tddp_hook_compress(TDDP_BFLOAT16, NULL, &hook);
    if (status == TDDP_OK) {
        status = tddp_comm_hook_run(hook, group, &bucket->bucket, 0, &work, &again);
    }
    if (status == TDDP_OK) {
        status = tddp_work_wait(work, NULL);
    }
    tddp_fail_allocation(0);
    tddp_work_release(work);
    tddp_comm_hook_release(hook);
    drop(group, store);
    return status;
}

/* Nothing leaks either: ASan checks. */
TEST(failed_allocations_are_reported)
{
    test_bucket bucket;
    make_bucket(&bucket, 0, 1, TDDP_FLOAT16, shapes, GRADIENTS);
    fill_low_rank(&bucket, 0, 1);
    for (int which = 0; which < 3; which++) {
        long nth = 1;
        while (run_short_of_memory(which, &bucket, nth) == TDDP_OUT_OF_MEMORY) {
            CHECK(++nth < 60);
        }
        CHECK_OK(run_short_of_memory(which, &bucket, 0));
        CHECK(nth > 4); /* the hook, its states, the bucket's state, the operation */
    }
    free_bucket(&bucket);
}
