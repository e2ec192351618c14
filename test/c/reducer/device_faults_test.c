/* Buckets on devices, with stand-ins for NCCL and CUDA: refusals, delays, failures, and the
 * lifetime of memory. */
#include "on_device.h"

static const tddp_reducer_opts plain = TDDP_REDUCER_OPTS_INIT;

static void mark_all(device_test *test, int rank, int step)
{
    for (size_t i = 0; i < PARAMS; i++) {
        int all = -1;
        write_gradient(test->reducer, test->params, i, rank, step);
        CHECK_OK(tddp_reducer_mark_ready(test->reducer, i, &all));
        CHECK_INT(all, i + 1 == PARAMS);
    }
}

/* --- waits ------------------------------------------------------------------------------------ */

/* The host finishes iterations that the device hasn't started. */
MULTI_TEST(the_host_does_not_wait, 2, 120)
{
    enum { ITERATIONS = 3, DELAY_MS = 60 };
    device_test test;
    begin_with(&test, rank, world_size, port, false, plain, 60000);
    synchronize_stream();
    standin_set_delay_ms(DELAY_MS);
    for (int step = 0; step < ITERATIONS; step++) { /* no rebuild, which waits for rank 0 */
        const int64_t before = tddp_now_ns();
        CHECK_OK(tddp_reducer_prepare(test.reducer));
        mark_all(&test, rank, step);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        /* The writes alone take the stream eleven times the delay. */
        CHECK(tddp_now_ns() - before < PARAMS * DELAY_MS * INT64_C(1000000));
    }
    for (size_t i = 0; i < PARAMS; i++) {
        check_gradient(test.reducer, test.params, i, 0.5, ITERATIONS - 1, 1);
    }
    CHECK_INT(tddp_reducer_rounds(test.reducer), ITERATIONS);
    end(&test);
}

/* More streams than a bucket records. */
MULTI_TEST(many_streams, 2, 60)
{
    device_test test;
    tddp_cuda_stream streams[PARAMS];
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    tddp_cuda_stream before = current_stream;
    for (size_t i = 0; i < PARAMS; i++) {
        streams[i] = make_stream();
    }
    standin_set_delay_ms(2);
    for (int step = 0; step < 3; step++) {
        CHECK_OK(tddp_reducer_prepare(test.reducer));
        for (size_t i = 0; i < PARAMS; i++) {
            wait_for_current(streams[i]);
        }
        for (size_t i = 0; i < PARAMS; i++) {
            int all = 0;
            current_stream = streams[(i + (size_t)step) % PARAMS];
            write_gradient(test.reducer, test.params, i, rank, step);
            CHECK_OK(tddp_reducer_mark_ready(test.reducer, i, &all));
        }
        current_stream = before;
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        for (size_t i = 0; i < PARAMS; i++) {
            check_gradient(test.reducer, test.params, i, 0.5, step, 1);
        }
    }
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK_INT(cuda()->cudaStreamDestroy(streams[i]), 0);
    }
    end(&test);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Pending buckets keep their memory, before and after finish; so does a retained reference. */
static void free_early(int rank, int world_size, int port, bool finishes)
{
    device_test test;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    synchronize_stream();
    standin_set_delay_ms(20);
    CHECK_OK(tddp_reducer_prepare(test.reducer));
    mark_all(&test, rank, 0);
    if (finishes) {
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
    }
    tddp_reducer_free(test.reducer);
    test.reducer = NULL;
    CHECK_INT(atomic_load(&allocations), 2); /* the writes alone take 220 ms */
    end(&test);
}

MULTI_TEST(freed_while_pending, 2, 60)
{
    free_early(rank, world_size, port, false);
}

MULTI_TEST(freed_after_finish, 3, 60)
{
    free_early(rank, world_size, port, true);
}

MULTI_TEST(retained_memory, 1, 60)
{
    device_test test;
    begin_with(&test, rank, world_size, port, true, plain, TIMEOUT_MS);
    float *gradient = tddp_reducer_gradient(test.reducer, 0);
    tddp_flat_memory *memory = tddp_flat_memory_retain(tddp_reducer_memory(test.reducer));
    tddp_reducer_free(test.reducer);
    test.reducer = NULL;
    synchronize_stream();
    CHECK_INT(atomic_load(&allocations), 2);
    CHECK_DOUBLE((double)*gradient, 0, 0);
    tddp_flat_memory_release(memory);
    end(&test);
}

/* --- failures --------------------------------------------------------------------------------- */

/* A failure after finish is returned by the next iteration. */
MULTI_TEST(a_late_failure, 2, 60)
{
    device_test test;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    CHECK_OK(tddp_reducer_prepare(test.reducer));
    mark_all(&test, rank, 0);
    CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
    synchronize_stream();
    if (rank == 0) { /* the other rank doesn't take part in a second one */
        CHECK_OK(tddp_group_set_timeout(test.group, 500));
        CHECK_OK(tddp_reducer_prepare(test.reducer));
        mark_all(&test, rank, 1);
        CHECK_OK(tddp_reducer_finish(test.reducer, NULL));
        tddp_status status = TDDP_OK;
        for (int n = 0; n < 1000 && status == TDDP_OK; n++) {
            nanosleep(&(struct timespec){0, 10000000}, NULL);
            status = tddp_reducer_prepare(test.reducer);
        }
        CHECK(status == TDDP_TIMEOUT || status == TDDP_GROUP_FAILED);
        CHECK_CONTAINS(tddp_error_message(), "all_reduce");
        int none = 0;
        CHECK_STATUS(tddp_reducer_rebuild(test.reducer, NULL, &none), status);
        CHECK_STATUS(tddp_reducer_mark_ready(test.reducer, 0, &none), status);
        CHECK_STATUS(tddp_reducer_finish(test.reducer, NULL), status);
    }
    end(&test);
}

