/*
 * all_reduce. Runs on the group's progress thread.
 *
 * Small messages go to everybody at once and every rank computes the result, always in the order of
 * ranks, so that all get the same bits. Two ranks do so with larger ones too, piece by piece: each
 * byte travels once, as in any other way, but there is only one stage to wait for. With more ranks
 * rank r owns part r: the others send it their share of that part, it combines them, and sends each
 * piece back to all while the next arrives.
 *
 * Two ranks over loopback on two busy cores, float32, microseconds, the middle one of three
 * medians, taken in turns with PyTorch 1.13's Gloo backend, both with the way of three and more:
 *
 *     bytes      4 KiB   64 KiB   256 KiB   1 MiB   4 MiB   8 MiB
 *     here          96      131       382     537    2646    5624
 *     PyTorch      578      260       403     638    3368    7275
 */
#include <vector>

#include "collectives.h"
#include "reduction.h"

namespace tddp_gloo
{
namespace
{

/* A piece of a message between two ranks, see all_reduce_pair(). */
constexpr size_t PAIR_PIECE_BYTES = 1024 * 1024;

/* Whether a op b has the same bits as b op a. Not so for the smaller one of 0.0 and -0.0. */
bool commutes(const tddp_op &op)
{
    bool ordered = op.reduce == TDDP_REDUCE_MIN || op.reduce == TDDP_REDUCE_MAX;
    return !ordered || op.input.dtype < TDDP_FLOAT16 || op.input.dtype == TDDP_BOOL;
}

/* Everybody gets everything and computes the result. */
void all_reduce_small(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    Round round(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    const size_t count = op.output.count;
    each_peer(mesh, [&](int peer) { round.greet(peer, data, bytes); });
    if (mesh.size == 2 && commutes(op)) {
        tddp_combine(op.reduce, op.input.dtype, data, round.answer(1 - mesh.rank), count);
        scale(op.input.dtype, data, count, factor_after(mesh, op));
    } else {
        combine_answers(mesh, round, op, data, count, Shares::SCALED);
    }
    round.finish();
}

void all_reduce_large(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    Round round(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    Parts parts(op.output.count, mesh.size, tddp_dtype_size(op.input.dtype));
    char *own = data + parts.offset(mesh.rank);
    std::vector<Buffer *> whole(static_cast<size_t>(mesh.size));
    each_peer(mesh, [&](int peer) {
        round.greet(peer, nullptr, 0);
        Buffer &region = round.region(data, bytes);
        whole[static_cast<size_t>(peer)] = &region;
        size_t start = parts.offset(peer);
        each_piece(parts.bytes(peer), [&](size_t at, size_t length) {
            round.send(region, peer, TO_OWNER, start + at, length);
            /* Comes after the peer has got what is sent from there now. */
            round.recv(region, peer, FROM_OWNER, start + at, length);
        });
    });
    const Part part = {own, own, parts.bytes(mesh.rank), Shares::SCALED};
    char *inbound = mesh.scratch(inbound_bytes(mesh, part.bytes));
    combine(mesh, round, op, part, inbound, [&](size_t at, size_t length) {
        each_peer(mesh, [&](int peer) {
            round.send(*whole[static_cast<size_t>(peer)], peer, FROM_OWNER,
                       parts.offset(mesh.rank) + at, length);
        });
    });
    each_peer(mesh, [&](int peer) {
        each_piece(parts.bytes(peer), [&](size_t, size_t) {
            mesh.wait_recv(*whole[static_cast<size_t>(peer)], peer);
        });
    });
    round.finish();
}

/*
 * Between two ranks, each combining all of it. The head travels with the header, so that the check
 * of the header is no wait: the rest comes behind it. With several pieces the sends are announced
 * before the receives, so that Gloo's thread carries them out: done on this thread they would hold
 * the connection's lock, on which Gloo's thread does not sleep but spins when something arrives.
 */
void all_reduce_pair(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    Round round(mesh, op);
    const int peer = 1 - mesh.rank;
    const double factor = factor_after(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    const size_t head = EAGER_BYTES;
    const size_t rest = bytes - head;
    /* Pieces of equal size: a bucket is often a little larger than a round number of them. */
    const size_t pieces = std::max<size_t>(1, bytes / PAIR_PIECE_BYTES);
    const size_t piece = ((rest + pieces - 1) / pieces + 63) / 64 * 64;
    const size_t window = WINDOW * piece;
    auto length_at = [&](size_t at) { return std::min(piece, rest - at); };

    if (pieces == 1) {
        round.greet(peer, data, head);
    }
    Buffer &whole = round.region(data + head, rest);
    for (size_t at = 0; at < rest; at += piece) {
        round.send(whole, peer, WHOLE, at, length_at(at));
    }
    if (pieces > 1) {
        round.greet(peer, data, head);
    }
    const size_t room = std::min(window, rest);
    char *memory = mesh.scratch(room);
    Buffer &inbound = round.region(memory, room);
    auto post = [&](size_t at) {
        if (at < rest) {
            round.recv(inbound, peer, WHOLE, at % window, length_at(at));
        }
    };
    for (size_t i = 0; i < WINDOW; i++) {
        post(i * piece);
    }
    combine_scaled(op, data, round.answer(peer), head, factor);
    for (size_t at = 0; at < rest; at += piece) {
        mesh.wait_recv(inbound, peer);
        round.wait_sent(whole, peer); /* before it is overwritten */
        combine_scaled(op, data + head + at, memory + at % window, length_at(at), factor);
        post(at + window);
    }
    round.finish();
}

} // namespace

void all_reduce(Mesh &mesh, const tddp_op &op)
{
    size_t bytes = op.output.count * tddp_dtype_size(op.output.dtype);
    scale(op.input.dtype, op.output.data, op.output.count, factor_before(mesh, op, op.premul));
    if (mesh.size == 1) {
        return;
    }
    if (bytes <= EAGER_BYTES / static_cast<size_t>(mesh.size - 1)) {
        all_reduce_small(mesh, op, bytes);
    } else if (mesh.size == 2 && commutes(op)) {
        all_reduce_pair(mesh, op, bytes);
    } else {
        all_reduce_large(mesh, op, bytes);
    }
}

} // namespace tddp_gloo
