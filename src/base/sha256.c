/*
 * SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104), for the store's challenge and response. It is
 * our own because libtddp and torchrun link libc alone, which has neither, and a few hundred bytes
 * per connection do not justify a cryptographic library. Pure functions, any thread. What is hashed
 * is not secret by its length; what depends on a key is compared by tddp_equal_bytes() only.
 */
#include <endian.h>
#include <string.h>

#include "base/base.h"

enum { BLOCK = 64, ROUNDS = 64, LENGTH_AT = BLOCK - 8 };

typedef struct hash {
    uint32_t state[8];
    unsigned char block[BLOCK];
    size_t used; /* of the block */
    uint64_t bytes;
} hash;

/* The first 32 bits of the fractions of the cube roots of the first 64 primes. */
static const uint32_t constants[ROUNDS] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* The same of the square roots of the first 8. */
static const uint32_t start_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static uint32_t turned(uint32_t word, int bits)
{
    return word >> bits | word << (32 - bits);
}

static void expand(const unsigned char block[BLOCK], uint32_t words[ROUNDS])
{
    for (int i = 0; i < 16; i++) {
        uint32_t word;
        memcpy(&word, block + 4 * i, sizeof word);
        words[i] = be32toh(word);
    }
    for (int i = 16; i < ROUNDS; i++) {
        uint32_t a = words[i - 15];
        uint32_t b = words[i - 2];
        words[i] = words[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + words[i - 7] +
                   (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
}

static void take_block(uint32_t state[8], const unsigned char block[BLOCK])
{
    uint32_t words[ROUNDS];
    uint32_t s[8]; /* a to h of the standard */
    expand(block, words);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t first = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + choice +
                         constants[i] + words[i];
        uint32_t second = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++) {
        state[i] += s[i];
    }
}

static void hash_start(hash *h)
{
    *h = (hash){0};
    memcpy(h->state, start_state, sizeof h->state);
}

static void hash_add(hash *h, const void *data, size_t size)
{
    const unsigned char *from = data;
    h->bytes += size;
    while (size > 0) {
        size_t part = BLOCK - h->used < size ? BLOCK - h->used : size;
        memcpy(h->block + h->used, from, part);
        h->used += part;
        from += part;
        size -= part;
        if (h->used == BLOCK) {
            take_block(h->state, h->block);
            h->used = 0;
        }
    }
}

static void hash_end(hash *h, unsigned char out[TDDP_SHA256_BYTES])
{
    static const unsigned char padding[BLOCK] = {0x80};
    uint64_t bits = htobe64(h->bytes * 8);
    size_t used = h->used;
    hash_add(h, padding, (used < LENGTH_AT ? LENGTH_AT : LENGTH_AT + BLOCK) - used);
    hash_add(h, &bits, sizeof bits);
    for (int i = 0; i < 8; i++) {
        uint32_t word = htobe32(h->state[i]);
        memcpy(out + 4 * i, &word, sizeof word);
    }
    explicit_bzero(h, sizeof *h);
}

void tddp_sha256(const void *data, size_t size, unsigned char out[TDDP_SHA256_BYTES])
{
    hash h;
    hash_start(&h);
    hash_add(&h, data, size);
    hash_end(&h, out);
}

static void key_block(const void *key, size_t size, unsigned char flip, unsigned char out[BLOCK])
{
    memset(out, 0, BLOCK);
    if (size > BLOCK) {
        tddp_sha256(key, size, out);
    } else if (size) {
        memcpy(out, key, size);
    }
    for (int i = 0; i < BLOCK; i++) {
        out[i] ^= flip;
    }
}

void tddp_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                      unsigned char out[TDDP_SHA256_BYTES])
{
    unsigned char block[BLOCK];
    unsigned char inner[TDDP_SHA256_BYTES];
    hash h;
    key_block(key, key_size, 0x36, block);
    hash_start(&h);
    hash_add(&h, block, BLOCK);
    hash_add(&h, data, size);
    hash_end(&h, inner);
    key_block(key, key_size, 0x5c, block);
    hash_start(&h);
    hash_add(&h, block, BLOCK);
    hash_add(&h, inner, sizeof inner);
    hash_end(&h, out);
    explicit_bzero(block, sizeof block);
}

bool tddp_equal_bytes(const void *a, const void *b, size_t size)
{
    const volatile unsigned char *x = a;
    const volatile unsigned char *y = b;
    unsigned char different = 0;
    for (size_t i = 0; i < size; i++) {
        different |= (unsigned char)(x[i] ^ y[i]);
    }
    return different == 0;
}
