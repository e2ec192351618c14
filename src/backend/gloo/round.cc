/*
 * Headers and payloads of one operation. Runs on the group's progress thread.
 *
 * Invariant: in each operation that two ranks both take part in, each sends the other exactly one
 * header, and neither ends before it has the other's. So a peer is at most one header ahead, and
 * two inboxes suffice.
 */
#include "round.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "failure.h"

namespace tddp_gloo
{
namespace
{

struct Header {
    uint64_t sequence;
    uint64_t count; /* of input */
    uint32_t kind;
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
};
static_assert(sizeof(Header) <= HEADER_BYTES, "a header has its place");

bool reduces(const tddp_op &op)
{
    return op.kind == TDDP_OP_ALL_REDUCE || op.kind == TDDP_OP_REDUCE_SCATTER;
}

Header header_of(const tddp_op &op)
{
    Header header = {};
    header.sequence = op.sequence;
    header.count = op.input.count;
    header.kind = op.kind;
    header.dtype = op.input.dtype;
    header.reduce = reduces(op) ? op.reduce : 0;
    header.root = op.kind == TDDP_OP_BROADCAST ? op.root : 0;
    return header;
}

std::string describe(const Header &header)
{
    auto kind = static_cast<tddp_op_kind>(header.kind);
    std::string text =
        std::string(tddp_op_name(kind)) + " (operation " + std::to_string(header.sequence);
    if (kind != TDDP_OP_BARRIER) {
        text += ", " + std::to_string(header.count) + " elements of " +
                tddp_dtype_name(static_cast<tddp_dtype>(header.dtype));
    }
    if (kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE_SCATTER) {
        text += std::string(", ") + tddp_reduce_op_name(static_cast<tddp_reduce_op>(header.reduce));
    }
    if (kind == TDDP_OP_BROADCAST) {
        text += ", root " + std::to_string(header.root);
    }
    return text + ")";
}

/* 30 bits of what the ranks must agree on (FNV-1a), below the sequence number's lowest 31. */
uint64_t slot_of(const Header &header)
{
    const auto *bytes = reinterpret_cast<const unsigned char *>(&header);
    uint64_t hash = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < sizeof header; i++) {
        hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
    }
    return ((header.sequence & 0x7fffffffu) << 33) | ((hash >> 34) << 3);
}

} // namespace

Round::Round(Mesh &mesh, const tddp_op &op) : mesh_(mesh), op_(op), slot_(slot_of(header_of(op))) {}

void Round::greet(int peer, const void *data, size_t bytes)
{
    Link &link = mesh_.link(peer);
    mesh_.post_inbox(peer, link.turn ^ 1u);
    Header header = header_of(op_);
    memcpy(link.outbox_data, &header, sizeof header);
    if (bytes > 0) {
        memcpy(link.outbox_data + HEADER_BYTES, data, bytes);
    }
    mesh_.send(*link.outbox, peer, HEADER_SLOT, 0, HEADER_BYTES + bytes);
    sent_.push_back({link.outbox.get(), peer});
}

const char *Round::answer(int peer)
{
    Link &link = mesh_.link(peer);
    mesh_.wait_recv(*link.inbox[link.turn], peer);
    const char *data = link.inbox_data[link.turn];
    link.turn ^= 1u;
    Header mine = header_of(op_);
    Header theirs;
    memcpy(&theirs, data, sizeof theirs);
    if (memcmp(&mine, &theirs, sizeof mine) != 0) {
        throw Failure(TDDP_MISMATCH, "rank " + std::to_string(mesh_.rank) + " runs " +
                                         describe(mine) + ", rank " + std::to_string(peer) +
                                         " runs " + describe(theirs) +
                                         ": all ranks must make the same calls in the same order");
    }
    return data + HEADER_BYTES;
}

Buffer &Round::region(const void *data, size_t bytes)
{
    /* Gloo takes one kind of pointer for both directions; what is sent is not written to. */
    regions_.push_back(mesh_.buffer(const_cast<void *>(data), bytes));
    return *regions_.back();
}

void Round::send(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.send(region, peer, slot_ | phase, offset, bytes);
    sent_.push_back({&region, peer});
}

void Round::recv(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.recv(region, peer, slot_ | phase, offset, bytes);
}

void Round::wait_sent(Buffer &region, int peer)
{
    auto oldest = std::find_if(sent_.begin(), sent_.end(),
                               [&](const Sent &each) { return each.buffer == &region; });
    if (oldest != sent_.end()) {
        mesh_.wait_send(region, peer);
        sent_.erase(oldest);
    }
}

void Round::finish()
{
    for (const Sent &each : sent_) {
        mesh_.wait_send(*each.buffer, each.peer);
    }
    sent_.clear();
}

} // namespace tddp_gloo
