/* Hooks in a reducer, whose buckets are rebuilt after the first iteration. */
#include <tddp/hooks.h>

#include "args.h"
#include "reducer/world.h"

enum { COUNT = 4, ITERATIONS = 5 };

static const int64_t dims[COUNT][2] = {{9, 31}, {40, 1}, {20, 14}, {50, 50}};

/* A matrix of rank 1; all elements are multiples of an eighth. */
static float gradient_of(int rank, int iteration, size_t i, size_t k)
{
    size_t row = k / (size_t)dims[i][1];
    size_t column = k % (size_t)dims[i][1];
    float product = (float)(row % 5) * ((float)(column % 3) - 1.5f);
    return product * (float)(rank + 1) * (float)(iteration + 1) / 8.0f;
}

static tddp_reducer *make(tddp_group *group, tddp_comm_hook *hook)
{
    tddp_reducer_opts opts = buckets_of(1000, 4000);
    tddp_param params[COUNT];
    tddp_reducer *reducer = NULL;
    for (size_t i = 0; i < COUNT; i++) {
        size_t count = (size_t)(dims[i][0] * dims[i][1]);
        params[i] = (tddp_param){names[i], count, TDDP_FLOAT32, TDDP_CPU, 0, dims[i], 2, 0};
    }
    CHECK_OK(tddp_reducer_create(group, params, COUNT, &opts, NULL, &reducer));
    CHECK_OK(tddp_reducer_set_hook(reducer, hook));
    tddp_comm_hook_release(hook);
    return reducer;
}

/* `tolerance` is relative to the largest gradient. */
static void train(tddp_group *group, tddp_comm_hook *hook, double tolerance)
{
    int rank = tddp_group_rank(group);
    double middle = (tddp_group_world_size(group) + 1) / 2.0;
    tddp_reducer *reducer = make(group, hook);
    for (int iteration = 0; iteration < ITERATIONS; iteration++) {
        int done = 0;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &done));
        CHECK_INT(done, iteration == 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        for (size_t n = COUNT; n-- > 0;) {
            float *gradient = tddp_reducer_gradient(reducer, n);
            for (size_t k = 0; k < (size_t)(dims[n][0] * dims[n][1]); k++) {
                gradient[k] = gradient_of(rank, iteration, n, k);
            }
            CHECK_OK(tddp_reducer_mark_ready(reducer, n, &done));
        }
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        double largest = 0.75 * (iteration + 1) * middle;
        for (size_t i = 0; i < COUNT; i++) {
            const float *gradient = tddp_reducer_gradient(reducer, i);
            for (size_t k = 0; k < (size_t)(dims[i][0] * dims[i][1]); k++) {
                CHECK_DOUBLE(gradient[k], (double)gradient_of(0, iteration, i, k) * middle,
                             largest * tolerance);
            }
        }
    }
    CHECK(tddp_reducer_bucket_count(reducer) > 1);
    tddp_reducer_free(reducer);
}

static void train_all(tddp_group *group)
{
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    tddp_comm_hook *hook = NULL;
    tddp_comm_hook *inner = NULL;
    CHECK_OK(tddp_hook_allreduce(&hook));
    train(group, hook, 1e-6);
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, NULL, &hook));
    train(group, hook, 2e-3);
    CHECK_OK(tddp_hook_compress(TDDP_BFLOAT16, NULL, &hook));
    train(group, hook, 2e-2);
    CHECK_OK(tddp_hook_quantize(0, 0, &hook));
    train(group, hook, 1e-2);
    CHECK_OK(tddp_hook_quantize(1, 100, &hook));
    train(group, hook, 1e-2);
    for (opts.start_iteration = 0; opts.start_iteration <= 2; opts.start_iteration++) {
        CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
        train(group, hook, 1e-5);
    }
    CHECK_OK(tddp_hook_power_sgd(&opts, &inner));
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, inner, &hook));
    tddp_comm_hook_release(inner);
    train(group, hook, 1e-2);
    CHECK_OK(tddp_hook_post_local_sgd(group, 2, 1, &hook));
    train(group, hook, 1e-6);
}

