/*
 * all_reduce of little data, and barrier, of many ranks, by recursive doubling. Runs on the
 * operation's thread.
 *
 * With a power of two of ranks, each exchanges in step i what it has with the rank whose number
 * differs in bit i, and combines both, the lower rank's first: in the end all have combined the
 * same data in the same order, bit for bit. With r ranks more, each of the first r pairs begins as
 * one rank, the even one, which passes the result to the odd one at the end. (R. Thakur, R.
 * Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
 *
 * Headers, and with them the comparison of calls, go the same ways: one for each step, not one for
 * each other rank. Calls that agree along all of them are all the same; ranks whose calls differ
 * from others' exchange a header with one of those in some step. As everywhere, no rank returns
 * before all have entered the operation.
 */
#include "doubling.h"

#include <vector>

#include "op_messages.h"
#include "partition.h"

namespace tddp_gloo
{
namespace
{

/* Where a rank stands among those that exchange. */
struct Places {
    explicit Places(int size)
    {
        while (2 * count <= size) {
            count *= 2;
        }
        pairs = size - count;
    }
    bool in_pair(int rank) const
    {
        return rank < 2 * pairs;
    }
    int of(int rank) const
    {
        return in_pair(rank) ? rank / 2 : rank - pairs;
    }
    int rank_at(int place) const
    {
        return place < pairs ? 2 * place : place + pairs;
    }

    int count = 1; /* a power of two */
    int pairs;
};

/* The ranks with which this one exchanges headers. */
std::vector<int> partners_of(const Places &places, int rank)
{
    std::vector<int> partners;
    if (places.in_pair(rank)) {
        partners.push_back(rank ^ 1);
    }
    for (int bit = 1; bit < places.count && !(places.in_pair(rank) && rank % 2 == 1); bit *= 2) {
        partners.push_back(places.rank_at(places.of(rank) ^ bit));
    }
    return partners;
}

} // namespace

void all_reduce_doubling(Mesh &mesh, const tddp_op &op)
{
    const Places places(mesh.size);
    const int rank = mesh.rank;
    const int place = places.of(rank);
    const bool in_pair = places.in_pair(rank);
    const size_t count = op.output.count;
    const size_t bytes = bytes_of(op.output);
    char *data = static_cast<char *>(op.output.data);
    mesh.limit_partners(partners_of(places, rank));
    OpMessages messages(mesh, op);
    if (in_pair && rank % 2 == 1) {
        messages.send_header(rank - 1, data, bytes);
        copy(data, messages.recv_header(rank - 1), bytes);
        messages.finish();
        return;
    }
    if (in_pair) {
        messages.expect_header(rank + 1);
        tddp_combine(op.reduce, op.input.dtype, data, messages.recv_header(rank + 1), count);
    }
    for (int bit = 1; bit < places.count; bit *= 2) {
        const int peer = places.rank_at(place ^ bit);
        messages.send_header(peer, data, bytes);
        char *theirs = messages.recv_header(peer);
        if (place & bit) {
            tddp_combine(op.reduce, op.input.dtype, theirs, data, count);
            copy(data, theirs, bytes);
        } else {
            tddp_combine(op.reduce, op.input.dtype, data, theirs, count);
        }
    }
    if (in_pair) {
        messages.answer_header(rank + 1, data, bytes);
    }
    messages.finish();
}

} // namespace tddp_gloo
