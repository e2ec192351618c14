/* Aborts by a stand-in for NCCL whose abort waits for the device, as NCCL's may. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl/rules.h"

/* A sum and a message hang on communicators of one group: neither abort ends before the other has
 * begun. */
MULTI_TEST(two_communicators_of_a_group_hang, 2, 60)
{
    static float data[2][COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    const tddp_buffer room = on_device(data[0], COUNT, TDDP_FLOAT32);
    end(begin_sum(group, data[1]));
    CHECK_OK(rank == 0 ? tddp_recv(group, room, 1, 0, NULL) : tddp_send(group, room, 0, 0, NULL));
    if (rank == 0) {
        tddp_work *message;
        CHECK_OK(tddp_recv(group, room, 1, 0, &message));
        tddp_work *sum = begin_sum(group, data[1]);
        await_kernels(2);
        tddp_group_shutdown(group, 0);
        CHECK_STATUS(tddp_work_wait(message, NULL), TDDP_GROUP_CLOSED);
        CHECK_STATUS(tddp_work_wait(sum, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(message);
        tddp_work_release(sum);
        CHECK_INT(standin_alive(), 0);
    }
    CHECK_MEET(DONE, world_size);
    leave(group, store);
}

/* The first group that ends waits for its abort, but not for ever: else the second one, whose
 * kernel that waits for, would never be aborted. */
MULTI_TEST(two_groups_hang, 2, 60)
{
    static float data[2][COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *first = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    tddp_group *second = second_group(first, store, rank, world_size);
    end(begin_sum(first, data[0]));
    end(begin_sum(second, data[1]));
    if (rank == 0) {
        tddp_work *works[] = {begin_sum(first, data[0]), begin_sum(second, data[1])};
        await_kernels(2);
        tddp_group_shutdown(first, 0);
        tddp_group_shutdown(second, 0);
        for (int i = 0; i < 2; i++) {
            CHECK_STATUS(tddp_work_wait(works[i], NULL), TDDP_GROUP_CLOSED);
            tddp_work_release(works[i]);
        }
    }
    CHECK_MEET(DONE, world_size);
    tddp_group_shutdown(second, 1000);
    tddp_group_release(second);
    tddp_group_shutdown(first, 1000);
    tddp_group_release(first);
    tddp_store_release(store);
    while (standin_alive() > 0) { /* the first one's communicator, until its thread is through */
        (void)sched_yield();
    }
}

/* The rank that is to send fails within NCCL; the one that receives is within NCCL as well, and
 * only an abort ends that in the test's time. */
MULTI_TEST(a_first_message_whose_peer_fails, 2, 60)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, 60 * TIMEOUT_MS);
    const tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    if (rank == 1) {
        standin_fail_next("ncclSend", TDDP_NCCL_INTERNAL_ERROR);
    }
    tddp_status status =
        rank == 0 ? tddp_recv(group, buffer, 1, 0, NULL) : tddp_send(group, buffer, 0, 0, NULL);
    CHECK(status != TDDP_OK && status != TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "internal error");
    CHECK_MEET(DONE, world_size);
    leave(group, store);
}

static void hang_in_an_abort(int output)
{
    static float data[COUNT];
    tddp_store *store;
    CHECK_INT(dup2(output, STDERR_FILENO), STDERR_FILENO);
    CHECK_INT(setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1", 1), 0);
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_group(store, 0, 1, 0, TIMEOUT_MS);
    standin_set_abort_hangs(1);
    standin_fail_next("ncclAllReduce", TDDP_NCCL_INTERNAL_ERROR);
    CHECK(tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    for (;;) {
        (void)pause();
    }
}

TEST(an_abort_that_does_not_return_ends_the_process)
{
    char text[4096];
    size_t size = 0;
    int ends[2];
    int status = 0;
    CHECK_INT(pipe(ends), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        hang_in_an_abort(ends[1]);
    }
    CHECK_INT(close(ends[1]), 0);
    for (ssize_t got = 1; got > 0; size += (size_t)(got > 0 ? got : 0)) {
        got = read(ends[0], text + size, sizeof text - 1 - size);
    }
    text[size] = '\0';
    CHECK_INT(close(ends[0]), 0);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), EXIT_FAILURE);
    CHECK_CONTAINS(text, "ncclCommAbort of the communicator nccl/0 on cuda:0 has not returned for "
                         "1 s");
}
