/* A send or a receive under way: what p2p.c and offer.c share of it. */
#ifndef TDDP_SHM_POST_H
#define TDDP_SHM_POST_H

#include "backend/shm/mail.h"

struct tddp_shm_post {
    const tddp_op *op;
    int64_t deadline;
    int64_t looked; /* when it was last looked whether anything stands against waiting */
    int peer;       /* of a receive from any: once it is settled */
    /* A send's letter is in the ring; a receive has the letter that is for it. */
    _Atomic bool settled;
    tddp_shm_letter letter;
    bool begun;                /* both ends are at it */
    tddp_shm_offer *offer;     /* the letter's */
    tddp_shm_channel *channel; /* the offer's */
    uint32_t channel_block;
    uint64_t step; /* chunks that went through it */
    tddp_shm_post *next;
};

static inline size_t tddp_shm_post_bytes(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

/* --- matching.c ------------------------------------------------------------------------------ */

/* Sends what found no room so far, and matches what has come: for all requests. */
TDDP_NODISCARD tddp_status tddp_shm_posts_bring_on(tddp_shm *shm);
/* A letter that is written goes out, now or when there is room. */
void tddp_shm_posts_add_send(tddp_shm *shm, tddp_shm_post *self);
/* It gets the first message that was kept and fits, or waits for one. */
void tddp_shm_posts_add_receive(tddp_shm *shm, tddp_shm_post *self);
/* It waits no longer, whether it is settled or not. */
void tddp_shm_posts_remove(tddp_shm *shm, const tddp_shm_post *self);

/* Of this rank's blocks: 0 if there is none. */
uint32_t tddp_shm_posts_take_parcel(tddp_shm *shm, size_t bytes);
uint32_t tddp_shm_posts_take_block(tddp_shm *shm, tddp_shm_block_kind kind);
void tddp_shm_posts_free_block(tddp_shm *shm, tddp_shm_block_kind kind, uint32_t block);

/* Whether nobody who sends to a peer has looked at it for a while; the caller does then. */
bool tddp_shm_posts_time_to_look(tddp_shm *shm, int peer, int64_t now);

/* --- p2p.c ----------------------------------------------------------------------------------- */

/* Waits until something is so. Errors: TDDP_TIMEOUT, what tddp_shm_look() says. */
TDDP_NODISCARD tddp_status tddp_shm_post_await(tddp_shm *shm, tddp_shm_post *self,
                                               bool (*reached)(tddp_shm *shm, tddp_shm_post *self));

/* Sets the text for a message that the one sends and the other does not expect; from either end.
 * The sender knows by its offer what is expected. Returns TDDP_MISMATCH. */
tddp_status tddp_shm_post_disagree(const tddp_shm *shm, const tddp_shm_post *self, int sender,
                                   int receiver);

/* --- offer.c --------------------------------------------------------------------------------- */

/* Brings an offered message over: the sender's part, and the receiver's. */
TDDP_NODISCARD tddp_status tddp_shm_offer_serve(tddp_shm *shm, tddp_shm_post *self);
TDDP_NODISCARD tddp_status tddp_shm_offer_accept(tddp_shm *shm, tddp_shm_post *self);
/* The receiver does not want it. */
void tddp_shm_offer_refuse(tddp_shm *shm, tddp_shm_post *self);

#endif
