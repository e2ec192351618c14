/* What all collectives that only move data have in common: exchange.c, and chunks.c for what goes
 * through staging. */
#ifndef TDDP_SHM_EXCHANGE_H
#define TDDP_SHM_EXCHANGE_H

#include "backend/shm/choose.h"

/* Which buffer `rank`, that asks, has for a peer or for itself, and where it wants the peer's:
 * empty where nothing travels. */
typedef struct tddp_shm_pattern {
    tddp_buffer (*given)(const tddp_op *op, int rank, int peer);
    tddp_buffer (*wanted)(const tddp_op *op, int rank, int peer);
    bool whole;   /* all who get something from a rank get the same */
    bool spreads; /* every rank wants what the root gives, and nothing else */
} tddp_shm_pattern;

/* Carries out an operation. Both ends of a piece agree on its size when tddp_shm_meet() says so. */
TDDP_NODISCARD tddp_status tddp_shm_exchange(tddp_shm *shm, const tddp_op *op,
                                             const tddp_shm_pattern *pattern);

/* What is given or wanted where nothing is. */
static inline tddp_buffer tddp_shm_nothing(const tddp_op *op)
{
    tddp_buffer none = op->input;
    none.data = NULL;
    none.count = 0;
    return none;
}

/* The step of those who have done. */
enum { TDDP_SHM_LAST_STEP = (1 << 24) - 1 };

/* An operation that is carried out, as this rank sees it. */
typedef struct tddp_shm_moves {
    tddp_shm *shm;
    const tddp_op *op;
    const tddp_shm_pattern *pattern;
    tddp_shm_course *course;
    int forced; /* what was asked for: 1 + tddp_shm_algorithm, or 0 */
    int rank;
    int size;
    bool alone;     /* a giver has one piece, for one or all */
    bool streaming; /* too much is written for the cache */
    char *half;     /* the own one of staging */
    size_t area;    /* of it, for each piece, in bytes */
} tddp_shm_moves;

static inline size_t tddp_shm_bytes_of(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

static inline tddp_buffer tddp_shm_given_to(const tddp_shm_moves *self, int peer)
{
    return self->pattern->given(self->op, self->rank, peer);
}

static inline tddp_buffer tddp_shm_wanted_from(const tddp_shm_moves *self, int peer)
{
    return self->pattern->wanted(self->op, self->rank, peer);
}

/* The others in turn, each rank beginning with the one behind it. */
static inline int tddp_shm_peer_after(const tddp_shm_moves *self, int distance)
{
    int peer = self->rank + distance;
    return peer < self->size ? peer : peer - self->size;
}

/* Which of a giver's pieces a taker's is. */
static inline int tddp_shm_piece_index(const tddp_shm_moves *self, int giver, int taker)
{
    return self->alone ? 0 : taker < giver ? taker : taker - 1;
}

/* Whether a piece that this rank gives goes through its staging, and one that it gets through a
 * giver's: known when all have entered. */
bool tddp_shm_gives_staged(const tddp_shm_moves *self, const tddp_buffer *piece);
bool tddp_shm_gets_staged(const tddp_shm_moves *self, int giver, const tddp_buffer *piece);

/* --- chunks.c -------------------------------------------------------------------------------- */

/* Copies the first chunks into staging, before the rank enters. */
void tddp_shm_stage_first(const tddp_shm_moves *self);
/* In how many steps this rank has a part. */
size_t tddp_shm_count_steps(const tddp_shm_moves *self);
/* All the steps, from where the course is. */
TDDP_NODISCARD tddp_status tddp_shm_move_chunks(const tddp_shm_moves *self);
/* Whether the own piece is copied to its place as it is staged. */
bool tddp_shm_stages_own(const tddp_shm_moves *self);

#endif
