/*
 * all_reduce, reduce and reduce_scatter against formulas: every dtype and operation, sizes around
 * every threshold, odd addresses, 1 to 20 ranks, each interrupted at moments of its own.
 */
#include <stdlib.h>
#include <string.h>

#include "mailbox.h"
#include "shm/numbers.h"

/* Each way in which factors are applied. */
static const tddp_reduce_op REDUCTIONS[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_AVG,
                                            TDDP_REDUCE_PREMUL_SUM, TDDP_REDUCE_MAX};
enum { REDUCTION_COUNT = sizeof REDUCTIONS / sizeof *REDUCTIONS };

/* Memory at the least aligned address that the dtype allows, different on each rank. */
static char *allocate(const coll_rank *it, size_t bytes, tddp_dtype dtype, char **out)
{
    *out = malloc(bytes + 2048);
    CHECK(*out);
    return *out + (size_t)(3 * it->rank + 1) * tddp_dtype_size(dtype);
}

static tddp_op make_op(coll_rank *it, tddp_op_kind kind, tddp_reduce_op reduce)
{
    tddp_op op = coll_op(it, kind);
    op.reduce = reduce;
    op.premul = given_factor(it->rank);
    return op;
}

static void check_result(const coll_rank *it, const tddp_op *op, const void *data, size_t first)
{
    const bool half = op->output.dtype == TDDP_FLOAT16 || op->output.dtype == TDDP_BFLOAT16;
    check_rounded_numbers(tddp_op_name(op->kind), op->reduce, op->output.dtype, data, it->size,
                          first, op->output.count, half ? it->size : 1);
}

static void check_whole(coll_rank *it, tddp_op_kind kind, tddp_reduce_op reduce, tddp_dtype dtype,
                        size_t count)
{
    const size_t bytes = count * tddp_dtype_size(dtype);
    char *memory;
    char *data = allocate(it, bytes, dtype, &memory);
    char *before = malloc(bytes + 1);
    CHECK(before);
    fill_numbers(reduce, dtype, data, it->rank, 0, count);
    data[bytes] = 0x5a;
    memcpy(before, data, bytes);
    tddp_op op = make_op(it, kind, reduce);
    op.input = op.output = coll_buffer(data, count, dtype);
    op.root = kind == TDDP_OP_REDUCE ? (int)(op.sequence % (uint64_t)it->size) : 0;
    coll_run(it, &op);
    if (kind == TDDP_OP_ALL_REDUCE || it->rank == op.root) {
        check_result(it, &op, data, 0);
    } else {
        CHECK(memcmp(before, data, bytes) == 0);
    }
    CHECK_INT(data[bytes], 0x5a);
    free(before);
    free(memory);
}

/* Elements of a rank's part; uneven: one rank has none, another most. */
static size_t part_count(bool uneven, int size, int rank, size_t count)
{
    const size_t even = count / (size_t)size;
    return !uneven ? even : rank == 0 ? 0 : rank == 1 ? even + 3 : even / 2;
}

static void check_reduce_scatter(coll_rank *it, bool uneven, tddp_reduce_op reduce,
                                 tddp_dtype dtype, size_t count)
{
    tddp_buffer parts[MOST_RANKS];
    size_t first[MOST_RANKS + 1] = {0};
    const size_t element = tddp_dtype_size(dtype);
    for (int rank = 0; rank < it->size; rank++) {
        first[rank + 1] = first[rank] + part_count(uneven, it->size, rank, count);
    }
    const size_t all = first[it->size];
    const size_t local = first[it->rank + 1] - first[it->rank];
    char *memory[2];
    char *input = allocate(it, all * element, dtype, &memory[0]);
    char *output = allocate(it, local * element, dtype, &memory[1]);
    fill_numbers(reduce, dtype, input, it->rank, 0, all);
    for (int rank = 0; rank < it->size; rank++) {
        parts[rank] =
            coll_buffer(input + first[rank] * element, first[rank + 1] - first[rank], dtype);
    }
    tddp_op op = make_op(it, TDDP_OP_REDUCE_SCATTER, reduce);
    op.input = coll_buffer(input, all, dtype);
    op.input_parts = parts;
    op.output = coll_buffer(output, local, dtype);
    coll_run(it, &op);
    check_result(it, &op, output, first[it->rank]);
    free(memory[0]);
    free(memory[1]);
}

/* One of four operations. */
static void check_kind(coll_rank *it, unsigned kind, tddp_reduce_op reduce, tddp_dtype dtype,
                       size_t bytes)
{
    const size_t count = bytes / tddp_dtype_size(dtype);
    if (kind % 4 < 2) {
        check_whole(it, kind % 4 == 0 ? TDDP_OP_ALL_REDUCE : TDDP_OP_REDUCE, reduce, dtype, count);
    } else {
        check_reduce_scatter(it, kind % 4 == 3, reduce, dtype, count);
    }
}

