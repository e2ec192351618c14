/*
 * reduce and reduce_scatter. Runs on the group's progress thread.
 *
 * What a rank contributes may be memory that must stay as it is, so factors that come before the
 * sum are applied by the one who combines, to what has arrived.
 */
#include <memory>
#include <vector>

#include "collectives.h"
#include "failure.h"
#include "reduction.h"

namespace tddp_gloo
{
namespace
{

/* All send to the root, which combines. */
void reduce_small(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    Round round(mesh, op);
    each_peer(mesh,
              [&](int peer) { round.greet(peer, op.input.data, peer == op.root ? bytes : 0); });
    if (mesh.rank == op.root) {
        combine_answers(mesh, round, op, static_cast<char *>(op.output.data), op.output.count,
                        Shares::PLAIN);
    } else {
        each_peer(mesh, [&](int peer) { round.answer(peer); });
    }
    round.finish();
}

/* Up to here a second way costs more than it saves: three and four ranks on one host. */
constexpr size_t STRAIGHT_BYTES = 2 * 1024 * 1024;

/*
 * Each rank combines a part, as in all_reduce, but sends it to the root alone: otherwise everything
 * would have to enter the root. With two ranks, and where that is not much, the root combines all.
 */
class LargeReduce
{
  public:
    LargeReduce(Mesh &mesh, const tddp_op &op)
        : mesh_(mesh), op_(op), round_(mesh, op), data_(static_cast<char *>(op.output.data)),
          owners_(mesh.size == 2 || bytes_of(op.output) <= STRAIGHT_BYTES ? 1 : mesh.size),
          parts_(op.output.count, owners_, tddp_dtype_size(op.output.dtype)),
          whole_(static_cast<size_t>(mesh.size))
    {
    }

    void run()
    {
        each_peer(mesh_, [&](int peer) { begin(peer); });
        if (is_root()) {
            combine_at_root();
        } else {
            combine_elsewhere();
        }
        round_.finish();
    }

  private:
    bool is_root() const
    {
        return mesh_.rank == op_.root;
    }
    /* The part that a rank combines; the root has the first one. */
    size_t start(int rank) const
    {
        return parts_.offset(owner(rank));
    }
    size_t bytes(int rank) const
    {
        return owner(rank) < owners_ ? parts_.bytes(owner(rank)) : 0;
    }
    int owner(int rank) const
    {
        return (rank - op_.root + mesh_.size) % mesh_.size;
    }
    Buffer &whole(int peer)
    {
        return *whole_[static_cast<size_t>(peer)];
    }

    void begin(int peer);
    void combine_at_root();
    /* The result of this rank's part has no place in its own buffer, which keeps its contents. */
    void combine_elsewhere();

    Mesh &mesh_;
    const tddp_op &op_;
    Round round_;
    char *data_;
    const int owners_;
    const Parts parts_;
    std::vector<Buffer *> whole_;
};

void LargeReduce::begin(int peer)
{
    round_.greet(peer, nullptr, 0);
    whole_[static_cast<size_t>(peer)] = &round_.region(data_, bytes_of(op_.output));
    each_piece(bytes(peer), [&](size_t at, size_t length) {
        round_.send(whole(peer), peer, TO_OWNER, start(peer) + at, length);
        if (is_root()) {
            /* Comes after the peer has got what is sent from there now. */
            round_.recv(whole(peer), peer, FROM_OWNER, start(peer) + at, length);
        }
    });
}

void LargeReduce::combine_at_root()
{
    char *own = data_ + start(mesh_.rank);
    const Part part = {own, own, bytes(mesh_.rank), Shares::PLAIN};
    char *inbound = mesh_.scratch(inbound_bytes(mesh_, part.bytes));
    combine(mesh_, round_, op_, part, inbound, [](size_t, size_t) {});
    each_peer(mesh_, [&](int peer) {
        each_piece(bytes(peer), [&](size_t, size_t) { mesh_.wait_recv(whole(peer), peer); });
    });
}

void LargeReduce::combine_elsewhere()
{
    const size_t length = bytes(mesh_.rank);
    const size_t inbound = (inbound_bytes(mesh_, length) + 63) / 64 * 64;
    char *memory = mesh_.scratch(inbound + length);
    Buffer &result = round_.region(memory + inbound, length);
    const Part part = {data_ + start(mesh_.rank), memory + inbound, length, Shares::PLAIN};
    combine(mesh_, round_, op_, part, memory,
            [&](size_t at, size_t piece) { round_.send(result, op_.root, FROM_OWNER, at, piece); });
}

} // namespace

void reduce(Mesh &mesh, const tddp_op &op)
{
    const size_t bytes = bytes_of(op.output);
    if (mesh.size == 1) {
        scale(op.output.dtype, op.output.data, op.output.count, factor_before(mesh, op, op.premul));
    } else if (bytes <= EAGER_BYTES) {
        reduce_small(mesh, op, bytes);
    } else {
        LargeReduce(mesh, op).run();
    }
}

void reduce_scatter(Mesh &mesh, const tddp_op &op)
{
    const tddp_buffer &own = op.input_parts[mesh.rank];
    char *output = static_cast<char *>(op.output.data);
    const size_t bytes = bytes_of(op.output);
    if (own.count != op.output.count) {
        throw Failure(TDDP_MISMATCH, "reduce_scatter: part " + std::to_string(mesh.rank) +
                                         " of the input has " + std::to_string(own.count) +
                                         " elements, the output " +
                                         std::to_string(op.output.count));
    }
    Round round(mesh, op);
    each_peer(mesh, [&](int peer) {
        const tddp_buffer &theirs = op.input_parts[peer];
        const bool eager = bytes_of(theirs) <= EAGER_BYTES;
        round.greet(peer, theirs.data, eager ? bytes_of(theirs) : 0);
        if (!eager) {
            Buffer &region = round.region(theirs.data, bytes_of(theirs));
            each_piece(bytes_of(theirs), [&](size_t at, size_t length) {
                round.send(region, peer, TO_OWNER, at, length);
            });
        }
    });
    if (bytes <= EAGER_BYTES) {
        copy(output, own.data, bytes);
        combine_answers(mesh, round, op, output, op.output.count, Shares::PLAIN);
    } else {
        const Part part = {static_cast<const char *>(own.data), output, bytes, Shares::PLAIN};
        char *inbound = mesh.scratch(inbound_bytes(mesh, bytes));
        combine(mesh, round, op, part, inbound, [](size_t, size_t) {});
    }
    round.finish();
}

} // namespace tddp_gloo
