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

} // namespace

double factor_before(const Mesh &mesh, const tddp_op &op)
{
    if (op.reduce == TDDP_REDUCE_PREMUL_SUM) {
        return op.premul;
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

void combine(Mesh &mesh, Round &round, const tddp_op &op, const char *own, char *into, size_t bytes,
             const std::function<void(size_t at, size_t bytes)> &done)
{
    const double factor = factor_after(mesh, op);
    size_t window = std::min(WINDOW * PIECE_BYTES, bytes);
    char *memory = mesh.scratch(window * static_cast<size_t>(mesh.size));
    std::vector<Buffer *> inbound(static_cast<size_t>(mesh.size));
    auto slot_at = [&](int peer) { return static_cast<size_t>(peer); };
    auto post = [&](int peer, size_t at) {
        if (at < bytes) {
            round.recv(*inbound[slot_at(peer)], peer, TO_OWNER, at % (WINDOW * PIECE_BYTES),
                       std::min(PIECE_BYTES, bytes - at));
        }
    };
    each_peer(mesh, [&](int peer) {
        inbound[slot_at(peer)] = &round.region(memory + window * slot_at(peer), window);
        for (size_t i = 0; i < WINDOW; i++) {
            post(peer, i * PIECE_BYTES);
        }
    });
    each_peer(mesh, [&](int peer) { round.answer(peer); });
    each_piece(bytes, [&](size_t at, size_t length) {
        if (own) {
            copy(into + at, own + at, length);
        }
        int left = mesh.size - 1;
        each_peer(mesh, [&](int peer) {
            mesh.wait_recv(*inbound[slot_at(peer)], peer);
            const char *theirs = memory + window * slot_at(peer) + at % (WINDOW * PIECE_BYTES);
            combine_scaled(op, into + at, theirs, length, --left == 0 ? factor : 1.0);
            post(peer, at + WINDOW * PIECE_BYTES);
        });
        done(at, length);
    });
}

} // namespace tddp_gloo
