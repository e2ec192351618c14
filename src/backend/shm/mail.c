/*
 * The mail regions: rings of letters, blocks for payload, bells. Entered by all threads that post
 * and finish messages; what only the owner of a region may do it does with its lock held.
 *
 * Invariant: a letter is written by its sender alone until its turn is published, and read by its
 * receiver alone until it is counted as taken; a block belongs to its region's owner, but for a
 * parcel between its letter's turn and its return. Nobody waits here for anybody but in
 * bell_wait(), whose sleep has an end: a rank that dies in the middle leaves nothing locked.
 */
#include "backend/shm/mail.h"

#include <string.h>

enum { LINE = 64, PAGE = 4096, PARCEL_KINDS = 3, KIND_SHIFT = 24, SPINS_PER_LOOK = 64 };

typedef struct ring {
    _Atomic uint32_t taken;   /* the receiver's: so many letters, ever */
    _Atomic uint32_t crowded; /* the sender's: it waits for room */
    char unused[LINE - 8];
    tddp_shm_letter letters[TDDP_SHM_LETTERS];
} ring;

/* Of each region, before the rings to all ranks and the blocks. */
typedef struct head {
    _Atomic uint32_t bell;
    _Atomic uint32_t sleepers;
    char unused[LINE - 8];
    _Atomic uint32_t returned[PARCEL_KINDS]; /* chains of parcels that came back */
    char unused_too[LINE - 4 * PARCEL_KINDS];
} head;

/* Before a parcel's payload. */
typedef struct parcel {
    _Atomic uint32_t next;
    char unused[LINE - 4];
} parcel;

_Static_assert(sizeof(tddp_shm_letter) == LINE, "a letter fills a cache line");
_Static_assert(sizeof(tddp_shm_offer) == LINE, "an offer fills a cache line");
_Static_assert(sizeof(head) == (size_t)2 * LINE, "the head is laid out by lines");
_Static_assert(sizeof(parcel) == LINE, "payload begins on a line");

typedef struct block_size {
    size_t bytes; /* with what stands before the payload */
    uint32_t count;
} block_size;

/* There are more offers than a process can have threads that wait for them. */
static const block_size sizes[TDDP_SHM_BLOCK_KINDS] = {
    [TDDP_SHM_PARCEL_SMALL] = {sizeof(parcel) + 1024, 1024},
    [TDDP_SHM_PARCEL_MIDDLE] = {sizeof(parcel) + 8192, 512},
    [TDDP_SHM_PARCEL_LARGE] = {sizeof(parcel) + TDDP_SHM_EAGER_BYTES, 256},
    [TDDP_SHM_OFFERS] = {sizeof(tddp_shm_offer), 65536},
    [TDDP_SHM_CHANNELS] = {sizeof(tddp_shm_channel), 8},
};

static size_t rings_bytes(int size)
{
    return ((size_t)size * sizeof(ring) + PAGE - 1) / PAGE * PAGE;
}

/* Where the blocks of a kind begin; of the last kind and one, where the region ends. */
static size_t blocks_at(int size, int kind)
{
    size_t at = PAGE + rings_bytes(size);
    for (int i = 0; i < kind; i++) {
        at += (sizes[i].bytes * sizes[i].count + PAGE - 1) / PAGE * PAGE;
    }
    return at;
}

size_t tddp_shm_mail_bytes(int size)
{
    return blocks_at(size, TDDP_SHM_BLOCK_KINDS);
}

static head *head_of(const tddp_shm *shm, int rank)
{
    return tddp_shm_mail(shm, rank);
}

static ring *ring_between(const tddp_shm *shm, int from, int to)
{
    return (ring *)(void *)((char *)tddp_shm_mail(shm, from) + PAGE) + to;
}

/* --- blocks ---------------------------------------------------------------------------------- */

static void *block_at(const tddp_shm *shm, int owner, tddp_shm_block_kind kind, uint32_t block)
{
    return (char *)tddp_shm_mail(shm, owner) + blocks_at(tddp_shm_size(shm), (int)kind) +
           (block - 1) * sizes[kind].bytes;
}

static _Atomic uint32_t *link_of(const tddp_shm *shm, int owner, tddp_shm_block_kind kind,
                                 uint32_t block)
{
    void *it = block_at(shm, owner, kind, block);
    return kind == TDDP_SHM_OFFERS     ? &((tddp_shm_offer *)it)->next
           : kind == TDDP_SHM_CHANNELS ? &((tddp_shm_channel *)it)->next
                                       : &((parcel *)it)->next;
}

uint32_t tddp_shm_block_take(tddp_shm *shm, tddp_shm_stock *stock, tddp_shm_block_kind kind)
{
    int rank = tddp_shm_rank(shm);
    if (!stock->free[kind] && kind < TDDP_SHM_OFFERS) {
        stock->free[kind] =
            atomic_exchange_explicit(&head_of(shm, rank)->returned[kind], 0, memory_order_acquire);
    }
    uint32_t block = stock->free[kind];
    if (block) {
        stock->free[kind] =
            atomic_load_explicit(link_of(shm, rank, kind, block), memory_order_relaxed);
        return block;
    }
    return stock->used[kind] < sizes[kind].count ? ++stock->used[kind] : 0;
}

