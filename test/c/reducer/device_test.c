/* Buckets on devices, with stand-ins for NCCL and CUDA: values in each mode, while all work on
 * streams is delayed. The tests wait for a stream only to read results. */
#include "on_device.h"

enum { STEPS = 4, NONE = PARAMS };

static const tddp_reducer_opts plain = TDDP_REDUCER_OPTS_INIT;

static double mean_rank(int world_size)
{
    return (world_size - 1) / 2.0;
}

static void prepare(device_test *test, int step, bool rebuilds)
{
    int rebuilt = -1;
    CHECK_OK(tddp_reducer_rebuild(test->reducer, NULL, &rebuilt));
    CHECK_INT(rebuilt, rebuilds && step == 1);
    CHECK_OK(tddp_reducer_prepare(test->reducer));
}

static void check_means(device_test *test, int world_size, int step)
{
    for (size_t i = 0; i < PARAMS; i++) {
        check_gradient(test->reducer, test->params, i, mean_rank(world_size), step, 1);
    }
}

/* --- averages --------------------------------------------------------------------------------- */

static void average(int rank, int world_size, int port, bool mixed)
{
    device_test test;
    begin_with(&test, rank, world_size, port, mixed, plain, TIMEOUT_MS);
    CHECK_INT(tddp_reducer_bucket_count(test.reducer), mixed ? 4 : 3);
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        prepare(&test, step, true);
        if (step == 1) { /* the rebuild copied the gradients, without a wait of the host */
            check_means(&test, world_size, 0);
        }
        backward(test.reducer, test.params, test.streams, rank, step, NONE, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        check_means(&test, world_size, step);
    }
    CHECK(tddp_reducer_bucket_count(test.reducer) > 4);
    CHECK_INT(atomic_load(&copies),
              mixed ? 9 : PARAMS); /* of the rebuild; not for those on the host */
    end(&test);
}

MULTI_TEST(one_rank, 1, 60)
{
    average(rank, world_size, port, false);
}

MULTI_TEST(two_ranks, 2, 60)
{
    average(rank, world_size, port, false);
}

MULTI_TEST(three_ranks_with_host_memory_too, 3, 60)
{
    average(rank, world_size, port, true);
}

MULTI_TEST(four_ranks, 4, 60)
{
    average(rank, world_size, port, false);
}

/* --- unused parameters, static graphs, joined ranks ------------------------------------------- */

/* Rank 0 doesn't use a parameter; in the last iteration no rank does. */
static void skip_one(int rank, int world_size, int port, bool skips)
{
    enum { UNUSED = 5 };
    const size_t unused[] = {UNUSED};
    device_test test;
    tddp_reducer_opts opts = plain;
    opts.find_unused = 1;
    opts.skip_unused = skips;
    begin_with(&test, rank, world_size, port, true, opts, TIMEOUT_MS);
    standin_set_delay_ms(1);
    for (int step = 0; step < 3; step++) {
        const bool skips_one = rank == 0 || step == 2;
        prepare(&test, step, false);
        if (skips_one) { /* delayed, on the calling thread's stream */
            write_gradient(test.reducer, test.params, UNUSED, -1, step);
        }
        CHECK_OK(tddp_reducer_set_unused(test.reducer, unused, skips_one, NULL));
        backward(test.reducer, test.params, test.streams, rank, step, skips_one ? UNUSED : NONE, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        CHECK_INT(tddp_reducer_used(test.reducer, UNUSED), step < 2 && world_size > 1);
        for (size_t i = 0; i < PARAMS; i++) {
            const double others = world_size - 1.0;
            if (i != UNUSED) {
                check_gradient(test.reducer, test.params, i, mean_rank(world_size), step, 1);
            } else if (step < 2 && world_size > 1) { /* the sum of ranks 1 and up, divided by all */
                check_gradient(test.reducer, test.params, i, world_size / 2.0, step,
                               others / world_size);
            } else {
                check_gradient(test.reducer, test.params, i, 0, step, 0);
            }
        }
    }
    end(&test);
}

MULTI_TEST(unused_parameters, 3, 60)
{
    skip_one(rank, world_size, port, false);
}

MULTI_TEST(skipped_buckets, 2, 60)
{
    skip_one(rank, world_size, port, true);
}

/* The first iteration launches its buckets in finish, on that thread's stream. */
MULTI_TEST(static_graph, 3, 60)
{
    device_test test;
    tddp_reducer_opts opts = plain;
    opts.static_graph = 1;
    begin_with(&test, rank, world_size, port, false, opts, TIMEOUT_MS);
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        prepare(&test, step, true);
        backward(test.reducer, test.params, test.streams, rank, step, NONE, 2);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        check_means(&test, world_size, step);
    }
    end(&test);
}

