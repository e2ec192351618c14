/* Every collective with every dtype on one to four ranks, even and uneven sizes, every root,
 * against formulas. Rank r's element i of what it sends to rank p is value(r, p, i). */
#include <stdbool.h>

#include "args.h"
#include "ranks.h"
#include "values.h"

enum { SIZES = 3 };
static const size_t sizes[SIZES] = {0, 1, 7};

typedef struct setting {
    tddp_group *group;
    int rank;
    int world;
    tddp_dtype dtype;
    size_t size;
} setting;

/* 1 to 3: sums and products of four are exact in every dtype. */
static double value(int from, int to, size_t i)
{
    return (double)((size_t)(3 * from + 5 * to) + i) -
           3.0 * (double)(((size_t)(3 * from + 5 * to) + i) / 3) + 1;
}

/* Sizes of uneven parts: some empty, different for each pair. */
static size_t part_size(const setting *self, int from, int to)
{
    return self->size == 0 ? 0 : (self->size + (size_t)(2 * from + 3 * to)) % 5;
}

static void fill(const setting *self, void *data, size_t count, int from, int to)
{
    for (size_t i = 0; i < count; i++) {
        put(self->dtype, data, i, value(from, to, i));
    }
}

static void expect(const setting *self, const void *data, size_t count, int from, int to)
{
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE(get(self->dtype, data, i), as_stored(self->dtype, value(from, to, i)), 0);
    }
}

static double reduced(const setting *self, tddp_reduce_op op, double premul, int to, size_t i)
{
    double result = 0;
    for (int rank = 0; rank < self->world; rank++) {
        double x = as_stored(self->dtype, value(rank, to, i));
        if (rank == 0) {
            result = op == TDDP_REDUCE_PREMUL_SUM ? x * premul : x;
            continue;
        }
        switch (op) {
        case TDDP_REDUCE_SUM:
        case TDDP_REDUCE_AVG:
            result += x;
            break;
        case TDDP_REDUCE_PREMUL_SUM:
            result += x * premul;
            break;
        case TDDP_REDUCE_PRODUCT:
            result *= x;
            break;
        case TDDP_REDUCE_MIN:
            result = x < result ? x : result;
            break;
        case TDDP_REDUCE_MAX:
            result = x > result ? x : result;
            break;
        case TDDP_REDUCE_BAND:
            result = (double)((int)result & (int)x);
            break;
        case TDDP_REDUCE_BOR:
            result = (double)((int)result | (int)x);
            break;
        case TDDP_REDUCE_BXOR:
            result = (double)((int)result ^ (int)x);
            break;
        }
    }
    return op == TDDP_REDUCE_AVG ? result / self->world : result;
}

static void expect_reduced(const setting *self, const void *data, size_t count, tddp_reduce_op op,
                           int to)
{
    bool coarse = self->dtype == TDDP_FLOAT16 || self->dtype == TDDP_BFLOAT16;
    double tolerance = op == TDDP_REDUCE_AVG ? (coarse ? 0.02 : 1e-6) : 0;
    for (size_t i = 0; i < count; i++) {
        double wanted = as_stored(self->dtype, reduced(self, op, 2, to, i));
        CHECK_DOUBLE(get(self->dtype, data, i), wanted, tolerance);
    }
}

static tddp_buffer buffer(const setting *self, void *data, size_t count)
{
    return buffer_of(data, count, self->dtype);
}

/* Cuts memory into a buffer for each rank; with `gap` elements between them. */
static void cut(const setting *self, void *memory, tddp_buffer *parts, const size_t *counts,
                size_t gap)
{
    size_t at = 0;
    for (int i = 0; i < self->world; i++) {
        parts[i] = buffer(self, (char *)memory + at * tddp_dtype_size(self->dtype), counts[i]);
        at += counts[i] + gap;
    }
}

