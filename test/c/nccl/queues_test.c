/*
 * Operations on a device's queue: streams that wait, several operations in flight, early ends. With
 * stand-ins for NCCL and CUDA.
 */
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>

#include <tddp/cuda.h>
#include <tddp/recorder.h>
#include <tddp/work.h>

#include "args.h"
#include "nccl/world.h"
#include "standin/standin.h"

enum { COUNT = 1000, MANY = 8, DELAY_MS = 30 };

static const tddp_cuda *cuda(void)
{
    const tddp_cuda *found;
    CHECK_OK(tddp_cuda_get(&found));
    return found;
}

static tddp_cuda_stream make_stream(void)
{
    tddp_cuda_stream stream;
    CHECK_INT(cuda()->cudaStreamCreateWithPriority(&stream, TDDP_CUDA_NON_BLOCKING, 0), 0);
    return stream;
}

static void fill(float *data, float value)
{
    for (int i = 0; i < COUNT; i++) {
        data[i] = value;
    }
}

static tddp_buffer on_stream(float *data, tddp_cuda_stream stream)
{
    tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    buffer.stream = stream;
    return buffer;
}

/* The result includes what the caller's stream writes late, and the stream reads it after
 * order(), without the host waiting in between. */
MULTI_TEST(streams_wait_for_each_other, 2, 30)
{
    static float source[COUNT], data[COUNT], result[COUNT];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    tddp_cuda_stream stream = make_stream();
    fill(source, (float)(rank + 1));
    standin_set_delay_ms(DELAY_MS);
    CHECK_INT(cuda()->cudaMemcpyAsync(data, source, sizeof data, TDDP_CUDA_COPY_ANY, stream), 0);
    CHECK_OK(tddp_all_reduce(group, on_stream(data, stream), TDDP_REDUCE_SUM, 0, &work));
    int32_t index = -1;
    CHECK_INT(tddp_work_device(work, &index), TDDP_CUDA);
    CHECK_INT(index, 0);
    CHECK_OK(tddp_work_order(work, stream, NULL));
    CHECK_INT(cuda()->cudaMemcpyAsync(result, data, sizeof data, TDDP_CUDA_COPY_ANY, stream), 0);
    CHECK_INT(tddp_work_completed(work), 0); /* four delayed operations */
    tddp_cuda_event end;
    CHECK_INT(cuda()->cudaEventCreateWithFlags(&end, TDDP_CUDA_NO_TIMING), 0);
    CHECK_INT(cuda()->cudaEventRecord(end, stream), 0);
    while (cuda()->cudaEventQuery(end) == TDDP_CUDA_NOT_READY) {
    }
    CHECK_DOUBLE((double)result[COUNT - 1], 3, 0);
    CHECK_OK(tddp_work_wait(work, NULL));
    /* Now there is nothing to wait for. */
    CHECK_OK(tddp_work_order(work, stream, NULL));
    tddp_work_release(work);
    CHECK_INT(cuda()->cudaEventDestroy(end), 0);
    CHECK_INT(cuda()->cudaStreamDestroy(stream), 0);
    leave(group, store);
}

/* Each is launched while earlier ones are in flight; all kinds, one buffer. */
MULTI_TEST(several_operations_in_flight, 3, 60)
{
    static float data[MANY][COUNT];
    tddp_work *works[MANY];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    tddp_cuda_stream stream = make_stream();
    standin_set_delay_ms(DELAY_MS);
    for (int i = 0; i < MANY; i++) {
        fill(data[i], (float)(rank + i));
        CHECK_OK(tddp_all_reduce(group, on_stream(data[i], stream), TDDP_REDUCE_SUM, 0, &works[i]));
    }
    /* The last is launched before the first is complete: its order() returns at once. */
    CHECK_OK(tddp_work_order(works[MANY - 1], stream, NULL));
    CHECK_INT(tddp_work_completed(works[MANY - 1]), 0);
    struct pollfd entry = {.events = POLLIN};
    CHECK_OK(tddp_work_fd(works[MANY - 1], &entry.fd));
    CHECK_INT(poll(&entry, 1, 0), 0);
    CHECK_INT(poll(&entry, 1, TIMEOUT_MS), 1);
    CHECK_OK(tddp_work_status(works[MANY - 1]));
    for (int i = MANY - 1; i >= 0; i--) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        CHECK_DOUBLE((double)data[i][COUNT - 1], 3.0 + 3 * i, 0);
        tddp_work_release(works[i]);
    }
    CHECK_INT(cuda()->cudaStreamDestroy(stream), 0);
    leave(group, store);
}

