/* The collectives over Gloo: every dtype and operation, sizes from nothing to several pieces, one
 * to five ranks. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "world.h"

/* Small numbers that every dtype holds, different on each rank and at each place. */
static double number(int rank, size_t i)
{
    return (double)((i * 3 + (size_t)rank * 5) % 4 + 1);
}

static void put(void *data, tddp_dtype dtype, size_t i, double value)
{
    uint16_t half;
    float single = (float)value;
    uint32_t bits;
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_INT8:
        ((int8_t *)data)[i] = (int8_t)value;
        break;
    case TDDP_BOOL:
        ((uint8_t *)data)[i] = value > 2;
        break;
    case TDDP_INT16:
        ((int16_t *)data)[i] = (int16_t)value;
        break;
    case TDDP_INT32:
        ((int32_t *)data)[i] = (int32_t)value;
        break;
    case TDDP_INT64:
        ((int64_t *)data)[i] = (int64_t)value;
        break;
    case TDDP_FLOAT16: {
        /* Exact for these: normal numbers with few digits. */
        int exponent;
        double fraction = frexp(value, &exponent);
        half = (uint16_t)(((exponent + 14) << 10) | (int)((fraction * 2 - 1) * 1024));
        ((uint16_t *)data)[i] = half;
        break;
    }
    case TDDP_BFLOAT16:
        memcpy(&bits, &single, sizeof bits);
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        break;
    case TDDP_FLOAT32:
        ((float *)data)[i] = single;
        break;
    case TDDP_FLOAT64:
        ((double *)data)[i] = value;
        break;
    case TDDP_COMPLEX64:
        ((float *)data)[2 * i] = single;
        ((float *)data)[2 * i + 1] = -single;
        break;
    case TDDP_COMPLEX128:
        ((double *)data)[2 * i] = value;
        ((double *)data)[2 * i + 1] = -value;
        break;
    }
}

static double get(const void *data, tddp_dtype dtype, size_t i)
{
    uint32_t bits;
    float single;
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_BOOL:
        return ((const uint8_t *)data)[i];
    case TDDP_INT8:
        return ((const int8_t *)data)[i];
    case TDDP_INT16:
        return ((const int16_t *)data)[i];
    case TDDP_INT32:
        return ((const int32_t *)data)[i];
    case TDDP_INT64:
        return (double)((const int64_t *)data)[i];
    case TDDP_FLOAT16:
        bits = ((const uint16_t *)data)[i];
        return bits ? ldexp((double)(1024 + (bits & 1023)), (int)(bits >> 10) - 25) : 0;
    case TDDP_BFLOAT16:
        bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        memcpy(&single, &bits, sizeof single);
        return single;
    case TDDP_FLOAT32:
        return ((const float *)data)[i];
    case TDDP_FLOAT64:
        return ((const double *)data)[i];
    case TDDP_COMPLEX64:
        return ((const float *)data)[2 * i];
    case TDDP_COMPLEX128:
        return ((const double *)data)[2 * i];
    }
    return NAN;
}

/* The real part of what all ranks' numbers at place i combine to. */
static double expected(tddp_reduce_op op, tddp_dtype dtype, int world_size, size_t i, double premul)
{
    bool complex_number = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
    double real = 0;
    double imaginary = 0;
    for (int rank = 0; rank < world_size; rank++) {
        double x = number(rank, i);
        int whole = (int)x;
        if (dtype == TDDP_BOOL) {
            x = whole = x > 2;
        }
        if (rank == 0) {
            real = x;
            imaginary = complex_number ? -x : 0;
            continue;
        }
        double before = real;
        switch (op) {
        case TDDP_REDUCE_PRODUCT:
            real = complex_number ? before * x + imaginary * x : before * x;
            imaginary = complex_number ? imaginary * x - before * x : 0;
            break;
        case TDDP_REDUCE_MIN:
            real = fmin(real, x);
            break;
        case TDDP_REDUCE_MAX:
            real = fmax(real, x);
            break;
        case TDDP_REDUCE_BAND:
            real = (int)real & whole;
            break;
        case TDDP_REDUCE_BOR:
            real = (int)real | whole;
            break;
        case TDDP_REDUCE_BXOR:
            real = (int)real ^ whole;
            break;
        default:
            real = dtype == TDDP_BOOL ? fmax(real, x) : real + x;
            break;
        }
    }
    return op == TDDP_REDUCE_AVG          ? real / world_size
           : op == TDDP_REDUCE_PREMUL_SUM ? real * premul
                                          : real;
}

/* float16 and bfloat16 round at each step; the others are exact but for the division. */
static double tolerance(tddp_dtype dtype, tddp_reduce_op op, double value)
{
    double unit = dtype == TDDP_FLOAT16 ? 1.0 / 1024 : dtype == TDDP_BFLOAT16 ? 1.0 / 64 : 1e-6;
    bool exact = op != TDDP_REDUCE_AVG && op != TDDP_REDUCE_PREMUL_SUM && op != TDDP_REDUCE_PRODUCT;
    return exact ? 0 : fabs(value) * unit;
}

