/*
 * SipHash-2-4, after "SipHash: a fast short-input PRF" (Aumasson and Bernstein, 2012): a keyed hash
 * for tables with untrusted keys, so that these cannot be chosen to collide. Pure functions, but
 * for this process's key, which is made once.
 */
#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/base.h"

typedef struct state {
    uint64_t v0, v1, v2, v3;
} state;

static uint64_t rotated(uint64_t value, unsigned bits)
{
    return value << bits | value >> (64 - bits);
}

static void mix(state *s, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        s->v0 += s->v1;
        s->v2 += s->v3;
        s->v1 = rotated(s->v1, 13) ^ s->v0;
        s->v3 = rotated(s->v3, 16) ^ s->v2;
        s->v0 = rotated(s->v0, 32);
        s->v2 += s->v1;
        s->v0 += s->v3;
        s->v1 = rotated(s->v1, 17) ^ s->v2;
        s->v3 = rotated(s->v3, 21) ^ s->v0;
        s->v2 = rotated(s->v2, 32);
    }
}

static void compress(state *s, uint64_t word)
{
    s->v3 ^= word;
    mix(s, 2);
    s->v0 ^= word;
}

uint64_t tddp_siphash(const uint64_t key[2], const void *data, size_t size)
{
    const unsigned char *bytes = data;
    state s = {key[0] ^ UINT64_C(0x736f6d6570736575), key[1] ^ UINT64_C(0x646f72616e646f6d),
               key[0] ^ UINT64_C(0x6c7967656e657261), key[1] ^ UINT64_C(0x7465646279746573)};
    size_t aligned = size - size % 8;
    for (size_t i = 0; i < aligned; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, sizeof word);
        compress(&s, le64toh(word));
    }
    uint64_t last = (uint64_t)size << 56;
    for (size_t i = aligned; i < size; i++) {
        last |= (uint64_t)bytes[i] << 8 * (i - aligned);
    }
    compress(&s, last);
    s.v2 ^= 0xff;
    mix(&s, 4);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

static uint64_t process_key[2];

static void make_key(void)
{
    ssize_t got;
    do {
        got = getrandom(process_key, sizeof process_key, 0);
    } while (got < 0 && errno == EINTR);
    if (got != sizeof process_key) {
        /* A kernel without it: what others are unlikely to know. */
        process_key[0] = (uint64_t)tddp_now_ns();
        process_key[1] = (uint64_t)(uintptr_t)&got ^ (uint64_t)getpid() << 32;
    }
}

uint64_t tddp_hash(const void *data, size_t size)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_key);
    return tddp_siphash(process_key, data, size);
}
