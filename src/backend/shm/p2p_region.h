/*
 * The point-to-point region of a rank's segment: rings of message headers and payload blocks;
 * p2p_region.c. Each pair of ranks has a ring for each direction, in order. Small payload is in the
 * header; larger payload is copied to an eager buffer of the sender (eager protocol);
 * large payload is announced, and moved when the receiver is ready (rendezvous protocol).
 *
 * A region stays mapped as long as anyone uses it, so messages can be read after their sender has
 * left.
 */
#ifndef TDDP_SHM_P2P_REGION_H
#define TDDP_SHM_P2P_REGION_H

#include "backend/shm/shm.h"

enum {
    TDDP_SHM_RING_ENTRIES = 256,  /* messages in flight from one rank to another */
    TDDP_SHM_INLINE_BYTES = 40,   /* of payload in a header */
    TDDP_SHM_EAGER_BYTES = 65536, /* largest payload that is sent before the receiver asks for it */
    TDDP_SHM_CHANNEL_CHUNK = 65536,
    TDDP_SHM_CHANNEL_DEPTH = 4,
};

typedef enum tddp_shm_protocol {
    TDDP_SHM_PROTOCOL_INLINE, /* the payload is in the header */
    TDDP_SHM_PROTOCOL_EAGER,  /* in an eager buffer */
    TDDP_SHM_PROTOCOL_RNDV,   /* at the sender */
    TDDP_SHM_PROTOCOL_FOREIGN /* elsewhere: `data` has a pointer that is not shared memory's */
} tddp_shm_protocol;

typedef struct tddp_shm_header {
    _Atomic uint32_t sequence; /* 1 + the header's number in the ring, once it is published */
    uint32_t tag;
    uint64_t count;
    uint16_t dtype;
    uint16_t protocol;
    uint32_t block; /* an eager buffer or a rendezvous block */
    unsigned char data[TDDP_SHM_INLINE_BYTES];
} tddp_shm_header;

enum {
    TDDP_SHM_RNDV_RTS = 1,
    TDDP_SHM_RNDV_COPYING,   /* the receiver copies from the sender's segment */
    TDDP_SHM_RNDV_CTS,       /* clear to send: the receiver wants chunks */
    TDDP_SHM_RNDV_STREAMING, /* the sender writes chunks to `channel` */
    TDDP_SHM_RNDV_COMPLETE,  /* the receiver has everything */
    TDDP_SHM_RNDV_REJECTED,  /* the receiver expects something else */
    TDDP_SHM_RNDV_CANCELED   /* by either side */
};

/* The state of a large message, shared by both sides. TDDP_SHM_RNDV_RTS: ready to send. */
typedef struct tddp_shm_rndv {
    _Atomic uint32_t next; /* free block */
    _Atomic uint32_t state;
    uint64_t offset;  /* of the payload in the sender's segment, or TDDP_SHM_NOT_SHARED */
    uint64_t count;   /* rejected: the elements that the receiver expected */
    uint32_t dtype;   /* rejected: their dtype */
    uint32_t channel; /* block of the channel, if the payload isn't shared; 0: not yet */
    char unused[32];
} tddp_shm_rndv;

/* A pipelined copy buffer for messages that aren't in the sender's segment. */
typedef struct tddp_shm_channel {
    _Atomic uint32_t next;     /* free block */
    _Atomic uint64_t produced; /* chunks so far */
    char unused[48];
    _Atomic uint64_t consumed;
    char unused_too[56];
    char chunks[TDDP_SHM_CHANNEL_DEPTH][TDDP_SHM_CHANNEL_CHUNK];
} tddp_shm_channel;

/* Blocks of fixed size, each beginning with the number of the next free one. Eager buffers have
 * their payload on the next cache line. */
typedef enum tddp_shm_block_kind {
    TDDP_SHM_EAGER_SMALL,
    TDDP_SHM_EAGER_MEDIUM,
    TDDP_SHM_EAGER_LARGE,
    TDDP_SHM_RNDV_BLOCKS,
    TDDP_SHM_CHANNEL_BLOCKS,
    TDDP_SHM_BLOCK_KINDS
} tddp_shm_block_kind;

/* The owner's block allocator; used with its lock held. */
typedef struct tddp_shm_block_pool {
    uint32_t free[TDDP_SHM_BLOCK_KINDS]; /* head of the free list; 0: empty */
    uint32_t used[TDDP_SHM_BLOCK_KINDS]; /* blocks handed out for the first time */
} tddp_shm_block_pool;

/* The kind of eager buffers for so many bytes. */
tddp_shm_block_kind tddp_shm_eager_kind(size_t bytes);
/* Returns a block, kind and number in one; 0 if there is none left. If there is no small eager
 * buffer, it may be a larger one. */
uint32_t tddp_shm_block_alloc(tddp_shm *shm, tddp_shm_block_pool *pool, tddp_shm_block_kind kind);
/* Returns the block to its owner. Any rank and thread. */
void tddp_shm_block_free(tddp_shm *shm, int owner, uint32_t block);
void *tddp_shm_eager_data(const tddp_shm *shm, int owner, uint32_t block);
tddp_shm_rndv *tddp_shm_rndv_at(const tddp_shm *shm, int owner, uint32_t block);
tddp_shm_channel *tddp_shm_channel_at(const tddp_shm *shm, int owner, uint32_t block);

/* Puts header `number`, from 0, into the ring to a rank. False: the ring is full; the receiver
 * will count an event here when it has space. */
bool tddp_shm_ring_put(tddp_shm *shm, int to, uint32_t number, const tddp_shm_header *header);
/* Takes header `number` from the ring of `from` to this rank; false if it hasn't arrived. */
bool tddp_shm_ring_get(tddp_shm *shm, int from, uint32_t number, tddp_shm_header *header);

#endif
