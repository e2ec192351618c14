/*
 * Results have the same bits on all ranks, in every run, and with every algorithm; and numbers that
 * survive only if they are rounded once.
 */
#include "numbers.h"
#include "ranks.h"

enum { COUNT = 70001, ALGORITHMS = 4 };

/* Numbers of very different magnitude, so that the order of a sum shows in its last bits. */
static float uneven_number(int rank, size_t i)
{
    uint32_t bits = (uint32_t)i * 2654435761u + (uint32_t)rank * 40503u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    return ldexpf((float)(int32_t)bits, (int)(bits % 40) - 50);
}

/* The first COUNT of them, computed once by each thread. */
static const float *uneven_numbers(int rank)
{
    static _Thread_local float numbers[COUNT];
    static _Thread_local int of = -1;
    for (size_t i = 0; i < COUNT && of != rank; i++) {
        numbers[i] = uneven_number(rank, i);
    }
    of = rank;
    return numbers;
}

static uint64_t hash_of(const void *data, size_t bytes)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; i += sizeof word) {
        memcpy(&word, (const char *)data + i, bytes - i < sizeof word ? bytes - i : sizeof word);
        hash = (hash ^ word) * UINT64_C(1099511628211);
        hash ^= hash >> 32;
    }
    return hash;
}

static void check_equal_everywhere(shm_rank *it, uint64_t hash)
{
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    tddp_shm_enter(it->shm, &op, &hash, sizeof hash);
    CHECK_OK(tddp_shm_sync(it->shm));
    for (int rank = 0; rank < it->size; rank++) {
        CHECK(memcmp(tddp_shm_payload(it->shm, rank), &hash, sizeof hash) == 0);
    }
}

/* Runs all_reduce with `count` numbers and returns the hash of the result. */
static uint64_t reduce_all(shm_rank *it, tddp_reduce_op reduce, tddp_dtype dtype, void *data,
                           size_t count)
{
    tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
    const float *numbers = uneven_numbers(it->rank);
    for (size_t i = 0; i < count; i++) {
        put_number(dtype, data, i, (double)numbers[i]);
    }
    op.reduce = reduce;
    op.premul = 1.0 / (it->rank + 3);
    op.input = op.output = shm_buffer(data, count, dtype);
    CHECK_OK(tddp_shm_all_reduce(it->shm, &op));
    uint64_t hash = hash_of(data, count * tddp_dtype_size(dtype));
    check_equal_everywhere(it, hash);
    return hash;
}

typedef struct results {
    uint64_t hash[5][3][2]; /* by dtype, operation, number of elements */
} results;

static const tddp_dtype dtypes[] = {TDDP_FLOAT32, TDDP_FLOAT64, TDDP_FLOAT16, TDDP_BFLOAT16,
                                    TDDP_COMPLEX64};
static const tddp_reduce_op ops[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_AVG, TDDP_REDUCE_PREMUL_SUM};

static void all_results(shm_rank *it, void *data, results *out)
{
    for (size_t d = 0; d < 5; d++) {
        for (size_t o = 0; o < 3; o++) {
            out->hash[d][o][0] = reduce_all(it, ops[o], dtypes[d], data, 61);
            out->hash[d][o][1] = reduce_all(it, ops[o], dtypes[d], data, COUNT);
        }
    }
}

/* The first run fills `data`; the others must have the same results. */
static void compare_with_first(shm_rank *it)
{
    results *first = it->data;
    results now;
    void *handle;
    void *registered;
    char *any = malloc(COUNT * 8 + 64);
    CHECK(any);
    CHECK_OK(tddp_shm_allocate(it->shm, COUNT * 8 + 64, &handle, &registered));
    for (int run = 0; run < 2; run++) {
        all_results(it, any + 8 * (size_t)(it->rank + 1), &now);
        if (it->rank == 0 && first->hash[0][0][0] == 0) {
            *first = now;
        }
        check_equal_everywhere(it, 0);
        CHECK(memcmp(first, &now, sizeof now) == 0);
        all_results(it, (char *)registered + 8 * (size_t)it->rank, &now);
        CHECK(memcmp(first, &now, sizeof now) == 0);
    }
    free(any);
    tddp_shm_deallocate(handle);
}

