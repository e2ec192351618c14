/*
 * all_reduce, reduce and reduce_scatter over Gloo, beyond what random sequences (test/c/sequences)
 * do: eight ranks, many chunks, equal bits, means of large float16.
 */
#include <tddp/backend.h>

#include "numbers.h"
#include "world.h"

enum { GUARD = 64 };

/* Memory for `count` elements, between guard bytes. */
static char *guarded(size_t count, tddp_dtype dtype)
{
    size_t bytes = count * tddp_dtype_size(dtype) + (size_t)2 * GUARD;
    char *memory = malloc(bytes);
    CHECK(memory != NULL);
    memset(memory, 0x5a, bytes);
    return memory + GUARD;
}

static void release(char *data, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++) {
        CHECK_INT(data[-(ptrdiff_t)i - 1], 0x5a);
        CHECK_INT(data[bytes + i], 0x5a);
    }
    free(data - GUARD);
}

static void all_reduce(tddp_group *group, size_t count, tddp_dtype dtype, tddp_reduce_op op)
{
    char *data = guarded(count, dtype);
    fill_numbers(data, dtype, tddp_group_rank(group), 0, count);
    CHECK_OK(tddp_all_reduce(group, buffer_of(data, count, dtype), op, 0.5, NULL));
    check_combined(data, dtype, op, tddp_group_world_size(group), 0, count, 1);
    release(data, count * tddp_dtype_size(dtype));
}

static void reduce(tddp_group *group, size_t count, tddp_dtype dtype, tddp_reduce_op op)
{
    int rank = tddp_group_rank(group);
    for (int root = 0; root < tddp_group_world_size(group); root++) {
        char *data = guarded(count, dtype);
        fill_numbers(data, dtype, rank, 0, count);
        CHECK_OK(tddp_reduce(group, buffer_of(data, count, dtype), op, 0.5, root, NULL));
        if (rank == root) {
            check_combined(data, dtype, op, tddp_group_world_size(group), 0, count, 1);
        } else {
            check_numbers(data, dtype, rank, 0, count);
        }
        release(data, count * tddp_dtype_size(dtype));
    }
}

static void reduce_scatter(tddp_group *group, size_t count, tddp_dtype dtype, tddp_reduce_op op)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    size_t total = count * (size_t)world_size;
    char *input = guarded(total, dtype);
    char *output = guarded(count, dtype);
    fill_numbers(input, dtype, rank, 0, total);
    CHECK_OK(tddp_reduce_scatter(group, buffer_of(input, total, dtype),
                                 buffer_of(output, count, dtype), op, 0.5, NULL));
    check_combined(output, dtype, op, world_size, count * (size_t)rank, count, 1);
    check_numbers(input, dtype, rank, 0, total);
    /* In place: the output is this rank's part of the input. */
    char *local = input + count * (size_t)rank * tddp_dtype_size(dtype);
    CHECK_OK(tddp_reduce_scatter(group, buffer_of(input, total, dtype),
                                 buffer_of(local, count, dtype), op, 0.5, NULL));
    check_combined(local, dtype, op, world_size, count * (size_t)rank, count, 1);
    release(input, total * tddp_dtype_size(dtype));
    release(output, count * tddp_dtype_size(dtype));
}

static size_t part_size(int rank, size_t count)
{
    return rank % 3 == 1 ? 0 : rank % 3 == 2 ? count / 2 + 1 : count;
}

/* Parts in separate memory; element i of part r is at position r + i. */
static void reduce_scatter_list(tddp_group *group, size_t count, tddp_dtype dtype,
                                tddp_reduce_op op)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    tddp_buffer parts[8];
    size_t local = part_size(rank, count);
    char *output = guarded(local, dtype);
    for (int r = 0; r < world_size; r++) {
        parts[r] = buffer_of(guarded(part_size(r, count), dtype), part_size(r, count), dtype);
        fill_numbers(parts[r].data, dtype, rank, (size_t)r, parts[r].count);
    }
    CHECK_OK(tddp_reduce_scatter_list(group, parts, (size_t)world_size,
                                      buffer_of(output, local, dtype), op, 0.5, NULL));
    check_combined(output, dtype, op, world_size, (size_t)rank, local, 1);
    for (int r = 0; r < world_size; r++) {
        check_numbers(parts[r].data, dtype, rank, (size_t)r, parts[r].count);
        release(parts[r].data, parts[r].count * tddp_dtype_size(dtype));
    }
    release(output, local * tddp_dtype_size(dtype));
}

