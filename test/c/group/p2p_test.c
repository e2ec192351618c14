/* Sends and receives: values, order, any source, beside collectives. */
#include <stdlib.h>

#include "ranks.h"
#include "values.h"

static double value(int from, int to, size_t i)
{
    return (double)((size_t)(from + 2 * to) + i % 3);
}

/* Everyone sends to everyone, receives posted first. */
static void exchange(tddp_group *group, int rank, int world, tddp_dtype dtype, size_t count)
{
    tddp_work *works[2 * MAX_RANKS] = {0};
    void *sent[MAX_RANKS] = {0};
    void *received[MAX_RANKS] = {0};
    for (int peer = 0; peer < world; peer++) {
        if (peer != rank) {
            received[peer] = room_for(count);
            CHECK_OK(
                tddp_recv(group, buffer_of(received[peer], count, dtype), peer, 7, &works[peer]));
        }
    }
    for (int peer = 0; peer < world; peer++) {
        if (peer != rank) {
            sent[peer] = room_for(count);
            for (size_t i = 0; i < count; i++) {
                put(dtype, sent[peer], i, value(rank, peer, i));
            }
            CHECK_OK(tddp_send(group, buffer_of(sent[peer], count, dtype), peer, 7,
                               &works[MAX_RANKS + peer]));
        }
    }
    for (int peer = 0; peer < world; peer++) {
        if (peer == rank) {
            continue;
        }
        CHECK_OK(tddp_work_wait(works[peer], NULL));
        CHECK_OK(tddp_work_wait(works[MAX_RANKS + peer], NULL));
        CHECK_INT(tddp_work_source(works[peer]), peer);
        CHECK_INT(tddp_work_source(works[MAX_RANKS + peer]), TDDP_ANY_SOURCE);
        CHECK_INT(tddp_work_kind(works[peer]), TDDP_OP_RECV);
        for (size_t i = 0; i < count; i++) {
            CHECK_DOUBLE(get(dtype, received[peer], i), as_stored(dtype, value(peer, rank, i)), 0);
        }
        tddp_work_release(works[peer]);
        tddp_work_release(works[MAX_RANKS + peer]);
        free(sent[peer]);
        free(received[peer]);
    }
}

static void all_pairs(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        exchange(group, rank, world, (tddp_dtype)dtype, 0);
        exchange(group, rank, world, (tddp_dtype)dtype, 1);
        exchange(group, rank, world, (tddp_dtype)dtype, 129);
    }
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

TEST(every_dtype_between_all_pairs)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        run_ranks(ranks, all_pairs, NULL);
    }
}

/* Blocking calls around a ring, beside collectives that are under way. */
static void ring(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t token = 0;
    tddp_work *barrier = NULL;
    if (rank > 0) {
        CHECK_OK(tddp_barrier(group, &barrier));
        CHECK_OK(tddp_recv(group, buffer_of(&token, 1, TDDP_INT32), rank - 1, 0, NULL));
        CHECK_INT(token, rank);
        CHECK_INT(tddp_work_completed(barrier), 0);
    }
    token++;
    CHECK_OK(tddp_send(group, buffer_of(&token, 1, TDDP_INT32), (rank + 1) % world, 0, NULL));
    if (rank == 0) {
        CHECK_OK(tddp_recv(group, buffer_of(&token, 1, TDDP_INT32), world - 1, 0, NULL));
        CHECK_INT(token, world);
        CHECK_OK(tddp_barrier(group, &barrier));
    }
    CHECK_OK(tddp_work_wait(barrier, NULL));
    /* Collectives are numbered separately. */
    CHECK_INT(tddp_work_sequence(barrier), 1);
    tddp_work_release(barrier);
    tddp_group_release(group);
}

TEST(a_token_ring_runs_beside_a_barrier)
{
    run_ranks(4, ring, NULL);
}

/* Where the store has a connection, a barrier that waits there does not hold up the messages. */
MULTI_TEST(a_token_ring_of_processes_runs_beside_a_barrier, 3, 20)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    opts.host = "127.0.0.1";
    opts.port = (uint16_t)port;
    opts.is_server = rank == 0;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    ring(rank, world_size, store, NULL);
    /* The host of the store ends last. */
    for (char peer = '1'; rank == 0 && peer <= '2'; peer++) {
        tddp_blob gone;
        CHECK_OK(tddp_store_get(store, (tddp_slice){&peer, 1}, NULL, &gone));
        tddp_blob_free(&gone);
    }
    char own = (char)('0' + rank);
    CHECK_OK(tddp_store_set(store, (tddp_slice){&own, 1}, (tddp_slice){&own, 1}, NULL));
    tddp_store_release(store);
}