static void check_bits(int size)
{
    static const char *const algorithms[] = {"inline", "staged", "sliced", "direct"};
    results *first = shm_common(sizeof *first);
    run_shm(SHM_PROCESSES, size, compare_with_first, first);
    for (int i = 0; i < ALGORITHMS; i++) {
        char text[64];
        snprintf(text, sizeof text, "all_reduce=%s", algorithms[i]);
        CHECK_INT(setenv("TDDP_SHM_ALGORITHM", text, 1), 0);
        run_shm(SHM_PROCESSES, size, compare_with_first, first);
    }
}

TEST(same_bits_on_2_ranks)
{
    check_bits(2);
}

TEST(same_bits_on_3_ranks)
{
    check_bits(3);
}

TEST(same_bits_on_4_ranks)
{
    check_bits(4);
}

/* reduce and reduce_scatter give the same results as all_reduce. */
static void compare_operations(shm_rank *it)
{
    float *data = malloc(COUNT * sizeof *data);
    float *all = malloc(COUNT * sizeof *all);
    CHECK(data && all);
    (void)reduce_all(it, TDDP_REDUCE_AVG, TDDP_FLOAT32, all, COUNT);
    memcpy(data, uneven_numbers(it->rank), COUNT * sizeof *data);
    tddp_op op = shm_op(it, TDDP_OP_REDUCE);
    op.reduce = TDDP_REDUCE_AVG;
    op.root = it->size - 1;
    op.input = op.output = shm_buffer(data, COUNT, TDDP_FLOAT32);
    CHECK_OK(tddp_shm_reduce(it->shm, &op));
    CHECK((memcmp(data, all, COUNT * sizeof *data) == 0) == (it->rank == op.root || it->size == 1));

    tddp_buffer parts[SHM_MAX_RANKS];
    size_t each = COUNT / (size_t)it->size;
    for (int rank = 0; rank < it->size; rank++) {
        parts[rank] = shm_buffer(data + each * (size_t)rank, each, TDDP_FLOAT32);
    }
    memcpy(data, uneven_numbers(it->rank), COUNT * sizeof *data);
    op = shm_op(it, TDDP_OP_REDUCE_SCATTER);
    op.reduce = TDDP_REDUCE_AVG;
    op.input = shm_buffer(data, each * (size_t)it->size, TDDP_FLOAT32);
    op.input_parts = parts;
    op.output = parts[it->rank];
    CHECK_OK(tddp_shm_reduce_scatter(it->shm, &op));
    CHECK(memcmp(op.output.data, all + each * (size_t)it->rank, each * sizeof *all) == 0);
    free(data);
    free(all);
}

SHM_TEST(reduce_and_reduce_scatter_give_the_same_bits, compare_operations)

/* Means of float16 whose sums would overflow. */
static void large_means(shm_rank *it)
{
    static const size_t counts[] = {3, 5000, 300001};
    uint16_t *data = malloc(300001 * sizeof *data);
    CHECK(data);
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        for (size_t i = 0; i < counts[k]; i++) {
            put_number(TDDP_FLOAT16, data, i, i % 2 ? 60000 : -65504);
        }
        tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
        op.reduce = TDDP_REDUCE_AVG;
        op.input = op.output = shm_buffer(data, counts[k], TDDP_FLOAT16);
        CHECK_OK(tddp_shm_all_reduce(it->shm, &op));
        for (size_t i = 0; i < counts[k]; i++) {
            CHECK_DOUBLE(get_number(TDDP_FLOAT16, data, i, 0), i % 2 ? 60000 : -65504, 0);
        }
    }
    free(data);
}

SHM_TEST(means_of_large_halves, large_means)
