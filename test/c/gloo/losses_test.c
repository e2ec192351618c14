/*
 * Failed operations over Gloo: mismatched messages, missing ranks, ranks that die or leave. The
 * error names the rank, before any timeout.
 */
#include <stdbool.h>
#include <unistd.h>

#include "fixture.h"

enum { LARGE_BYTES = 5 * 1024 * 1024 };

enum { DONE, RANK_0, RANK_2, RANK_3 }; /* events */

static uint8_t out[LARGE_BYTES];
static uint8_t in[LARGE_BYTES];

static void differing(int rank, int world_size, int port, size_t sent, size_t received,
                      tddp_dtype dtype, const char *theirs, const char *mine)
{
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0) {
        CHECK_STATUS(tddp_recv(here.group, buffer_of(in, received, dtype), 1, 3, NULL),
                     TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), theirs);
        CHECK_CONTAINS(tddp_error_message(), mine);
    } else {
        tddp_status status = tddp_send(here.group, buffer_of(out, sent, TDDP_FLOAT32), 0, 3, NULL);
        if (status == TDDP_OK) {
            /* A small message completes before the receiver looks at it. */
            status = tddp_barrier(here.group, NULL);
        }
        CHECK_STATUS(status, TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), "rank 0");
        CHECK_CONTAINS(tddp_error_message(), theirs);
        CHECK_CONTAINS(tddp_error_message(), mine);
    }
    abandon_world(here);
}

MULTI_TEST(a_small_message_of_another_size, 2, 20)
{
    differing(rank, world_size, port, 12, 10, TDDP_FLOAT32, "rank 1 sends 12 elements of float32",
              "rank 0 receives 10 elements of float32 with tag 3");
}

MULTI_TEST(a_small_message_of_another_dtype, 2, 20)
{
    differing(rank, world_size, port, 12, 12, TDDP_INT32, "rank 1 sends 12 elements of float32",
              "rank 0 receives 12 elements of int32 with tag 3");
}

MULTI_TEST(a_large_message_where_a_small_one_is_expected, 2, 20)
{
    differing(rank, world_size, port, 500000, 2, TDDP_FLOAT32,
              "rank 1 sends 500000 elements of float32", "rank 0 receives 2 elements of float32");
}

MULTI_TEST(a_small_message_where_a_large_one_is_expected, 2, 20)
{
    differing(rank, world_size, port, 0, 500000, TDDP_FLOAT32, "rank 1 sends 0 elements of float32",
              "rank 0 receives 500000 elements of float32");
}

MULTI_TEST(a_receive_without_a_send_times_out, 2, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    limit_to(here.group, rank == 0 ? 300 : 20000);
    if (rank == 0) {
        double start = now();
        CHECK_STATUS(tddp_recv(here.group, bytes_of(in, 8), 1, 77, NULL), TDDP_TIMEOUT);
        CHECK(now() - start > 0.25);
        CHECK_CONTAINS(tddp_error_message(),
                       "not done after 300 ms; rank 1 has not sent it with tag 77");
    } else {
        CHECK_STATUS(tddp_recv(here.group, bytes_of(in, 8), 0, 1, NULL), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "not done after 300 ms; rank 1 has not sent it");
    }
    abandon_world(here);
}

MULTI_TEST(a_send_without_a_receive_times_out, 2, 20)
{
    for_gloo_alone();
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    limit_to(here.group, rank == 0 ? 300 : 20000);
    if (rank == 0) {
        CHECK_STATUS(tddp_send(here.group, bytes_of(out, 8), 1, 5, NULL), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(),
                       "not done after 300 ms; rank 1 has not received it with tag 5");
    }
    CHECK_MEET(DONE, world_size);
    abandon_world(here);
}

MULTI_TEST(a_wildcard_receive_times_out, 3, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    limit_to(here.group, rank == 0 ? 300 : 20000);
    if (rank == 0) {
        CHECK_STATUS(tddp_recv(here.group, bytes_of(in, 8), TDDP_ANY_SOURCE, 5, NULL),
                     TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "no rank has sent one with tag 5");
    }
    CHECK_MEET(DONE, world_size);
    abandon_world(here);
}

/* The text lists ranks that have entered and ranks that haven't, also those whose headers were
 * not processed yet. */
