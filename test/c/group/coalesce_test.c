/* Several buffers in one all_reduce: values, the steps, and mismatches between ranks. */
#include <stdbool.h>

#include "ranks.h"
#include "values.h"

enum { MOST = 6, LARGE = (1 << 20) / 4 };

static double value(int rank, size_t buffer, size_t i)
{
    return (double)((size_t)rank + 2 * buffer + i % 3);
}

/* The mean of value() over all ranks. */
static double mean(int world, size_t buffer, size_t i)
{
    return (double)(world - 1) / 2 + (double)(2 * buffer + i % 3);
}

/* Cuts buffers with `gap` elements between them, fills, combines, compares. */
static void combine(tddp_group *group, tddp_dtype dtype, const size_t *counts, size_t count,
                    size_t gap, tddp_reduce_op op)
{
    int world = tddp_group_world_size(group);
    int rank = tddp_group_rank(group);
    size_t total = 0;
    for (size_t k = 0; k < count; k++) {
        total += counts[k] + gap;
    }
    tddp_buffer buffers[MOST];
    char *memory = room_for(total);
    size_t at = 0;
    for (size_t k = 0; k < count; k++) {
        buffers[k] = buffer_of(memory + at * tddp_dtype_size(dtype), counts[k], dtype);
        at += counts[k] + gap;
        for (size_t i = 0; i < counts[k]; i++) {
            put(dtype, buffers[k].data, i, value(rank, k, i));
        }
        for (size_t i = 0; i < gap; i++) {
            put(dtype, buffers[k].data, counts[k] + i, 1);
        }
    }
    CHECK_OK(tddp_all_reduce_coalesced(group, buffers, count, op, 2, NULL));
    for (size_t k = 0; k < count; k++) {
        for (size_t i = 0; i < counts[k]; i++) {
            double wanted = mean(world, k, i);
            wanted *= op == TDDP_REDUCE_AVG ? 1 : op == TDDP_REDUCE_SUM ? world : 2 * world;
            CHECK_DOUBLE(get(dtype, buffers[k].data, i), as_stored(dtype, wanted), 0);
        }
        /* The memory between them is unchanged. */
        for (size_t i = 0; i < gap; i++) {
            CHECK_DOUBLE(get(dtype, buffers[k].data, counts[k] + i), 1, 0);
        }
    }
    free(memory);
}

static void values(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    const size_t small[MOST] = {3, 0, 1, 7, 0, 5};
    for (int dtype = 0; dtype < TDDP_BOOL; dtype++) {
        for (size_t count = 1; count <= MOST; count++) {
            /* Contiguous on some ranks, not on others. */
            combine(group, (tddp_dtype)dtype, small, count, (size_t)rank % 2, TDDP_REDUCE_SUM);
            combine(group, (tddp_dtype)dtype, small, count, 0, TDDP_REDUCE_SUM);
            combine(group, (tddp_dtype)dtype, small, count, 2, TDDP_REDUCE_SUM);
        }
    }
    combine(group, TDDP_FLOAT64, small, MOST, 1, TDDP_REDUCE_AVG);
    combine(group, TDDP_FLOAT32, small, MOST, 1, TDDP_REDUCE_PREMUL_SUM);
    const size_t none[3] = {0, 0, 0};
    combine(group, TDDP_FLOAT32, none, 3, 0, TDDP_REDUCE_SUM);
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

TEST(small_buffers_are_reduced_in_one_step)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_ranks(ranks, values, NULL);
    }
}

static void large(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    const size_t counts[MOST] = {5, LARGE - 5, 3, LARGE + 1, 0, 9};
    for (size_t gap = 0; gap < 2; gap++) {
        combine(group, TDDP_FLOAT32, counts, MOST, gap, TDDP_REDUCE_SUM);
        combine(group, TDDP_FLOAT32, counts, MOST, gap, TDDP_REDUCE_AVG);
        combine(group, TDDP_FLOAT32, counts + 3, 1, gap, TDDP_REDUCE_SUM);
    }
    /* What follows is still in step. */
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

TEST(large_buffers_have_a_step_each)
{
    run_ranks(2, large, NULL);
}

static void several(int rank, int world, tddp_store *store, void *data)
{
    enum { WORKS = 4 };
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    static int64_t numbers[MAX_RANKS][WORKS][5];
    tddp_work *works[WORKS];
    for (int k = 0; k < WORKS; k++) {
        tddp_buffer buffers[2] = {buffer_of(&numbers[rank][k][0], 2, TDDP_INT64),
                                  buffer_of(&numbers[rank][k][3], 2, TDDP_INT64)};
        for (int i = 0; i < 5; i++) {
            numbers[rank][k][i] = rank + k + i;
        }
        CHECK_OK(tddp_all_reduce_coalesced(group, buffers, 2, TDDP_REDUCE_MAX, 0, &works[k]));
    }
    for (int k = WORKS - 1; k >= 0; k--) {
        CHECK_OK(tddp_work_wait(works[k], NULL));
        CHECK_INT(tddp_work_kind(works[k]), TDDP_OP_ALL_REDUCE);
        tddp_work_release(works[k]);
        for (int i = 0; i < 5; i++) {
            CHECK_INT(numbers[rank][k][i], (i == 2 ? rank : world - 1) + k + i);
        }
    }
    tddp_group_release(group);
}

TEST(several_are_under_way_at_once)
{
    run_ranks(3, several, NULL);
}

static void other_sizes(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    tddp_buffer buffers[2] = {buffer_of(x, rank ? 2 : 3, TDDP_FLOAT32),
                              buffer_of(x + 4, rank ? 3 : 2, TDDP_FLOAT32)};
    CHECK_STATUS(tddp_all_reduce_coalesced(group, buffers, 2, TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_MISMATCH);
    /* A failed step leaves the buffers unchanged. */
    for (int i = 0; i < 8; i++) {
        CHECK_DOUBLE(x[i], i + 1, 0);
    }
    tddp_group_release(group);
}

TEST(lists_of_other_sizes_do_not_match)
{
    run_ranks(2, other_sizes, NULL);
}

static void more_empty_ones(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    float x[3] = {0};
    tddp_buffer buffers[3] = {buffer_of(x, 0, TDDP_FLOAT32), buffer_of(x, 0, TDDP_FLOAT32),
                              buffer_of(x, 3, TDDP_FLOAT32)};
    size_t left_out = rank ? 1 : 0;
    CHECK_STATUS(tddp_all_reduce_coalesced(group, buffers + left_out, 3 - left_out, TDDP_REDUCE_SUM,
                                           0, NULL),
                 TDDP_MISMATCH);
    tddp_group_release(group);
}

TEST(empty_buffers_count_where_lists_are_compared)
{
    run_ranks(2, more_empty_ones, NULL);
}

static void second_step_fails(int rank, int world, tddp_store *store, void *data)
{
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    float *big = room_for(2 * (size_t)LARGE + 2);
    tddp_buffer buffers[2] = {buffer_of(big, LARGE + 1, TDDP_FLOAT32),
                              buffer_of(big + LARGE + 1, LARGE + 1, TDDP_FLOAT32)};
    tddp_work *work;
    CHECK_OK(tddp_all_reduce_coalesced(group, buffers, 2, TDDP_REDUCE_SUM, 0, &work));
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_PEER_LOST);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    tddp_work_release(work);
    tddp_group_release(group);
    free(big);
    (void)data;
}

TEST(a_later_step_that_fails_fails_the_work)
{
    setenv("TDDP_FAKE", "lose_at=2", 1);
    run_ranks(2, second_step_fails, NULL);
}
