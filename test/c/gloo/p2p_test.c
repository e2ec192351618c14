/*
 * Sends and receives over Gloo: every dtype, sizes from zero to several MiB, tags, wildcard
 * sources, many requests at once. Failures are in losses_test.c.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixture.h"

static const tddp_dtype dtypes[] = {
    TDDP_UINT8,    TDDP_INT8,    TDDP_INT16,   TDDP_INT32,     TDDP_INT64,      TDDP_FLOAT16,
    TDDP_BFLOAT16, TDDP_FLOAT32, TDDP_FLOAT64, TDDP_COMPLEX64, TDDP_COMPLEX128, TDDP_BOOL,
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes, EAGER = 64 * 1024, MOST = 5 * 1024 * 1024 + 16 };

static uint8_t out[MOST];
static uint8_t in[MOST];

/* Bytes that depend on the sender, the message and the position. */
static uint8_t byte_of(int sender, int message, size_t at)
{
    return (uint8_t)(at * 7 + (at >> 8) + (size_t)sender * 31 + (size_t)message * 5 + 1);
}

static void fill(void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)data)[i] = byte_of(sender, message, i);
    }
}

static void check_bytes(const void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        if (((const uint8_t *)data)[i] != byte_of(sender, message, i)) {
            check_failed(__FILE__, __LINE__, "message %d of rank %d: byte %zu of %zu is %d, not %d",
                         message, sender, i, bytes, ((const uint8_t *)data)[i],
                         byte_of(sender, message, i));
        }
    }
}

/* Every rank sends to its successor and receives from its predecessor. */
static void round_the_ring(tddp_group *group, int rank, int world_size, tddp_dtype dtype,
                           size_t count, int message)
{
    int next = (rank + 1) % world_size;
    int before = (rank + world_size - 1) % world_size;
    size_t bytes = count * tddp_dtype_size(dtype);
    fill(out, bytes, rank, message);
    memset(in, 0, bytes + 1);
    tddp_work *sent = post_send(group, buffer_of(out, count, dtype), next, 0);
    CHECK_INT(wait_for_source(post_recv(group, buffer_of(in, count, dtype), before, 0)), before);
    CHECK_OK(end(sent));
    check_bytes(in, bytes, before, message);
    CHECK_INT(in[bytes], 0);
}

static void all_dtypes_and_sizes(int rank, int world_size, int port)
{
    static const size_t sizes[] = {0, 1, 3, 1001, EAGER, EAGER + 1, 300007};
    world here = open_world(rank, world_size, port, 20000);
    int message = 0;
    for (size_t d = 0; d < DTYPES; d++) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            if (sizes[s] * tddp_dtype_size(dtypes[d]) < MOST) {
                round_the_ring(here.group, rank, world_size, dtypes[d], sizes[s], message++);
            }
        }
    }
    round_the_ring(here.group, rank, world_size, TDDP_UINT8, MOST - 1, message);
    close_world(here);
}

MULTI_TEST(all_dtypes_and_sizes_2, 2, 60)
{
    all_dtypes_and_sizes(rank, world_size, port);
}

MULTI_TEST(all_dtypes_and_sizes_3, 3, 60)
{
    all_dtypes_and_sizes(rank, world_size, port);
}

MULTI_TEST(all_dtypes_and_sizes_4, 4, 60)
{
    all_dtypes_and_sizes(rank, world_size, port);
}

/* Just below, at and above the size that is sent with the header. */
MULTI_TEST(sizes_round_the_limit, 2, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int i = -2; i <= 2; i++) {
        round_the_ring(here.group, rank, world_size, TDDP_UINT8, (size_t)(EAGER + i), i + 2);
    }
    close_world(here);
}

MULTI_TEST(tags_match_in_any_order, 2, 30)
{
    static const uint32_t sent[] = {5, 3, 0, UINT32_MAX, 7};
    static const uint32_t received[] = {UINT32_MAX, 7, 5, 0, 3};
    enum { COUNT = 5 };
    world here = open_world(rank, world_size, port, 20000);
    for (size_t bytes = 10; bytes <= 200000; bytes *= 20000) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            if (rank == 0) {
                fill(out + 200000 * i, bytes, 0, (int)sent[i]);
                works[i] = post_send(here.group, bytes_of(out + 200000 * i, bytes), 1, sent[i]);
            } else {
                CHECK_OK(tddp_recv(here.group, bytes_of(in, bytes), 0, received[i], NULL));
                check_bytes(in, bytes, 0, (int)received[i]);
            }
        }
        for (int i = 0; i < COUNT && rank == 0; i++) {
            CHECK_OK(end(works[i]));
        }
    }
    close_world(here);
}

static size_t size_of_message(int message)
{
    return message % 3 == 0 ? 100000 : message % 3 == 1 ? 8 : 0;
}

/* With one tag, messages match in the order of the calls, in whatever order the requests are
 * finished. */
MULTI_TEST(many_in_flight_match_in_order, 2, 60)
{
    enum { COUNT = 48 };
    world here = open_world(rank, world_size, port, 20000);
    for (int turn = 0; turn < 3; turn++) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            uint8_t *place = (rank == 0 ? out : in) + 100000 * i;
            size_t bytes = size_of_message(i);
            if (rank == 0) {
                fill(place, bytes, turn, i);
                works[i] = post_send(here.group, bytes_of(place, bytes), 1, 9);
            } else {
                memset(place, 0, bytes);
                works[i] = post_recv(here.group, bytes_of(place, bytes), 0, 9);
            }
        }
        for (int k = 0; k < COUNT; k++) {
            int i = turn == 0 ? COUNT - 1 - k : turn == 1 ? k : (k * 29 + 7) % COUNT;
            CHECK_OK(end(works[i]));
            if (rank == 1) {
                check_bytes(in + 100000 * i, size_of_message(i), turn, i);
            }
        }
    }
    close_world(here);
}

