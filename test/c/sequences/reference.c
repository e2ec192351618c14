/*
 * What ranks give, and what must come of it.
 *
 * Numbers that are only moved have any bits. Integers that are reduced have any value, and wrap.
 * Floating-point numbers that are reduced are small whole ones, so that in every dtype and in every
 * order of summing the result is exact; but for means of three, which are rounded once or more.
 */
#include <math.h>
#include <string.h>

#include "sequences/sequence.h"

typedef struct number {
    double real;
    double imaginary;
} number;

/* The bits of an element of a rank's part. */
static uint64_t bits_of(const seq_call *call, int rank, int part, size_t i)
{
    seq_random random = {call->program->seed * UINT64_C(0x9e3779b97f4a7c15) +
                         (uint64_t)call->op->number * 1000003u + (uint64_t)rank * 10007u +
                         (uint64_t)part * 101u + i * UINT64_C(0xd1342543de82ef95)};
    return seq_next(&random);
}

static bool is_complex(tddp_dtype dtype)
{
    return dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
}

static bool is_whole(tddp_dtype dtype)
{
    return dtype <= TDDP_INT64 || dtype == TDDP_BOOL;
}

static number number_of(const seq_call *call, int rank, int part, size_t i)
{
    /* Products of four of them still fit the eight bits of bfloat16. */
    static const double factors[] = {1, 2, -1, 3, 1, -2, 1, 2};
    uint64_t bits = bits_of(call, rank, part, i);
    if (call->op->reduce == TDDP_REDUCE_PRODUCT) {
        return (number){factors[bits & 7],
                        is_complex(call->op->dtype) ? factors[bits >> 3 & 7] : 0};
    }
    return (number){(double)(bits % 17) - 8,
                    is_complex(call->op->dtype) ? (double)((bits >> 8) % 17) - 8 : 0};
}

/* --- elements -------------------------------------------------------------------------------- */

/* Of a small whole number, which every dtype has exactly. */
static uint16_t half_of(double value)
{
    int exponent;
    double part = frexp(fabs(value), &exponent); /* 0.5 <= part < 1 */
    int bits = ((exponent + 14) << 10) + (int)((part * 2 - 1) * 1024);
    return (uint16_t)((value == 0 ? 0 : bits) | (value < 0 ? 0x8000 : 0));
}

static double of_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double part = exponent > 0 ? 1024 + (bits & 1023) : bits & 1023;
    double value = exponent == 31 ? NAN : ldexp(part, (exponent > 0 ? exponent : 1) - 25);
    return bits & 0x8000 ? -value : value;
}

static void encode(void *to, tddp_dtype dtype, number value)
{
    const float narrow[2] = {(float)value.real, (float)value.imaginary};
    const double wide[2] = {value.real, value.imaginary};
    uint16_t half = half_of(value.real);
    uint32_t bits;
    switch (dtype) {
    case TDDP_FLOAT16:
        memcpy(to, &half, 2);
        break;
    case TDDP_BFLOAT16:
        memcpy(&bits, narrow, 4);
        half = (uint16_t)(bits >> 16);
        memcpy(to, &half, 2);
        break;
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        memcpy(to, narrow, tddp_dtype_size(dtype));
        break;
    default:
        memcpy(to, wide, tddp_dtype_size(dtype));
    }
}

static number decode(const void *from, tddp_dtype dtype)
{
    float narrow[2] = {0};
    double wide[2] = {0};
    uint16_t half;
    uint32_t bits;
    switch (dtype) {
    case TDDP_FLOAT16:
        memcpy(&half, from, 2);
        return (number){of_half(half), 0};
    case TDDP_BFLOAT16:
        memcpy(&half, from, 2);
        bits = (uint32_t)half << 16;
        memcpy(narrow, &bits, 4);
        return (number){(double)narrow[0], 0};
    case TDDP_FLOAT32:
    case TDDP_COMPLEX64:
        memcpy(narrow, from, tddp_dtype_size(dtype));
        return (number){(double)narrow[0], (double)narrow[1]};
    default:
        memcpy(wide, from, tddp_dtype_size(dtype));
        return (number){wide[0], wide[1]};
    }
}

/* Writes an element as a rank gives it. */
static void give_element(const seq_call *call, unsigned char *to, int rank, int part, size_t i)
{
    const tddp_dtype dtype = call->op->dtype;
    uint64_t bits[2] = {bits_of(call, rank, part, i), 0};
    if (seq_kind_reduces(call->op->kind) && !is_whole(dtype)) {
        encode(to, dtype, number_of(call, rank, part, i));
    } else if (dtype == TDDP_BOOL) {
        *to = bits[0] & 1;
    } else {
        bits[1] = ~bits[0];
        memcpy(to, bits, tddp_dtype_size(dtype));
    }
}

static void copy_part(seq_call *call, tddp_buffer buffer, int rank, int part)
{
    const size_t element = tddp_dtype_size(buffer.dtype);
    unsigned char *to = buffer.count > 0 ? seq_expected(call, buffer.data) : NULL;
    for (size_t i = 0; i < buffer.count; i++) {
        give_element(call, to + i * element, rank, part, i);
    }
}

void seq_give(seq_call *call, tddp_buffer buffer, int rank, int part)
{
    copy_part(call, buffer, rank, part);
}

void seq_expect_copy(seq_call *call, tddp_buffer buffer, int rank, int part)
{
    copy_part(call, buffer, rank, part);
}

/* --- reductions ------------------------------------------------------------------------------ */

