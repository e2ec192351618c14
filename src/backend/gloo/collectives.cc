/*
 * The collectives, as direct exchanges between all pairs of ranks. Runs on the group's progress
 * thread.
 *
 * Small messages go to everybody at once and every rank computes the result, always in the order of
 * ranks, so that all get the same bits. For larger ones rank r owns part r: the others send it
 * their share of that part, it combines them piece by piece, and sends each piece back to all while
 * the next arrives.
 */
#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "round.h"

namespace tddp_gloo
{
namespace
{

/*
 * Pieces small enough to be combined while they are in the processor's cache, large enough not to
 * be all messages. Two ranks over loopback on two busy cores, float32, all_reduce in microseconds,
 * the middle one of three medians, taken in turns with PyTorch 1.13's Gloo backend:
 *
 *     bytes      4 KiB   64 KiB   256 KiB   1 MiB   4 MiB   8 MiB
 *     here          96      131       382     537    2646    5624
 *     PyTorch      578      260       403     638    3368    7275
 *
 * Pieces of 128 KiB and 256 KiB cost a fifth more from 1 MiB on, 1 MiB and 2 MiB nothing less. Both
 * ranks sending everything and adding everything themselves saves a step (220 at 256 KiB), but on
 * busy cores its median is now and then that of a scheduler's tick (4000).
 */
constexpr size_t PIECE_BYTES = 512 * 1024;
/* Pieces of one peer's that may be on their way to us. */
constexpr size_t WINDOW = 4;

enum Phase : unsigned { TO_OWNER = 0, FROM_OWNER = 1, WHOLE = 2 };

bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* The factor on what this rank contributes. A sum of float16 could overflow before it is divided.
 */
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

void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        memcpy(to, from, bytes);
    }
}

template <typename Visit> void each_peer(const Mesh &mesh, Visit visit)
{
    for (int peer = 0; peer < mesh.size; peer++) {
        if (peer != mesh.rank) {
            visit(peer);
        }
    }
}

/* Equal parts of `count` elements; all start on a cache line if the whole does. */
class Parts
{
  public:
    Parts(size_t count, int ranks, size_t element) : count_(count), element_(element)
    {
        size_t even = (count + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks);
        size_t line = 64 / element;
        each_ = (even + line - 1) / line * line;
    }
    size_t offset(int rank) const
    {
        return std::min(count_, each_ * static_cast<size_t>(rank)) * element_;
    }
    size_t bytes(int rank) const
    {
        return offset(rank + 1) - offset(rank);
    }

  private:
    size_t count_;
    size_t element_;
    size_t each_;
};

template <typename Visit> void each_piece(size_t bytes, Visit visit)
{
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        visit(at, std::min(PIECE_BYTES, bytes - at));
    }
}

/*
 * Receives every peer's share of this rank's part and combines it into `into`, which holds this
 * rank's own share or, if `own` is given, gets it from there. `done(at, bytes)` is told of each
 * piece.
 */
template <typename Done>
void combine(Mesh &mesh, Round &round, const tddp_op &op, const char *own, char *into, size_t bytes,
             Done done)
{
    size_t element = tddp_dtype_size(op.input.dtype);
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
        each_peer(mesh, [&](int peer) {
            mesh.wait_recv(*inbound[slot_at(peer)], peer);
            const char *theirs = memory + window * slot_at(peer) + at % (WINDOW * PIECE_BYTES);
            tddp_reduce(op.reduce, op.input.dtype, into + at, theirs, length / element);
            post(peer, at + WINDOW * PIECE_BYTES);
        });
        scale(op.input.dtype, into + at, length / element, factor_after(mesh, op));
        done(at, length);
    });
}

/* Everybody gets everything and computes the result. */
void all_reduce_small(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    Round round(mesh, op);
    char *data = static_cast<char *>(op.output.data);
    size_t count = op.output.count;
    each_peer(mesh, [&](int peer) { round.greet(peer, data, bytes); });
    if (mesh.size == 2) {
        /* Two numbers combine to the same bits in either order. */
        tddp_reduce(op.reduce, op.input.dtype, data, round.answer(1 - mesh.rank), count);
    } else {
        char *mine = mesh.scratch(bytes);
        copy(mine, data, bytes);
        for (int peer = 0; peer < mesh.size; peer++) {
            const char *theirs = peer == mesh.rank ? mine : round.answer(peer);
            if (peer == 0) {
                copy(data, theirs, bytes);
            } else {
                tddp_reduce(op.reduce, op.input.dtype, data, theirs, count);
            }
        }
    }
    scale(op.input.dtype, data, count, factor_after(mesh, op));
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
    combine(mesh, round, op, nullptr, own, parts.bytes(mesh.rank), [&](size_t at, size_t length) {
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

} // namespace

void all_reduce(Mesh &mesh, const tddp_op &op)
{
    size_t bytes = op.output.count * tddp_dtype_size(op.output.dtype);
    scale(op.input.dtype, op.output.data, op.output.count, factor_before(mesh, op));
    if (mesh.size == 1) {
        return;
    }
    if (bytes <= EAGER_BYTES / static_cast<size_t>(mesh.size - 1)) {
        all_reduce_small(mesh, op, bytes);
    } else {
        all_reduce_large(mesh, op, bytes);
    }
}

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
            tddp_reduce(op.reduce, op.input.dtype, output, round.answer(peer), op.output.count);
        });
        scale(op.output.dtype, output, op.output.count, factor_after(mesh, op));
    } else {
        combine(mesh, round, op, own, output, part, [](size_t, size_t) {});
    }
    round.finish();
}

} // namespace tddp_gloo