/* Each receive has its own memory, since its message's source isn't known before. */
static void from_any_source(int rank, int world_size, int port, size_t bytes)
{
    enum { EACH = 6 };
    world here = open_world(rank, world_size, port, 20000);
    int others = world_size - 1;
    if (rank > 0) {
        for (int i = 0; i < EACH; i++) {
            fill(out, bytes, rank, i);
            CHECK_OK(tddp_send(here.group, bytes_of(out, bytes), 0, 4, NULL));
        }
    } else {
        tddp_work *works[EACH * 3];
        int seen[4] = {0};
        for (int i = 0; i < EACH * others; i++) {
            works[i] =
                post_recv(here.group, bytes_of(in + bytes * (size_t)i, bytes), TDDP_ANY_SOURCE, 4);
        }
        for (int i = 0; i < EACH * others; i++) {
            int source = wait_for_source(works[i]);
            CHECK(source > 0 && source < world_size);
            /* A sender waits for each message, so its own messages arrive in order. */
            check_bytes(in + bytes * (size_t)i, bytes, source, seen[source]++);
        }
        for (int peer = 1; peer < world_size; peer++) {
            CHECK_INT(seen[peer], EACH);
        }
    }
    close_world(here);
}

MULTI_TEST(small_from_any_source, 4, 30)
{
    from_any_source(rank, world_size, port, 8);
}

MULTI_TEST(large_from_any_source, 3, 30)
{
    from_any_source(rank, world_size, port, 150001);
}

MULTI_TEST(any_source_beside_one_source, 3, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    int32_t x = rank * 10;
    if (rank == 0) {
        int32_t got[2] = {-1, -1};
        /* In the other order some backends let the first receive take either message. */
        tddp_work *one = post_recv(here.group, buffer_of(&got[1], 1, TDDP_INT32), 2, 0);
        tddp_work *any = post_recv(here.group, buffer_of(&got[0], 1, TDDP_INT32), -1, 0);
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_INT(wait_for_source(any), 1);
        CHECK_INT(wait_for_source(one), 2);
        CHECK_INT(got[0], 10);
        CHECK_INT(got[1], 20);
    } else {
        /* Otherwise the first receive might take the message that the second one waits for. */
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_OK(tddp_send(here.group, buffer_of(&x, 1, TDDP_INT32), 0, 0, NULL));
    }
    close_world(here);
}

MULTI_TEST(large_messages_both_ways_at_once, 2, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int turn = 0; turn < 4; turn++) {
        /* Both sides post their send first: neither waits for the other's receive. */
        fill(out, MOST, rank, turn);
        tddp_work *sent = post_send(here.group, bytes_of(out, MOST), 1 - rank, 1);
        usleep(turn == rank ? 30000 : 0);
        tddp_work *received = post_recv(here.group, bytes_of(in, MOST), 1 - rank, 1);
        CHECK_OK(end(received));
        CHECK_OK(end(sent));
        check_bytes(in, MOST, 1 - rank, turn);
    }
    close_world(here);
}

MULTI_TEST(beside_collectives, 3, 60)
{
    enum { TURNS = 30, SIZE = 100000 };
    static float sums[TURNS][SIZE];
    world here = open_world(rank, world_size, port, 20000);
    tddp_work *collectives[TURNS];
    int next = (rank + 1) % 3;
    int before = (rank + 2) % 3;
    for (int i = 0; i < TURNS; i++) {
        size_t count = i % 2 ? SIZE : 5;
        for (size_t k = 0; k < count; k++) {
            sums[i][k] = (float)(rank + i);
        }
        CHECK_OK(tddp_all_reduce(here.group, buffer_of(sums[i], count, TDDP_FLOAT32),
                                 TDDP_REDUCE_SUM, 0, &collectives[i]));
        size_t bytes = i % 3 ? 16 : 150000;
        fill(out, bytes, rank, i);
        tddp_work *sent = post_send(here.group, bytes_of(out, bytes), next, (uint32_t)i);
        CHECK_OK(tddp_recv(here.group, bytes_of(in, bytes), before, (uint32_t)i, NULL));
        CHECK_OK(end(sent));
        check_bytes(in, bytes, before, i);
    }
    for (int i = 0; i < TURNS; i++) {
        CHECK_OK(end(collectives[i]));
        CHECK_DOUBLE(sums[i][4], 3 + 3 * i, 0);
    }
    close_world(here);
}

enum { THROUGH = 1 }; /* events */

/* Unmatched requests block neither collectives nor the group's shutdown. */
MULTI_TEST(shutdown_cancels_posted_requests, 2, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_work *works[4];
    works[0] = post_recv(here.group, bytes_of(in, 100), 1 - rank, 1);
    works[1] = post_recv(here.group, bytes_of(in + 1000, 200000), 1 - rank, 2);
    works[2] = post_recv(here.group, bytes_of(in + 300000, 100), TDDP_ANY_SOURCE, 3);
    works[3] = post_send(here.group, bytes_of(out, 200000), 1 - rank, 4);
    CHECK_OK(tddp_barrier(here.group, NULL));
    /* One rank may be through while the other's barrier still runs, and would fail by its leaving.
     */
    CHECK_MEET(THROUGH, world_size);
    tddp_group_shutdown(here.group, 0);
    for (int i = 0; i < 4; i++) {
        /* The first rank to leave is lost for the other. */
        tddp_status status = tddp_work_wait(works[i], NULL);
        CHECK(status == TDDP_GROUP_CLOSED || status == TDDP_PEER_LOST ||
              status == TDDP_GROUP_FAILED);
        tddp_work_release(works[i]);
    }
    abandon_world(here);
}
