/*
 * Headers and payloads of one operation. Runs on the group's progress thread.
 *
 * Invariant: in each operation each rank sends every other exactly one header, sends all of them
 * before it looks at any, and does not end before it has looked at all. So a peer is at most one
 * header ahead, and two inboxes suffice; and a rank that meets a disagreement has told all others
 * what it runs, so that they find it as well.
 */
#include "round.h"

#include <algorithm>
#include <cstring>

#include "failure.h"

namespace tddp_gloo
{

static_assert(sizeof(tddp_call) <= HEADER_BYTES, "a header has its place");

Round::Round(Mesh &mesh, const tddp_op &op) : mesh_(mesh), op_(op) {}

void Round::greet(int peer, const void *data, size_t bytes)
{
    Link &link = mesh_.link(peer);
    const tddp_call call = tddp_call_of(&op_, mesh_.rank, peer);
    mesh_.post_inbox(peer, link.turn ^ 1u);
    memcpy(link.outbox_data, &call, sizeof call);
    if (bytes > 0) {
        memcpy(link.outbox_data + HEADER_BYTES, data, bytes);
    }
    mesh_.send(*link.outbox, peer, HEADER_SLOT, 0, HEADER_BYTES + bytes);
    sent_.push_back({link.outbox.get(), peer});
}

char *Round::answer(int peer)
{
    Link &link = mesh_.link(peer);
    mesh_.wait_recv(*link.inbox[link.turn], peer);
    char *data = link.inbox_data[link.turn];
    link.turn ^= 1u;
    mesh_.compare(op_, peer, data);
    return data + HEADER_BYTES;
}

double Round::premul(int peer) const
{
    return mesh_.link(peer).before.theirs.premul;
}

Buffer &Round::region(const void *data, size_t bytes)
{
    /* Gloo takes one kind of pointer for both directions; what is sent is not written to. */
    regions_.push_back(mesh_.buffer(const_cast<void *>(data), bytes));
    return *regions_.back();
}

void Round::send(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.send(region, peer, slot_of_given(op_, mesh_.rank, peer) | phase, offset, bytes);
    sent_.push_back({&region, peer});
}

void Round::recv(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.recv(region, peer, slot_of_expected(op_, mesh_.rank, peer) | phase, offset, bytes);
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
