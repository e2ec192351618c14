/*
 * all_reduce. Runs on the operation's thread.
 *
 * Small data go to every rank at once, and every rank computes the result in the order of ranks, so
 * that all get the same bits. Else rank r owns part r (reduce_scatter and all_gather): the others
 * send it their data of that part, it combines them, and sends each chunk to all while the next one
 * arrives, directly to where it belongs.
 *
 * Two ranks once exchanged all data, and each combined everything, which takes a step less. With
 * little memory for what arrives the sender had to wait for permissions, which stood behind the
 * data of the other direction: over 10 Gbit/s 64 MiB took 90 ms instead of 64, and on this machine
 * alone a fifth longer from 128 KiB to 25 MiB.
 */
#include <vector>

#include "collectives.h"
#include "doubling.h"
#include "reduction.h"

namespace tddp_gloo
{
namespace
{

/* Whether a op b has the same bits as b op a. MIN and MAX of 0.0 and -0.0 do not. */
bool commutes(const tddp_op &op)
{
    bool ordered = op.reduce == TDDP_REDUCE_MIN || op.reduce == TDDP_REDUCE_MAX;
    return !ordered || op.input.dtype < TDDP_FLOAT16 || op.input.dtype == TDDP_BOOL;
}

/* Every rank sends its data to all others and computes the result. */
void all_reduce_small(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    OpMessages messages(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    const size_t count = op.output.count;
    each_peer(mesh, [&](int peer) { messages.send_header(peer, data, bytes); });
    messages.exchange_headers();
    if (mesh.size == 2 && commutes(op)) {
        tddp_combine(op.reduce, op.input.dtype, data, messages.recv_header(1 - mesh.rank), count);
        scale(op.input.dtype, data, count, factor_after(mesh, op));
    } else {
        combine_inline(mesh, messages, op, data, count, Scaling::SCALED);
    }
}

void all_reduce_large(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    OpMessages messages(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    Partition parts(op.output.count, mesh.size, tddp_dtype_size(op.input.dtype));
    char *local = data + parts.offset(mesh.rank);
    std::vector<Buffer *> regions(static_cast<size_t>(mesh.size));
    each_peer(mesh, [&](int peer) {
        messages.send_header(peer, nullptr, 0);
        Buffer &region = messages.region(data, bytes);
        regions[static_cast<size_t>(peer)] = &region;
        size_t start = parts.offset(peer);
        each_chunk(parts.bytes(peer), [&](size_t at, size_t length) {
            messages.send(region, peer, TO_OWNER, start + at, length);
            /* The peer sends this after it has received the data sent from here now. */
            messages.recv(region, peer, FROM_OWNER, start + at, length);
        });
    });
    const LocalPart part = {local, local, parts.bytes(mesh.rank), Scaling::SCALED};
    char *incoming = mesh.scratch(window_bytes(mesh, part.bytes));
    combine(mesh, messages, op, part, incoming, [&](size_t at, size_t length) {
        each_peer(mesh, [&](int peer) {
            messages.send(*regions[static_cast<size_t>(peer)], peer, FROM_OWNER,
                          parts.offset(mesh.rank) + at, length);
        });
    });
    each_peer(mesh, [&](int peer) {
        each_chunk(parts.bytes(peer), [&](size_t, size_t) {
            mesh.wait_recv(*regions[static_cast<size_t>(peer)], peer);
        });
    });
    messages.finish();
}

} // namespace

void all_reduce(Mesh &mesh, const tddp_op &op)
{
    size_t bytes = op.output.count * tddp_dtype_size(op.output.dtype);
    if (!mesh.resumed()) {
        scale(op.input.dtype, op.output.data, op.output.count, factor_before(mesh, op, op.premul));
    }
    if (mesh.size == 1) {
        return;
    }
    if (doubles(mesh, bytes)) {
        all_reduce_doubling(mesh, op);
        scale(op.input.dtype, op.output.data, op.output.count, factor_after(mesh, op));
    } else if (is_small(mesh, bytes)) {
        all_reduce_small(mesh, op, bytes);
    } else {
        all_reduce_large(mesh, op, bytes);
    }
}

} // namespace tddp_gloo
