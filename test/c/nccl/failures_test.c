/* Ranks that die, groups that end early, calls that fail: with stand-ins for NCCL and CUDA. */
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "args.h"
#include "nccl/world.h"
#include "recorded.h"
#include "standin/standin.h"

enum { DONE, RANK }; /* events; one for each rank from RANK on */

static tddp_status sum(tddp_group *group, float *data, size_t count)
{
    return tddp_all_reduce(group, on_device(data, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
}

/* Without telling the others. */
static void part(tddp_group *group, tddp_store *store)
{
    tddp_group_release(group);
    CHECK_INT(standin_alive(), 0);
    tddp_store_release(store);
}

MULTI_TEST(a_rank_is_killed, 3, 30)
{
    static float data[100];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_OK(sum(group, data, 100));
    if (rank == 2) {
        CHECK_AWAIT_BLOCKED(RANK + 0);
        CHECK_AWAIT_BLOCKED(RANK + 1);
        syscall(SYS_exit_group, 0);
    }
    check_will_block(RANK + rank);
    tddp_status status = sum(group, data, 100);
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "rank 2");
    CHECK_STATUS(sum(group, data, 100), TDDP_GROUP_FAILED);
    part(group, store);
}

MULTI_TEST(a_rank_is_killed_while_ranks_connect, 3, 30)
{
    static float data[100];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, 2000);
    if (rank == 2) {
        syscall(SYS_exit_group, 0);
    }
    CHECK(sum(group, data, 100) != TDDP_OK);
    part(group, store);
}