static void reductions(const setting *self, tddp_reduce_op op)
{
    size_t n = self->size;
    char *data = room_for(n);
    fill(self, data, n, self->rank, 0);
    CHECK_OK(tddp_all_reduce(self->group, buffer(self, data, n), op, 2, NULL));
    expect_reduced(self, data, n, op, 0);
    for (int root = 0; root < self->world; root++) {
        fill(self, data, n, self->rank, root);
        CHECK_OK(tddp_reduce(self->group, buffer(self, data, n), op, 2, root, NULL));
        if (root == self->rank) {
            expect_reduced(self, data, n, op, root);
        } else {
            expect(self, data, n, self->rank, root);
        }
    }
    free(data);
}

static void reduce_scatters(const setting *self, tddp_reduce_op op)
{
    size_t world = (size_t)self->world;
    size_t n = self->size;
    size_t even[MAX_RANKS];
    size_t uneven[MAX_RANKS];
    for (int i = 0; i < self->world; i++) {
        even[i] = n;
        uneven[i] = part_size(self, i, i);
    }
    tddp_buffer parts[MAX_RANKS];
    char *input = room_for(world * (n + 8));
    char *output = room_for(n + 8);
    cut(self, input, parts, even, 0);
    for (int i = 0; i < self->world; i++) {
        fill(self, parts[i].data, n, self->rank, i);
    }
    CHECK_OK(tddp_reduce_scatter(self->group, buffer(self, input, n * world),
                                 buffer(self, output, n), op, 2, NULL));
    expect_reduced(self, output, n, op, self->rank);
    for (size_t gap = 0; gap < 2; gap++) {
        cut(self, input, parts, uneven, gap);
        for (int i = 0; i < self->world; i++) {
            fill(self, parts[i].data, uneven[i], self->rank, i);
        }
        /* In place in the own part, and into memory of its own. */
        tddp_buffer own = buffer(self, output, uneven[self->rank]);
        own = gap ? own : parts[self->rank];
        CHECK_OK(tddp_reduce_scatter_list(self->group, parts, world, own, op, 2, NULL));
        expect_reduced(self, own.data, own.count, op, self->rank);
    }
    free(input);
    free(output);
}

static void broadcasts(const setting *self)
{
    char *data = room_for(self->size);
    for (int root = 0; root < self->world; root++) {
        fill(self, data, self->size, self->rank, root);
        CHECK_OK(tddp_broadcast(self->group, buffer(self, data, self->size), root, NULL));
        expect(self, data, self->size, root, root);
    }
    free(data);
}

static void gathers(const setting *self)
{
    size_t world = (size_t)self->world;
    size_t n = self->size;
    size_t even[MAX_RANKS];
    size_t uneven[MAX_RANKS];
    for (int i = 0; i < self->world; i++) {
        even[i] = n;
        uneven[i] = part_size(self, i, i);
    }
    tddp_buffer parts[MAX_RANKS];
    char *all = room_for(world * (n + 8));
    char *own = room_for(n + 8);
    fill(self, own, n, self->rank, self->rank);
    CHECK_OK(
        tddp_all_gather(self->group, buffer(self, own, n), buffer(self, all, n * world), NULL));
    cut(self, all, parts, even, 0);
    for (int i = 0; i < self->world; i++) {
        expect(self, parts[i].data, n, i, i);
    }
    for (size_t gap = 0; gap < 2; gap++) {
        memset(all, 0, world * (n + 8));
        cut(self, all, parts, uneven, gap);
        tddp_buffer input = gap ? buffer(self, own, uneven[self->rank]) : parts[self->rank];
        fill(self, input.data, input.count, self->rank, self->rank);
        CHECK_OK(tddp_all_gather_list(self->group, input, parts, world, NULL));
        for (int i = 0; i < self->world; i++) {
            expect(self, parts[i].data, uneven[i], i, i);
        }
        for (int root = 0; root < self->world; root++) {
            bool here = root == self->rank;
            memset(all, 0, world * (n + 8));
            input = gap || !here ? buffer(self, own, uneven[self->rank]) : parts[self->rank];
            fill(self, input.data, input.count, self->rank, self->rank);
            CHECK_OK(
                tddp_gather(self->group, input, here ? parts : NULL, here ? world : 0, root, NULL));
            for (int i = 0; here && i < self->world; i++) {
                expect(self, parts[i].data, uneven[i], i, i);
            }
        }
    }
    free(all);
    free(own);
}

