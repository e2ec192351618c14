/*
 * all_reduce. Runs on the group's progress thread.
 *
 * Of few ranks: small data go to every rank at once, and every rank computes the result in the
 * order of ranks, so that all get the same bits. Two ranks do the same with large data, chunk by
 * chunk: each byte is sent once, as with any algorithm, but there is only one step to wait for.
 * With more ranks, rank r owns part r (reduce_scatter and all_gather): the others send it their
 * data of that part, it combines them, and sends each chunk to all while the next one arrives.
 *
 * Two ranks over loopback on two busy cores, float32, microseconds, the middle one of three
 * medians, alternating with PyTorch 1.13's Gloo backend, both with the algorithm for three ranks
 * and more:
 *
 *     bytes      4 KiB   64 KiB   256 KiB   1 MiB   4 MiB   8 MiB
 *     here          96      131       382     537    2646    5624
 *     PyTorch      578      260       403     638    3368    7275
 */
#include <vector>

#include "collectives.h"
#include "doubling.h"
#include "reduction.h"

namespace tddp_gloo
{
namespace
{

/* A chunk between two ranks, see all_reduce_pair(). */
constexpr size_t PAIR_CHUNK_BYTES = 1024 * 1024;

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

/*
 * Two ranks, each of which combines everything. The first EAGER_BYTES travel with the header, so
 * that the rest follows without waiting for the check. With several chunks the sends are posted
 * before the receives, so that Gloo's thread executes them. On this thread they would hold the
 * connection's lock, for which Gloo's thread spins when data arrive.
 */
void all_reduce_pair(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    OpMessages messages(mesh, op);
    const int peer = 1 - mesh.rank;
    const double factor = factor_after(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    const size_t head = EAGER_BYTES;
    const size_t rest = bytes - head;
    /* Chunks of equal size: a bucket is often a little larger than a multiple of
     * PAIR_CHUNK_BYTES. */
    const size_t chunks = std::max<size_t>(1, bytes / PAIR_CHUNK_BYTES);
    const size_t chunk = ((rest + chunks - 1) / chunks + 63) / 64 * 64;
    const size_t window = WINDOW * chunk;
    auto length_at = [&](size_t at) { return std::min(chunk, rest - at); };

    if (chunks == 1) {
        messages.send_header(peer, data, head);
    }
    Buffer &outgoing = messages.region(data + head, rest);
    for (size_t at = 0; at < rest; at += chunk) {
        messages.send(outgoing, peer, DIRECT, at, length_at(at));
    }
    if (chunks > 1) {
        messages.send_header(peer, data, head);
    }
    const size_t incoming_bytes = std::min(window, rest);
    char *memory = mesh.scratch(incoming_bytes);
    Buffer &incoming = messages.region(memory, incoming_bytes);
    auto post = [&](size_t at) {
        if (at < rest) {
            messages.recv(incoming, peer, DIRECT, at % window, length_at(at));
        }
    };
    for (size_t i = 0; i < WINDOW; i++) {
        post(i * chunk);
    }
    combine_scaled(op, data, messages.recv_header(peer), head, factor);
    for (size_t at = 0; at < rest; at += chunk) {
        mesh.wait_recv(incoming, peer);
        messages.wait_sent(outgoing, peer); /* before it is overwritten */
        combine_scaled(op, data + head + at, memory + at % window, length_at(at), factor);
        post(at + window);
    }
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
    } else if (mesh.size == 2 && commutes(op)) {
        all_reduce_pair(mesh, op, bytes);
    } else {
        all_reduce_large(mesh, op, bytes);
    }
}

} // namespace tddp_gloo