MULTI_TEST(buffers_are_fused_into_one_launch, 2, 30)
{
    static float data[3][COUNT];
    tddp_buffer buffers[3];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    for (int i = 0; i < 3; i++) {
        fill(data[i], (float)(rank * 10 + i));
        /* From the last to the first, so that they aren't contiguous. */
        buffers[2 - i] = on_device(data[i], (size_t)(COUNT - i), TDDP_FLOAT32);
    }
    CHECK_OK(tddp_all_reduce_coalesced(group, buffers, 3, TDDP_REDUCE_AVG, 0, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_DOUBLE((double)data[i][COUNT - i - 1], 5.0 + i, 0);
    }
    CHECK_DOUBLE((double)data[2][COUNT - 1], rank * 10 + 2, 0);
    /* Every rank used one sequence number. */
    tddp_work *work;
    CHECK_OK(tddp_barrier(group, &work));
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_INT((int)tddp_work_sequence(work), 2);
    tddp_work_release(work);
    leave(group, store);
}

MULTI_TEST(a_shorter_wait, 2, 30)
{
    static float data[COUNT];
    tddp_work *work;
    const tddp_wait briefly = {20, NULL};
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    standin_set_delay_ms(150);
    CHECK_OK(
        tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    CHECK_STATUS(tddp_work_wait(work, &briefly), TDDP_TIMEOUT);
    CHECK_INT(tddp_work_completed(work), 0);
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    leave(group, store);
}

/* Shutdown lets operations in flight finish; a handle outlives the group. */
MULTI_TEST(shutdown_waits_for_the_device, 2, 30)
{
    static float data[COUNT];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    fill(data, 1);
    standin_set_delay_ms(DELAY_MS);
    CHECK_OK(
        tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    tddp_group_shutdown(group, 5000);
    CHECK_OK(tddp_work_status(work));
    CHECK_INT(tddp_work_completed(work), 1);
    CHECK_DOUBLE((double)data[0], 2, 0);
    CHECK_OK(tddp_work_order(work, NULL, NULL));
    tddp_work_release(work);
    leave(group, store);
}

MULTI_TEST(a_graph_that_is_captured, 2, 30)
{
    static float data[COUNT];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    standin_set_capture(1);
    CHECK_STATUS(
        tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work),
        TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "being captured in a CUDA graph");
    CHECK_STATUS(tddp_send(group, on_device(data, 3, TDDP_FLOAT32), 1 - rank, 0, NULL),
                 TDDP_UNSUPPORTED);
    standin_set_capture(0);
    CHECK_OK(tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    leave(group, store);
}

/* An operation that can't be launched, or fails in flight, fails the group; later ones are
 * refused. */
MULTI_TEST(a_failure_ends_all_operations_in_flight, 2, 60)
{
    static float data[MANY][COUNT];
    tddp_work *works[MANY];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, 2000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) { /* the other rank doesn't take part */
        for (int i = 0; i < MANY; i++) {
            tddp_buffer buffer = on_device(data[i], COUNT, TDDP_FLOAT32);
            CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, &works[i]));
        }
        for (int i = 0; i < MANY; i++) {
            tddp_status status = tddp_work_wait(works[i], NULL);
            CHECK(status == TDDP_TIMEOUT || status == TDDP_GROUP_FAILED);
            CHECK_CONTAINS(tddp_error_message(), "all_reduce");
            CHECK_STATUS(tddp_work_order(works[i], NULL, NULL), status);
            tddp_work_release(works[i]);
        }
        tddp_work *work;
        CHECK(tddp_all_reduce(group, on_device(data[0], 1, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                              &work) != TDDP_OK);
    }
    leave(group, store);
}

/* On request a duration is the device's own (12.5 ms by the stand-in's clock), otherwise the
 * time that the host saw. */
static double recorded_duration(int rank, int world_size, int port)
{
    static float data[COUNT];
    char path[64];
    char text[8192];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    standin_set_delay_ms(DELAY_MS);
    CHECK_OK(
        tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    (void)snprintf(path, sizeof path, "nccl_times_%d_%d", port, rank);
    CHECK_OK(tddp_group_dump(group, path));
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t size = fread(text, 1, sizeof text - 1, file);
    text[size] = '\0';
    CHECK_INT(fclose(file), 0);
    CHECK_INT(remove(path), 0);
    const char *duration = strstr(text, "\"duration_ms\": ");
    CHECK(duration != NULL);
    CHECK_CONTAINS(text, "\"profiling_name\": \"nccl:all_reduce\"");
    leave(group, store);
    return strtod(duration + strlen("\"duration_ms\": "), NULL);
}

MULTI_TEST(the_recorder_has_device_times, 2, 30)
{
    CHECK_INT(setenv("TORCH_NCCL_ENABLE_TIMING", "1", 1), 0);
    CHECK_DOUBLE(recorded_duration(rank, world_size, port), 12.5, 0);
}

MULTI_TEST(device_times_are_recorded_on_request, 2, 30)
{
    CHECK(recorded_duration(rank, world_size, port) != 12.5);
}

/* Ranks with fingerprints compare their calls before NCCL gets them. */
MULTI_TEST(mismatched_calls, 3, 30)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    for (int i = 0; i < 3; i++) {
        fill(data, (float)rank);
        CHECK_OK(described_sum(group, on_device(data, COUNT, TDDP_FLOAT32), "float32 [1000]"));
        CHECK_DOUBLE((double)data[COUNT - 1], 3, 0);
    }
    /* However many were compared, the store has the keys of the last one, and perhaps some of the
     * next: that another rank has begun. */
    int64_t keys;
    CHECK_OK(tddp_store_num_keys(store, NULL, &keys));
    for (int i = 0; i < 5; i++) {
        CHECK_OK(described_sum(group, on_device(data, COUNT, TDDP_FLOAT32), "float32 [1000]"));
    }
    if (rank == 0) {
        int64_t after;
        CHECK_OK(tddp_store_num_keys(store, NULL, &after));
        CHECK(after <= keys + 3);
    }
    size_t count = rank == 2 ? COUNT - 1 : COUNT;
    CHECK_STATUS(described_sum(group, on_device(data, count, TDDP_FLOAT32),
                               rank == 2 ? "float32 [999]" : "float32 [1000]"),
                 TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "999");
    leave(group, store);
}

static void check_sum(tddp_group *group, tddp_status expected)
{
    static float data[COUNT];
    fill(data, 1);
    CHECK_STATUS(described_sum(group, on_device(data, COUNT, TDDP_FLOAT32), "float32 [1000]"),
                 expected);
    if (expected == TDDP_OK) {
        CHECK_DOUBLE((double)data[COUNT - 1], 2, 0);
    }
}

/* The last process hosts the store, and ends it when the two others have created their groups. */
static void end_of_store(int rank, bool compare_first, tddp_status expected)
{
    enum { HOSTED };
    static const tddp_slice ready = {"ready", 5};
    int64_t count = 0;
    tddp_store *store = open_store_of_rank_0(rank == 2 ? 0 : 1, 0, HOSTED);
    if (rank == 2) {
        CHECK_OK(tddp_store_wait(store, &ready, 1, NULL));
        tddp_store_release(store);
        return;
    }
    tddp_group *group = open_group(store, rank, 2, -1, TIMEOUT_MS);
    if (compare_first) {
        check_sum(group, TDDP_OK);
    }
    CHECK_OK(tddp_store_add(store, (tddp_slice){"made", 4}, 1, NULL, &count));
    if (count == 2) {
        CHECK_OK(tddp_store_set(store, ready, (tddp_slice){"1", 1}, NULL));
    }
    while (tddp_store_add(store, (tddp_slice){"made", 4}, 0, NULL, &count) == TDDP_OK) {
    }
    check_sum(group, expected);
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(ranks_connect_after_the_store_has_ended, 3, 30)
{
    end_of_store(rank, false, TDDP_OK);
}

MULTI_TEST(comparing_stops_when_the_store_has_ended, 3, 30)
{
    end_of_store(rank, true, TDDP_OK);
}

MULTI_TEST(requested_comparing_fails_when_the_store_has_ended, 3, 30)
{
    setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL", 1);
    end_of_store(rank, true, TDDP_NETWORK);
}
