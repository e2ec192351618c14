/*
 * Values by which results are checked. They repeat after PERIOD elements, so that a block of them
 * is made once and then copied or compared at the memory's speed.
 *
 * Entered by the one thread of a partner.
 */
#include "values.h"

#include <stdint.h>
#include <string.h>

enum { PERIOD = 13, BLOCK = PERIOD * 315, LARGEST = 8 };

static int value(size_t i, int rank, int ranks)
{
    if (rank == BENCH_SUM) {
        int sum = 0;
        for (int r = 0; r < ranks; r++) {
            sum += value(i, r, ranks);
        }
        return sum;
    }
    return (int)((i * 7 + (size_t)rank * 3) % PERIOD);
}

/* Halves of a whole number from 0 to 2047: no rounding. */
static uint16_t half_of(int number)
{
    int exponent = 0;
    if (number == 0) {
        return 0;
    }
    while (number >> (exponent + 1)) {
        exponent++;
    }
    int fraction = (number << (10 - exponent)) & 0x3ff;
    return (uint16_t)((exponent + 15) << 10 | fraction);
}

static uint16_t bfloat_of(int number)
{
    float single = (float)number;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static size_t put(unsigned char *to, bench_dtype dtype, int number)
{
    union {
        uint8_t u8;
        int32_t i32;
        int64_t i64;
        uint16_t bits;
        float f32;
        double f64;
    } element;
    size_t size;
    switch (dtype) {
    case BENCH_UINT8:
        element.u8 = (uint8_t)number;
        size = 1;
        break;
    case BENCH_INT32:
        element.i32 = number;
        size = 4;
        break;
    case BENCH_INT64:
        element.i64 = number;
        size = 8;
        break;
    case BENCH_FLOAT16:
        element.bits = half_of(number);
        size = 2;
        break;
    case BENCH_BFLOAT16:
        element.bits = bfloat_of(number);
        size = 2;
        break;
    case BENCH_FLOAT32:
        element.f32 = (float)number;
        size = 4;
        break;
    default:
        element.f64 = number;
        size = 8;
    }
    memcpy(to, &element, size);
    return size;
}

/* Returns the bytes of an element. */
static size_t make_block(unsigned char *block, size_t count, bench_dtype dtype, int rank, int ranks,
                         size_t first)
{
    size_t size = 0;
    for (size_t i = 0; i < (count < BLOCK ? count : BLOCK); i++) {
        size = put(block + i * size, dtype, value((first + i) % PERIOD, rank, ranks));
    }
    return size;
}

void bench_fill(void *data, size_t count, bench_dtype dtype, int rank, int ranks, size_t first)
{
    unsigned char block[BLOCK * LARGEST];
    size_t size = make_block(block, count, dtype, rank, ranks, first);
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t now = count - done < BLOCK ? count - done : BLOCK;
        memcpy((unsigned char *)data + done * size, block, now * size);
    }
}

bool bench_equals(const void *data, size_t count, bench_dtype dtype, int rank, int ranks,
                  size_t first)
{
    unsigned char block[BLOCK * LARGEST];
    size_t size = make_block(block, count, dtype, rank, ranks, first);
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t now = count - done < BLOCK ? count - done : BLOCK;
        if (memcmp((const unsigned char *)data + done * size, block, now * size) != 0) {
            return false;
        }
    }
    return true;
}
