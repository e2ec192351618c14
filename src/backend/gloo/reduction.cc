/*
 * Arithmetic on what peers send. Runs on the group's progress thread.
 */
#include "reduction.h"

#include <vector>

namespace tddp_gloo
{
namespace
{

/* Half of a processor's smallest first-level cache: the factor finds the sum still there. */
constexpr size_t BLOCK_BYTES = 16 * 1024;

bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* What a rank's share is still to be multiplied by. */
double missing_factor(const Mesh &mesh, const Round &round, const tddp_op &op, Shares shares,
                      int rank)
{
    if (shares == Shares::SCALED) {
        return 1.0;
    }
    return factor_before(mesh, op, rank == mesh.rank ? op.premul : round.premul(rank));
}

} // namespace

double factor_before(const Mesh &mesh, const tddp_op &op, double premul)
{
    if (op.reduce == TDDP_REDUCE_PREMUL_SUM) {
        return premul;
    }
    return op.reduce == TDDP_REDUCE_AVG && is_half(op.input.dtype) ? 1.0 / mesh.size : 1.0;
}

double factor_after(const Mesh &mesh, const tddp_op &op)
{
    return op.reduce == TDDP_REDUCE_AVG && !is_half(op.input.dtype) ? 1.0 / mesh.size : 1.0;
}

void scale(tddp_dtype dtype, void *data, size_t count, double factor)
{
    if (factor != 1.0) {
        tddp_scale(dtype, data, count, factor);
    }
}

void combine_scaled(const tddp_op &op, char *into, const char *from, size_t bytes, double factor)
{
    size_t element = tddp_dtype_size(op.input.dtype);
    for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
        size_t count = std::min(BLOCK_BYTES, bytes - at) / element;
        tddp_combine(op.reduce, op.input.dtype, into + at, from + at, count);
        scale(op.input.dtype, into + at, count, factor);
    }
}

void combine_answers(Mesh &mesh, Round &round, const tddp_op &op, char *data, size_t count,
                     Shares shares)
{
    const tddp_dtype dtype = op.input.dtype;
    const size_t bytes = count * tddp_dtype_size(dtype);
    char *mine = data;
    if (mesh.rank > 0) {
        mine = mesh.scratch(bytes);
        copy(mine, data, bytes);
    }
    scale(dtype, mine, count, missing_factor(mesh, round, op, shares, mesh.rank));
    for (int rank = 0; rank < mesh.size; rank++) {
        char *share = mine;
        if (rank != mesh.rank) {
            share = round.answer(rank);
            scale(dtype, share, count, missing_factor(mesh, round, op, shares, rank));
        }
        if (rank == 0) {
            copy(data, share, bytes);
        } else {
            tddp_combine(op.reduce, dtype, data, share, count);
        }
    }
    scale(dtype, data, count, factor_after(mesh, op));
}

size_t inbound_bytes(const Mesh &mesh, size_t bytes)
{
    return std::min(WINDOW * PIECE_BYTES, bytes) * static_cast<size_t>(mesh.size);
}

void combine(Mesh &mesh, Round &round, const tddp_op &op, const Part &part, char *inbound,
             const std::function<void(size_t at, size_t bytes)> &done)
{
    const size_t window = std::min(WINDOW * PIECE_BYTES, part.bytes);
    const size_t element = tddp_dtype_size(op.input.dtype);
    auto place = [&](int peer, size_t at) {
        return inbound + window * static_cast<size_t>(peer) + at % (WINDOW * PIECE_BYTES);
    };
    std::vector<Buffer *> regions(static_cast<size_t>(mesh.size));
    auto post = [&](int peer, size_t at) {
        if (at < part.bytes) {
            round.recv(*regions[static_cast<size_t>(peer)], peer, TO_OWNER,
                       at % (WINDOW * PIECE_BYTES), std::min(PIECE_BYTES, part.bytes - at));
        }
    };
    each_peer(mesh, [&](int peer) {
        regions[static_cast<size_t>(peer)] = &round.region(place(peer, 0), window);
        for (size_t i = 0; i < WINDOW; i++) {
            post(peer, i * PIECE_BYTES);
        }
    });
    each_peer(mesh, [&](int peer) { round.answer(peer); });
    each_piece(part.bytes, [&](size_t at, size_t length) {
        copy(part.into + at, part.own + at, length);
        scale(op.input.dtype, part.into + at, length / element,
              missing_factor(mesh, round, op, part.shares, mesh.rank));
        int left = mesh.size - 1;
        each_peer(mesh, [&](int peer) {
            mesh.wait_recv(*regions[static_cast<size_t>(peer)], peer);
            scale(op.input.dtype, place(peer, at), length / element,
                  missing_factor(mesh, round, op, part.shares, peer));
            const double after = --left == 0 ? factor_after(mesh, op) : 1.0;
            combine_scaled(op, part.into + at, place(peer, at), length, after);
            post(peer, at + WINDOW * PIECE_BYTES);
        });
        done(at, length);
    });
}

} // namespace tddp_gloo
