/*
 * The collectives that only move data, as direct exchanges between pairs of ranks: large parts go
 * from the sender's memory to the receiver's, small ones with the header. Runs on the
 * operation's thread.
 */
#include "collectives.h"

#include <vector>

#include "doubling.h"
#include "failure.h"
#include "op_messages.h"
#include "partition.h"

namespace tddp_gloo
{
namespace
{

/* Only an unchecked call can fail here; the other ranks wait for this one meanwhile. */
void check_local_part(const Mesh &mesh, const tddp_op &op, const tddp_buffer &send_part,
                      const tddp_buffer &recv_part)
{
    if (bytes_of(send_part) != bytes_of(recv_part)) {
        throw Failure(TDDP_MISMATCH,
                      std::string(tddp_op_name(op.kind)) + ": " + mesh.rank_text(mesh.rank) +
                          " sends itself " + std::to_string(send_part.count) +
                          " elements and expects " + std::to_string(recv_part.count));
    }
}

void exchange(Mesh &mesh, const tddp_op &op)
{
    auto send_part = [&](int peer) { return tddp_op_sends(&op, mesh.rank, peer); };
    auto recv_part = [&](int peer) { return tddp_op_receives(&op, mesh.rank, peer); };
    check_local_part(mesh, op, send_part(mesh.rank), recv_part(mesh.rank));
    std::vector<Buffer *> incoming(static_cast<size_t>(mesh.size));
    OpMessages messages(mesh, op);
    each_peer(mesh, [&](int peer) {
        const tddp_buffer out = send_part(peer);
        const tddp_buffer in = recv_part(peer);
        const bool eager = bytes_of(out) <= EAGER_BYTES;
        messages.send_header(peer, out.data, eager ? bytes_of(out) : 0);
        if (bytes_of(in) > EAGER_BYTES) {
            Buffer &region = messages.region(in.data, bytes_of(in));
            incoming[static_cast<size_t>(peer)] = &region;
            messages.recv(region, peer, DIRECT, 0, bytes_of(in));
        }
        if (!eager) {
            messages.send(messages.region(out.data, bytes_of(out)), peer, DIRECT, 0, bytes_of(out));
        }
    });
    messages.exchange_headers();
    copy(recv_part(mesh.rank).data, send_part(mesh.rank).data, bytes_of(send_part(mesh.rank)));
    each_peer(mesh, [&](int peer) {
        const char *data = messages.recv_header(peer);
        if (!incoming[static_cast<size_t>(peer)]) {
            copy(recv_part(peer).data, data, bytes_of(recv_part(peer)));
        }
    });
    each_peer(mesh, [&](int peer) {
        if (incoming[static_cast<size_t>(peer)]) {
            mesh.wait_recv(*incoming[static_cast<size_t>(peer)], peer);
        }
    });
    messages.finish();
}

/* Up to this size a second step costs more than it saves: three and four ranks on one host. */
constexpr size_t DIRECT_BYTES = 512 * 1024;

/* Sent directly to every rank, each byte would leave the root once for each rank. Instead the
 * root sends a different part to each of the others, and they forward their parts to each other
 * (scatter and all_gather): each rank sends about as much as it receives. */
void broadcast_scattered(Mesh &mesh, const tddp_op &op)
{
    const size_t bytes = bytes_of(op.output);
    const Partition parts(op.output.count, mesh.size - 1, tddp_dtype_size(op.output.dtype));
    auto part_of_rank = [&](int rank) { return rank < op.root ? rank : rank - 1; };
    std::vector<Buffer *> regions(static_cast<size_t>(mesh.size));
    OpMessages messages(mesh, op);
    each_peer(mesh, [&](int peer) {
        messages.send_header(peer, nullptr, 0);
        Buffer &region = messages.region(op.output.data, bytes);
        regions[static_cast<size_t>(peer)] = &region;
        /* The root owns no part: from it this rank receives its own part. */
        const int part = part_of_rank(mesh.rank == op.root || peer != op.root ? peer : mesh.rank);
        const size_t start = parts.offset(part);
        each_chunk(parts.bytes(part), [&](size_t at, size_t length) {
            if (mesh.rank == op.root) {
                messages.send(region, peer, TO_OWNER, start + at, length);
            } else {
                messages.recv(region, peer, peer == op.root ? TO_OWNER : FROM_OWNER, start + at,
                              length);
            }
        });
    });
    each_peer(mesh, [&](int peer) { messages.recv_header(peer); });
    auto wait_for = [&](int peer) { mesh.wait_recv(*regions[static_cast<size_t>(peer)], peer); };
    if (mesh.rank != op.root) {
        const size_t start = parts.offset(part_of_rank(mesh.rank));
        each_chunk(parts.bytes(part_of_rank(mesh.rank)), [&](size_t at, size_t length) {
            wait_for(op.root);
            each_peer(mesh, [&](int peer) {
                if (peer != op.root) {
                    Buffer &region = *regions[static_cast<size_t>(peer)];
                    messages.send(region, peer, FROM_OWNER, start + at, length);
                }
            });
        });
        each_peer(mesh, [&](int peer) {
            if (peer != op.root) {
                each_chunk(parts.bytes(part_of_rank(peer)),
                           [&](size_t, size_t) { wait_for(peer); });
            }
        });
    }
    messages.finish();
}

} // namespace

void broadcast(Mesh &mesh, const tddp_op &op)
{
    if (mesh.size > 2 && bytes_of(op.output) > DIRECT_BYTES) {
        broadcast_scattered(mesh, op);
        return;
    }
    exchange(mesh, op);
}

void barrier(Mesh &mesh, const tddp_op &op)
{
    if (doubles(mesh, 0)) {
        all_reduce_doubling(mesh, op);
        return;
    }
    exchange(mesh, op);
}

void move_parts(Mesh &mesh, const tddp_op &op)
{
    exchange(mesh, op);
}

/* The largest of a list of parts, one for each rank; without a list 0. */
static size_t most_in(const Mesh &mesh, const tddp_buffer *parts)
{
    size_t most = 0;
    for (int rank = 0; parts && rank < mesh.size; rank++) {
        most = std::max(most, bytes_of(parts[rank]));
    }
    return most;
}

bool resumes(const Mesh &mesh, const tddp_op &op)
{
    if (op.kind == TDDP_OP_ALL_REDUCE) {
        const size_t bytes = bytes_of(op.output);
        return !doubles(mesh, bytes) && is_small(mesh, bytes);
    }
    const size_t most =
        std::max(op.input_parts ? most_in(mesh, op.input_parts) : bytes_of(op.input),
                 op.output_parts ? most_in(mesh, op.output_parts) : bytes_of(op.output));
    return most <= EAGER_BYTES && !(op.kind == TDDP_OP_BARRIER && doubles(mesh, 0));
}

} // namespace tddp_gloo
