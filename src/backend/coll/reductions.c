/*
 * all_reduce, reduce and reduce_scatter. Appends steps; on the thread that runs the operation.
 *
 * They are one algorithm: each rank owns a share of the data, perhaps none. The others send it
 * their data of that share, it combines them, and sends the result to who gets it. For little data
 * every rank owns all of them: a step less. Shares of at most EAGER_BYTES go with the headers; of
 * larger ones a chunk is combined while the next arrives, directly from and to where it belongs.
 *
 * Invariants: what a rank combines, and in which order, does not depend on when data arrive, and
 * all owners of one share get the same bits. The input must not change, so the owner applies the
 * factors of the other ranks to what it has received.
 *
 * Two ranks once exchanged all data, and each combined everything. With little memory for what
 * arrives the sender had to wait for permissions, which stood behind the data of the other
 * direction: over 10 Gbit/s 64 MiB took 90 ms instead of 64, and on one machine alone a fifth
 * longer from 128 KiB to 25 MiB.
 */
#include "backend/coll/coll.h"

/* Chunks of one peer that may be in transit to the owner, and the memory for them. */
#define RING_BYTES (TDDP_COLL_WINDOW * CHUNK_BYTES)
/* Up to this size a second step of reduce costs more than it saves: three and four ranks on one
 * host. */
#define DIRECT_BYTES ((size_t)2 * 1024 * 1024)

enum { TO_ALL = -1, TO_NONE = -2 };

typedef struct plan {
    const tddp_op *op;
    int owners; /* ranks that own a part, from `first` on; 0: all own all, or as the parts of
                 * the input say */
    int first;
    int to;         /* the rank that gets the results, TO_ALL or TO_NONE */
    char *incoming; /* memory for received data */
    char *into;     /* where this rank's share is combined */
} plan;

/* The share of a rank, in this rank's memory. */
static tddp_coll_span share_of(const tddp_coll *coll, const plan *self, int rank)
{
    const tddp_op *op = self->op;
    if (op->kind == TDDP_OP_REDUCE_SCATTER) {
        const tddp_buffer *part = &op->input_parts[rank];
        return (tddp_coll_span){part->data, tddp_buffer_bytes(part)};
    }
    const int part = (rank - self->first + coll->size) % coll->size;
    if (self->owners > 0 && part >= self->owners) {
        return (tddp_coll_span){NULL, 0};
    }
    return tddp_coll_part(&op->output, self->owners > 0 ? self->owners : 1,
                          self->owners > 0 ? part : 0);
}

/* --- factors --------------------------------------------------------------------------------- */

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* The factor on this rank's data. For AVG of float16 it divides, since the sum could overflow. */
static double factor_before(const tddp_coll *coll, const tddp_op *op)
{
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        return op->premul;
    }
    return op->reduce == TDDP_REDUCE_AVG && is_half(op->input.dtype) ? 1.0 / coll->size : 1.0;
}

/* The factor on the result. */
static double factor_after(const tddp_coll *coll, const tddp_op *op)
{
    return op->reduce == TDDP_REDUCE_AVG && !is_half(op->input.dtype) ? 1.0 / coll->size : 1.0;
}

/* Applies the factor on a rank's data. */
static void scale_data_of(tddp_coll *coll, const tddp_op *op, int rank, char *data, size_t bytes)
{
    if (op->reduce == TDDP_REDUCE_PREMUL_SUM && rank != coll->rank) {
        ADD_STEP(coll, .kind = STEP_SCALE_PEER, .peer = rank, .to = data, .bytes = bytes);
    } else {
        tddp_coll_scale(coll, data, bytes, factor_before(coll, op));
    }
}

/* --- data that come with the headers --------------------------------------------------------- */