static void all_reduce_all(tddp_group *group, size_t count)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    char *data = calloc(count + 1, 16);
    CHECK(data != NULL);
    for (int d = 0; d <= TDDP_BOOL; d++) {
        for (int o = 0; o <= TDDP_REDUCE_PREMUL_SUM; o++) {
            tddp_dtype dtype = (tddp_dtype)d;
            tddp_reduce_op op = (tddp_reduce_op)o;
            if (tddp_reduce_check(op, dtype)) {
                continue;
            }
            for (size_t i = 0; i < count; i++) {
                put(data, dtype, i, number(rank, i));
            }
            CHECK_OK(tddp_all_reduce(group, buffer_of(data, count, dtype), op, 0.5, NULL));
            for (size_t i = 0; i < count; i++) {
                double value = expected(op, dtype, world_size, i, 0.5);
                CHECK_DOUBLE(get(data, dtype, i), value, tolerance(dtype, op, value));
            }
        }
    }
    free(data);
}

static void reduce_scatter_all(tddp_group *group, size_t count)
{
    int rank = tddp_group_rank(group);
    int world_size = tddp_group_world_size(group);
    size_t total = count * (size_t)world_size;
    char *input = calloc(total + 1, 16);
    char *output = calloc(count + 1, 16);
    CHECK(input && output);
    const tddp_dtype dtypes[] = {TDDP_UINT8, TDDP_FLOAT16, TDDP_FLOAT32, TDDP_COMPLEX128};
    for (int d = 0; d < 4; d++) {
        for (int o = 0; o <= TDDP_REDUCE_PREMUL_SUM; o++) {
            tddp_dtype dtype = dtypes[d];
            tddp_reduce_op op = (tddp_reduce_op)o;
            if (tddp_reduce_check(op, dtype)) {
                continue;
            }
            for (size_t i = 0; i < total; i++) {
                put(input, dtype, i, number(rank, i));
            }
            CHECK_OK(tddp_reduce_scatter(group, buffer_of(input, total, dtype),
                                         buffer_of(output, count, dtype), op, 0.5, NULL));
            for (size_t i = 0; i < count; i++) {
                double value = expected(op, dtype, world_size, i + count * (size_t)rank, 0.5);
                CHECK_DOUBLE(get(output, dtype, i), value, tolerance(dtype, op, value));
            }
            for (size_t i = 0; i < total; i++) {
                double before = number(rank, i);
                CHECK_DOUBLE(get(input, dtype, i), before, 0);
            }
        }
    }
    free(input);
    free(output);
}

static void copies(tddp_group *group, size_t count)
{
    int rank = tddp_group_rank(group);
    size_t world = (size_t)tddp_group_world_size(group);
    int64_t *mine = calloc(count + 1, sizeof *mine);
    int64_t *all = calloc(count * world + 1, sizeof *all);
    CHECK(mine && all);
    for (int root = 0; root < (int)world; root++) {
        for (size_t i = 0; i < count; i++) {
            mine[i] = (int64_t)i * 10 + rank;
        }
        CHECK_OK(tddp_broadcast(group, buffer_of(mine, count, TDDP_INT64), root, NULL));
        for (size_t i = 0; i < count; i++) {
            CHECK_INT(mine[i], (int64_t)i * 10 + root);
        }
    }
    for (size_t i = 0; i < count; i++) {
        mine[i] = (int64_t)i * 100 + rank;
    }
    CHECK_OK(tddp_all_gather(group, buffer_of(mine, count, TDDP_INT64),
                             buffer_of(all, count * world, TDDP_INT64), NULL));
    for (size_t i = 0; i < count * world; i++) {
        CHECK_INT(all[i], (int64_t)(i % count) * 100 + (int64_t)(i / count));
    }
    /* In place: the input is this rank's part of the output. */
    CHECK_OK(tddp_all_gather(group, buffer_of(all + count * (size_t)rank, count, TDDP_INT64),
                             buffer_of(all, count * world, TDDP_INT64), NULL));
    for (size_t i = 0; i < count * world; i++) {
        CHECK_INT(all[i], (int64_t)(i % count) * 100 + (int64_t)(i / count));
    }
    free(mine);
    free(all);
}

static void everything(int rank, int world_size, int port)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    const size_t small[] = {0, 1, 2, 3, 7, 64, 1001};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        all_reduce_all(group, small[i]);
        reduce_scatter_all(group, small[i]);
        copies(group, small[i]);
    }
    /* Either side of what travels with the header. */
    const size_t medium[] = {16383, 16384, 16385, 70001};
    for (size_t i = 0; i < sizeof medium / sizeof *medium; i++) {
        all_reduce_all(group, medium[i]);
        reduce_scatter_all(group, medium[i]);
        copies(group, medium[i]);
    }
    leave(group, store);
}

