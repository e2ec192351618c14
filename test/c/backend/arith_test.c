/*
 * Arithmetic over many sources: every set of loops that this processor supports gives the bits of
 * the reference, wherever its operands are.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/arith/set.h"
#include "backend/arith_elements.h"
#include "backend/half.h"
#include "check.h"

enum { MAX_SOURCES = 9, MAX_RESULTS = 4, MAX_COUNT = 9000, GUARD = 128 };

static const char *const names[] = {"avx512", "avx2", "neon", "baseline"};
enum { NAMES = sizeof names / sizeof *names };

/* --- operands ----------------------------------------------------------------------------------*/

static uint64_t state = 88172645463325252u;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static int below(int limit)
{
    return (int)((draw() >> 20) % (unsigned)limit);
}

/* Mostly numbers of one size, among them all that is special about a kind of number. */
static uint64_t bits_of(tddp_dtype dtype)
{
    static const uint16_t float16[] = {0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0xfbff,
                                       0x7c00, 0xfc00, 0x7e01, 0x7c01, 0xfd55, 0x0400};
    static const uint16_t bfloat16[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x7f7f, 0xff7f,
                                        0x7f80, 0xff80, 0x7fc1, 0x7f81, 0xff95, 0x0080};
    const uint64_t any = draw();
    const int special = below(80);
    const bool is_special = special < 12;
    switch (dtype) {
    case TDDP_FLOAT16:
        return is_special ? float16[special] : (any & 0x83ff) | (uint64_t)(12 + below(8)) << 10;
    case TDDP_BFLOAT16:
        return is_special ? bfloat16[special] : (any & 0x807f) | (uint64_t)(124 + below(8)) << 7;
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        return is_special ? (uint64_t)bfloat16[special] << 16 | (any & (special < 2 ? 0 : 7))
                          : (any & 0x807fffff) | (uint64_t)(124 + below(8)) << 23;
    case TDDP_FLOAT64:
    case TDDP_COMPLEX128:
        if (is_special) {
            static const uint16_t float64[] = {0x0000, 0x8000, 0x0001, 0x800f, 0x7fef, 0xffef,
                                               0x7ff0, 0xfff0, 0x7ff8, 0x7ff1, 0xfff2, 0x0010};
            return (uint64_t)float64[special] << 48;
        }
        return (any & 0x800fffffffffffff) | (uint64_t)(1020 + below(8)) << 52;
    case TDDP_BOOL:
        return (uint64_t)below(3);
    default:
        return any;
    }
}

static void fill(tddp_dtype dtype, void *data, size_t count)
{
    const bool is_complex = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
    const size_t size = tddp_dtype_size(dtype) / (is_complex ? 2 : 1);
    for (size_t i = 0; i < count * (is_complex ? 2 : 1); i++) {
        const uint64_t bits = bits_of(dtype);
        memcpy((char *)data + i * size, &bits, size);
    }
}

/* Memory of a source or result; what surrounds its elements must stay. */
typedef struct place {
    _Alignas(64) unsigned char memory[MAX_COUNT * 16 + 2 * GUARD];
    unsigned char before[MAX_COUNT * 16 + 2 * GUARD];
    size_t offset;
} place;

static place sources[MAX_SOURCES];
static place results[MAX_RESULTS];
static unsigned char expected[MAX_COUNT * 16];
static bool any_nan[MAX_COUNT];

