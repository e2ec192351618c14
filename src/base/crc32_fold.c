/*
 * CRC-32 by multiplication without carries, where the processor has it: 64 bytes at a time are
 * folded into the 64 that follow, at several times the speed of tables. What is left are 16 bytes
 * with the same remainder, for the tables. Any thread. crc32.c processes the rest.
 */
#include "base/crc32.h"

#ifdef __x86_64__

#include <string.h>

#include <immintrin.h>

/* Powers of x modulo the polynomial, bits reflected: x^(512+32), x^(512-32); x^(128+32),
 * x^(128-32). */
static const uint64_t by_64[2] = {0x0154442bd4, 0x01c6e41596};
static const uint64_t by_16[2] = {0x01751997d0, 0x00ccaa009e};

#define FOLDS __attribute__((target("pclmul,sse2")))

bool tddp_base_crc32_folds(void)
{
    return __builtin_cpu_supports("pclmul") != 0;
}

FOLDS static __m128i load(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

/* What stands for `before` in the bytes that `distance` is the constant for, and these bytes. */
FOLDS static __m128i fold(__m128i before, __m128i distance, __m128i next)
{
    const __m128i low = _mm_clmulepi64_si128(before, distance, 0x00);
    const __m128i high = _mm_clmulepi64_si128(before, distance, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDS void tddp_base_crc32_fold(uint32_t state, const unsigned char *data, size_t size,
                                unsigned char out[TDDP_BASE_CRC32_REST])
{
    __m128i lanes[4];
    for (size_t i = 0; i < 4; i++) {
        lanes[i] = load(data + 16 * i);
    }
    int first;
    memcpy(&first, &state, sizeof first);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(first));
    const __m128i far = load(by_64);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        for (size_t i = 0; i < 4; i++) {
            lanes[i] = fold(lanes[i], far, load(data + 16 * i));
        }
    }
    const __m128i near = load(by_16);
    __m128i rest = lanes[0];
    for (size_t i = 1; i < 4; i++) {
        rest = fold(rest, near, lanes[i]);
    }
    _mm_storeu_si128((__m128i *)out, rest);
}

#else

bool tddp_base_crc32_folds(void)
{
    return false;
}

void tddp_base_crc32_fold(uint32_t state, const unsigned char *data, size_t size,
                          unsigned char out[TDDP_BASE_CRC32_REST])
{
    (void)state;
    (void)data;
    (void)size;
    (void)out;
}

#endif