/* NCCL's own threads find the error while an operation runs. */
MULTI_TEST(an_asynchronous_nccl_error, 2, 30)
{
    static float data[100];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_OK(sum(group, data, 100));
    if (rank == 1) {
        CHECK_OK(
            tddp_all_reduce(group, on_device(data, 100, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
        await_started(group, 2);
        standin_fail_next("ncclCommGetAsyncError", TDDP_NCCL_INTERNAL_ERROR);
        CHECK(tddp_work_wait(work, NULL) != TDDP_OK);
        CHECK_CONTAINS(tddp_error_message(), "communication: internal error");
        tddp_work_release(work);
    } else {
        CHECK_AWAIT(DONE, 1);
        CHECK(sum(group, data, 100) != TDDP_OK);
        CHECK_CONTAINS(tddp_error_message(), "rank 1");
    }
    check_signal(DONE);
    CHECK_AWAIT(DONE, world_size);
    part(group, store);
}

MULTI_TEST(a_group_that_ends_while_operations_run, 2, 30)
{
    static float data[100];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_OK(sum(group, data, 100)); /* the first one's launch waits for the other rank's */
    if (rank == 0) {
        CHECK_OK(
            tddp_all_reduce(group, on_device(data, 100, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
        await_started(group, 2);
        tddp_group_shutdown(group, 0);
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
    }
    CHECK_MEET(DONE, world_size);
    part(group, store);
}

static void *shut_down(void *group)
{
    await_started(group, 1);
    tddp_group_shutdown(group, 0);
    return NULL;
}

/* The caller is within the launch, which waits for the other rank. */
static void check_end_in_launch(int rank, int world_size, int port, int device, const char *text)
{
    static float data[100];
    tddp_work *work;
    tddp_op_args args = sum_args(on_device(data, 100, TDDP_FLOAT32));
    args.description = text;
    pthread_t thread;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, device, 20 * TIMEOUT_MS);
    if (rank == 0) {
        CHECK_INT(pthread_create(&thread, NULL, shut_down, group), 0);
        CHECK_OK(tddp_submit(group, &args, &work));
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
        CHECK_INT(pthread_join(thread, NULL), 0);
    }
    CHECK_MEET(DONE, world_size);
    part(group, store);
}

MULTI_TEST(a_group_that_ends_during_a_launch, 2, 30)
{
    check_end_in_launch(rank, world_size, port, 0, NULL);
}

MULTI_TEST(a_group_that_ends_while_ranks_connect, 2, 30)
{
    check_end_in_launch(rank, world_size, port, -1, NULL);
}

MULTI_TEST(a_group_that_ends_while_calls_are_compared, 2, 30)
{
    check_end_in_launch(rank, world_size, port, 0, "float32 [100]");
}

/* The launch is ended by the watchdog: within NCCL nothing looks at a deadline. */
MULTI_TEST(a_launch_that_takes_too_long, 2, 60)
{
    static float data[100];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, 500);
    if (rank == 0) {
        CHECK_OK(
            tddp_all_reduce(group, on_device(data, 100, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "in the time given");
        CHECK_CONTAINS(tddp_error_message(), "not arrived: rank 1");
        tddp_work_release(work);
    }
    CHECK_MEET(DONE, world_size);
    part(group, store);
}

/* The interrupt ends the call, not the operation: a lent thread connects and launches it, and the
 * next one is launched after it. */
MULTI_TEST(a_launch_that_is_interrupted, 2, 30)
{
    static float data[2][100];
    tddp_work *works[2];
    tddp_cancel *token;
    tddp_op_args args = sum_args(on_device(data[0], 100, TDDP_FLOAT32));
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    data[0][99] = data[1][99] = (float)(rank + 1);
    CHECK_OK(tddp_cancel_create(&token));
    if (rank == 0) {
        tddp_cancel_trigger(token);
        args.cancel = token;
    } else {
        CHECK_AWAIT(DONE, 1);
    }
    CHECK_OK(tddp_submit(group, &args, &works[0]));
    if (rank == 0) {
        CHECK_INT(tddp_work_completed(works[0]), 0);
        check_signal(DONE);
    }
    CHECK_OK(tddp_all_reduce(group, on_device(data[1], 100, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                             &works[1]));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        CHECK_INT((int)tddp_work_sequence(works[i]), i + 1);
        CHECK_DOUBLE((double)data[i][99], 3, 0);
        tddp_work_release(works[i]);
    }
    tddp_cancel_free(token);
    part(group, store);
}

/* The first message's launch goes on elsewhere: nothing overtakes it. */
MULTI_TEST(a_message_whose_launch_is_interrupted, 2, 30)
{
    static float data[2][100];
    tddp_work *works[2];
    tddp_cancel *token;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    CHECK_OK(tddp_cancel_create(&token));
    tddp_cancel_trigger(token);
    if (rank == 0) {
        data[0][99] = 1;
        data[1][99] = 2;
        for (int i = 0; i < 2; i++) {
            tddp_op_args args = message_to(on_device(data[i], 100, TDDP_FLOAT32), 1, 0);
            args.cancel = token;
            CHECK_STATUS(tddp_submit(group, &args, &works[i]), i == 0 ? TDDP_OK : TDDP_CANCELED);
        }
        CHECK_CONTAINS(tddp_error_message(), "send: interrupted before it was launched");
        tddp_op_args args = sum_args(on_device(data[1], 100, TDDP_FLOAT32));
        args.cancel = token;
        CHECK_STATUS(tddp_submit(group, &args, &works[1]), TDDP_CANCELED);
        check_signal(DONE);
        CHECK_OK(tddp_send(group, on_device(data[1], 100, TDDP_FLOAT32), 1, 0, &works[1]));
    } else {
        CHECK_AWAIT(DONE, 1);
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tddp_recv(group, on_device(data[i], 100, TDDP_FLOAT32), 0, 0, &works[i]));
        }
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        CHECK_DOUBLE((double)data[i][99], i + 1, 0);
        tddp_work_release(works[i]);
    }
    tddp_cancel_free(token);
    part(group, store);
}

MULTI_TEST(cuda_calls_that_fail, 1, 30)
{
    static const char *const names[] = {"cudaSetDevice", "cudaEventCreateWithFlags",
                                        "cudaEventRecord", "cudaStreamWaitEvent"};
    static float data[100];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        tddp_store *store;
        CHECK_OK(tddp_hash_store_create(1000, &store));
        tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
        standin_fail_next(names[i], 2);
        tddp_status status = sum(group, data, 100);
        CHECK_STATUS(status, TDDP_SYSTEM);
        CHECK_CONTAINS(tddp_error_message(), names[i]);
        CHECK_CONTAINS(tddp_error_message(), "made to fail (CUDA error 2)");
        tddp_group_shutdown(group, 1000);
        tddp_group_release(group);
        tddp_store_release(store);
        CHECK_INT(standin_alive(), 0);
    }
}

MULTI_TEST(groups_that_cannot_be_made, 1, 30)
{
    static const struct {
        const char *name;
        int error;
        const char *expected;
    } rows[] = {
        {"cudaGetDeviceCount", 35, "cudaGetDeviceCount: made to fail (CUDA error 35)"},
        {"cudaStreamCreateWithPriority", 2, "cudaStreamCreateWithPriority"},
        {"cudaMalloc", 2, "cudaMalloc"},
        {"ncclGetUniqueId", TDDP_NCCL_SYSTEM_ERROR, "ncclGetUniqueId: unhandled system error"},
        {"ncclCommInitRankConfig", TDDP_NCCL_INVALID_USAGE,
         "ncclCommInitRankConfig: invalid usage"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        tddp_group *group;
        CHECK_OK(tddp_hash_store_create(1000, &opts.store));
        opts.backend = "nccl";
        opts.device_index = 0;
        opts.device_bound = 1;
        standin_fail_next(rows[i].name, rows[i].error);
        CHECK(tddp_group_create(&opts, NULL, &group) != TDDP_OK);
        CHECK_CONTAINS(tddp_error_message(), rows[i].expected);
        tddp_store_release(opts.store);
        CHECK_INT(standin_alive(), 0);
    }
}
