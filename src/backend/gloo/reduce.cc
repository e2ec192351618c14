/*
 * reduce and reduce_scatter. Runs on the operation's thread.
 *
 * The input must not change, so the rank that combines applies the other ranks' factors to the
 * received data.
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

/* All ranks send to the root, which combines. */
void reduce_small(Mesh &mesh, const tddp_op &op, size_t bytes)
{
    OpMessages messages(mesh, op);
    each_peer(mesh, [&](int peer) {
        messages.send_header(peer, op.input.data, peer == op.root ? bytes : 0);
    });
    messages.exchange_headers();
    if (mesh.rank == op.root) {
        combine_inline(mesh, messages, op, static_cast<char *>(op.output.data), op.output.count,
                       Scaling::UNSCALED);
    }
}

/* Up to this size a second step costs more than it saves: three and four ranks on one host. */
constexpr size_t DIRECT_BYTES = 2 * 1024 * 1024;

/* Each rank combines a part, as in all_reduce, but sends it only to the root: otherwise all data
 * would have to enter the root. With two ranks, and with less data, the root combines
 * everything. */
class LargeReduce
{
  public:
    LargeReduce(Mesh &mesh, const tddp_op &op)
        : mesh_(mesh), op_(op), messages_(mesh, op), data_(static_cast<char *>(op.output.data)),
          owners_(mesh.size == 2 || bytes_of(op.output) <= DIRECT_BYTES ? 1 : mesh.size),
          parts_(op.output.count, owners_, tddp_dtype_size(op.output.dtype)),
          regions_(static_cast<size_t>(mesh.size))
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
        messages_.finish();
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
    Buffer &region(int peer)
    {
        return *regions_[static_cast<size_t>(peer)];
    }

    void begin(int peer);
    void combine_at_root();
    /* The result goes to scratch memory, since this rank's buffer must not change. */
    void combine_elsewhere();

    Mesh &mesh_;
    const tddp_op &op_;
    OpMessages messages_;
    char *data_;
    const int owners_;
    const Partition parts_;
    std::vector<Buffer *> regions_;
};

void LargeReduce::begin(int peer)
{
    messages_.send_header(peer, nullptr, 0);
    regions_[static_cast<size_t>(peer)] = &messages_.region(data_, bytes_of(op_.output));
    each_chunk(bytes(peer), [&](size_t at, size_t length) {
        messages_.send(region(peer), peer, TO_OWNER, start(peer) + at, length);
        if (is_root()) {
            /* The peer sends this after it has received the data sent from here now. */
            messages_.recv(region(peer), peer, FROM_OWNER, start(peer) + at, length);
        }
    });
}

void LargeReduce::combine_at_root()
{
    char *local = data_ + start(mesh_.rank);
    const LocalPart part = {local, local, bytes(mesh_.rank), Scaling::UNSCALED};
    char *incoming = mesh_.scratch(window_bytes(mesh_, part.bytes));
    combine(mesh_, messages_, op_, part, incoming, [](size_t, size_t) {});
    each_peer(mesh_, [&](int peer) {
        each_chunk(bytes(peer), [&](size_t, size_t) { mesh_.wait_recv(region(peer), peer); });
    });
}

void LargeReduce::combine_elsewhere()
{
    const size_t length = bytes(mesh_.rank);
    const size_t incoming = (window_bytes(mesh_, length) + 63) / 64 * 64;
    char *memory = mesh_.scratch(incoming + length);
    Buffer &result = messages_.region(memory + incoming, length);
    const LocalPart part = {data_ + start(mesh_.rank), memory + incoming, length,
                            Scaling::UNSCALED};
    combine(mesh_, messages_, op_, part, memory, [&](size_t at, size_t chunk) {
        messages_.send(result, op_.root, FROM_OWNER, at, chunk);
    });
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
    const tddp_buffer &local = op.input_parts[mesh.rank];
    char *output = static_cast<char *>(op.output.data);
    const size_t bytes = bytes_of(op.output);
    if (local.count != op.output.count) {
        throw Failure(TDDP_MISMATCH, "reduce_scatter: part " + std::to_string(mesh.rank) +
                                         " of the input has " + std::to_string(local.count) +
                                         " elements, the output " +
                                         std::to_string(op.output.count));
    }
    OpMessages messages(mesh, op);
    each_peer(mesh, [&](int peer) {
        const tddp_buffer &theirs = op.input_parts[peer];
        const bool eager = bytes_of(theirs) <= EAGER_BYTES;
        messages.send_header(peer, theirs.data, eager ? bytes_of(theirs) : 0);
        if (!eager) {
            Buffer &region = messages.region(theirs.data, bytes_of(theirs));
            each_chunk(bytes_of(theirs), [&](size_t at, size_t length) {
                messages.send(region, peer, TO_OWNER, at, length);
            });
        }
    });
    if (bytes <= EAGER_BYTES) {
        messages.exchange_headers();
        copy(output, local.data, bytes);
        combine_inline(mesh, messages, op, output, op.output.count, Scaling::UNSCALED);
    } else {
        const LocalPart part = {static_cast<const char *>(local.data), output, bytes,
                                Scaling::UNSCALED};
        char *incoming = mesh.scratch(window_bytes(mesh, bytes));
        combine(mesh, messages, op, part, incoming, [](size_t, size_t) {});
    }
    messages.finish();
}

} // namespace tddp_gloo