static void check_worlds(int least, int most, void (*body)(coll_rank *), const void *data)
{
    for (int size = least; size <= most; size++) {
        run_ranks(size, (unsigned)size, body, (void *)(uintptr_t)data);
    }
}

/* Each world has another operation for a dtype and a reduction. */
static void each_dtype(coll_rank *it)
{
    unsigned kind = (unsigned)it->size;
    for (tddp_dtype dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (tddp_reduce_op reduce = 0; reduce <= TDDP_REDUCE_PREMUL_SUM; reduce++) {
            if (tddp_reduce_check(reduce, dtype) == TDDP_OK) {
                check_kind(it, kind, reduce, dtype, kind / 4 % 2 == 0 ? 16 : 65552);
                kind++;
            }
        }
    }
}

MULTI_TEST(all_dtypes, 1, 120)
{
    check_worlds(1, 5, each_dtype, NULL);
}

typedef struct sizes {
    const size_t *bytes; /* ends with SIZE_MAX */
    unsigned kinds;
} sizes;

static void each_size(coll_rank *it)
{
    const sizes *tried = it->data;
    unsigned number = 0;
    for (const size_t *bytes = tried->bytes; *bytes != SIZE_MAX; bytes++) {
        for (unsigned kind = 0; kind < tried->kinds; kind++, number++) {
            const tddp_reduce_op reduce = REDUCTIONS[number % REDUCTION_COUNT];
            check_kind(it, kind, reduce, TDDP_FLOAT32, *bytes);
            check_kind(it, kind, reduce, TDDP_FLOAT16, *bytes);
        }
        number++;
    }
}

/* Around the limits of what goes with headers: 64 KiB by the number of other ranks, or for each. */
MULTI_TEST(small, 1, 120)
{
    static const size_t bytes[] = {0,     1040,  16384, 16400, 21840,
                                   21856, 32768, 32784, 65536, SIZE_MAX};
    const sizes tried = {bytes, 4};
    check_worlds(1, 5, each_size, &tried);
}

/* Chunks of 512 KiB, of which four are on their way. */
MULTI_TEST(large, 1, 120)
{
    static const size_t bytes[] = {200016, 1048576, 2400016, SIZE_MAX};
    const sizes tried = {bytes, 4};
    check_worlds(2, 4, each_size, &tried);
}

/* Recursive doubling, also with numbers of ranks that are no power of two. */
MULTI_TEST(many_ranks, 1, 120)
{
    static const size_t bytes[] = {16, 4016, 65536, SIZE_MAX};
    static const int worlds[] = {9, 12, 16, 20};
    const sizes tried = {bytes, 2};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        check_worlds(worlds[i], worlds[i], each_size, &tried);
    }
}

/* --- bits ------------------------------------------------------------------------------------ */

enum { MOST_FLOATS = 100000 };
static float results[MOST_RANKS][MOST_FLOATS];

/* Numbers whose sum depends on the order in which they are added. */
static void sum_of_random(coll_rank *it)
{
    unsigned seed = it->seed;
    for (size_t i = 0; i < MOST_FLOATS; i++) {
        results[it->rank][i] =
            ((float)coll_random(&seed, 20000) - 10000) * (i % 3 ? 1.0f : 1.0f / 1024);
    }
    tddp_op op = coll_op(it, TDDP_OP_ALL_REDUCE);
    op.input = op.output = coll_buffer(results[it->rank], *(size_t *)it->data, TDDP_FLOAT32);
    coll_run(it, &op);
}

TEST(all_ranks_have_the_same_bits)
{
    for (size_t count = 1000; count <= MOST_FLOATS; count *= 10) {
        for (int size = 2; size <= 11; size++) {
            run_ranks(size, (unsigned)size, sum_of_random, &count);
            for (int other = 1; other < size; other++) {
                CHECK(memcmp(results[0], results[other], count * sizeof(float)) == 0);
            }
        }
    }
}

/* 0.0 and -0.0 are equal, and which one is the result depends on the order. */
static void extreme_of_zeros(coll_rank *it)
{
    float *data = results[it->rank];
    for (int i = 0; i < 2; i++) {
        data[0] = it->rank ? 0.0f : -0.0f;
        data[1] = it->rank ? -0.0f : 0.0f;
        tddp_op op = coll_op(it, TDDP_OP_ALL_REDUCE);
        op.reduce = i ? TDDP_REDUCE_MIN : TDDP_REDUCE_MAX;
        op.input = op.output = coll_buffer(data, 2, TDDP_FLOAT32);
        coll_run(it, &op);
        memcpy(data + 2 + 2 * i, data, 2 * sizeof *data);
    }
}

TEST(zeros_have_the_same_sign)
{
    run_ranks(2, 1, extreme_of_zeros, NULL);
    CHECK(memcmp(results[0], results[1], 6 * sizeof(float)) == 0);
}