void tddp_shm_block_free(tddp_shm *shm, tddp_shm_stock *stock, tddp_shm_block_kind kind,
                         uint32_t block)
{
    atomic_store_explicit(link_of(shm, tddp_shm_rank(shm), kind, block), stock->free[kind],
                          memory_order_relaxed);
    stock->free[kind] = block;
}

tddp_shm_offer *tddp_shm_offer_at(const tddp_shm *shm, int owner, uint32_t block)
{
    return block_at(shm, owner, TDDP_SHM_OFFERS, block);
}

tddp_shm_channel *tddp_shm_channel_at(const tddp_shm *shm, int owner, uint32_t block)
{
    return block_at(shm, owner, TDDP_SHM_CHANNELS, block);
}

/* --- parcels: block numbers with their kind above them --------------------------------------- */

static tddp_shm_block_kind kind_of(uint32_t number)
{
    return (tddp_shm_block_kind)(number >> KIND_SHIFT);
}

static uint32_t block_of(uint32_t number)
{
    return number & ((1u << KIND_SHIFT) - 1);
}

uint32_t tddp_shm_parcel_take(tddp_shm *shm, tddp_shm_stock *stock, size_t bytes)
{
    for (uint32_t kind = 0; kind < PARCEL_KINDS; kind++) {
        if (bytes <= sizes[kind].bytes - sizeof(parcel)) {
            uint32_t block = tddp_shm_block_take(shm, stock, (tddp_shm_block_kind)kind);
            if (block) {
                return kind << KIND_SHIFT | block;
            }
        }
    }
    return 0;
}

void *tddp_shm_parcel_data(const tddp_shm *shm, int owner, uint32_t number)
{
    parcel *it = block_at(shm, owner, kind_of(number), block_of(number));
    return it + 1;
}

/* Only its owner takes from the chain, and all at once: a block that was seen at its head cannot
 * have gone and come back meanwhile with another behind it. */
void tddp_shm_parcel_return(tddp_shm *shm, int owner, uint32_t number)
{
    _Atomic uint32_t *chain = &head_of(shm, owner)->returned[kind_of(number)];
    _Atomic uint32_t *link = link_of(shm, owner, kind_of(number), block_of(number));
    uint32_t first = atomic_load_explicit(chain, memory_order_relaxed);
    do {
        atomic_store_explicit(link, first, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak_explicit(chain, &first, block_of(number),
                                                    memory_order_release, memory_order_relaxed));
}

/* --- letters --------------------------------------------------------------------------------- */

static bool has_room(const ring *it, uint32_t number)
{
    return number - atomic_load(&it->taken) < TDDP_SHM_LETTERS;
}

bool tddp_shm_letter_put(tddp_shm *shm, int to, uint32_t number, const tddp_shm_letter *letter)
{
    ring *it = ring_between(shm, tddp_shm_rank(shm), to);
    if (!has_room(it, number)) {
        /* The receiver looks at this after it has made room. */
        atomic_store(&it->crowded, 1);
        if (!has_room(it, number)) {
            return false;
        }
    }
    tddp_shm_letter *place = &it->letters[number % TDDP_SHM_LETTERS];
    size_t turn_bytes = offsetof(tddp_shm_letter, tag);
    memcpy((char *)place + turn_bytes, (const char *)letter + turn_bytes,
           sizeof *place - turn_bytes);
    atomic_store_explicit(&place->turn, number + 1, memory_order_release);
    return true;
}

bool tddp_shm_letter_get(tddp_shm *shm, int from, uint32_t number, tddp_shm_letter *letter)
{
    ring *it = ring_between(shm, from, tddp_shm_rank(shm));
    tddp_shm_letter *place = &it->letters[number % TDDP_SHM_LETTERS];
    if (atomic_load_explicit(&place->turn, memory_order_acquire) != number + 1) {
        return false;
    }
    size_t turn_bytes = offsetof(tddp_shm_letter, tag);
    memcpy((char *)letter + turn_bytes, (const char *)place + turn_bytes,
           sizeof *place - turn_bytes);
    atomic_store(&it->taken, number + 1);
    if (atomic_load(&it->crowded)) {
        atomic_store(&it->crowded, 0);
        tddp_shm_bell_ring(shm, from);
    }
    return true;
}

/* --- bells ----------------------------------------------------------------------------------- */

uint32_t tddp_shm_bell(const tddp_shm *shm)
{
    return atomic_load(&head_of(shm, tddp_shm_rank(shm))->bell);
}

void tddp_shm_bell_ring(tddp_shm *shm, int rank)
{
    head *it = head_of(shm, rank);
    atomic_fetch_add(&it->bell, 1);
    if (atomic_load(&it->sleepers) > 0) {
        tddp_shm_wake(&it->bell);
    }
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void tddp_shm_bell_wait(tddp_shm *shm, uint32_t seen, int64_t spin_ns, int64_t sleep_ns)
{
    head *it = head_of(shm, tddp_shm_rank(shm));
    int64_t end = tddp_now_ns() + spin_ns;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (atomic_load(&it->bell) != seen) {
                return;
            }
            relax();
        }
    } while (tddp_now_ns() < end);
    atomic_fetch_add(&it->sleepers, 1);
    if (atomic_load(&it->bell) == seen && sleep_ns > 0) {
        tddp_shm_sleep(&it->bell, seen, sleep_ns);
    }
    atomic_fetch_sub(&it->sleepers, 1);
}
