/*
 * What a rank's mail region holds, and what is done with it; mail.c. Letters go to each other rank
 * in a ring of their own, in order. Payload that does not fit into a letter is in a parcel of the
 * sender's, or, if it is large, is offered: the letter names an offer by which both ends agree.
 *
 * The region is not given back while anybody has it mapped, so what was sent can be read when the
 * sender has left.
 */
#ifndef TDDP_SHM_MAIL_H
#define TDDP_SHM_MAIL_H

#include "backend/shm/shm.h"

enum {
    TDDP_SHM_LETTERS = 256,       /* under way between two ranks */
    TDDP_SHM_LETTER_BYTES = 40,   /* of payload in a letter itself */
    TDDP_SHM_EAGER_BYTES = 65536, /* that are sent before anybody asks for them */
    TDDP_SHM_CHANNEL_CHUNK = 65536,
    TDDP_SHM_CHANNEL_DEPTH = 4,
};

typedef enum tddp_shm_letter_way {
    TDDP_SHM_ENCLOSED, /* the payload is in the letter */
    TDDP_SHM_PARCEL,   /* in a parcel */
    TDDP_SHM_OFFER     /* to be had */
} tddp_shm_letter_way;

typedef struct tddp_shm_letter {
    _Atomic uint32_t turn; /* 1 + its number among those of the ring, when it is there */
    uint32_t tag;
    uint64_t count;
    uint16_t dtype;
    uint16_t way;
    uint32_t block; /* of a parcel or an offer */
    unsigned char data[TDDP_SHM_LETTER_BYTES];
} tddp_shm_letter;

enum {
    TDDP_SHM_OFFERED = 1,
    TDDP_SHM_COPIED,   /* the receiver copies it from where it lies */
    TDDP_SHM_ASKED,    /* the receiver wants it in chunks */
    TDDP_SHM_FLOWING,  /* it gets it, through `channel` */
    TDDP_SHM_ACCEPTED, /* the receiver has it all */
    TDDP_SHM_REFUSED,  /* it expects something else */
    TDDP_SHM_WITHDRAWN /* one of both has given up */
};

/* A large message that is to be had. */
typedef struct tddp_shm_offer {
    _Atomic uint32_t state;
    _Atomic uint32_t next;
    uint64_t where;   /* it lies in the sender's segment; NOWHERE: it must be asked for */
    uint64_t count;   /* that a receiver expected who refused, */
    uint32_t dtype;   /* of this dtype */
    uint32_t channel; /* block */
    char unused[32];
} tddp_shm_offer;

/* Through which a message flows. */
typedef struct tddp_shm_channel {
    _Atomic uint64_t filled; /* chunks */
    _Atomic uint32_t next;
    char unused[52];
    _Atomic uint64_t emptied;
    char unused_too[56];
    char chunks[TDDP_SHM_CHANNEL_DEPTH][TDDP_SHM_CHANNEL_CHUNK];
} tddp_shm_channel;

/* Blocks of one size. Those that are free are kept by their owner, in its own memory. */
typedef enum tddp_shm_block_kind {
    TDDP_SHM_PARCEL_SMALL,
    TDDP_SHM_PARCEL_MIDDLE,
    TDDP_SHM_PARCEL_LARGE,
    TDDP_SHM_OFFERS,
    TDDP_SHM_CHANNELS,
    TDDP_SHM_BLOCK_KINDS
} tddp_shm_block_kind;

/* The owner's books of its blocks; with its lock held. */
typedef struct tddp_shm_stock {
    uint32_t free[TDDP_SHM_BLOCK_KINDS]; /* first of a chain, 0 at its end */
    uint32_t used[TDDP_SHM_BLOCK_KINDS]; /* so many from the first on were taken before */
} tddp_shm_stock;

/* A block's number, from 1, among those of its kind; 0 if there is none left. Parcels may be large
 * enough by their kind. */
uint32_t tddp_shm_block_take(tddp_shm *shm, tddp_shm_stock *stock, tddp_shm_block_kind kind);
void tddp_shm_block_free(tddp_shm *shm, tddp_shm_stock *stock, tddp_shm_block_kind kind,
                         uint32_t block);
/* A parcel for so many bytes: kind and number in one. */
uint32_t tddp_shm_parcel_take(tddp_shm *shm, tddp_shm_stock *stock, size_t bytes);
void *tddp_shm_parcel_data(const tddp_shm *shm, int owner, uint32_t parcel);
/* By the receiver: the owner may have it again. Any thread. */
void tddp_shm_parcel_return(tddp_shm *shm, int owner, uint32_t parcel);
tddp_shm_offer *tddp_shm_offer_at(const tddp_shm *shm, int owner, uint32_t block);
tddp_shm_channel *tddp_shm_channel_at(const tddp_shm *shm, int owner, uint32_t block);

/* Puts letter `number`, from 0, into the ring to a rank. False: the ring is full; the receiver will
 * ring the bell when it no longer is. */
bool tddp_shm_letter_put(tddp_shm *shm, int to, uint32_t number, const tddp_shm_letter *letter);
/* Takes it out of the ring that a rank has for this one; false if it is not there. */
bool tddp_shm_letter_get(tddp_shm *shm, int from, uint32_t number, tddp_shm_letter *letter);

/* A rank's bell is rung when something has changed that its threads may wait for. */
uint32_t tddp_shm_bell(const tddp_shm *shm);
void tddp_shm_bell_ring(tddp_shm *shm, int rank);
/* Waits until the own one is no more what it was `seen` to be: spins for so long, then sleeps, at
 * most so long; may return for no reason. */
void tddp_shm_bell_wait(tddp_shm *shm, uint32_t seen, int64_t spin_ns, int64_t sleep_ns);

#endif
