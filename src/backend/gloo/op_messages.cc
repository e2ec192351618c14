/*
 * Headers and payloads of one operation. Runs on the operation's thread.
 *
 * Invariant: in each operation each rank sends exactly one header to every other rank, sends all of
 * them before it waits for any, and does not return before it has received all. So a peer is at
 * most one header ahead, and two inboxes suffice; and a rank that detects a mismatch has sent its
 * call to all others, so that they detect it too. (By recursive doubling only to the partners, and
 * one after the other; but there too no rank returns before all have entered.)
 */
#include "op_messages.h"

#include <cstring>

#include "failure.h"

namespace tddp_gloo
{

static_assert(sizeof(tddp_call) <= HEADER_BYTES, "a header has its place");

OpMessages::OpMessages(Mesh &mesh, const tddp_op &op) : mesh_(mesh), op_(op) {}

void OpMessages::send_header(int peer, const void *data, size_t bytes)
{
    expect_header(peer);
    answer_header(peer, data, bytes);
}

void OpMessages::expect_header(int peer)
{
    if (mesh_.link(peer).sent != op_.sequence) {
        mesh_.post_inbox(peer, mesh_.link(peer).inbox_index ^ 1u);
    }
}

void OpMessages::answer_header(int peer, const void *data, size_t bytes)
{
    Link &link = mesh_.link(peer);
    if (link.sent == op_.sequence) {
        return; /* before the operation was interrupted */
    }
    const tddp_call call = tddp_call_of(&op_, mesh_.rank, peer);
    memcpy(link.outbox_data, &call, sizeof call);
    if (bytes > 0) {
        memcpy(link.outbox_data + HEADER_BYTES, data, bytes);
    }
    link.sent = op_.sequence;
    link.sending = true;
    mesh_.send(*link.outbox, peer, HEADER_SLOT, 0, HEADER_BYTES + bytes);
}

char *OpMessages::recv_header(int peer)
{
    Link &link = mesh_.link(peer);
    if (link.agreed != op_.sequence) {
        mesh_.wait_header(peer);
        link.inbox_index ^= 1u;
        mesh_.compare(op_, peer, link.inbox_data[link.inbox_index ^ 1u]);
    }
    return link.inbox_data[link.inbox_index ^ 1u] + HEADER_BYTES;
}

void OpMessages::exchange_headers()
{
    for (int peer = 0; peer < mesh_.size; peer++) {
        if (peer != mesh_.rank) {
            recv_header(peer);
        }
    }
    finish_headers();
}

void OpMessages::finish_headers()
{
    for (int peer = 0; peer < mesh_.size; peer++) {
        if (peer != mesh_.rank && mesh_.link(peer).sending) {
            mesh_.wait_send(*mesh_.link(peer).outbox, peer);
            mesh_.link(peer).sending = false;
        }
    }
}

double OpMessages::premul(int peer) const
{
    return mesh_.link(peer).before.theirs.premul;
}

Buffer &OpMessages::region(const void *data, size_t bytes)
{
    /* Gloo has one pointer type for both directions; a send doesn't write. */
    regions_.push_back(mesh_.buffer(const_cast<void *>(data), bytes));
    return *regions_.back();
}

void OpMessages::send(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.send(region, peer, send_slot_of(op_, mesh_.rank, peer) | phase, offset, bytes);
    sent_.push_back({&region, peer});
}

void OpMessages::recv(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes)
{
    mesh_.recv(region, peer, recv_slot_of(op_, mesh_.rank, peer) | phase, offset, bytes);
}

void OpMessages::finish()
{
    finish_headers();
    for (const Sent &each : sent_) {
        mesh_.wait_send(*each.buffer, each.peer);
    }
    sent_.clear();
}

} // namespace tddp_gloo