static void scatters(const setting *self)
{
    size_t world = (size_t)self->world;
    size_t n = self->size;
    size_t uneven[MAX_RANKS];
    for (int i = 0; i < self->world; i++) {
        uneven[i] = part_size(self, i, i);
    }
    tddp_buffer parts[MAX_RANKS];
    char *all = room_for(world * (n + 8));
    char *own = room_for(n + 8);
    for (int root = 0; root < self->world; root++) {
        bool here = root == self->rank;
        for (size_t gap = 0; gap < 2; gap++) {
            memset(own, 0, n + 8);
            cut(self, all, parts, uneven, gap);
            for (int i = 0; i < self->world; i++) {
                fill(self, parts[i].data, uneven[i], self->rank, i);
            }
            tddp_buffer output = buffer(self, own, uneven[self->rank]);
            output = gap || !here ? output : parts[self->rank];
            CHECK_OK(tddp_scatter(self->group, output, here ? parts : NULL, here ? world : 0, root,
                                  NULL));
            expect(self, output.data, output.count, root, self->rank);
        }
    }
    free(all);
    free(own);
}

static void exchanges(const setting *self)
{
    size_t world = (size_t)self->world;
    size_t to[MAX_RANKS];
    size_t from[MAX_RANKS];
    for (int i = 0; i < self->world; i++) {
        to[i] = part_size(self, self->rank, i);
        from[i] = part_size(self, i, self->rank);
    }
    tddp_buffer inputs[MAX_RANKS];
    tddp_buffer outputs[MAX_RANKS];
    char *sent = room_for(world * 8);
    char *received = room_for(world * 8);
    for (size_t gap = 0; gap < 2; gap++) {
        memset(received, 0, world * 8);
        cut(self, sent, inputs, to, gap);
        cut(self, received, outputs, from, 1 - gap);
        if (gap) {
            inputs[self->rank] = outputs[self->rank];
        }
        for (int i = 0; i < self->world; i++) {
            fill(self, inputs[i].data, to[i], self->rank, i);
        }
        CHECK_OK(tddp_all_to_all(self->group, inputs, outputs, world, NULL));
        for (int i = 0; i < self->world; i++) {
            expect(self, outputs[i].data, from[i], i, self->rank);
        }
    }
    free(sent);
    free(received);
}

static void everything(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (int i = 0; i < SIZES; i++) {
            setting self = {group, rank, world, (tddp_dtype)dtype, sizes[i]};
            for (int op = 0; op <= TDDP_REDUCE_PREMUL_SUM; op++) {
                if (tddp_reduce_check((tddp_reduce_op)op, self.dtype) == TDDP_OK) {
                    reductions(&self, (tddp_reduce_op)op);
                    reduce_scatters(&self, (tddp_reduce_op)op);
                }
            }
            broadcasts(&self);
            gathers(&self);
            scatters(&self);
            exchanges(&self);
            CHECK_OK(tddp_barrier(group, NULL));
        }
    }
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

MULTI_TEST(everything_on_one_rank, 1, 60)
{
    run_ranks(1, everything, NULL);
}

MULTI_TEST(everything_on_two_ranks, 1, 60)
{
    run_ranks(2, everything, NULL);
}

MULTI_TEST(everything_on_three_ranks, 1, 60)
{
    run_ranks(3, everything, NULL);
}

MULTI_TEST(everything_on_four_ranks, 1, 100)
{
    run_ranks(4, everything, NULL);
}

/* --- mismatches between ranks ----------------------------------------------------------------- */

typedef tddp_status (*quarrel)(tddp_group *group, int rank);

typedef struct quarrels {
    quarrel body;
    const char *text;
    atomic_int raised;
} quarrels;

static float memory[3][16];

static tddp_buffer floats(int rank, size_t count)
{
    return buffer_of(memory[rank], count, TDDP_FLOAT32);
}

