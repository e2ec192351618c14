/* The slots of collectives' payloads. */
#ifndef TDDP_GLOO_SLOTS_H
#define TDDP_GLOO_SLOTS_H

#include <cstdint>

#include <tddp/call.h>

namespace tddp_gloo
{

/* The slot of what this rank sends to a peer, or receives from it, in an operation: a hash of
 * what both ends know. It differs for operations that don't agree. Uses neither the lowest three
 * bits nor the highest one. */
uint64_t send_slot_of(const tddp_op &op, int rank, int peer);
uint64_t recv_slot_of(const tddp_op &op, int rank, int peer);

} // namespace tddp_gloo

#endif
