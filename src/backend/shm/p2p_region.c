/*
 * The point-to-point regions of the segments: rings of message headers, blocks for payload. Used by
 * all threads that post and finish requests; the owner's block pool is used with the owner's lock
 * held.
 *
 * Invariants: only the sender writes a ring entry until its sequence is published, and only the
 * receiver reads it until it is counted as consumed. A block belongs to the region's owner, except
 * an eager buffer between its header's publication and its return. Nothing here waits for a peer: a
 * rank that dies leaves nothing locked.
 */
#include "backend/shm/p2p_region.h"

#include <string.h>

enum { LINE = 64, PAGE = 4096, KIND_SHIFT = 24 };

typedef struct ring {
    _Atomic uint32_t consumed;     /* by the receiver: headers so far */
    _Atomic uint32_t sender_waits; /* by the sender: the ring is full */
    char unused[LINE - 8];
    tddp_shm_header entries[TDDP_SHM_RING_ENTRIES];
} ring;

/* At the start of each region, before the rings to all ranks and the blocks. */
typedef struct region_header {
    _Atomic uint32_t returned[TDDP_SHM_BLOCK_KINDS]; /* lists of blocks that were freed */
    char unused[LINE - 4 * TDDP_SHM_BLOCK_KINDS];
} region_header;

/* Before an eager buffer's payload. */
typedef struct eager_buffer {
    _Atomic uint32_t next;
    char unused[LINE - 4];
} eager_buffer;

_Static_assert(sizeof(tddp_shm_header) == LINE, "a header fills a cache line");
_Static_assert(sizeof(tddp_shm_rndv) == LINE, "a rendezvous fills a cache line");
_Static_assert(sizeof(region_header) == LINE, "a region header fills a cache line");
_Static_assert(sizeof(eager_buffer) == LINE, "payload begins on a line");

typedef struct block_size {
    size_t bytes; /* including the block's header */
    uint32_t count;
} block_size;

/* More rendezvous blocks than a process can have threads that wait for them. */
static const block_size sizes[TDDP_SHM_BLOCK_KINDS] = {
    [TDDP_SHM_EAGER_SMALL] = {sizeof(eager_buffer) + 1024, 1024},
    [TDDP_SHM_EAGER_MEDIUM] = {sizeof(eager_buffer) + 8192, 512},
    [TDDP_SHM_EAGER_LARGE] = {sizeof(eager_buffer) + TDDP_SHM_EAGER_BYTES, 256},
    [TDDP_SHM_RNDV_BLOCKS] = {sizeof(tddp_shm_rndv), 65536},
    [TDDP_SHM_CHANNEL_BLOCKS] = {sizeof(tddp_shm_channel), 8},
};

static size_t rings_bytes(int size)
{
    return ((size_t)size * sizeof(ring) + PAGE - 1) / PAGE * PAGE;
}

/* The offset of the blocks of a kind; for TDDP_SHM_BLOCK_KINDS that of the region's end. */
static size_t blocks_offset(int size, int kind)
{
    size_t at = PAGE + rings_bytes(size);
    for (int i = 0; i < kind; i++) {
        at += (sizes[i].bytes * sizes[i].count + PAGE - 1) / PAGE * PAGE;
    }
    return at;
}

size_t tddp_shm_p2p_region_bytes(int size)
{
    return blocks_offset(size, TDDP_SHM_BLOCK_KINDS);
}

static region_header *region_header_of(const tddp_shm *shm, int rank)
{
    return tddp_shm_p2p_region(shm, rank);
}

static ring *ring_between(const tddp_shm *shm, int from, int to)
{
    return (ring *)(void *)((char *)tddp_shm_p2p_region(shm, from) + PAGE) + to;
}

/* --- blocks: numbers among those of their kind, from 1, with the kind in the upper bits ------- */

static void *block_at(const tddp_shm *shm, int owner, uint32_t block)
{
    const uint32_t kind = block >> KIND_SHIFT;
    const uint32_t number = block & ((1u << KIND_SHIFT) - 1);
    return (char *)tddp_shm_p2p_region(shm, owner) + blocks_offset(tddp_shm_size(shm), (int)kind) +
           (number - 1) * sizes[kind].bytes;
}