static tddp_status other_roots(tddp_group *group, int rank)
{
    return tddp_broadcast(group, floats(rank, 3), rank == 2 ? 1 : 0, NULL);
}

static tddp_status other_operations(tddp_group *group, int rank)
{
    return rank == 1 ? tddp_barrier(group, NULL)
                     : tddp_reduce(group, floats(rank, 3), TDDP_REDUCE_SUM, 0, 0, NULL);
}

static tddp_status other_dtypes(tddp_group *group, int rank)
{
    return tddp_all_reduce(group, buffer_of(memory[rank], 3, rank ? TDDP_FLOAT32 : TDDP_INT32),
                           TDDP_REDUCE_SUM, 0, NULL);
}

static tddp_status other_reductions(tddp_group *group, int rank)
{
    return tddp_all_reduce(group, floats(rank, 3), rank == 1 ? TDDP_REDUCE_MAX : TDDP_REDUCE_SUM, 0,
                           NULL);
}

static tddp_status other_parts(tddp_group *group, int rank)
{
    tddp_buffer parts[3];
    for (int i = 0; i < 3; i++) {
        size_t count = rank == 0 && i == 1 ? 4 : 2;
        parts[i] = buffer_of(&memory[rank][4 * i + 2], count, TDDP_FLOAT32);
    }
    return tddp_all_gather_list(group, floats(rank, 2), parts, 3, NULL);
}

static tddp_status other_pieces(tddp_group *group, int rank)
{
    tddp_buffer parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = buffer_of(&memory[rank][4 + 3 * i], rank == 2 && i == 1 ? 3 : 2, TDDP_FLOAT32);
    }
    return tddp_scatter(group, floats(rank, 2), rank == 2 ? parts : NULL, rank == 2 ? 3 : 0, 2,
                        NULL);
}

static tddp_status other_words(tddp_group *group, int rank)
{
    return described_sum(group, floats(rank, 12), rank == 1 ? "weights (3, 4)" : "weights (4, 3)");
}

/* A rank that has no part in what differs may be done; then it learns of it in the next one. */
static void quarrel_once(int rank, int world, tddp_store *store, void *data)
{
    quarrels *self = data;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    tddp_status status = self->body(group, rank);
    if (status) {
        CHECK_STATUS(status, TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), self->text);
        atomic_fetch_add(&self->raised, 1);
    }
    CHECK(tddp_barrier(group, NULL) != TDDP_OK);
    tddp_group_release(group);
}

TEST(a_mismatch_is_raised_on_all_ranks)
{
    quarrels all[] = {
        {other_roots, "root 1", 0},
        {other_operations, "runs barrier", 0},
        {other_dtypes, "int32", 0},
        {other_reductions, "max", 0},
        {other_parts, "rank 1 sends 2 elements of float32, rank 0 expects 4", 0},
        {other_pieces, "rank 2 sends 3 elements of float32, rank 1 expects 2", 0},
        {other_words, "shapes or names differ between rank ", 0},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        run_ranks(3, quarrel_once, &all[i]);
        CHECK(atomic_load(&all[i].raised) >= 2); /* both sides */
    }
}

static void describe(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    (void)world;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    CHECK_OK(described_sum(group, floats(rank, 3), "the same"));
    CHECK_OK(described_sum(group, floats(rank, 3), ""));
    /* A single rank's description is not compared. */
    CHECK_OK(described_sum(group, floats(rank, 3), rank ? NULL : "mine"));
    CHECK_OK(tddp_barrier(group, NULL));
    char text[600];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    text[TDDP_DESCRIPTION_BYTES - 1 + rank] = 'y';
    CHECK_OK(described_sum(group, floats(rank, 3), text));
    text[TDDP_DESCRIPTION_BYTES - 2] = (char)('a' + rank);
    CHECK_STATUS(described_sum(group, floats(rank, 3), text), TDDP_MISMATCH);
    tddp_group_release(group);
}

TEST(descriptions_are_compared)
{
    run_ranks(3, describe, NULL);
}