MULTI_TEST(a_timeout_lists_entered_and_missing_ranks, 4, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    limit_to(here.group, rank == 0 ? 500 : 20000);
    if (rank == 0) {
        /* The others have entered or are about to; the last one is seen when it blocks. */
        CHECK_AWAIT_BLOCKED(RANK_2);
        CHECK_AWAIT_BLOCKED(RANK_3);
        CHECK_STATUS(tddp_all_gather(here.group, bytes_of(out, 8), bytes_of(in, 32), NULL),
                     TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "not done after 500 ms; rank 1 has not done its part; "
                                             "entered: rank 2, rank 3; not entered: rank 1 (last "
                                             "in barrier, operation 1)");
    } else if (rank > 1) {
        check_will_block(rank == 2 ? RANK_2 : RANK_3);
        CHECK_STATUS(tddp_all_gather(here.group, bytes_of(out, 8), bytes_of(in, 32), NULL),
                     TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 0");
        CHECK_CONTAINS(tddp_error_message(), "not done after 500 ms; rank 1 has not done its part");
    }
    CHECK_MEET(DONE, world_size);
    abandon_world(here);
}

/* Each kind of operation on rank 0 while rank 1 dies; with a third rank that stays. */
typedef tddp_status (*pending)(tddp_group *group);

static tddp_status recv_from_1(tddp_group *group)
{
    return tddp_recv(group, bytes_of(in, 8), 1, 0, NULL);
}

static tddp_status recv_from_2(tddp_group *group)
{
    return tddp_recv(group, bytes_of(in, 8), 2, 0, NULL);
}

static tddp_status recv_from_any(tddp_group *group)
{
    return tddp_recv(group, bytes_of(in, 8), TDDP_ANY_SOURCE, 0, NULL);
}

static tddp_status send_to_1(tddp_group *group)
{
    return tddp_send(group, bytes_of(out, 8), 1, 0, NULL);
}

static tddp_status send_much_to_1(tddp_group *group)
{
    return tddp_send(group, bytes_of(out, LARGE_BYTES), 1, 0, NULL);
}

static tddp_status send_to_2(tddp_group *group)
{
    return tddp_send(group, bytes_of(out, 8), 2, 0, NULL);
}

static tddp_status broadcast_from_2(tddp_group *group)
{
    return tddp_broadcast(group, bytes_of(in, 8), 2, NULL);
}

static void killed(int rank, int world_size, int port, pending run, bool before)
{
    if (run == send_to_1 || run == send_to_2) {
        for_gloo_alone();
    }
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 1) {
        if (!before) {
            CHECK_AWAIT_BLOCKED(RANK_0);
        }
        die();
    }
    if (rank == 0) {
        if (before) {
            CHECK_AWAIT_END(1);
        }
        check_will_block(RANK_0);
        CHECK_STATUS(run(here.group), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
        CHECK_STATUS(recv_from_2(here.group), TDDP_GROUP_FAILED);
        check_signal(DONE);
    } else {
        /* Rank 0 destroys its group now. */
        CHECK_AWAIT(DONE, 1);
        CHECK_STATUS(broadcast_from_2(here.group), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
    }
    abandon_world(here);
}

#define KILLED(operation)                                 \
    MULTI_TEST(a_rank_dies_before_##operation, 3, 20)     \
    {                                                     \
        killed(rank, world_size, port, operation, true);  \
    }                                                     \
    MULTI_TEST(a_rank_dies_during_##operation, 3, 20)     \
    {                                                     \
        killed(rank, world_size, port, operation, false); \
    }

KILLED(recv_from_1)
KILLED(recv_from_2)
KILLED(recv_from_any)
KILLED(send_to_1)
KILLED(send_much_to_1)
KILLED(send_to_2)
KILLED(broadcast_from_2)

/* A rank that destroys its group when it has finished isn't lost: the others continue. */
MULTI_TEST(workers_leave_one_by_one, 4, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank > 0) {
        if (rank > 1) {
            CHECK_AWAIT_END(rank - 1);
        }
        int32_t x = rank;
        CHECK_OK(tddp_send(here.group, buffer_of(&x, 1, TDDP_INT32), 0, 0, NULL));
        abandon_world(here);
        return;
    }
    for (int i = 1; i < world_size; i++) {
        int32_t got = 0;
        tddp_work *work = post_recv(here.group, buffer_of(&got, 1, TDDP_INT32), TDDP_ANY_SOURCE, 0);
        CHECK_INT(wait_for_source(work), i);
        CHECK_INT(got, i);
    }
    CHECK_AWAIT_END(world_size - 1);
    CHECK_STATUS(recv_from_any(here.group), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 1 has left the group; rank 2 has left the group; rank 3 has left");
    abandon_world(here);
}

MULTI_TEST(a_rank_that_has_left, 3, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK_0);
        abandon_world(here);
        return;
    }
    int32_t x = rank;
    tddp_buffer buffer = buffer_of(&x, 1, TDDP_INT32);
    if (rank == 0) {
        /* It leaves during this operation, which doesn't need it. */
        check_will_block(RANK_0);
        CHECK_OK(tddp_recv(here.group, buffer, 2, 0, NULL));
        CHECK_INT(x, 2);
        CHECK_STATUS(recv_from_1(here.group), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 1 has left the group");
    } else {
        CHECK_AWAIT_END(1);
        CHECK_OK(tddp_send(here.group, buffer, 0, 0, NULL));
        CHECK_AWAIT_END(0);
    }
    abandon_world(here);
}
