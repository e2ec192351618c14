/*
 * reduce and reduce_scatter. Appends steps; on the thread that runs the operation.
 *
 * The input must not change, so the rank that combines applies the other ranks' factors to the
 * received data.
 */
#include "backend/coll/coll.h"

/* Up to this size a second step of reduce costs more than it saves: three and four ranks on one
 * host. */
#define DIRECT_BYTES ((size_t)2 * 1024 * 1024)

/* All ranks send to the root, which combines. */
static tddp_status reduce_small(tddp_coll *coll, const tddp_op *op, size_t bytes)
{
    const bool is_root = coll->rank == op->root;
    char *data = op->output.data;
    char *memory = is_root ? tddp_coll_scratch(coll, bytes) : NULL;
    if (is_root && bytes > 0 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    EACH_PEER(coll, peer)
    {
        tddp_coll_send_header(coll, peer, op->input.data, peer == op->root ? bytes : 0);
    }
    tddp_coll_recv_headers(coll);
    if (is_root) {
        const tddp_coll_part part = {data, data, bytes, false, memory};
        tddp_coll_combine_headers(coll, op, &part);
    }
    return TDDP_OK;
}

/* The part that a rank combines; the root has the first one. */
static int owner_of(const tddp_coll *coll, const tddp_op *op, int rank)
{
    return (rank - op->root + coll->size) % coll->size;
}

/* Appends the transfers with a peer that need no data of others. */
static void begin_reduce(tddp_coll *coll, const tddp_op *op, const tddp_coll_partition *parts,
                         int peer, size_t bytes)
{
    char *data = (char *)op->output.data + tddp_coll_part_start(parts, owner_of(coll, op, peer));
    tddp_coll_send_header(coll, peer, NULL, 0);
    EACH_CHUNK(bytes, at)
    {
        const size_t length = tddp_coll_min(CHUNK_BYTES, bytes - at);
        (void)tddp_coll_send(coll, op, peer, TO_OWNER, data + at, length);
        if (coll->rank == op->root) {
            /* The peer sends this after it has received the data sent from here now. */
            (void)tddp_coll_recv(coll, op, peer, FROM_OWNER, data + at, length);
        }
    }
}

/* Each rank combines a part, as in all_reduce, but sends it only to the root: otherwise all data
 * would have to enter the root. With two ranks, and with less data, the root combines everything.
 * The other ranks' buffers must not change: their results are in memory of this module. */
static tddp_status reduce_large(tddp_coll *coll, const tddp_op *op, size_t bytes)
{
    const bool is_root = coll->rank == op->root;
    const int owners = coll->size == 2 || bytes <= DIRECT_BYTES ? 1 : coll->size;
    const tddp_coll_partition parts = tddp_coll_partition_of(&op->output, owners);
    const int mine = owner_of(coll, op, coll->rank);
    const size_t length = mine < owners ? tddp_coll_part_bytes(&parts, mine) : 0;
    const size_t window = (tddp_coll_window_bytes(coll, length) + 63) / 64 * 64;
    char *memory = tddp_coll_scratch(coll, window + (is_root ? 0 : length));
    if (length > 0 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    EACH_PEER(coll, peer)
    {
        const int owner = owner_of(coll, op, peer);
        begin_reduce(coll, op, &parts, peer,
                     owner < owners ? tddp_coll_part_bytes(&parts, owner) : 0);
    }
    char *local = length > 0 ? (char *)op->output.data + tddp_coll_part_start(&parts, mine) : NULL;
    const tddp_coll_part part = {local, is_root || length == 0 ? local : memory + window, length,
                                 false, memory};
    tddp_coll_combine_part(coll, op, &part, is_root ? TO_NONE : op->root);
    return TDDP_OK;
}

tddp_status tddp_coll_reduce(tddp_coll *coll, const tddp_op *op)
{
    const size_t bytes = tddp_buffer_bytes(&op->output);
    if (coll->size == 1) {
        tddp_coll_scale(coll, op->output.data, bytes, tddp_coll_factor_before(coll, op));
        return TDDP_OK;
    }
    return bytes <= EAGER_BYTES ? reduce_small(coll, op, bytes) : reduce_large(coll, op, bytes);
}

tddp_status tddp_coll_reduce_scatter(tddp_coll *coll, const tddp_op *op)
{
    const tddp_buffer *local = &op->input_parts[coll->rank];
    const size_t bytes = tddp_buffer_bytes(&op->output);
    if (local->count != op->output.count) {
        return tddp_fail(TDDP_MISMATCH,
                         "reduce_scatter: part %d of the input has %zu elements, the output %zu",
                         coll->rank, local->count, op->output.count);
    }
    const bool eager = bytes <= EAGER_BYTES;
    char *memory = tddp_coll_scratch(coll, eager ? bytes : tddp_coll_window_bytes(coll, bytes));
    if (bytes > 0 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    EACH_PEER(coll, peer)
    {
        const tddp_buffer *theirs = &op->input_parts[peer];
        const size_t sent = tddp_buffer_bytes(theirs);
        tddp_coll_send_header(coll, peer, theirs->data, sent <= EAGER_BYTES ? sent : 0);
        EACH_CHUNK(sent <= EAGER_BYTES ? 0 : sent, at)
        {
            (void)tddp_coll_send(coll, op, peer, TO_OWNER, (const char *)theirs->data + at,
                                 tddp_coll_min(CHUNK_BYTES, sent - at));
        }
    }
    const tddp_coll_part part = {local->data, op->output.data, bytes, false, memory};
    if (eager) {
        tddp_coll_recv_headers(coll);
        tddp_coll_combine_headers(coll, op, &part);
    } else {
        tddp_coll_combine_part(coll, op, &part, TO_NONE);
    }
    return TDDP_OK;
}