/* Without the wait of a stream a bucket would be reduced before it is complete. */
MULTI_TEST(a_failed_stream_wait, 1, 60)
{
    device_test test;
    tddp_cuda_stream before = NULL;
    int all = 0;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    before = current_stream;
    CHECK_OK(tddp_reducer_prepare(test.reducer));
    for (size_t i = 0; i + 1 < PARAMS; i++) {
        current_stream = test.streams[i % THREADS];
        CHECK_OK(tddp_reducer_mark_ready(test.reducer, i, &all));
    }
    standin_fail_next("cudaStreamWaitEvent", 700);
    CHECK_STATUS(tddp_reducer_mark_ready(test.reducer, PARAMS - 1, &all), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "cudaStreamWaitEvent");
    current_stream = before;
    CHECK_STATUS(tddp_reducer_finish(test.reducer, NULL), TDDP_SYSTEM);
    CHECK_STATUS(tddp_reducer_prepare(test.reducer), TDDP_SYSTEM);
    end(&test);
}

static tddp_status no_memory(void *user, int32_t device, size_t bytes, void **handle, void **data)
{
    (void)user;
    (void)handle;
    (void)data;
    return tddp_fail(TDDP_OUT_OF_MEMORY, "device %d has no %zu bytes left", (int)device, bytes);
}

static tddp_status no_copy(void *user, int32_t device, void *into, const void *from, size_t bytes)
{
    (void)user;
    (void)device;
    (void)into;
    (void)from;
    return tddp_fail(TDDP_OUT_OF_MEMORY, "no copy of %zu bytes", bytes);
}

/* A failed allocation leaks nothing, and a later one may succeed. */
MULTI_TEST(failed_device_memory, 1, 60)
{
    device_test test;
    tddp_param params[PARAMS];
    tddp_device_memory_ops ops = device_ops;
    tddp_reducer_opts opts = plain;
    tddp_reducer *reducer = NULL;
    int rebuilt = -1;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    describe_model(params, false);
    CHECK_STATUS(tddp_reducer_create(test.group, params, PARAMS, &opts, NULL, &reducer),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "parameter \"a\" (number 0) is on cuda: ");
    opts.device = &ops;
    ops.allocate = no_memory;
    CHECK_STATUS(tddp_reducer_create(test.group, params, PARAMS, &opts, NULL, &reducer),
                 TDDP_OUT_OF_MEMORY);
    CHECK_CONTAINS(tddp_error_message(), "device 1 has no");
    ops.zero = NULL;
    CHECK_STATUS(tddp_reducer_create(test.group, params, PARAMS, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    ops = device_ops;
    ops.size = offsetof(tddp_device_memory_ops, stream);
    CHECK_STATUS(tddp_reducer_create(test.group, params, PARAMS, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "sizeof(tddp_device_memory_ops)");
    ops = device_ops;
    ops.copy = no_copy;
    CHECK_OK(tddp_reducer_create(test.group, params, PARAMS, &opts, NULL, &reducer));
    tddp_reducer *before = test.reducer;
    test.reducer = reducer;
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark_all(&test, rank, 0);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_STATUS(tddp_reducer_rebuild(reducer, NULL, &rebuilt), TDDP_OUT_OF_MEMORY);
    check_gradient(reducer, params, 3, 0, 0, 1);
    tddp_reducer_free(reducer);
    test.reducer = before;
    end(&test);
}

/* --- ranks that differ ------------------------------------------------------------------------ */

/* Ranks may use different devices if the same parameters share one. */
MULTI_TEST(different_devices_on_different_ranks, 2, 60)
{
    device_test test;
    tddp_reducer_opts opts = plain;
    tddp_reducer *reducer = NULL;
    begin_with(&test, rank, world_size, port, false, plain, TIMEOUT_MS);
    opts.device = &device_ops;
    for (size_t i = 0; rank == 1 && i < PARAMS; i++) {
        test.params[i].device_index = 1 - test.params[i].device_index;
    }
    CHECK_OK(tddp_reducer_create(test.group, test.params, PARAMS, &opts, NULL, &reducer));
    tddp_reducer_free(reducer);
    if (rank == 1) {
        test.params[3].device_index = 1 - test.params[3].device_index;
    }
    CHECK_STATUS(tddp_reducer_create(test.group, test.params, PARAMS, &opts, NULL, &reducer),
                 TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(),
                   "\"d\" (number 3) is float32 [129] on cuda, with parameter number 0 on rank 0, "
                   "but float32 [129] on cuda, with parameter number 2 on rank 1");
    test.params[3].device_index = test.params[0].device_index;
    if (rank == 0) {
        test.params[3].device_type = TDDP_CPU;
    }
    CHECK_STATUS(tddp_reducer_create(test.group, test.params, PARAMS, &opts, NULL, &reducer),
                 TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(),
                   "is float32 [129] on cpu, with parameter number 3 on rank 0");
    end(&test);
}
