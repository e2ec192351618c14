/*
 * all_reduce. Appends steps; on the thread that runs the operation.
 *
 * Small data go to every rank at once, and every rank computes the result in the order of ranks, so
 * that all get the same bits; of many ranks by recursive doubling. Else rank r owns part r
 * (reduce_scatter and all_gather): the others send it their data of that part, it combines them,
 * and sends each chunk to all while the next one arrives, directly to where it belongs.
 *
 * Two ranks once exchanged all data, and each combined everything, which takes a step less. With
 * little memory for what arrives the sender had to wait for permissions, which stood behind the
 * data of the other direction: over 10 Gbit/s 64 MiB took 90 ms instead of 64, and on one machine
 * alone a fifth longer from 128 KiB to 25 MiB.
 */
#include "backend/coll/coll.h"

/* Whether a op b has the same bits as b op a. MIN and MAX of 0.0 and -0.0 do not. */
static bool commutes(const tddp_op *op)
{
    const bool ordered = op->reduce == TDDP_REDUCE_MIN || op->reduce == TDDP_REDUCE_MAX;
    return !ordered || op->input.dtype < TDDP_FLOAT16 || op->input.dtype == TDDP_BOOL;
}

/* Every rank sends its data to all others and computes the result. */
static tddp_status all_reduce_small(tddp_coll *coll, const tddp_op *op, size_t bytes)
{
    char *data = op->output.data;
    const bool in_place = coll->size == 2 && commutes(op);
    char *memory = in_place ? NULL : tddp_coll_scratch(coll, bytes);
    if (!in_place && bytes > 0 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    EACH_PEER(coll, peer)
    {
        tddp_coll_send_header(coll, peer, data, bytes);
    }
    tddp_coll_recv_headers(coll);
    if (in_place) {
        tddp_coll_combine(coll, data, tddp_coll_payload(coll, 1 - coll->rank), bytes,
                          tddp_coll_factor_after(coll, op));
    } else {
        const tddp_coll_part part = {data, data, bytes, true, memory};
        tddp_coll_combine_headers(coll, op, &part);
    }
    return TDDP_OK;
}

static tddp_status all_reduce_large(tddp_coll *coll, const tddp_op *op)
{
    char *data = op->output.data;
    const tddp_coll_partition parts = tddp_coll_partition_of(&op->output, coll->size);
    char *local = data + tddp_coll_part_start(&parts, coll->rank);
    const size_t bytes = tddp_coll_part_bytes(&parts, coll->rank);
    const size_t window = tddp_coll_window_bytes(coll, bytes);
    char *memory = tddp_coll_scratch(coll, window);
    if (window > 0 && !memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    EACH_PEER(coll, peer)
    {
        char *theirs = data + tddp_coll_part_start(&parts, peer);
        const size_t sent = tddp_coll_part_bytes(&parts, peer);
        tddp_coll_send_header(coll, peer, NULL, 0);
        EACH_CHUNK(sent, at)
        {
            const size_t length = tddp_coll_min(CHUNK_BYTES, sent - at);
            (void)tddp_coll_send(coll, op, peer, TO_OWNER, theirs + at, length);
            /* The peer sends this after it has received the data sent from here now. */
            (void)tddp_coll_recv(coll, op, peer, FROM_OWNER, theirs + at, length);
        }
    }
    const tddp_coll_part part = {local, local, bytes, true, memory};
    tddp_coll_combine_part(coll, op, &part, TO_ALL);
    return TDDP_OK;
}

/* Whether this is sent with the headers, from each rank to every other. */
static bool is_small(const tddp_coll *coll, size_t bytes)
{
    return bytes <= EAGER_BYTES / (size_t)(coll->size - 1);
}

tddp_status tddp_coll_all_reduce(tddp_coll *coll, const tddp_op *op)
{
    const size_t bytes = tddp_buffer_bytes(&op->output);
    tddp_coll_scale(coll, op->output.data, bytes, tddp_coll_factor_before(coll, op));
    if (coll->size == 1) {
        return TDDP_OK;
    }
    if (tddp_coll_doubles(coll, bytes)) {
        tddp_coll_all_reduce_doubling(coll, op);
        tddp_coll_scale(coll, op->output.data, bytes, tddp_coll_factor_after(coll, op));
        return TDDP_OK;
    }
    return is_small(coll, bytes) ? all_reduce_small(coll, op, bytes) : all_reduce_large(coll, op);
}

/* --- recursive doubling ---------------------------------------------------------------------- */

/*
 * With a power of two of ranks, each exchanges in step i what it has with the rank whose number
 * differs in bit i, and combines both, the lower rank's first: in the end all have combined the
 * same data in the same order, bit for bit. With r ranks more, each of the first r pairs begins as
 * one rank, the even one, which passes the result to the odd one at the end. (R. Thakur, R.
 * Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
 *
 * Headers, and with them the comparison of calls, go the same ways: one for each step, not one for
 * each other rank. Calls that agree along all of them are all the same; ranks whose calls differ
 * from others' exchange a header with one of those in some step. As everywhere, no rank completes
 * before all have entered the operation.
 */
void tddp_coll_all_reduce_doubling(tddp_coll *coll, const tddp_op *op)
{
    const size_t bytes = tddp_buffer_bytes(&op->output);
    char *data = op->output.data;
    const int rank = coll->rank;
    int power = 1;
    while (2 * power <= coll->size) {
        power *= 2;
    }
    const int pairs = coll->size - power;
    const bool in_pair = rank < 2 * pairs;
    if (in_pair && rank % 2 == 1) {
        tddp_coll_send_header(coll, rank - 1, data, bytes);
        tddp_coll_recv_header(coll, rank - 1);
        tddp_coll_copy(coll, data, tddp_coll_payload(coll, rank - 1), bytes);
        return;
    }
    if (in_pair) {
        tddp_coll_expect_header(coll, rank + 1);
        tddp_coll_recv_header(coll, rank + 1);
        tddp_coll_combine(coll, data, tddp_coll_payload(coll, rank + 1), bytes, 1.0);
    }
    const int number = in_pair ? rank / 2 : rank - pairs; /* among those that exchange */
    for (int bit = 1; bit < power; bit *= 2) {
        const int other = number ^ bit;
        const int peer = other < pairs ? 2 * other : other + pairs;
        char *theirs = tddp_coll_payload(coll, peer);
        tddp_coll_send_header(coll, peer, data, bytes);
        tddp_coll_recv_header(coll, peer);
        if (number & bit) {
            tddp_coll_combine(coll, theirs, data, bytes, 1.0);
            tddp_coll_copy(coll, data, theirs, bytes);
        } else {
            tddp_coll_combine(coll, data, theirs, bytes, 1.0);
        }
    }
    if (in_pair) {
        tddp_coll_answer_header(coll, rank + 1, data, bytes);
    }
}