/* Whether a op b has the same bits as b op a. MIN and MAX of 0.0 and -0.0 do not. */
static bool commutes(const tddp_op *op)
{
    const bool ordered = op->reduce == TDDP_REDUCE_MIN || op->reduce == TDDP_REDUCE_MAX;
    return !ordered || op->input.dtype < TDDP_FLOAT16 || op->input.dtype == TDDP_BOOL;
}

/* In the order of ranks: this rank's data are needed when those of lower ranks have taken their
 * place. */
static void combine_headers(tddp_coll *coll, const plan *self, tddp_coll_span own)
{
    const tddp_op *op = self->op;
    const bool swaps = coll->size == 2 && commutes(op);
    const int start = swaps ? coll->rank : 0;
    char *mine = start == coll->rank ? self->into : self->incoming;
    tddp_coll_copy(coll, mine, own.data, own.bytes);
    for (int i = 0; i < coll->size; i++) {
        const int rank = (start + i) % coll->size;
        char *data = rank == coll->rank ? mine : tddp_coll_payload(coll, rank);
        const double after = i == coll->size - 1 ? factor_after(coll, op) : 1.0;
        scale_data_of(coll, op, rank, data, own.bytes);
        if (i == 0) {
            tddp_coll_copy(coll, self->into, data, own.bytes);
        } else {
            tddp_coll_combine(coll, self->into, data, own.bytes, after);
        }
    }
}

/* --- data that come in chunks ---------------------------------------------------------------- */

/* Where a peer's chunk is received. */
static char *slot_of(const tddp_coll *coll, const plan *self, int peer, size_t at, size_t bytes)
{
    const int row = peer - (peer > coll->rank);
    return self->incoming + tddp_coll_min(RING_BYTES, bytes) * (size_t)row + at % RING_BYTES;
}

static size_t *posted_at(tddp_coll *coll, int peer, size_t at)
{
    return &coll->links[peer].posted[at / CHUNK_BYTES % TDDP_COLL_WINDOW];
}

static void post_chunk(tddp_coll *coll, const plan *self, int peer, size_t at, size_t bytes)
{
    if (at < bytes) {
        *posted_at(coll, peer, at) =
            tddp_coll_recv(coll, self->op, peer, TO_OWNER, slot_of(coll, self, peer, at, bytes),
                           tddp_coll_min(CHUNK_BYTES, bytes - at));
    }
}

static void combine_chunk(tddp_coll *coll, const plan *self, tddp_coll_span own, size_t at)
{
    const tddp_op *op = self->op;
    const size_t bytes = tddp_coll_min(CHUNK_BYTES, own.bytes - at);
    int left = coll->size - 1;
    tddp_coll_copy(coll, self->into + at, own.data + at, bytes);
    scale_data_of(coll, op, coll->rank, self->into + at, bytes);
    EACH_PEER(coll, peer)
    {
        char *data = slot_of(coll, self, peer, at, own.bytes);
        const double after = --left == 0 ? factor_after(coll, op) : 1.0;
        tddp_coll_await_step(coll, peer, *posted_at(coll, peer, at));
        scale_data_of(coll, op, peer, data, bytes);
        tddp_coll_combine(coll, self->into + at, data, bytes, after);
        post_chunk(coll, self, peer, at + RING_BYTES, own.bytes);
    }
}

/* --- the algorithm --------------------------------------------------------------------------- */

/* The transfers with a peer that need no data of others. */
static void begin_with(tddp_coll *coll, const plan *self, int peer)
{
    const tddp_coll_span share = share_of(coll, self, peer);
    const bool eager = share.bytes <= EAGER_BYTES;
    tddp_coll_send_header(coll, peer, share.data, eager ? share.bytes : 0);
    EACH_CHUNK(share.bytes, at)
    {
        const size_t bytes = tddp_coll_min(CHUNK_BYTES, share.bytes - at);
        if (!eager) {
            (void)tddp_coll_send(coll, self->op, peer, TO_OWNER, share.data + at, bytes);
        }
        if (self->to == TO_ALL || self->to == coll->rank) {
            /* The peer sends this after it has received the data sent from here now. */
            (void)tddp_coll_recv(coll, self->op, peer, FROM_OWNER, share.data + at, bytes);
        }
    }
}