enum { MANY = 60 };

/* Messages with one tag match in the order of the calls, independently of other tags. */
static void in_order(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    tddp_work *works[MANY];
    int64_t numbers[MANY] = {0};
    int peer = 1 - rank;
    for (int i = 0; i < MANY; i++) {
        tddp_buffer buffer = buffer_of(&numbers[i], 1, TDDP_INT64);
        if (rank == 0) {
            numbers[i] = i;
            CHECK_OK(tddp_send(group, buffer, peer, (uint32_t)(i % 3), &works[i]));
        } else {
            /* The tags in another order than they were sent in. */
            CHECK_OK(tddp_recv(group, buffer, peer, (uint32_t)(2 - i / (MANY / 3)), &works[i]));
        }
        CHECK_INT(tddp_work_sequence(works[i]), i + 1);
    }
    for (int i = MANY - 1; i >= 0; i--) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    for (int i = 0; rank == 1 && i < MANY; i++) {
        CHECK_INT(numbers[i], 3 * (i % (MANY / 3)) + 2 - i / (MANY / 3));
    }
    tddp_group_release(group);
}

TEST(messages_match_by_tag_in_order)
{
    run_ranks(2, in_order, NULL);
}

/* Rank 0 receives from any source; each rank's messages arrive in order. */
static void any_source(int rank, int world, tddp_store *store, void *data)
{
    enum { EACH = 5 };
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t seen[MAX_RANKS] = {0};
    if (rank > 0) {
        for (int32_t i = 0; i < EACH; i++) {
            int32_t pair[2] = {rank, i};
            CHECK_OK(tddp_send(group, buffer_of(pair, 2, TDDP_INT32), 0, 4, NULL));
        }
        CHECK_OK(tddp_barrier(group, NULL));
        int32_t last = -rank;
        CHECK_OK(tddp_send(group, buffer_of(&last, 1, TDDP_INT32), 0, 4, NULL));
        tddp_group_shutdown(group, 10000);
        tddp_group_release(group);
        return;
    }
    int count = EACH * (world - 1);
    tddp_work *works[EACH * MAX_RANKS];
    int32_t pairs[EACH * MAX_RANKS][2];
    for (int i = 0; i < count; i++) {
        CHECK_OK(
            tddp_recv(group, buffer_of(pairs[i], 2, TDDP_INT32), TDDP_ANY_SOURCE, 4, &works[i]));
    }
    for (int i = 0; i < count; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        int source = tddp_work_source(works[i]);
        CHECK(source > 0 && source < world);
        CHECK_INT(pairs[i][0], source);
        CHECK_INT(pairs[i][1], seen[source]);
        seen[source]++;
        tddp_work_release(works[i]);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    for (int peer = 1; peer < world; peer++) {
        int32_t last = 0;
        CHECK_OK(tddp_recv(group, buffer_of(&last, 1, TDDP_INT32), peer, 4, NULL));
        CHECK_INT(last, -peer);
    }
    tddp_group_release(group);
}

TEST(any_source_returns_the_sender)
{
    run_ranks(2, any_source, NULL);
    run_ranks(4, any_source, NULL);
}

/* A receive from one rank is matched after the earlier ones that may match that rank's messages. */
static void pending_receives(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t x[3] = {0};
    if (rank == 1) {
        for (int32_t i = 0; i < 3; i++) {
            CHECK_OK(tddp_send(group, buffer_of(&i, 1, TDDP_INT32), 0, 0, NULL));
        }
    } else {
        const int from[3] = {TDDP_ANY_SOURCE, 1, TDDP_ANY_SOURCE};
        tddp_work *works[3];
        for (int i = 0; i < 3; i++) {
            CHECK_OK(tddp_recv(group, buffer_of(&x[i], 1, TDDP_INT32), from[i], 0, &works[i]));
        }
        for (int i = 2; i >= 0; i--) {
            CHECK_OK(tddp_work_wait(works[i], NULL));
            CHECK_INT(x[i], i);
            tddp_work_release(works[i]);
        }
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
}

/* But for Gloo, which has two lists of them (tddp/group.h). */
TEST(pending_receives_match_in_order)
{
    setenv("TDDP_FAKE", "over=shm", 1);
    run_ranks(2, pending_receives, NULL);
}