/* In later iterations the unused parameters are written on the stream of the first thread, here one
 * that marks nothing ready. */
MULTI_TEST(static_graph_with_unused_parameters, 2, 60)
{
    enum { UNUSED = 4 };
    const size_t unused[] = {UNUSED};
    device_test test;
    tddp_reducer_opts opts = plain;
    opts.static_graph = 1;
    begin_with(&test, rank, world_size, port, false, opts, TIMEOUT_MS);
    tddp_cuda_stream before = current_stream, other = make_stream();
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        prepare(&test, step, true);
        wait_for_current(other);
        current_stream = other;
        for (int n = 0; n < 30; n++) { /* long after the others have written */
            write_gradient(test.reducer, test.params, UNUSED, n < 29 ? 7 : rank, step);
        }
        CHECK_OK(tddp_reducer_set_unused(test.reducer, unused, 1, NULL));
        current_stream = before;
        backward(test.reducer, test.params, test.streams, rank, step, UNUSED, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        CHECK_INT(tddp_reducer_used(test.reducer, UNUSED), 0);
        check_means(&test, world_size, step);
    }
    CHECK_INT(cuda()->cudaStreamDestroy(other), 0);
    end(&test);
}

/* A joined rank adds zeros, whatever its gradients contained. */
MULTI_TEST(a_joined_rank, 3, 60)
{
    device_test test;
    begin_with(&test, rank, world_size, port, true, plain, TIMEOUT_MS);
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        const bool shadows = rank == 2 && step > 1;
        prepare(&test, step, true);
        if (shadows) {
            CHECK_OK(tddp_reducer_shadow(test.reducer, NULL));
        } else {
            backward(test.reducer, test.params, test.streams, rank, step, NONE, 1);
            CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        }
        for (size_t i = 0; i < PARAMS; i++) {
            check_gradient(test.reducer, test.params, i, step > 1 ? 0.5 : 1, step,
                           step > 1 ? 2.0 / 3 : 1);
        }
    }
    end(&test);
}

/* --- hooks ------------------------------------------------------------------------------------ */

typedef struct doubling {
    tddp_buffer buffer;
} doubling;

static void double_now(void *data)
{
    doubling *task = data;
    for (size_t k = 0; k < task->buffer.count; k++) {
        if (task->buffer.dtype == TDDP_FLOAT64) {
            ((double *)task->buffer.data)[k] *= 2;
        } else {
            ((float *)task->buffer.data)[k] *= 2;
        }
    }
    free(task);
}

/* Averages, then doubles the average on the device, without a wait of the host. */
static tddp_status double_average(void *state, tddp_group *group, const tddp_bucket *bucket,
                                  int stage, tddp_work **work, int *again)
{
    (void)state;
    CHECK(bucket->buffer.stream == current_stream);
    if (stage == 0) {
        *again = 1;
        return tddp_all_reduce(group, bucket->buffer, TDDP_REDUCE_AVG, 1.0, work);
    }
    doubling *task = malloc(sizeof *task);
    CHECK(task != NULL);
    task->buffer = bucket->buffer;
    standin_put(current_stream, double_now, task);
    return TDDP_OK;
}

MULTI_TEST(a_hook_with_stages, 2, 60)
{
    const tddp_comm_hook_ops ops = {sizeof ops, "double",       0, double_average, NULL,
                                    NULL,       1u << TDDP_CUDA};
    device_test test;
    tddp_comm_hook *hook = NULL;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    CHECK_OK(tddp_comm_hook_make(&ops, NULL, &hook));
    CHECK_OK(tddp_reducer_set_hook(test.reducer, hook));
    tddp_comm_hook_release(hook);
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        prepare(&test, step, true);
        backward(test.reducer, test.params, test.streams, rank, step, NONE, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        for (size_t i = 0; i < PARAMS; i++) {
            check_gradient(test.reducer, test.params, i, 0.5, step, 2);
        }
    }
    end(&test);
}

