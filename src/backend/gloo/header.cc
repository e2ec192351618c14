/*
 * Slots of payloads. Pure functions; used on the group's progress thread.
 *
 * Invariant: a slot is made of the operation itself, also where it carries out a part of another:
 * what travels is its own, and its sequence number no other's.
 */
#include "header.h"

namespace tddp_gloo
{
namespace
{

tddp_call own_call(const tddp_op &op, int rank, int peer)
{
    tddp_op own = op;
    own.part_of = nullptr;
    return tddp_call_of(&own, rank, peer);
}

/* 30 bits of what both ends know, below the sequence number's lowest 30. The fingerprint
 * is not among it: a rank without one agrees with all; nor are factors, which may differ. */
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

uint64_t slot_of_given(const tddp_op &op, int rank, int peer)
{
    const tddp_call call = own_call(op, rank, peer);
    return slot_of(call, call.sends);
}

uint64_t slot_of_expected(const tddp_op &op, int rank, int peer)
{
    const tddp_call call = own_call(op, rank, peer);
    return slot_of(call, call.expects);
}

} // namespace tddp_gloo