static void all_kinds(tddp_group *group, size_t count, tddp_dtype dtype, tddp_reduce_op op)
{
    if (tddp_reduce_check(op, dtype)) {
        return;
    }
    all_reduce(group, count, dtype, op);
    reduce(group, count, dtype, op);
    reduce_scatter(group, count, dtype, op);
    reduce_scatter_list(group, count, dtype, op);
}

MULTI_TEST(eight_ranks, 8, 110)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 60000);
    const size_t counts[] = {0, 1, 3, 1001, 40009};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        all_kinds(group, counts[i], TDDP_FLOAT32, TDDP_REDUCE_SUM);
        all_kinds(group, counts[i], TDDP_BFLOAT16, TDDP_REDUCE_AVG);
        all_kinds(group, counts[i], TDDP_INT64, TDDP_REDUCE_MIN);
    }
    all_kinds(group, 300011, TDDP_FLOAT32, TDDP_REDUCE_SUM);
    leave(group, store);
}

/* More chunks than fit into the window, with sizes that divide evenly by nothing. */
static void check_many_chunks(int rank, int world_size, int port)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 60000);
    const size_t counts[] = {3000017, 4 * 131072};
    for (size_t c = 0; c < 2; c++) {
        all_reduce(group, counts[c], TDDP_FLOAT32, TDDP_REDUCE_SUM);
        reduce(group, counts[c], TDDP_FLOAT32, TDDP_REDUCE_AVG);
        reduce_scatter_list(group, counts[c], TDDP_FLOAT32, TDDP_REDUCE_PREMUL_SUM);
        reduce_scatter(group, counts[c] / (size_t)world_size, TDDP_FLOAT32, TDDP_REDUCE_SUM);
    }
    leave(group, store);
}

MULTI_TEST(many_chunks_on_two_ranks, 2, 60)
{
    check_many_chunks(rank, world_size, port);
}

MULTI_TEST(many_chunks_on_four_ranks, 4, 100)
{
    check_many_chunks(rank, world_size, port);
}

/* All ranks have the same bits, also of numbers whose sum depends on the order; and so has the
 * root of a small reduce, which combines in the same order. */
MULTI_TEST(all_ranks_get_the_same_bits, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    const size_t counts[] = {1000, 50001};
    for (size_t c = 0; c < 2; c++) {
        size_t count = counts[c];
        float *data = calloc(count, sizeof *data);
        float *again = calloc(count, sizeof *again);
        float *all = calloc(count * 3, sizeof *all);
        CHECK(data && again && all);
        for (size_t i = 0; i < count; i++) {
            data[i] = (float)sin((double)i * 1.7 + rank * 0.3) * powf(10, (float)(rank * 3));
            again[i] = data[i];
        }
        CHECK_OK(
            tddp_all_reduce(group, buffer_of(data, count, TDDP_FLOAT32), TDDP_REDUCE_AVG, 0, NULL));
        CHECK_OK(tddp_all_gather(group, buffer_of(data, count, TDDP_FLOAT32),
                                 buffer_of(all, count * 3, TDDP_FLOAT32), NULL));
        CHECK_INT(memcmp(all, all + count, count * sizeof *all), 0);
        CHECK_INT(memcmp(all, all + 2 * count, count * sizeof *all), 0);
        CHECK_OK(
            tddp_reduce(group, buffer_of(again, count, TDDP_FLOAT32), TDDP_REDUCE_AVG, 0, 1, NULL));
        if (rank == 1 && c == 0) {
            CHECK_INT(memcmp(again, all, count * sizeof *all), 0);
        }
        free(data);
        free(again);
        free(all);
    }
    leave(group, store);
}

/* The mean of numbers near the largest float16, whose sum would overflow. */
MULTI_TEST(means_of_halves_do_not_overflow, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    const size_t counts[] = {5, 40000};
    for (size_t c = 0; c < 2; c++) {
        size_t count = counts[c];
        uint16_t *data = calloc(2 * count, sizeof *data);
        uint16_t *output = calloc(count, sizeof *output);
        CHECK(data && output);
        for (size_t i = 0; i < 2 * count; i++) {
            data[i] = 0x7bff; /* 65504 */
        }
        CHECK_OK(tddp_reduce_scatter(group, buffer_of(data, 2 * count, TDDP_FLOAT16),
                                     buffer_of(output, count, TDDP_FLOAT16), TDDP_REDUCE_AVG, 0,
                                     NULL));
        CHECK_OK(tddp_reduce(group, buffer_of(data, 2 * count, TDDP_FLOAT16), TDDP_REDUCE_AVG, 0, 1,
                             NULL));
        for (size_t i = 0; i < count; i++) {
            CHECK_INT(output[i], 0x7bff);
            CHECK_INT(data[2 * i], 0x7bff);
        }
        free(data);
        free(output);
    }
    leave(group, store);
}
