/*
 * all_reduce of little data, and barrier, of many ranks, by recursive doubling. Appends steps; on
 * the thread that runs the operation.
 *
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
#include "backend/coll/coll.h"

void tddp_coll_double(tddp_coll *coll, const tddp_op *op)
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
        ADD_STEP(coll, .kind = STEP_HEADER, .peer = rank - 1);
        tddp_coll_copy(coll, data, tddp_coll_payload(coll, rank - 1), bytes);
        return;
    }
    if (in_pair) {
        ADD_STEP(coll, .kind = STEP_EXPECT, .peer = rank + 1);
        ADD_STEP(coll, .kind = STEP_HEADER, .peer = rank + 1);
        tddp_coll_combine(coll, data, tddp_coll_payload(coll, rank + 1), bytes, 1.0);
    }
    const int number = in_pair ? rank / 2 : rank - pairs; /* among those that exchange */
    for (int bit = 1; bit < power; bit *= 2) {
        const int other = number ^ bit;
        const int peer = other < pairs ? 2 * other : other + pairs;
        char *theirs = tddp_coll_payload(coll, peer);
        tddp_coll_send_header(coll, peer, data, bytes);
        ADD_STEP(coll, .kind = STEP_HEADER, .peer = peer);
        if (number & bit) {
            tddp_coll_combine(coll, theirs, data, bytes, 1.0);
            tddp_coll_copy(coll, data, theirs, bytes);
        } else {
            tddp_coll_combine(coll, data, theirs, bytes, 1.0);
        }
    }
    if (in_pair) {
        ADD_STEP(coll, .kind = STEP_ANSWER, .peer = rank + 1, .from = data, .bytes = bytes);
    }
}
