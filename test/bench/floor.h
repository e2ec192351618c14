/*
 * The least that two processes can do to add their vectors of float32 in shared memory, each into
 * its own place: a rank adds one half of both vectors and writes it to both, between two exchanges
 * of flags. No comparing of calls, no deadline, no other types: what any real all_reduce is
 * measured against.
 *
 * A vector of up to FLOOR_EAGER_BYTES travels in the line of its flag, one exchange in all.
 */
#ifndef TDDP_BENCH_FLOOR_H
#define TDDP_BENCH_FLOOR_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { FLOOR_LINE = 64, FLOOR_EAGER_BYTES = 32 };

/* What a rank writes for the other, in lines of their own; two that take turns. */
typedef struct floor_line {
    alignas(128) _Atomic uint64_t flag;
    float payload[FLOOR_EAGER_BYTES / sizeof(float)];
} floor_line;

typedef struct floor_area {
    floor_line lines[2][2]; /* by rank, by turn */
} floor_area;

typedef struct floor_rank {
    floor_area *area;
    int rank;
    uint64_t flag;
    float *vectors[2];
} floor_rank;

static inline void *floor_map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static inline void floor_exchange(floor_rank *self)
{
    uint64_t flag = ++self->flag;
    atomic_store_explicit(&self->area->lines[self->rank][flag % 2].flag, flag,
                          memory_order_release);
    _Atomic uint64_t *theirs = &self->area->lines[1 - self->rank][flag % 2].flag;
    while (atomic_load_explicit(theirs, memory_order_acquire) < flag) {
    }
}

static inline void floor_add_plain(float *a, float *b, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        float sum = a[i] + b[i];
        a[i] = sum;
        b[i] = sum;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static inline void
floor_add_avx512(float *a, float *b, size_t from, size_t to, bool streaming)
{
    if (streaming) {
        for (size_t i = from; i < to; i += 16) {
            __m512 sum = _mm512_add_ps(_mm512_load_ps(a + i), _mm512_load_ps(b + i));
            _mm512_stream_ps(a + i, sum);
            _mm512_stream_ps(b + i, sum);
        }
        _mm_sfence();
        return;
    }
    for (size_t i = from; i < to; i += 16) {
        __m512 sum = _mm512_add_ps(_mm512_load_ps(a + i), _mm512_load_ps(b + i));
        _mm512_store_ps(a + i, sum);
        _mm512_store_ps(b + i, sum);
    }
}

__attribute__((target("avx2"))) static inline void floor_add_avx2(float *a, float *b, size_t from,
                                                                  size_t to, bool streaming)
{
    if (streaming) {
        for (size_t i = from; i < to; i += 8) {
            __m256 sum = _mm256_add_ps(_mm256_load_ps(a + i), _mm256_load_ps(b + i));
            _mm256_stream_ps(a + i, sum);
            _mm256_stream_ps(b + i, sum);
        }
        _mm_sfence();
        return;
    }
    for (size_t i = from; i < to; i += 8) {
        __m256 sum = _mm256_add_ps(_mm256_load_ps(a + i), _mm256_load_ps(b + i));
        _mm256_store_ps(a + i, sum);
        _mm256_store_ps(b + i, sum);
    }
}
#endif

/* `from` and `to` at multiples of 64 bytes, the vectors too. */
static inline void floor_add(float *a, float *b, size_t from, size_t to, bool streaming)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        floor_add_avx512(a, b, from, to, streaming);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        floor_add_avx2(a, b, from, to, streaming);
        return;
    }
#endif
    (void)streaming;
    floor_add_plain(a, b, from, to);
}

static inline void floor_eager(floor_rank *self, size_t count)
{
    float *own = self->vectors[self->rank];
    uint64_t flag = ++self->flag;
    floor_line *mine = &self->area->lines[self->rank][flag % 2];
    const floor_line *theirs = &self->area->lines[1 - self->rank][flag % 2];
    memcpy(mine->payload, own, count * sizeof *own);
    atomic_store_explicit(&mine->flag, flag, memory_order_release);
    while (atomic_load_explicit(&theirs->flag, memory_order_acquire) < flag) {
    }
    for (size_t i = 0; i < count; i++) {
        own[i] += theirs->payload[i];
    }
}

static inline void floor_all_reduce(floor_rank *self, size_t bytes, bool streaming)
{
    size_t count = bytes / sizeof(float);
    if (bytes <= FLOOR_EAGER_BYTES) {
        floor_eager(self, count);
        return;
    }
    /* Whole lines for each; what is behind the last one is rank 1's. */
    size_t step = FLOOR_LINE / sizeof(float);
    size_t whole = count / step * step;
    size_t half = whole / step / 2 * step;
    floor_exchange(self);
    if (self->rank == 0) {
        floor_add(self->vectors[0], self->vectors[1], 0, half, streaming);
    } else {
        floor_add(self->vectors[0], self->vectors[1], half, whole, streaming);
        floor_add_plain(self->vectors[0], self->vectors[1], whole, count);
    }
    floor_exchange(self);
}

#endif
