/*
 * The collectives that only move data, as direct exchanges between pairs of ranks: each piece goes
 * straight from the one's memory to the other's, or with the header where it is small. Runs on the
 * group's progress thread.
 */
#include "collectives.h"

#include <vector>

#include "failure.h"
#include "parts.h"
#include "round.h"

namespace tddp_gloo
{
namespace
{

/* Only a caller that did not check can come here: the others wait for a rank that knows better. */
void check_own(const Mesh &mesh, const tddp_op &op, const tddp_buffer &given,
               const tddp_buffer &wanted)
{
    if (bytes_of(given) != bytes_of(wanted)) {
        throw Failure(TDDP_MISMATCH, std::string(tddp_op_name(op.kind)) + ": " +
                                         mesh.called(mesh.rank) + " gives itself " +
                                         std::to_string(given.count) + " elements and expects " +
                                         std::to_string(wanted.count));
    }
}

/* `given(rank)` goes to each rank, `wanted(rank)` is where its piece goes: buffers, empty where
 * nothing travels. */
template <typename Given, typename Wanted>
void exchange(Mesh &mesh, const tddp_op &op, Given given, Wanted wanted)
{
    check_own(mesh, op, given(mesh.rank), wanted(mesh.rank));
    std::vector<Buffer *> inbound(static_cast<size_t>(mesh.size));
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) {
        const tddp_buffer out = given(peer);
        const tddp_buffer in = wanted(peer);
        const bool eager = bytes_of(out) <= EAGER_BYTES;
        round.greet(peer, out.data, eager ? bytes_of(out) : 0);
        if (bytes_of(in) > EAGER_BYTES) {
            Buffer &region = round.region(in.data, bytes_of(in));
            inbound[static_cast<size_t>(peer)] = &region;
            round.recv(region, peer, WHOLE, 0, bytes_of(in));
        }
        if (!eager) {
            round.send(round.region(out.data, bytes_of(out)), peer, WHOLE, 0, bytes_of(out));
        }
    });
    copy(wanted(mesh.rank).data, given(mesh.rank).data, bytes_of(given(mesh.rank)));
    each_peer(mesh, [&](int peer) {
        const char *data = round.answer(peer);
        if (!inbound[static_cast<size_t>(peer)]) {
            copy(wanted(peer).data, data, bytes_of(wanted(peer)));
        }
    });
    each_peer(mesh, [&](int peer) {
        if (inbound[static_cast<size_t>(peer)]) {
            mesh.wait_recv(*inbound[static_cast<size_t>(peer)], peer);
        }
    });
    round.finish();
}

const tddp_buffer NOTHING = {};

/* Up to here a second way costs more than it saves: three and four ranks on one host. */
constexpr size_t STRAIGHT_BYTES = 512 * 1024;

/*
 * From the root straight to everybody, each byte would leave it once for each rank. So it deals the
 * message out instead, a part to each of the others, and they pass their parts on to each other:
 * all send about as much as they receive.
 */
void broadcast_in_parts(Mesh &mesh, const tddp_op &op)
{
    const size_t bytes = bytes_of(op.output);
    const Parts parts(op.output.count, mesh.size - 1, tddp_dtype_size(op.output.dtype));
    auto owned_by = [&](int rank) { return rank < op.root ? rank : rank - 1; };
    std::vector<Buffer *> whole(static_cast<size_t>(mesh.size));
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) {
        round.greet(peer, nullptr, 0);
        Buffer &region = round.region(op.output.data, bytes);
        whole[static_cast<size_t>(peer)] = &region;
        /* The root has no part: what comes from it is this rank's own. */
        const int part = owned_by(mesh.rank == op.root || peer != op.root ? peer : mesh.rank);
        const size_t start = parts.offset(part);
        each_piece(parts.bytes(part), [&](size_t at, size_t length) {
            if (mesh.rank == op.root) {
                round.send(region, peer, TO_OWNER, start + at, length);
            } else {
                round.recv(region, peer, peer == op.root ? TO_OWNER : FROM_OWNER, start + at,
                           length);
            }
        });
    });
    each_peer(mesh, [&](int peer) { round.answer(peer); });
    auto wait_for = [&](int peer) { mesh.wait_recv(*whole[static_cast<size_t>(peer)], peer); };
    if (mesh.rank != op.root) {
        const size_t start = parts.offset(owned_by(mesh.rank));
        each_piece(parts.bytes(owned_by(mesh.rank)), [&](size_t at, size_t length) {
            wait_for(op.root);
            each_peer(mesh, [&](int peer) {
                if (peer != op.root) {
                    Buffer &region = *whole[static_cast<size_t>(peer)];
                    round.send(region, peer, FROM_OWNER, start + at, length);
                }
            });
        });
        each_peer(mesh, [&](int peer) {
            if (peer != op.root) {
                each_piece(parts.bytes(owned_by(peer)), [&](size_t, size_t) { wait_for(peer); });
            }
        });
    }
    round.finish();
}

} // namespace

void broadcast(Mesh &mesh, const tddp_op &op)
{
    if (mesh.size > 2 && bytes_of(op.output) > STRAIGHT_BYTES) {
        broadcast_in_parts(mesh, op);
        return;
    }
    const bool gives = mesh.rank == op.root;
    exchange(
        mesh, op, [&](int peer) { return gives && peer != op.root ? op.output : NOTHING; },
        [&](int peer) { return !gives && peer == op.root ? op.output : NOTHING; });
}

void barrier(Mesh &mesh, const tddp_op &op)
{
    exchange(
        mesh, op, [](int) { return NOTHING; }, [](int) { return NOTHING; });
}

void all_gather(Mesh &mesh, const tddp_op &op)
{
    exchange(
        mesh, op, [&](int) { return op.input; }, [&](int peer) { return op.output_parts[peer]; });
}

void gather(Mesh &mesh, const tddp_op &op)
{
    exchange(
        mesh, op, [&](int peer) { return peer == op.root ? op.input : NOTHING; },
        [&](int peer) { return mesh.rank == op.root ? op.output_parts[peer] : NOTHING; });
}

void scatter(Mesh &mesh, const tddp_op &op)
{
    exchange(
        mesh, op, [&](int peer) { return mesh.rank == op.root ? op.input_parts[peer] : NOTHING; },
        [&](int peer) { return peer == op.root ? op.output : NOTHING; });
}

void all_to_all(Mesh &mesh, const tddp_op &op)
{
    exchange(
        mesh, op, [&](int peer) { return op.input_parts[peer]; },
        [&](int peer) { return op.output_parts[peer]; });
}

} // namespace tddp_gloo