/* Combines this rank's share, and sends the result. */
static void combine_share(tddp_coll *coll, const plan *self, tddp_coll_span own)
{
    const bool eager = own.bytes <= EAGER_BYTES;
    EACH_PEER(coll, peer)
    {
        EACH_CHUNK(eager ? 0 : tddp_coll_min(RING_BYTES, own.bytes), at)
        {
            post_chunk(coll, self, peer, at, own.bytes);
        }
    }
    tddp_coll_recv_headers(coll);
    EACH_CHUNK(own.bytes, at)
    {
        if (eager) {
            combine_headers(coll, self, own);
        } else {
            combine_chunk(coll, self, own, at);
        }
        EACH_PEER(coll, peer)
        {
            if (self->to == TO_ALL || self->to == peer) {
                (void)tddp_coll_send(coll, self->op, peer, FROM_OWNER, self->into + at,
                                     tddp_coll_min(CHUNK_BYTES, own.bytes - at));
            }
        }
    }
}

/* `into`: where this rank's result goes; NULL: to memory of this module. */
static tddp_status reduce_shares(tddp_coll *coll, plan *self, char *into)
{
    const tddp_coll_span own = share_of(coll, self, coll->rank);
    const size_t window = tddp_coll_min(RING_BYTES, own.bytes) * (size_t)(coll->size - 1);
    const size_t aligned = (window + 63) / 64 * 64;
    char *memory = tddp_coll_scratch(coll, aligned + (into ? 0 : own.bytes));
    if (own.bytes > 0 && coll->size > 1 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->incoming = memory;
    self->into = into || own.bytes == 0 ? into : memory + aligned;
    EACH_PEER(coll, peer)
    {
        begin_with(coll, self, peer);
    }
    combine_share(coll, self, own);
    return TDDP_OK;
}

tddp_status tddp_coll_all_reduce(tddp_coll *coll, const tddp_op *op)
{
    const size_t bytes = tddp_buffer_bytes(&op->output);
    if (tddp_coll_doubles(coll, bytes)) {
        tddp_coll_scale(coll, op->output.data, bytes, factor_before(coll, op));
        tddp_coll_double(coll, op);
        tddp_coll_scale(coll, op->output.data, bytes, factor_after(coll, op));
        return TDDP_OK;
    }
    const bool small = bytes * (size_t)(coll->size - 1) <= EAGER_BYTES;
    plan self = {.op = op, .owners = small ? 0 : coll->size, .to = small ? TO_NONE : TO_ALL};
    return reduce_shares(coll, &self, share_of(coll, &self, coll->rank).data);
}

/* Where every rank owns a part, the results go to the root only: otherwise all data would have to
 * enter it. With two ranks, and with less data, the root combines everything. The other ranks'
 * buffers must not change. */
tddp_status tddp_coll_reduce(tddp_coll *coll, const tddp_op *op)
{
    const bool direct = coll->size == 2 || tddp_buffer_bytes(&op->output) <= DIRECT_BYTES;
    plan self = {.op = op, .owners = direct ? 1 : coll->size, .first = op->root, .to = op->root};
    return reduce_shares(coll, &self, coll->rank == op->root ? op->output.data : NULL);
}

tddp_status tddp_coll_reduce_scatter(tddp_coll *coll, const tddp_op *op)
{
    const size_t count = op->input_parts[coll->rank].count;
    plan self = {.op = op, .to = TO_NONE};
    if (count != op->output.count) {
        return tddp_fail(TDDP_MISMATCH,
                         "reduce_scatter: part %d of the input has %zu elements, the output %zu",
                         coll->rank, count, op->output.count);
    }
    return reduce_shares(coll, &self, op->output.data);
}
