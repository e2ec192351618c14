/* Arithmetic on received data. Runs on the operation's thread. */
#include "reduction.h"

#include <vector>

namespace tddp_gloo
{
namespace
{

/* Half of the smallest first-level cache: the factor is applied while the sum is in the cache. */
constexpr size_t BLOCK_BYTES = 16 * 1024;

bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* The factor that a rank's data still need. */
double missing_factor(const Mesh &mesh, const OpMessages &messages, const tddp_op &op,
                      Scaling scaling, int rank)
{
    if (scaling == Scaling::SCALED) {
        return 1.0;
    }
    return factor_before(mesh, op, rank == mesh.rank ? op.premul : messages.premul(rank));
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

/* into = (into op from) * factor */
static void combine_scaled(const tddp_op &op, char *into, const char *from, size_t bytes,
                           double factor)
{
    size_t element = tddp_dtype_size(op.input.dtype);
    for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
        size_t count = std::min(BLOCK_BYTES, bytes - at) / element;
        tddp_combine(op.reduce, op.input.dtype, into + at, from + at, count);
        scale(op.input.dtype, into + at, count, factor);
    }
}

void combine_inline(Mesh &mesh, OpMessages &messages, const tddp_op &op, char *data, size_t count,
                    Scaling scaling)
{
    const tddp_dtype dtype = op.input.dtype;
    const size_t bytes = count * tddp_dtype_size(dtype);
    char *mine = data;
    if (mesh.rank > 0) {
        mine = mesh.scratch(bytes);
        copy(mine, data, bytes);
    }
    scale(dtype, mine, count, missing_factor(mesh, messages, op, scaling, mesh.rank));
    for (int rank = 0; rank < mesh.size; rank++) {
        char *share = mine;
        if (rank != mesh.rank) {
            share = messages.recv_header(rank);
            scale(dtype, share, count, missing_factor(mesh, messages, op, scaling, rank));
        }
        if (rank == 0) {
            copy(data, share, bytes);
        } else {
            tddp_combine(op.reduce, dtype, data, share, count);
        }
    }
    scale(dtype, data, count, factor_after(mesh, op));
}

size_t window_bytes(const Mesh &mesh, size_t bytes)
{
    return std::min(WINDOW * CHUNK_BYTES, bytes) * static_cast<size_t>(mesh.size);
}

void combine(Mesh &mesh, OpMessages &messages, const tddp_op &op, const LocalPart &part,
             char *incoming, const std::function<void(size_t at, size_t bytes)> &done)
{
    const size_t window = std::min(WINDOW * CHUNK_BYTES, part.bytes);
    const size_t element = tddp_dtype_size(op.input.dtype);
    auto slot_address = [&](int peer, size_t at) {
        return incoming + window * static_cast<size_t>(peer) + at % (WINDOW * CHUNK_BYTES);
    };
    std::vector<Buffer *> regions(static_cast<size_t>(mesh.size));
    auto post = [&](int peer, size_t at) {
        if (at < part.bytes) {
            messages.recv(*regions[static_cast<size_t>(peer)], peer, TO_OWNER,
                          at % (WINDOW * CHUNK_BYTES), std::min(CHUNK_BYTES, part.bytes - at));
        }
    };
    each_peer(mesh, [&](int peer) {
        regions[static_cast<size_t>(peer)] = &messages.region(slot_address(peer, 0), window);
        for (size_t i = 0; i < WINDOW; i++) {
            post(peer, i * CHUNK_BYTES);
        }
    });
    each_peer(mesh, [&](int peer) { messages.recv_header(peer); });
    each_chunk(part.bytes, [&](size_t at, size_t length) {
        copy(part.into + at, part.local + at, length);
        scale(op.input.dtype, part.into + at, length / element,
              missing_factor(mesh, messages, op, part.scaling, mesh.rank));
        int left = mesh.size - 1;
        each_peer(mesh, [&](int peer) {
            mesh.wait_recv(*regions[static_cast<size_t>(peer)], peer);
            scale(op.input.dtype, slot_address(peer, at), length / element,
                  missing_factor(mesh, messages, op, part.scaling, peer));
            const double after = --left == 0 ? factor_after(mesh, op) : 1.0;
            combine_scaled(op, part.into + at, slot_address(peer, at), length, after);
            post(peer, at + WINDOW * CHUNK_BYTES);
        });
        done(at, length);
    });
}

} // namespace tddp_gloo
