/* The NCCL calls of each operation, with stand-ins for NCCL and CUDA. */
#include "nccl/operations.h"
#include "events.h"
#include "standin/standin.h"

enum { OVER }; /* events */

MULTI_TEST(one_rank, 1, 60)
{
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks, 2, 60)
{
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(three_ranks_that_connect_late, 3, 60)
{
    check_all(rank, world_size, port, -1);
}

MULTI_TEST(four_ranks, 4, 60)
{
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(messages, 3, 60)
{
    static float data[1];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    check_messages(group, rank, world_size);
    CHECK_STATUS(tddp_recv(group, on_device(data, 1, TDDP_FLOAT32), TDDP_ANY_SOURCE, 0, NULL),
                 TDDP_UNSUPPORTED);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store);
}

MULTI_TEST(unsupported_operations, 2, 30)
{
    static int16_t narrow[3];
    static int32_t bits[3];
    static uint8_t eight_bits[3];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_STATUS(tddp_all_reduce(group, on_device(narrow, 3, TDDP_INT16), TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "nccl has no sum of int16");
    CHECK_STATUS(tddp_all_reduce(group, on_device(bits, 3, TDDP_INT32), TDDP_REDUCE_BAND, 0, NULL),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "it has sum, avg, product, min, max and premul_sum");
    const tddp_buffer eights = on_device(eight_bits, 3, TDDP_FLOAT8_E4M3FN);
    CHECK_STATUS(tddp_all_reduce(group, eights, TDDP_REDUCE_SUM, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "NCCL 2.20.5 has no sum of float8_e4m3fn: expected 2.24");
    /* The group still works. */
    CHECK_OK(tddp_broadcast(group, on_device(narrow, 3, TDDP_INT16), 0, NULL));
    CHECK_OK(tddp_broadcast(group, eights, 0, NULL));
    leave(group, store);
}

MULTI_TEST(a_call_that_fails, 2, 30)
{
    static float data[3];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    if (rank == 1) {
        standin_fail_next("ncclAllReduce", TDDP_NCCL_INTERNAL_ERROR);
    }
    tddp_status status =
        tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
    CHECK(status != TDDP_OK);
    if (rank == 1) {
        CHECK_CONTAINS(tddp_error_message(),
                       "ncclAllReduce: internal error: the stand-in was told to");
    }
    leave(group, store);
}

MULTI_TEST(a_rank_that_is_late_is_a_timeout, 2, 30)
{
    static float data[3];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, 700);
    if (rank == 0) {
        tddp_status status =
            tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
        CHECK_STATUS(status, TDDP_TIMEOUT);
        check_signal(OVER);
    } else {
        CHECK_AWAIT(OVER, 1);
        CHECK(tddp_all_reduce(group, on_device(data, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL) !=
              TDDP_OK);
    }
    leave(group, store);
}
