/*
 * How fast sources are combined: bench_arith [DTYPE] [OP]
 *
 * For each size, number of sources and results and set of loops the bytes read and written each
 * second, in GB, of the median repetition; beside it what memcpy moves, counted the same way.
 * Without arguments: sums of the floating-point dtypes, and a few others.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/arith/set.h"
#include "base/base.h"

enum { MOST_SOURCES = 8, MOST_RESULTS = 2, MOST_BYTES = 16 << 20, REPETITIONS = 15 };

static const size_t sizes[] = {16 << 10, 256 << 10, MOST_BYTES};
static const struct {
    int sources;
    int results;
} shapes[] = {{2, 1}, {2, 2}, {3, 1}, {4, 1}, {4, 2}, {8, 1}};
static const char *const names[] = {"avx512", "avx2", "neon", "baseline"};

static void *sources[MOST_SOURCES];
static void *results[MOST_RESULTS];

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of a set: the job; of none: memcpy. */
static double gigabytes(const tddp_arith_set *set, const tddp_arith_job *job, size_t bytes)
{
    double seconds[REPETITIONS];
    const int calls = (int)((8 << 20) / bytes) + 1;
    for (int r = -2; r < REPETITIONS; r++) {
        const int64_t start = tddp_now_ns();
        for (int i = 0; i < calls; i++) {
            if (set) {
                tddp_arith_reduce_by(set, job);
            } else {
                memcpy(results[0], sources[0], bytes);
            }
        }
        seconds[r < 0 ? 0 : r] = (double)(tddp_now_ns() - start) / 1e9 / calls;
    }
    qsort(seconds, REPETITIONS, sizeof *seconds, ascending);
    const int moved = set ? job->source_count + job->result_count : 2;
    return (double)bytes * moved / seconds[REPETITIONS / 2] / 1e9;
}

static void measure(tddp_dtype dtype, tddp_reduce_op op, int source_count, int result_count)
{
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        tddp_arith_job job = {
            .op = op,
            .dtype = dtype,
            .count = sizes[s] / tddp_dtype_size(dtype),
            .sources = (const void *const *)sources,
            .source_count = source_count,
            .results = results,
            .result_count = result_count,
            .factor = op == TDDP_REDUCE_AVG ? 0.5 : 1,
        };
        printf("%-10s %-7s %8zu KiB  %d to %d ", tddp_dtype_name(dtype), tddp_reduce_op_name(op),
               sizes[s] >> 10, source_count, result_count);
        for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
            const tddp_arith_set *set = tddp_arith_find(names[n]);
            if (!set) {
                continue;
            }
            job.streaming = false;
            printf("  %s %6.1f", names[n], gigabytes(set, &job, sizes[s]));
            if (sizes[s] == MOST_BYTES) {
                job.streaming = true;
                printf(" (streaming %5.1f)", gigabytes(set, &job, sizes[s]));
            }
        }
        printf("  memcpy %6.1f\n", gigabytes(NULL, NULL, sizes[s]));
        fflush(stdout);
    }
}

static void measure_shapes(tddp_dtype dtype, tddp_reduce_op op)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        measure(dtype, op, shapes[i].sources, shapes[i].results);
    }
}

static int number_of(const char *text, const char *(*name)(int), int count)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(text, name(i)) == 0) {
            return i;
        }
    }
    fprintf(stderr, "bench_arith: %s is no dtype or operation\n", text);
    exit(2);
}

static const char *name_of_dtype(int dtype)
{
    return tddp_dtype_name((tddp_dtype)dtype);
}

static const char *name_of_op(int op)
{
    return tddp_reduce_op_name((tddp_reduce_op)op);
}

/* Memory begins at various places within a page, as tensors do: addresses that agree in their last
 * twelve bits would wait for each other. */
static void *place(size_t index)
{
    unsigned char *memory = aligned_alloc(4096, MOST_BYTES + (64 << 10));
    if (!memory) {
        fprintf(stderr, "bench_arith: no memory\n");
        exit(1);
    }
    memset(memory, 0, MOST_BYTES + (64 << 10));
    return memory + index * 832;
}

int main(int argc, char **argv)
{
    for (size_t i = 0; i < MOST_SOURCES; i++) {
        sources[i] = place(i);
    }
    for (size_t i = 0; i < MOST_RESULTS; i++) {
        results[i] = place(MOST_SOURCES + i);
    }
    if (argc > 1) {
        measure_shapes((tddp_dtype)number_of(argv[1], name_of_dtype, TDDP_ARITH_DTYPES),
                       argc > 2 ? (tddp_reduce_op)number_of(argv[2], name_of_op, TDDP_ARITH_OPS)
                                : TDDP_REDUCE_SUM);
        return 0;
    }
    for (int dtype = TDDP_FLOAT16; dtype <= TDDP_FLOAT64; dtype++) {
        measure_shapes((tddp_dtype)dtype, TDDP_REDUCE_SUM);
    }
    measure(TDDP_FLOAT32, TDDP_REDUCE_AVG, 2, 1);
    measure(TDDP_FLOAT32, TDDP_REDUCE_MAX, 2, 1);
    measure(TDDP_BFLOAT16, TDDP_REDUCE_MAX, 2, 1);
    measure(TDDP_INT32, TDDP_REDUCE_SUM, 2, 1);
    measure(TDDP_INT64, TDDP_REDUCE_MIN, 2, 1);
    measure(TDDP_UINT8, TDDP_REDUCE_PRODUCT, 2, 1);
    measure(TDDP_COMPLEX64, TDDP_REDUCE_PRODUCT, 2, 1);
    return 0;
}