static bool both_nan(tddp_dtype dtype, const unsigned char *a, const unsigned char *b)
{
    float x;
    float y;
    double p;
    double q;
    switch (dtype) {
    case TDDP_FLOAT16:
    case TDDP_BFLOAT16:
        return isnan(arith_half(dtype, a)) && isnan(arith_half(dtype, b));
    case TDDP_FLOAT32:
        memcpy(&x, a, sizeof x);
        memcpy(&y, b, sizeof y);
        return isnan(x) && isnan(y);
    case TDDP_FLOAT64:
        memcpy(&p, a, sizeof p);
        memcpy(&q, b, sizeof q);
        return isnan(p) && isnan(q);
    case TDDP_COMPLEX64:
        return (memcmp(a, b, 4) == 0 || both_nan(TDDP_FLOAT32, a, b)) &&
               (memcmp(a + 4, b + 4, 4) == 0 || both_nan(TDDP_FLOAT32, a + 4, b + 4));
    case TDDP_COMPLEX128:
        return (memcmp(a, b, 8) == 0 || both_nan(TDDP_FLOAT64, a, b)) &&
               (memcmp(a + 8, b + 8, 8) == 0 || both_nan(TDDP_FLOAT64, a + 8, b + 8));
    default:
        return false;
    }
}

static void text_of(char *text, size_t size, const tddp_arith_job *job, const char *set, size_t i)
{
    snprintf(text, size, "%s: %s of %s, %zu elements, %d sources, %d results%s%s, element %zu", set,
             tddp_reduce_op_name(job->op), tddp_dtype_name(job->dtype), job->count,
             job->source_count, job->result_count, job->factors ? ", factors" : "",
             job->streaming ? ", streaming" : "", i);
}

static void check_result(const tddp_arith_job *job, const char *set, const unsigned char *got)
{
    const size_t size = tddp_dtype_size(job->dtype);
    for (size_t i = 0; i < job->count; i++) {
        const unsigned char *a = got + i * size;
        const unsigned char *b = expected + i * size;
        if (memcmp(a, b, size) != 0 && !(any_nan[i] && both_nan(job->dtype, a, b))) {
            char text[256];
            text_of(text, sizeof text, job, set, i);
            uint64_t x = 0;
            uint64_t y = 0;
            memcpy(&x, a, size < 8 ? size : 8);
            memcpy(&y, b, size < 8 ? size : 8);
            check_failed(__FILE__, __LINE__, "%s: %llx, not %llx", text, (unsigned long long)x,
                         (unsigned long long)y);
        }
    }
}

/* Nothing but the result's elements is changed; nothing at all of a source. */
static void check_rest(const place *where, size_t bytes, bool is_result)
{
    const size_t after = where->offset + (is_result ? bytes : 0);
    CHECK(memcmp(where->memory, where->before, where->offset) == 0);
    CHECK(memcmp(where->memory + after, where->before + after,
                 where->offset + bytes + GUARD - after) == 0);
}

/* The job by every set. A result that is the memory of a source has its number in `shared`. */
static void run(tddp_arith_job job, const int shared[])
{
    const size_t bytes = job.count * tddp_dtype_size(job.dtype);
    const void *from[MAX_SOURCES];
    void *into[MAX_RESULTS];
    place *places[MAX_RESULTS];
    for (int k = 0; k < job.source_count; k++) {
        from[k] = sources[k].memory + sources[k].offset;
    }
    for (int k = 0; k < job.result_count; k++) {
        places[k] = shared[k] >= 0 ? &sources[shared[k]] : &results[k];
        into[k] = places[k]->memory + places[k]->offset;
    }
    job.sources = from;
    job.results = into;
    for (size_t i = 0; i < job.count; i++) {
        any_nan[i] = arith_expect(&job, i, expected + i * tddp_dtype_size(job.dtype));
    }
    for (int n = 0; n < NAMES; n++) {
        const tddp_arith_set *set = tddp_arith_find(names[n]);
        if (!set) {
            continue;
        }
        tddp_arith_reduce_by(set, &job);
        for (int k = 0; k < job.result_count; k++) {
            check_result(&job, names[n], into[k]);
            check_rest(places[k], bytes, true);
            memcpy(places[k]->memory, places[k]->before, places[k]->offset + bytes + GUARD);
        }
        for (int k = 0; k < job.source_count; k++) {
            check_rest(&sources[k], bytes, false);
        }
    }
}

static void lay(place *where, size_t bytes, size_t offset)
{
    where->offset = GUARD / 2 + offset;
    memset(where->memory, 0xa5, where->offset + bytes + GUARD);
}

