/*
 * CRC-32 as zlib, gzip and PNG have it, eight bytes at a time: the tables have the effect
 * of a byte with zero to seven bytes behind it. Any thread; the tables are made once.
 * crc32_fold.c processes long data where the processor allows.
 */
#include "base/base.h"

#include <tddp/file.h>

#include "base/crc32.h"

enum { SLICES = 8, BYTE_BITS = 8 };

static uint32_t tables[SLICES][256];
static bool folds;
static pthread_once_t made = PTHREAD_ONCE_INIT;

static void prepare(void)
{
    folds = tddp_base_crc32_folds();
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < BYTE_BITS; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? UINT32_C(0xedb88320) : 0);
        }
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int slice = 1; slice < SLICES; slice++) {
            const uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    }
}

static uint32_t four_bytes(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Takes bytes into the register. */
static uint32_t take(uint32_t crc, const unsigned char *at, size_t size)
{
    for (; size >= SLICES; size -= SLICES, at += SLICES) {
        const uint32_t low = crc ^ four_bytes(at);
        const uint32_t high = four_bytes(at + 4);
        crc = tables[7][low & 0xff] ^ tables[6][(low >> 8) & 0xff] ^ tables[5][(low >> 16) & 0xff] ^
              tables[4][low >> 24] ^ tables[3][high & 0xff] ^ tables[2][(high >> 8) & 0xff] ^
              tables[1][(high >> 16) & 0xff] ^ tables[0][high >> 24];
    }
    for (; size > 0; size--, at++) {
        crc = (crc >> 8) ^ tables[0][(crc ^ *at) & 0xff];
    }
    return crc;
}

uint32_t tddp_crc32(uint32_t crc, const void *data, size_t size)
{
    pthread_once(&made, prepare);
    const unsigned char *at = data;
    crc = ~crc;
    const size_t folded = folds ? size - size % TDDP_BASE_CRC32_STRIDE : 0;
    if (folded > 0) {
        unsigned char rest[TDDP_BASE_CRC32_REST];
        tddp_base_crc32_fold(crc, at, folded, rest);
        crc = take(0, rest, sizeof rest);
    }
    return ~take(crc, at + folded, size - folded);
}
