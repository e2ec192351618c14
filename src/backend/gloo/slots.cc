/*
 * Slots of payloads. Pure functions; used on the operation's thread.
 *
 * Invariant: a slot is made from the operation itself, not from the operation that it is a part of:
 * its data and its sequence number are its own.
 */
#include "slots.h"

namespace tddp_gloo
{
namespace
{

tddp_call call_without_parent(const tddp_op &op, int rank, int peer)
{
    tddp_op standalone = op;
    standalone.part_of = nullptr;
    return tddp_call_of(&standalone, rank, peer);
}

/* 30 bits of a digest of what both ends know, and the lowest 30 bits of the sequence number
 * above. The fingerprint is left out, since a rank without one agrees with all; so are factors,
 * which may differ. */
uint64_t slot_of(const tddp_call &call, uint64_t elements)
{
    tddp_call facts = call;
    facts.sends = elements;
    facts.expects = elements;
    facts.fingerprint = 0;
    facts.premul = 0;
    const uint64_t hash = tddp_digest(TDDP_DIGEST_START, &facts, sizeof facts);
    return ((call.sequence & 0x3fffffffu) << 33) | ((hash >> 34) << 3);
}

} // namespace

uint64_t send_slot_of(const tddp_op &op, int rank, int peer)
{
    const tddp_call call = call_without_parent(op, rank, peer);
    return slot_of(call, call.sends);
}

uint64_t recv_slot_of(const tddp_op &op, int rank, int peer)
{
    const tddp_call call = call_without_parent(op, rank, peer);
    return slot_of(call, call.expects);
}

} // namespace tddp_gloo
