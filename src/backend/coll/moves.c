/*
 * The collectives that only move data, as direct exchanges between pairs of ranks: large parts go
 * from the sender's memory to the receiver's, small ones with the header. Appends steps; on the
 * thread that runs the operation.
 */
#include "backend/coll/coll.h"

/* Up to this size a second step of broadcast costs more than it saves: three and four ranks on one
 * host. */
#define DIRECT_BYTES ((size_t)512 * 1024)

/* Appends the steps that move one pair of parts, but what awaits the header. */
static void exchange_with(tddp_coll *coll, const tddp_op *op, int peer)
{
    const tddp_buffer out = tddp_op_sends(op, coll->rank, peer);
    const tddp_buffer in = tddp_op_receives(op, coll->rank, peer);
    const size_t sent = tddp_buffer_bytes(&out);
    const size_t received = tddp_buffer_bytes(&in);
    const bool eager = sent <= EAGER_BYTES;
    tddp_coll_send_header(coll, peer, out.data, eager ? sent : 0);
    if (received > EAGER_BYTES) {
        (void)tddp_coll_recv(coll, op, peer, DIRECT, in.data, received);
    }
    if (!eager) {
        (void)tddp_coll_send(coll, op, peer, DIRECT, out.data, sent);
    }
}

tddp_status tddp_coll_move(tddp_coll *coll, const tddp_op *op)
{
    const tddp_buffer out = tddp_op_sends(op, coll->rank, coll->rank);
    const tddp_buffer in = tddp_op_receives(op, coll->rank, coll->rank);
    if (tddp_buffer_bytes(&out) != tddp_buffer_bytes(&in)) {
        return tddp_fail(TDDP_MISMATCH, "%s: rank %d sends itself %zu elements and expects %zu",
                         tddp_op_name(op->kind), tddp_coll_rank_name(coll, coll->rank), out.count,
                         in.count);
    }
    EACH_PEER(coll, peer)
    {
        exchange_with(coll, op, peer);
    }
    tddp_coll_recv_headers(coll);
    tddp_coll_copy(coll, in.data, out.data, tddp_buffer_bytes(&in));
    EACH_PEER(coll, peer)
    {
        const tddp_buffer part = tddp_op_receives(op, coll->rank, peer);
        const size_t bytes = tddp_buffer_bytes(&part);
        if (bytes <= EAGER_BYTES) {
            tddp_coll_copy(coll, part.data, tddp_coll_payload(coll, peer), bytes);
        }
    }
    return TDDP_OK;
}

/* The part of each rank but the root. */
static tddp_coll_span part_of(const tddp_coll *coll, const tddp_op *op, int rank)
{
    return tddp_coll_part(&op->output, coll->size - 1, rank - (rank > op->root));
}

/* Appends the transfers with a peer that need no data of others. */
static void begin_scattered(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_span part)
{
    tddp_coll_send_header(coll, peer, NULL, 0);
    EACH_CHUNK(part.bytes, at)
    {
        const size_t bytes = tddp_coll_min(CHUNK_BYTES, part.bytes - at);
        if (coll->rank == op->root) {
            (void)tddp_coll_send(coll, op, peer, TO_OWNER, part.data + at, bytes);
        } else {
            (void)tddp_coll_recv(coll, op, peer, peer == op->root ? TO_OWNER : FROM_OWNER,
                                 part.data + at, bytes);
        }
    }
}

/* Sent directly to every rank, each byte would leave the root once for each rank. Instead the root
 * sends a different part to each of the others, and they forward their parts to each other (scatter
 * and all_gather): each rank sends about as much as it receives. */
static void broadcast_scattered(tddp_coll *coll, const tddp_op *op)
{
    const tddp_coll_span own = part_of(coll, op, coll->rank); /* the root's isn't used */
    size_t from_root = 0; /* the step that receives the first chunk of this rank's part */
    EACH_PEER(coll, peer)
    {
        from_root = peer == op->root ? coll->program.count + 2 : from_root;
        begin_scattered(coll, op, peer, peer == op->root ? own : part_of(coll, op, peer));
    }
    tddp_coll_recv_headers(coll);
    EACH_CHUNK(coll->rank == op->root ? 0 : own.bytes, at)
    {
        tddp_coll_await_step(coll, op->root, from_root + at / CHUNK_BYTES);
        EACH_PEER(coll, peer)
        {
            if (peer != op->root) {
                (void)tddp_coll_send(coll, op, peer, FROM_OWNER, own.data + at,
                                     tddp_coll_min(CHUNK_BYTES, own.bytes - at));
            }
        }
    }
}

tddp_status tddp_coll_broadcast(tddp_coll *coll, const tddp_op *op)
{
    if (coll->size > 2 && tddp_buffer_bytes(&op->output) > DIRECT_BYTES) {
        broadcast_scattered(coll, op);
        return TDDP_OK;
    }
    return tddp_coll_move(coll, op);
}

tddp_status tddp_coll_barrier(tddp_coll *coll, const tddp_op *op)
{
    if (tddp_coll_doubles(coll, 0)) {
        tddp_coll_double(coll, op);
        return TDDP_OK;
    }
    return tddp_coll_move(coll, op);
}