static uint32_t alloc(tddp_shm *shm, tddp_shm_block_pool *pool, uint32_t kind)
{
    const int rank = tddp_shm_rank(shm);
    if (!pool->free[kind]) {
        pool->free[kind] = atomic_exchange_explicit(&region_header_of(shm, rank)->returned[kind], 0,
                                                    memory_order_acquire);
    }
    const uint32_t block = pool->free[kind];
    if (block) {
        const _Atomic uint32_t *next = block_at(shm, rank, block);
        pool->free[kind] = atomic_load_explicit(next, memory_order_relaxed);
        return block;
    }
    return pool->used[kind] < sizes[kind].count ? kind << KIND_SHIFT | ++pool->used[kind] : 0;
}

tddp_shm_block_kind tddp_shm_eager_kind(size_t bytes)
{
    uint32_t kind = TDDP_SHM_EAGER_SMALL;
    while (bytes > sizes[kind].bytes - sizeof(eager_buffer)) {
        kind++;
    }
    return (tddp_shm_block_kind)kind;
}

uint32_t tddp_shm_block_alloc(tddp_shm *shm, tddp_shm_block_pool *pool, tddp_shm_block_kind kind)
{
    uint32_t larger = kind;
    uint32_t block = alloc(shm, pool, kind);
    while (!block && larger < TDDP_SHM_EAGER_LARGE) {
        block = alloc(shm, pool, ++larger);
    }
    return block;
}

/* Only the owner removes from the list, and takes all of it at once. So the list's head can't have
 * been removed and put back in between (ABA). */
void tddp_shm_block_free(tddp_shm *shm, int owner, uint32_t block)
{
    _Atomic uint32_t *list = &region_header_of(shm, owner)->returned[block >> KIND_SHIFT];
    _Atomic uint32_t *next = block_at(shm, owner, block);
    uint32_t first = atomic_load_explicit(list, memory_order_relaxed);
    do {
        atomic_store_explicit(next, first, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak_explicit(list, &first, block, memory_order_release,
                                                    memory_order_relaxed));
}

void *tddp_shm_eager_data(const tddp_shm *shm, int owner, uint32_t block)
{
    return (eager_buffer *)block_at(shm, owner, block) + 1;
}

tddp_shm_rndv *tddp_shm_rndv_at(const tddp_shm *shm, int owner, uint32_t block)
{
    return block_at(shm, owner, block);
}

tddp_shm_channel *tddp_shm_channel_at(const tddp_shm *shm, int owner, uint32_t block)
{
    return block_at(shm, owner, block);
}

/* --- rings ----------------------------------------------------------------------------------- */

static bool has_space(const ring *it, uint32_t number)
{
    return number - atomic_load(&it->consumed) < TDDP_SHM_RING_ENTRIES;
}

bool tddp_shm_ring_put(tddp_shm *shm, int to, uint32_t number, const tddp_shm_header *header)
{
    ring *it = ring_between(shm, tddp_shm_rank(shm), to);
    if (!has_space(it, number)) {
        /* The receiver checks this after it has freed an entry. */
        atomic_store(&it->sender_waits, 1);
        if (!has_space(it, number)) {
            return false;
        }
    }
    tddp_shm_header *entry = &it->entries[number % TDDP_SHM_RING_ENTRIES];
    size_t sequence_bytes = offsetof(tddp_shm_header, tag);
    memcpy((char *)entry + sequence_bytes, (const char *)header + sequence_bytes,
           sizeof *entry - sequence_bytes);
    atomic_store_explicit(&entry->sequence, number + 1, memory_order_release);
    return true;
}

bool tddp_shm_ring_get(tddp_shm *shm, int from, uint32_t number, tddp_shm_header *header)
{
    ring *it = ring_between(shm, from, tddp_shm_rank(shm));
    tddp_shm_header *entry = &it->entries[number % TDDP_SHM_RING_ENTRIES];
    if (atomic_load_explicit(&entry->sequence, memory_order_acquire) != number + 1) {
        return false;
    }
    size_t sequence_bytes = offsetof(tddp_shm_header, tag);
    memcpy((char *)header + sequence_bytes, (const char *)entry + sequence_bytes,
           sizeof *entry - sequence_bytes);
    atomic_store(&it->consumed, number + 1);
    if (atomic_load(&it->sender_waits)) {
        atomic_store(&it->sender_waits, 0);
        tddp_eventcount_notify(tddp_shm_events(shm, from));
    }
    return true;
}