MULTI_TEST(one_rank, 1, 20)
{
    everything(rank, world_size, port);
}

MULTI_TEST(two_ranks, 2, 40)
{
    everything(rank, world_size, port);
}

MULTI_TEST(three_ranks, 3, 60)
{
    everything(rank, world_size, port);
}

MULTI_TEST(five_ranks, 5, 90)
{
    everything(rank, world_size, port);
}

/* More pieces than fit into the window, with ends that divide evenly by nothing. */
MULTI_TEST(many_pieces_on_four_ranks, 4, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    const size_t counts[] = {3000017, 4 * 131072, 1};
    for (size_t c = 0; c < 3; c++) {
        size_t count = counts[c];
        float *data = calloc(count * 4, sizeof *data);
        float *part = calloc(count, sizeof *part);
        CHECK(data && part);
        for (size_t i = 0; i < count; i++) {
            data[i] = (float)number(rank, i);
        }
        CHECK_OK(
            tddp_all_reduce(group, buffer_of(data, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
        for (size_t i = 0; i < count; i++) {
            CHECK_DOUBLE(data[i], expected(TDDP_REDUCE_SUM, TDDP_FLOAT32, 4, i, 0), 0);
        }
        for (size_t i = 0; i < count * 4; i++) {
            data[i] = (float)number(rank, i);
        }
        CHECK_OK(tddp_reduce_scatter(group, buffer_of(data, count * 4, TDDP_FLOAT32),
                                     buffer_of(part, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                                     NULL));
        for (size_t i = 0; i < count; i++) {
            size_t at = i + count * (size_t)rank;
            CHECK_DOUBLE(part[i], expected(TDDP_REDUCE_SUM, TDDP_FLOAT32, 4, at, 0), 0);
        }
        free(data);
        free(part);
    }
    leave(group, store);
}

/* All ranks hold the same bits, also of numbers whose sum depends on the order. */
MULTI_TEST(all_ranks_get_the_same_bits, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    const size_t counts[] = {1000, 50001};
    for (size_t c = 0; c < 2; c++) {
        size_t count = counts[c];
        float *data = calloc(count, sizeof *data);
        float *all = calloc(count * 3, sizeof *all);
        CHECK(data && all);
        for (size_t i = 0; i < count; i++) {
            data[i] = (float)sin((double)i * 1.7 + rank * 0.3) * powf(10, (float)(rank * 3));
        }
        CHECK_OK(
            tddp_all_reduce(group, buffer_of(data, count, TDDP_FLOAT32), TDDP_REDUCE_AVG, 0, NULL));
        CHECK_OK(tddp_all_gather(group, buffer_of(data, count, TDDP_FLOAT32),
                                 buffer_of(all, count * 3, TDDP_FLOAT32), NULL));
        CHECK_INT(memcmp(all, all + count, count * sizeof *all), 0);
        CHECK_INT(memcmp(all, all + 2 * count, count * sizeof *all), 0);
        free(data);
        free(all);
    }
    leave(group, store);
}

MULTI_TEST(many_operations_under_way, 2, 30)
{
    enum { COUNT = 60, SIZE = 30000 };
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    static float data[COUNT][SIZE];
    tddp_work *works[COUNT];
    for (int k = 0; k < COUNT; k++) {
        size_t count = k % 2 ? SIZE : 100;
        for (size_t i = 0; i < count; i++) {
            data[k][i] = (float)(k + rank);
        }
        CHECK_OK(tddp_all_reduce(group, buffer_of(data[k], count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0,
                                 &works[k]));
    }
    for (int k = 0; k < COUNT; k++) {
        CHECK_OK(tddp_work_wait(works[k], NULL));
        CHECK_DOUBLE(data[k][99], 2 * k + 1, 0);
        tddp_work_release(works[k]);
    }
    leave(group, store);
}

MULTI_TEST(groups_one_after_the_other_and_side_by_side, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    for (int i = 0; i < 2; i++) {
        tddp_group *group = open_group(store, rank, world_size, 20000);
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        opts.backend = "gloo";
        opts.store = store;
        opts.name = "second";
        opts.rank = 1 - rank;
        opts.world_size = world_size;
        tddp_group *other;
        CHECK_OK(tddp_group_create(&opts, NULL, &other));
        int32_t x = rank;
        CHECK_OK(tddp_broadcast(other, buffer_of(&x, 1, TDDP_INT32), 0, NULL));
        CHECK_INT(x, 1);
        CHECK_OK(tddp_barrier(group, NULL));
        tddp_group_release(group);
        tddp_group_release(other);
        /* The store outlives this round on both ranks. */
        tddp_group *last = NULL;
        opts.name = i ? "end" : "middle";
        CHECK_OK(tddp_group_create(&opts, NULL, &last));
        CHECK_OK(tddp_barrier(last, NULL));
        tddp_group_release(last);
    }
    tddp_store_release(store);
}
