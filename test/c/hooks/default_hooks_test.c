/* allreduce, noop and post-local SGD; invalid options and unsupported buckets of all hooks. */
#include "driver.h"

static const shape two[] = {{{3, 5}}, {{7}}};

static void fill(test_bucket *bucket, int rank)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            set_value(bucket, i, k, (double)(k % 8) + 2 * rank);
        }
    }
}

static void check_plus(const test_bucket *bucket, double more)
{
    for (size_t i = 0; i < bucket->bucket.gradient_count; i++) {
        for (size_t k = 0; k < bucket->gradients[i].count; k++) {
            CHECK_DOUBLE(value_of(bucket, i, k), (double)(k % 8) + more, 0.01);
        }
    }
}

static void allreduce_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket buckets[2];
    CHECK_OK(tddp_hook_allreduce(&hook));
    CHECK_TEXT(tddp_comm_hook_name(hook), "allreduce");
    for (size_t d = 0; d < FLOATING; d++) {
        make_bucket(&buckets[0], 0, 2, floating[d], two, 2);
        make_bucket(&buckets[1], 1, 2, floating[d], two, 1);
        fill(&buckets[0], rank);
        fill(&buckets[1], rank + 1);
        CHECK_INT(run_iteration(hook, group, buckets, 2, 0), 2);
        check_plus(&buckets[0], world_size - 1);
        check_plus(&buckets[1], world_size + 1);
        free_bucket(&buckets[0]);
        free_bucket(&buckets[1]);
    }
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(allreduce_averages)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_ranks(ranks, allreduce_body, NULL);
    }
}

static void noop_body(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_noop(&hook));
    make_bucket(&bucket, 0, 1, TDDP_FLOAT32, two, 2);
    fill(&bucket, rank);
    CHECK_INT(run_iteration(hook, group, &bucket, 1, 0), 1);
    check_plus(&bucket, 2 * rank);
    free_bucket(&bucket);
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(noop_changes_nothing)
{
    run_ranks(3, noop_body, NULL);
}

static tddp_group *make_subgroup(tddp_group *parent, tddp_store *store, const char *name, int rank,
                                 int world_size)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "fake";
    opts.name = name;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 20000;
    opts.parent = parent;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

static void post_local_body(int rank, int world_size, tddp_store *store, void *data)
{
    int after = *(int *)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_group *pair =
        make_subgroup(group, store, rank < 2 ? "first pair" : "second pair", rank % 2, 2);
    tddp_comm_hook *hook;
    test_bucket bucket;
    CHECK_OK(tddp_hook_post_local_sgd(pair, 2, after, &hook));
    tddp_group_release(pair); /* the hook retains it if it needs it */
    for (uint64_t iteration = 0; iteration < 4; iteration++) {
        make_bucket(&bucket, 0, 1, TDDP_FLOAT32, two, 2);
        fill(&bucket, rank);
        (void)run_iteration(hook, group, &bucket, 1, iteration);
        double of_pair = rank < 2 ? 1 : 5;
        check_plus(&bucket, iteration < 2 ? 3 : after ? of_pair : 2 * rank);
        free_bucket(&bucket);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_comm_hook_release(hook);
    leave(group);
}

TEST(post_local_sgd_averages_over_all_ranks_then_over_the_subgroup)
{
    for (int after = 0; after <= 1; after++) {
        run_ranks(4, post_local_body, &after);
    }
}

TEST(invalid_options_are_refused)
{
    tddp_comm_hook *hook = NULL;
    CHECK_STATUS(tddp_hook_post_local_sgd(NULL, 10, 1, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "subgroup");
    CHECK_STATUS(tddp_hook_post_local_sgd(NULL, -1, 0, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_hook_compress(TDDP_FLOAT32, NULL, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "float32: expected float16 or bfloat16");
    CHECK_STATUS(tddp_hook_quantize(1, 0, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_hook_power_sgd(NULL, &hook), TDDP_INVALID_ARGUMENT);
    tddp_power_sgd_opts opts = {.size = 8};
    CHECK_STATUS(tddp_hook_power_sgd(&opts, &hook), TDDP_INVALID_ARGUMENT);
    tddp_power_sgd_opts_init(&opts, sizeof opts);
    CHECK_INT(opts.start_iteration, 1000);
    opts.rank = 0;
    CHECK_STATUS(tddp_hook_power_sgd(&opts, &hook), TDDP_INVALID_ARGUMENT);
    opts.rank = 1;
    opts.start_iteration = -1;
    CHECK_STATUS(tddp_hook_power_sgd(&opts, &hook), TDDP_INVALID_ARGUMENT);
    opts.start_iteration = 0;
    opts.min_compression_rate = NAN;
    CHECK_STATUS(tddp_hook_power_sgd(&opts, &hook), TDDP_INVALID_ARGUMENT);
    opts.min_compression_rate = 2;
    opts.orthogonalization_epsilon = -1;
    CHECK_STATUS(tddp_hook_power_sgd(&opts, &hook), TDDP_INVALID_ARGUMENT);
    CHECK(hook == NULL);
}

static tddp_comm_hook *any_of(int which)
{
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    tddp_comm_hook *hook = NULL;
    switch (which) {
    case 0:
        CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, NULL, &hook));
        break;
    case 1:
        CHECK_OK(tddp_hook_quantize(0, 0, &hook));
        break;
    default:
        CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    }
    return hook;
}

TEST(unsupported_buckets_are_refused)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    for (int which = 0; which < 3; which++) {
        tddp_comm_hook *hook = any_of(which);
        tddp_work *work = NULL;
        test_bucket bucket;
        int again = 0;
        make_bucket(&bucket, 0, 1, TDDP_INT32, two, 2);
        CHECK_STATUS(tddp_comm_hook_run(hook, group, &bucket.bucket, 0, &work, &again),
                     TDDP_UNSUPPORTED);
        CHECK_CONTAINS(tddp_error_message(), "int32");
        bucket.bucket.buffer.dtype = TDDP_FLOAT32;
        bucket.bucket.buffer.device_type = TDDP_CUDA;
        CHECK_STATUS(tddp_comm_hook_run(hook, group, &bucket.bucket, 0, &work, &again),
                     TDDP_UNSUPPORTED);
        CHECK_CONTAINS(tddp_error_message(), "cuda");
        bucket.bucket.buffer.device_type = TDDP_CPU;
        CHECK_STATUS(tddp_comm_hook_run(hook, group, &bucket.bucket, 1, &work, &again),
                     TDDP_INVALID_ARGUMENT);
        free_bucket(&bucket);
        tddp_comm_hook_release(hook);
    }
    drop(group, store);
}