MULTI_TEST(hooks_for_devices, 2, 60)
{
    for (int which = 0; which < 2; which++) {
        device_test test;
        tddp_comm_hook *hook = NULL;
        begin_with(&test, rank, world_size, port, true, plain, TIMEOUT_MS);
        CHECK_OK(which == 0 ? tddp_hook_allreduce(&hook) : tddp_hook_noop(&hook));
        CHECK_OK(tddp_reducer_set_hook(test.reducer, hook));
        tddp_comm_hook_release(hook);
        standin_set_delay_ms(1);
        prepare(&test, 0, true);
        backward(test.reducer, test.params, test.streams, rank, 0, NONE, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        for (size_t i = 0; i < PARAMS; i++) {
            check_gradient(test.reducer, test.params, i, which == 0 ? 0.5 : rank, 0, 1);
        }
        end(&test);
        CHECK_MEET(which, world_size); /* the next group has the same name */
    }
}

/* Gradients are small integers, whose averages are exact in the compressed dtype. */
static void compress(int rank, int world_size, int port, tddp_dtype dtype, bool around)
{
    device_test test;
    tddp_comm_hook *inner = NULL;
    tddp_comm_hook *hook = NULL;
    begin_with(&test, rank, world_size, port, true, plain, TIMEOUT_MS);
    if (around) {
        CHECK_OK(tddp_hook_allreduce(&inner));
    }
    CHECK_OK(tddp_hook_compress(dtype, inner, &hook));
    CHECK_OK(tddp_reducer_set_hook(test.reducer, hook));
    tddp_comm_hook_release(hook);
    tddp_comm_hook_release(inner);
    standin_set_delay_ms(1);
    for (int step = 0; step < STEPS; step++) {
        prepare(&test, step, true);
        backward(test.reducer, test.params, test.streams, rank, step, NONE, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        check_means(&test, world_size, step);
    }
    end(&test);
}

MULTI_TEST(float16_of_one_rank, 1, 60)
{
    compress(rank, world_size, port, TDDP_FLOAT16, false);
}

MULTI_TEST(float16_of_two_ranks, 2, 60)
{
    compress(rank, world_size, port, TDDP_FLOAT16, false);
}

MULTI_TEST(bfloat16_of_four_ranks, 4, 60)
{
    compress(rank, world_size, port, TDDP_BFLOAT16, false);
}

MULTI_TEST(bfloat16_around_another_hook, 2, 60)
{
    compress(rank, world_size, port, TDDP_BFLOAT16, true);
}

MULTI_TEST(hooks_for_the_cpu_are_refused, 1, 60)
{
    const tddp_comm_hook_ops before = {sizeof before, "own", 1, double_average, NULL, NULL, 0};
    device_test test;
    tddp_comm_hook *hook = NULL;
    begin_with(&test, rank, world_size, port, true, plain, TIMEOUT_MS);
    tddp_comm_hook *inner = NULL;
    CHECK_OK(tddp_hook_quantize(0, TDDP_QUANTIZE_BUCKET_SIZE, &inner));
    CHECK_STATUS(tddp_reducer_set_hook(test.reducer, inner), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "computes in the CPU's memory, but parameter \"a\" is on "
                                         "cuda: use no hook, allreduce, noop, fp16_compress");
    CHECK_OK(tddp_hook_compress(TDDP_FLOAT16, inner, &hook));
    tddp_comm_hook_release(inner);
    CHECK_STATUS(tddp_reducer_set_hook(test.reducer, hook), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "\"fp16_compress_wrapper\" computes in the CPU's memory");
    tddp_comm_hook_release(hook);
    CHECK_OK(tddp_comm_hook_make(&before, NULL, &hook));
    CHECK_STATUS(tddp_reducer_set_hook(test.reducer, hook), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "the communication hook \"own\" computes in the CPU's");
    tddp_comm_hook_release(hook);
    end(&test);
}
