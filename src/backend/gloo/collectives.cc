/*
 * The collectives but all_reduce, as direct exchanges between pairs of ranks. Runs on the group's
 * progress thread.
 */
#include "collectives.h"

#include <vector>

#include "reduction.h"

namespace tddp_gloo
{

void broadcast(Mesh &mesh, const tddp_op &op)
{
    size_t bytes = op.output.count * tddp_dtype_size(op.output.dtype);
    bool eager = bytes <= EAGER_BYTES;
    if (mesh.size == 1) {
        return;
    }
    Round round(mesh, op);
    if (mesh.rank == op.root) {
        each_peer(mesh, [&](int peer) {
            round.greet(peer, op.output.data, eager ? bytes : 0);
            if (!eager) {
                round.send(round.region(op.output.data, bytes), peer, WHOLE, 0, bytes);
            }
        });
        each_peer(mesh, [&](int peer) { round.answer(peer); });
    } else {
        Buffer *region = nullptr;
        round.greet(op.root, nullptr, 0);
        if (!eager) {
            region = &round.region(op.output.data, bytes);
            round.recv(*region, op.root, WHOLE, 0, bytes);
        }
        const char *data = round.answer(op.root);
        if (region) {
            mesh.wait_recv(*region, op.root);
        } else {
            copy(op.output.data, data, bytes);
        }
    }
    round.finish();
}

void barrier(Mesh &mesh, const tddp_op &op)
{
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) { round.greet(peer, nullptr, 0); });
    each_peer(mesh, [&](int peer) { round.answer(peer); });
    round.finish();
}

void all_gather(Mesh &mesh, const tddp_op &op)
{
    size_t bytes = op.input.count * tddp_dtype_size(op.input.dtype);
    bool eager = bytes <= EAGER_BYTES;
    char *output = static_cast<char *>(op.output.data);
    auto place = [&](int peer) { return output + bytes * static_cast<size_t>(peer); };
    std::vector<Buffer *> inbound(static_cast<size_t>(mesh.size));
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) {
        round.greet(peer, op.input.data, eager ? bytes : 0);
        if (!eager) {
            Buffer &region = round.region(place(peer), bytes);
            inbound[static_cast<size_t>(peer)] = &region;
            round.recv(region, peer, WHOLE, 0, bytes);
            round.send(round.region(op.input.data, bytes), peer, WHOLE, 0, bytes);
        }
    });
    copy(place(mesh.rank), op.input.data, bytes);
    each_peer(mesh, [&](int peer) {
        const char *data = round.answer(peer);
        if (eager) {
            copy(place(peer), data, bytes);
        }
    });
    each_peer(mesh, [&](int peer) {
        if (!eager) {
            mesh.wait_recv(*inbound[static_cast<size_t>(peer)], peer);
        }
    });
    round.finish();
}

void reduce_scatter(Mesh &mesh, const tddp_op &op)
{
    size_t part = op.output.count * tddp_dtype_size(op.output.dtype);
    const char *input = static_cast<const char *>(op.input.data);
    char *output = static_cast<char *>(op.output.data);
    std::vector<char> scaled;
    if (factor_before(mesh, op) != 1.0) {
        /* The caller's input stays as it is. */
        scaled.assign(input, input + part * static_cast<size_t>(mesh.size));
        tddp_scale(op.input.dtype, scaled.data(), op.input.count, factor_before(mesh, op));
        input = scaled.data();
    }
    const char *own = input + part * static_cast<size_t>(mesh.rank);
    bool eager = part <= EAGER_BYTES;
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) {
        const char *theirs = input + part * static_cast<size_t>(peer);
        round.greet(peer, theirs, eager ? part : 0);
        if (!eager) {
            Buffer &region = round.region(theirs, part);
            each_piece(part, [&](size_t at, size_t length) {
                round.send(region, peer, TO_OWNER, at, length);
            });
        }
    });
    if (eager) {
        copy(output, own, part);
        each_peer(mesh, [&](int peer) {
            tddp_combine(op.reduce, op.input.dtype, output, round.answer(peer), op.output.count);
        });
        scale(op.output.dtype, output, op.output.count, factor_after(mesh, op));
    } else {
        combine(mesh, round, op, own, output, part, [](size_t, size_t) {});
    }
    round.finish();
}

} // namespace tddp_gloo