double seq_factor(const seq_program *program, const seq_op *op, int rank)
{
    static const double factors[] = {0.5, 1, -1, 2};
    seq_random random = seq_random_of(program->seed, 2, (uint64_t)(op->number * SEQ_RANKS + rank));
    return op->reduce == TDDP_REDUCE_PREMUL_SUM ? factors[seq_below(&random, 4)] : 0;
}

static int64_t whole_of(const seq_call *call, int rank, int part, size_t i)
{
    const uint64_t bits = bits_of(call, rank, part, i);
    switch (call->op->dtype) {
    case TDDP_BOOL:
        return bits & 1;
    case TDDP_UINT8:
        return (uint8_t)bits;
    case TDDP_INT8:
        return (int8_t)bits;
    case TDDP_INT16:
        return (int16_t)bits;
    case TDDP_INT32:
        return (int32_t)bits;
    default:
        return (int64_t)bits;
    }
}

/* Both as numbers of the dtype; what does not fit is cut when it is stored. */
static int64_t combine_wholes(tddp_reduce_op op, bool truth, int64_t a, int64_t b)
{
    switch (op) {
    case TDDP_REDUCE_SUM:
        return truth ? a | b : (int64_t)((uint64_t)a + (uint64_t)b);
    case TDDP_REDUCE_PRODUCT:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case TDDP_REDUCE_MIN:
        return a < b ? a : b;
    case TDDP_REDUCE_MAX:
        return a > b ? a : b;
    case TDDP_REDUCE_BAND:
        return a & b;
    case TDDP_REDUCE_BOR:
        return a | b;
    case TDDP_REDUCE_BXOR:
        return a ^ b;
    default:
        check_failed(__FILE__, __LINE__, "no such reduction of whole numbers");
    }
}

static number combine_numbers(tddp_reduce_op op, number a, number b)
{
    switch (op) {
    case TDDP_REDUCE_PRODUCT:
        return (number){a.real * b.real - a.imaginary * b.imaginary,
                        a.real * b.imaginary + a.imaginary * b.real};
    case TDDP_REDUCE_MIN:
        return a.real < b.real ? a : b;
    case TDDP_REDUCE_MAX:
        return a.real > b.real ? a : b;
    default:
        return (number){a.real + b.real, a.imaginary + b.imaginary};
    }
}

static number factored(const seq_call *call, int rank, int part, size_t i)
{
    number one = number_of(call, rank, part, i);
    if (call->op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        double factor = seq_factor(call->program, call->op, rank);
        one = (number){one.real * factor, one.imaginary * factor};
    }
    return one;
}

static number reduced_number(const seq_call *call, int part, size_t i)
{
    number all = factored(call, 0, part, i);
    for (int rank = 1; rank < call->size; rank++) {
        all = combine_numbers(call->op->reduce, all, factored(call, rank, part, i));
    }
    if (call->op->reduce == TDDP_REDUCE_AVG) {
        all = (number){all.real / call->size, all.imaginary / call->size};
    }
    return all;
}

/* How far a mean may be off that is no number of the dtype: each rank's third is rounded, and what
 * becomes of each sum of them. */
static double slack_of(const seq_call *call, double value)
{
    const tddp_dtype dtype = call->op->dtype;
    double unit = dtype == TDDP_FLOAT16                              ? 1.0 / 1024
                  : dtype == TDDP_BFLOAT16                           ? 1.0 / 128
                  : dtype == TDDP_FLOAT32 || dtype == TDDP_COMPLEX64 ? 1.0 / (1 << 23)
                                                                     : 1.0 / ((int64_t)1 << 52);
    bool rounds = call->op->reduce == TDDP_REDUCE_AVG && call->size == 3;
    /* The sums on the way are as large as 16 at the most. */
    return rounds ? 2 * unit * (fabs(value) + 8) : 0;
}

/* An element that is near enough counts as what is expected. */
static void expect_number(const seq_call *call, const unsigned char *got, unsigned char *expected,
                          int part, size_t i)
{
    char text[SEQ_TEXT];
    number wanted = reduced_number(call, part, i);
    number found = decode(got, call->op->dtype);
    if (!(fabs(found.real - wanted.real) <= slack_of(call, wanted.real)) ||
        !(fabs(found.imaginary - wanted.imaginary) <= slack_of(call, wanted.imaginary))) {
        seq_describe_op(call->program, call->op, text, sizeof text);
        check_failed(__FILE__, __LINE__,
                     "%s: rank %d has %.17g%+.17gi, expected %.17g%+.17gi, as element %zu of part "
                     "%d",
                     text, call->rank, found.real, found.imaginary, wanted.real, wanted.imaginary,
                     i, part);
    }
    memcpy(expected, got, tddp_dtype_size(call->op->dtype));
}

static void expect_whole(const seq_call *call, unsigned char *expected, int part, size_t i)
{
    int64_t all = whole_of(call, 0, part, i);
    for (int rank = 1; rank < call->size; rank++) {
        all = combine_wholes(call->op->reduce, call->op->dtype == TDDP_BOOL, all,
                             whole_of(call, rank, part, i));
    }
    memcpy(expected, &all, tddp_dtype_size(call->op->dtype));
}

void seq_expect_reduced(seq_call *call, tddp_buffer buffer, int part)
{
    const size_t element = tddp_dtype_size(buffer.dtype);
    unsigned char *expected = buffer.count > 0 ? seq_expected(call, buffer.data) : NULL;
    const unsigned char *got = buffer.data;
    for (size_t i = 0; i < buffer.count; i++) {
        if (is_whole(buffer.dtype)) {
            expect_whole(call, expected + i * element, part, i);
        } else {
            expect_number(call, got + i * element, expected + i * element, part, i);
        }
    }
}