/* Runs the first iteration with this rank's hook, and releases the hook. */
static tddp_status try_iteration(tddp_group *group, tddp_comm_hook *hook)
{
    tddp_reducer *reducer = make(group, hook);
    int done = 0;
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t n = COUNT; n-- > 0;) {
        (void)!tddp_reducer_mark_ready(reducer, n, &done);
    }
    tddp_status status = tddp_reducer_finish(reducer, NULL);
    tddp_reducer_free(reducer);
    return status;
}

static tddp_comm_hook *power_of(int rank, uint64_t seed, bool wrapped)
{
    tddp_power_sgd_opts opts = TDDP_POWER_SGD_OPTS_INIT;
    tddp_comm_hook *hook = NULL;
    opts.rank = rank;
    opts.seed = seed;
    CHECK_OK(tddp_hook_power_sgd(&opts, &hook));
    if (wrapped) {
        tddp_comm_hook *outer = NULL;
        CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, hook, &outer));
        tddp_comm_hook_release(hook);
        hook = outer;
    }
    return hook;
}

/* Each rank's error contains both texts. */
static void check_mismatch(tddp_status status, const char *one, const char *other)
{
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), one);
    CHECK_CONTAINS(tddp_error_message(), other);
}

MULTI_TEST(different_settings_of_a_hook_are_a_mismatch, 2, 60)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_comm_hook *hook = NULL;
    CHECK_OK(tddp_hook_quantize(1, 512, &hook));
    CHECK_TEXT(tddp_comm_hook_settings(hook), "channels of 512 elements");
    CHECK_OK(try_iteration(group, hook)); /* equal settings */
    CHECK_OK(tddp_hook_quantize(1, rank ? 512 : 1024, &hook));
    check_mismatch(try_iteration(group, hook), "quantize_per_channel (channels of 512 elements)",
                   "quantize_per_channel (channels of 1024 elements)");
    tddp_group_release(group);
}

MULTI_TEST(different_settings_of_an_inner_hook_are_a_mismatch, 2, 60)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_comm_hook *hook = NULL;
    CHECK_OK(tddp_hook_allreduce(&hook));
    CHECK_TEXT(tddp_comm_hook_settings(hook), "");
    tddp_comm_hook_release(hook);
    CHECK_OK(try_iteration(group, power_of(2, 7, true)));
    check_mismatch(try_iteration(group, power_of(2, (uint64_t)rank, true)),
                   "fp16_compress_wrapper (float16 around power_sgd: rank 2, start 1000, seed 0, ",
                   "fp16_compress_wrapper (float16 around power_sgd: rank 2, start 1000, seed 1, ");
    tddp_group_release(group);
}

static tddp_status do_average(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                              tddp_work **work, int *again)
{
    (void)state;
    (void)stage;
    (void)again;
    tddp_op_args args = sum_args(bucket->buffer);
    args.reduce = TDDP_REDUCE_AVG;
    args.description = bucket->description;
    return tddp_submit(group, &args, work);
}

MULTI_TEST(long_settings_are_compared_by_a_checksum, 2, 60)
{
    tddp_group *group = join("fake", rank, world_size, port);
    char settings[400];
    memset(settings, 'x', sizeof settings - 1);
    settings[sizeof settings - 1] = '\0';
    settings[350] = rank ? 'y' : 'z';
    tddp_comm_hook_ops ops = {sizeof ops, "own", 0, do_average, NULL, settings, 0};
    tddp_comm_hook *hook = NULL;
    CHECK_OK(tddp_comm_hook_make(&ops, NULL, &hook));
    check_mismatch(try_iteration(group, hook), "own (xxx", "xxx... ");
    tddp_group_release(group);
}

MULTI_TEST(hooks_average_a_reducers_buckets, 3, 60)
{
    tddp_group *group = join("fake", rank, world_size, port);
    train_all(group);
    leave(group);
}

MULTI_TEST(hooks_average_the_buckets_of_one_rank, 1, 60)
{
    tddp_group *group = join("fake", rank, world_size, port);
    train_all(group);
    leave(group);
}
