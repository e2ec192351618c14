/*
 * The common part of reductions: factors, and combining the data of peers. Appends steps; on the
 * thread that runs the operation.
 *
 * Invariant: a rank combines in an order that does not depend on when data arrive.
 */
#include "backend/coll/coll.h"

/* Where a chunk is received while earlier ones are combined. */
#define RING_BYTES (WINDOW * CHUNK_BYTES)

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

double tddp_coll_factor_before(const tddp_coll *coll, const tddp_op *op)
{
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        return op->premul;
    }
    return op->reduce == TDDP_REDUCE_AVG && is_half(op->input.dtype) ? 1.0 / coll->size : 1.0;
}

double tddp_coll_factor_after(const tddp_coll *coll, const tddp_op *op)
{
    return op->reduce == TDDP_REDUCE_AVG && !is_half(op->input.dtype) ? 1.0 / coll->size : 1.0;
}

/* Applies the factor that a rank's data still need. */
static void scale_data_of(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part, int rank,
                          char *data, size_t bytes)
{
    if (part->scaled) {
        return;
    }
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM && rank != coll->rank) {
        tddp_coll_scale_peer(coll, rank, data, bytes);
    } else {
        tddp_coll_scale(coll, data, bytes, tddp_coll_factor_before(coll, op));
    }
}

void tddp_coll_combine_headers(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part)
{
    /* This rank's data are needed when those of lower ranks have taken their place. */
    char *mine = coll->rank == 0 ? part->into : part->incoming;
    tddp_coll_copy(coll, mine, part->local, part->bytes);
    for (int rank = 0; rank < coll->size; rank++) {
        char *data = rank == coll->rank ? mine : tddp_coll_payload(coll, rank);
        const double after = rank == coll->size - 1 ? tddp_coll_factor_after(coll, op) : 1.0;
        scale_data_of(coll, op, part, rank, data, part->bytes);
        if (rank == 0) {
            tddp_coll_copy(coll, part->into, data, part->bytes);
        } else {
            tddp_coll_combine(coll, part->into, data, part->bytes, after);
        }
    }
}

/* --- large data ------------------------------------------------------------------------------ */

size_t tddp_coll_window_bytes(const tddp_coll *coll, size_t bytes)
{
    return tddp_coll_min(RING_BYTES, bytes) * (size_t)coll->size;
}

/* Where a peer's chunk is received. */
static char *slot_of(const tddp_coll_part *part, int peer, size_t at)
{
    return part->incoming + tddp_coll_min(RING_BYTES, part->bytes) * (size_t)peer + at % RING_BYTES;
}

static void post_chunk(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part, int peer,
                       size_t at)
{
    if (at < part->bytes) {
        coll->links[peer].posted[at / CHUNK_BYTES % WINDOW] =
            tddp_coll_recv(coll, op, peer, TO_OWNER, slot_of(part, peer, at),
                           tddp_coll_min(CHUNK_BYTES, part->bytes - at));
    }
}

static void combine_chunk(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part, size_t at,
                          size_t bytes)
{
    int left = coll->size - 1;
    tddp_coll_copy(coll, part->into + at, part->local + at, bytes);
    scale_data_of(coll, op, part, coll->rank, part->into + at, bytes);
    EACH_PEER(coll, peer)
    {
        char *data = slot_of(part, peer, at);
        const double after = --left == 0 ? tddp_coll_factor_after(coll, op) : 1.0;
        tddp_coll_await_step(coll, peer, coll->links[peer].posted[at / CHUNK_BYTES % WINDOW]);
        scale_data_of(coll, op, part, peer, data, bytes);
        tddp_coll_combine(coll, part->into + at, data, bytes, after);
        post_chunk(coll, op, part, peer, at + RING_BYTES);
    }
}

void tddp_coll_combine_part(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part, int to)
{
    EACH_PEER(coll, peer)
    {
        EACH_CHUNK(tddp_coll_min(RING_BYTES, part->bytes), at)
        {
            post_chunk(coll, op, part, peer, at);
        }
    }
    tddp_coll_recv_headers(coll);
    EACH_CHUNK(part->bytes, at)
    {
        const size_t bytes = tddp_coll_min(CHUNK_BYTES, part->bytes - at);
        combine_chunk(coll, op, part, at, bytes);
        EACH_PEER(coll, peer)
        {
            if (to == TO_ALL || to == peer) {
                (void)tddp_coll_send(coll, op, peer, FROM_OWNER, part->into + at, bytes);
            }
        }
    }
}
