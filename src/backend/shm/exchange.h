/*
 * The common part of all collectives that only move data: exchange.c, and staged_exchange.c for the
 * parts that go through staging.
 */
#ifndef TDDP_SHM_EXCHANGE_H
#define TDDP_SHM_EXCHANGE_H

#include "backend/shm/algorithms.h"

/* The step of a rank that has finished. */
enum { TDDP_SHM_LAST_STEP = (1 << 24) - 1 };

/* This rank's view of a running operation. */
typedef struct tddp_shm_transfer {
    tddp_shm *shm;
    const tddp_op *op;
    bool uniform; /* a sender sends the same part to all its receivers */
    tddp_shm_cursor *cursor;
    int forced; /* by TDDP_SHM_ALGORITHM: 1 + tddp_shm_algorithm, or 0 */
    int rank;
    int size;
    bool single_part; /* a sender has one part, for one or all receivers */
    bool streaming;   /* more is written than fits into the cache */
    char *staging;    /* this rank's staging half */
    size_t area;      /* its bytes for each part */
} tddp_shm_transfer;

static inline tddp_buffer tddp_shm_send_part(const tddp_shm_transfer *self, int peer)
{
    return tddp_op_sends(self->op, self->rank, peer);
}

static inline tddp_buffer tddp_shm_recv_part(const tddp_shm_transfer *self, int peer)
{
    return tddp_op_receives(self->op, self->rank, peer);
}

/* The peers in rotated order: each rank starts with its successor. */
static inline int tddp_shm_peer_after(const tddp_shm_transfer *self, int distance)
{
    int peer = self->rank + distance;
    return peer < self->size ? peer : peer - self->size;
}

/* The index of a receiver's part among those of a sender. */
static inline int tddp_shm_part_index(const tddp_shm_transfer *self, int sender, int receiver)
{
    return self->single_part ? 0 : receiver < sender ? receiver : receiver - 1;
}

/* Whether a part that this rank sends, or receives from a sender, goes through staging; after
 * the sync. */
bool tddp_shm_sends_staged(const tddp_shm_transfer *self, const tddp_buffer *part);
bool tddp_shm_receives_staged(const tddp_shm_transfer *self, int sender, const tddp_buffer *part);

/* --- staged_exchange.c ----------------------------------------------------------------------- */

/* Copies the first chunks to staging, before the rank enters. */
void tddp_shm_stage_first(const tddp_shm_transfer *self);
/* The number of steps in which this rank sends or receives. */
size_t tddp_shm_count_steps(const tddp_shm_transfer *self);
/* Runs all steps, starting at the cursor. */
TDDP_NODISCARD tddp_status tddp_shm_run_staged_exchange(const tddp_shm_transfer *self);
/* Whether the rank's own part is copied to its output while it is staged. */
bool tddp_shm_copies_local_while_staging(const tddp_shm_transfer *self);

#endif