static void try_job(tddp_reduce_op op, tddp_dtype dtype, size_t count, int source_count,
                    int result_count)
{
    static const double factors[MAX_SOURCES] = {0.5, 3, -1, 0.1, 1, 7, 0.25, -0.3, 2};
    const size_t size = tddp_dtype_size(dtype);
    const int misplaced = below(3);
    for (int k = 0; k < source_count; k++) {
        lay(&sources[k], count * size, misplaced ? (size_t)below(16) * size % 64 : 0);
        fill(dtype, sources[k].memory + sources[k].offset, count);
        memcpy(sources[k].before, sources[k].memory, sources[k].offset + count * size + GUARD);
    }
    for (int k = 0; k < result_count; k++) {
        lay(&results[k], count * size, misplaced == 2 ? (size_t)below(16) * size % 64 : 0);
        memcpy(results[k].before, results[k].memory, results[k].offset + count * size + GUARD);
    }
    /* No result, one or all of them, each another source. */
    const int sharing = below(3);
    const int first = below(result_count);
    const int shift = below(source_count);
    int shared[MAX_RESULTS];
    for (int k = 0; k < result_count; k++) {
        const bool is_shared = sharing == 2 ? k < source_count : sharing == 1 && k == first;
        shared[k] = is_shared ? (k + shift) % source_count : -1;
    }
    const bool has_factors = op == TDDP_REDUCE_PREMUL_SUM || below(8) == 0;
    run(
        (tddp_arith_job){
            .op = op,
            .dtype = dtype,
            .count = count,
            .source_count = source_count,
            .result_count = result_count,
            .factors = has_factors ? factors : NULL,
            .factor = op == TDDP_REDUCE_AVG ? 1.0 / source_count
                      : below(8)            ? 1
                                            : 0.7,
            .streaming = below(3) == 0,
        },
        shared);
}

/* --- the tests ---------------------------------------------------------------------------------*/

static void try_dtypes(tddp_dtype first, tddp_dtype last)
{
    static const size_t large[] = {255, 256, 257, 511, 1024, 1025, 4099, 8999};
    for (int dtype = (int)first; dtype <= (int)last; dtype++) {
        for (int op = 0; op < TDDP_ARITH_OPS; op++) {
            if (tddp_reduce_check((tddp_reduce_op)op, (tddp_dtype)dtype)) {
                continue;
            }
            for (size_t count = 0; count <= 70; count++) {
                for (int i = 0; i < 4; i++) {
                    try_job((tddp_reduce_op)op, (tddp_dtype)dtype, count, 1 + below(MAX_SOURCES),
                            1 + below(MAX_RESULTS));
                }
            }
            for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
                try_job((tddp_reduce_op)op, (tddp_dtype)dtype, large[i], 1 + below(MAX_SOURCES),
                        1 + below(MAX_RESULTS));
            }
        }
    }
}

TEST(integers_bit_by_bit)
{
    try_dtypes(TDDP_UINT8, TDDP_INT64);
    try_dtypes(TDDP_BOOL, TDDP_BOOL);
}

TEST(floating_point_bit_by_bit)
{
    try_dtypes(TDDP_FLOAT16, TDDP_COMPLEX128);
}

TEST(sums_of_every_number_of_sources_and_results)
{
    static const tddp_dtype dtypes[] = {TDDP_FLOAT32, TDDP_FLOAT64, TDDP_FLOAT16, TDDP_BFLOAT16,
                                        TDDP_COMPLEX64};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (int from = 1; from <= MAX_SOURCES; from++) {
            for (int into = 1; into <= MAX_RESULTS; into++) {
                for (int i = 0; i < 8; i++) {
                    try_job(i % 2 ? TDDP_REDUCE_AVG : TDDP_REDUCE_SUM, dtypes[d],
                            (size_t)below(i < 6 ? 300 : 5000), from, into);
                }
            }
        }
    }
}
