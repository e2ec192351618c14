/* All ways to wait for operations over shared memory: at once, with a timeout, until interrupted,
 * or not at all; the results are right and equal on all ranks whichever thread executes them. */
#include "args.h"
#include "processes.h"

enum { ROUNDS = 400, ELEMENTS = 3000 };
enum { RANK_0 }; /* an event */

static float numbers[4][ELEMENTS];

static tddp_buffer fill(float *data, size_t count, int rank, int salt)
{
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)((rank + 1) * (int)(i % 7 + 1) + salt);
    }
    return buffer_of(data, count, TDDP_FLOAT32);
}

static void check_sum(const float *data, size_t count, int ranks, int salt)
{
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE(data[i], ranks * (ranks + 1) / 2 * (int)(i % 7 + 1) + ranks * salt, 0);
    }
}

/* Waits in one of several ways, which differ between ranks. */
static void wait_somehow(tddp_work *work, tddp_cancel *cancel, int how)
{
    tddp_wait brief = {1, NULL};
    tddp_wait cancelable = {-1, cancel};
    switch (how % 4) {
    case 1:
        (void)!tddp_work_wait(work, &brief);
        break;
    case 2:
        tddp_cancel_trigger(cancel);
        (void)!tddp_work_wait(work, &cancelable);
        tddp_cancel_reset(cancel);
        break;
    case 3:
        CHECK_OK(tddp_work_wait(work, &cancelable));
        break;
    default:
        break;
    }
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
}

static void run_round(tddp_group *group, tddp_cancel *cancel, int rank, int ranks, int at)
{
    size_t counts[4] = {2, (size_t)at % 40 + 1, ELEMENTS, 500};
    tddp_work *works[3];
    for (int k = 0; k < 3; k++) {
        tddp_buffer buffer = fill(numbers[k], counts[k], rank, at + k);
        CHECK_OK(inline_sum(group, buffer, (at + rank + k) % 3 * 20, NULL, &works[k]));
    }
    if (at % 11 == rank) {
        usleep(300);
    }
    if (at % 2) {
        tddp_buffer buffer = fill(numbers[3], counts[3], rank, at);
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        check_sum(numbers[3], counts[3], ranks, at);
    }
    for (int k = 2; k >= 0; k--) {
        wait_somehow(works[k], cancel, at / 3 + rank + k);
        check_sum(numbers[k], counts[k], ranks, at + k);
    }
}

static void use(int rank, int world_size, int port)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("shm", "modes", store, rank, world_size, 60000, NULL);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    CHECK_TEXT(tddp_group_carrier(group), "shm");
    for (int at = 0; at < ROUNDS; at++) {
        run_round(group, cancel, rank, world_size, at);
    }
    tddp_cancel_free(cancel);
    leave(group, store, world_size);
}

MULTI_TEST(two_ranks_wait_in_every_way, 2, 60)
{
    use(rank, world_size, port);
}

MULTI_TEST(four_ranks_wait_in_every_way, 4, 100)
{
    use(rank, world_size, port);
}

MULTI_TEST(a_wait_that_times_out_leaves_its_operation_running, 2, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("shm", "late", store, rank, world_size, 60000, NULL);
    tddp_buffer buffer = fill(numbers[0], 4, rank, 0);
    tddp_work *work;
    tddp_wait wait = {100, NULL};
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        meet(store, "waited", world_size);
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        meet(store, "done", world_size);
    } else {
        CHECK_OK(inline_sum(group, buffer, 50, NULL, &work));
        double start = now();
        CHECK_STATUS(tddp_work_wait(work, &wait), TDDP_TIMEOUT);
        CHECK(now() - start > 0.09);
        CHECK_INT(tddp_work_completed(work), 0);
        meet(store, "waited", world_size);
        /* No thread waits for it here: the progress thread executes this rank's part. */
        meet(store, "done", world_size);
        CHECK_OK(tddp_work_wait(work, NULL));
        tddp_work_release(work);
    }
    check_sum(numbers[0], 4, 2, 0);
    leave(group, store, world_size);
}

MULTI_TEST(memory_of_the_group_is_reduced_in_place, 2, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("shm", "memory", store, rank, world_size, 60000, NULL);
    tddp_group_memory *memory;
    CHECK_OK(tddp_group_memory_create(group, sizeof numbers[0], &memory));
    CHECK_INT(tddp_group_memory_shared(memory), 1);
    float *data = tddp_group_memory_data(memory);
    for (int i = 0; i < 10; i++) {
        tddp_buffer buffer = fill(data, ELEMENTS, rank, i);
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        check_sum(data, ELEMENTS, world_size, i);
    }
    leave(group, store, world_size);
    data[0] = 1;
    tddp_group_memory_release(memory);
}

MULTI_TEST(a_lost_rank_fails_the_call_that_executes, 2, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("shm", "lost", store, rank, world_size, 60000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK_0);
        die();
    }
    check_will_block(RANK_0);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "barrier 2 of group \"lost\" on rank 0 of 2");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    tddp_group_release(group);
    tddp_store_release(store);
}
