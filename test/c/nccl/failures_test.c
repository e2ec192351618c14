/* Ranks that die, groups that end early, calls that fail: with stand-ins for NCCL and CUDA. */
#include <sys/syscall.h>
#include <unistd.h>

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
    if (rank == 0) {
        CHECK_OK(
            tddp_all_reduce(group, on_device(data, 100, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
        await_started(group, 1);
        tddp_group_shutdown(group, 0);
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
    }
    CHECK_MEET(DONE, world_size);
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
