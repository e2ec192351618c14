/*
 * More than eight ranks over Gloo, whose barriers and small reductions go by recursive doubling,
 * among operations that all ranks do with each other directly.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <tddp/backend.h>

#include "fixture.h"
#include "numbers.h"

enum { EAGER_FLOATS = 16 * 1024, BITS_COUNT = 500 };

enum { DONE }; /* events */

static void all_reduce(tddp_group *group, size_t count, tddp_dtype dtype, tddp_reduce_op op)
{
    if (tddp_reduce_check(op, dtype)) {
        return;
    }
    char *data = calloc(count + 1, tddp_dtype_size(dtype));
    CHECK(data != NULL);
    fill_numbers(data, dtype, tddp_group_rank(group), 0, count);
    CHECK_OK(tddp_all_reduce(group, buffer_of(data, count, dtype), op, 0.5, NULL));
    check_combined(data, dtype, op, tddp_group_world_size(group), 0, count, 1);
    free(data);
}

/* An operation of each rank with all others; element r becomes `step` and r. */
static void gather_all(tddp_group *group, int step)
{
    int32_t all[16];
    tddp_buffer parts[16];
    int32_t mine = step * 100 + tddp_group_rank(group);
    const int size = tddp_group_world_size(group);
    for (int r = 0; r < size; r++) {
        parts[r] = buffer_of(&all[r], 1, TDDP_INT32);
    }
    CHECK_OK(
        tddp_all_gather_list(group, buffer_of(&mine, 1, TDDP_INT32), parts, (size_t)size, NULL));
    for (int r = 0; r < size; r++) {
        CHECK_INT(all[r], step * 100 + r);
    }
}

/* Of the same bits on all ranks, whatever the order of additions. */
static void same_bits(tddp_group *group)
{
    static float data[BITS_COUNT];
    static float all[16 * BITS_COUNT];
    const int size = tddp_group_world_size(group);
    for (int i = 0; i < BITS_COUNT; i++) {
        data[i] = (float)((i * 37 + tddp_group_rank(group) * 101) % 1009) / 7.0f;
    }
    CHECK_OK(tddp_all_reduce(group, buffer_of(data, BITS_COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                             NULL));
    CHECK_OK(tddp_all_gather(group, buffer_of(data, BITS_COUNT, TDDP_FLOAT32),
                             buffer_of(all, (size_t)size * BITS_COUNT, TDDP_FLOAT32), NULL));
    for (int r = 0; r < size; r++) {
        CHECK(memcmp(&all[r * BITS_COUNT], data, sizeof data) == 0);
    }
}

static void check_all(int rank, int world_size, int port)
{
    static const size_t counts[] = {0, 1, 3, 1001, EAGER_FLOATS, EAGER_FLOATS + 1, 40009};
    static const tddp_dtype dtypes[] = {TDDP_FLOAT32, TDDP_BFLOAT16, TDDP_INT64, TDDP_UINT8,
                                        TDDP_COMPLEX64};
    static const tddp_reduce_op ops[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_AVG, TDDP_REDUCE_MIN,
                                         TDDP_REDUCE_MAX, TDDP_REDUCE_PREMUL_SUM};
    world here = open_world(rank, world_size, port, 60000);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            all_reduce(here.group, counts[c], dtypes[d], ops[(c + d) % 5]);
        }
        CHECK_OK(tddp_barrier(here.group, NULL));
        gather_all(here.group, (int)c);
    }
    for (int i = 0; i < 5; i++) {
        all_reduce(here.group, 100, TDDP_FLOAT32, ops[i]);
        gather_all(here.group, i);
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_OK(tddp_barrier(here.group, NULL));
    }
    same_bits(here.group);
    close_world(here);
}

MULTI_TEST(nine_ranks, 9, 110)
{
    check_all(rank, world_size, port);
}

MULTI_TEST(eleven_ranks, 11, 110)
{
    check_all(rank, world_size, port);
}

MULTI_TEST(sixteen_ranks, 16, 110)
{
    check_all(rank, world_size, port);
}

/* --- failures -------------------------------------------------------------------------------- */

/* One rank calls something else, by the same way or by another; all are told what. */
static void differ(int rank, int world_size, int port, int other, bool directly)
{
    static float data[64];
    world here = open_world(rank, world_size, port, 60000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    tddp_status status;
    if (rank == other && directly) {
        status = tddp_broadcast(here.group, buffer_of(data, 64, TDDP_FLOAT32), 0, NULL);
    } else if (rank == other) {
        status = tddp_barrier(here.group, NULL);
    } else {
        status = tddp_all_reduce(here.group, buffer_of(data, 64, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                                 NULL);
    }
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), directly ? "broadcast" : "barrier");
    CHECK_CONTAINS(tddp_error_message(), "all_reduce");
    abandon_world(here);
}

MULTI_TEST(a_rank_calls_another_operation_of_this_way, 9, 60)
{
    differ(rank, world_size, port, 4, false);
}

MULTI_TEST(the_odd_one_of_a_pair_calls_another, 9, 60)
{
    differ(rank, world_size, port, 1, false);
}

MULTI_TEST(a_rank_calls_a_direct_operation, 11, 60)
{
    differ(rank, world_size, port, 7, true);
}

static void lose(int rank, int world_size, int port, int dying)
{
    static float data[64];
    char name[16];
    world here = open_world(rank, world_size, port, 60000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == dying) {
        die();
    }
    tddp_status status =
        tddp_all_reduce(here.group, buffer_of(data, 64, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
    CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    (void)snprintf(name, sizeof name, "rank %d", dying);
    CHECK_CONTAINS(tddp_error_message(), name);
    abandon_world(here);
}

MULTI_TEST(a_rank_dies, 10, 60)
{
    lose(rank, world_size, port, 9);
}

MULTI_TEST(the_even_one_of_a_pair_dies, 10, 60)
{
    lose(rank, world_size, port, 2);
}

/* It says how many it needs, to the others too. */
MULTI_TEST(a_rank_may_open_too_few_files, 12, 60)
{
    tddp_group *group;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = WORLD_BACKEND;
    opts.store = open_store(rank, world_size, port);
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 60000;
    if (rank == 3) {
        const struct rlimit limit = {20, 20};
        CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    }
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), rank == 3 ? TDDP_SYSTEM : TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "connections to 11 ranks need a limit of ");
    CHECK_CONTAINS(tddp_error_message(), " open files, and it is 20: raise it (ulimit -n)");
    tddp_store_release(opts.store);
}

MULTI_TEST(a_rank_is_late, 9, 60)
{
    world here = open_world(rank, world_size, port, 60000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 6) {
        CHECK_AWAIT(DONE, world_size - 1);
        abandon_world(here);
        return;
    }
    limit_to(here.group, rank == 0 ? 300 : 50000);
    tddp_status status = tddp_barrier(here.group, NULL);
    CHECK(status == TDDP_TIMEOUT || status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "not done after 300 ms");
    if (status == TDDP_TIMEOUT) { /* rank 0, unless another told it first that it has given up */
        CHECK_INT(rank, 0);
        CHECK_CONTAINS(tddp_error_message(), "not arrived: rank 6");
    }
    check_signal(DONE);
    abandon_world(here);
}
