/*
 * The slots under which payloads of collectives travel.
 */
#ifndef TDDP_GLOO_HEADER_H
#define TDDP_GLOO_HEADER_H

#include <cstdint>

#include <tddp/call.h>

namespace tddp_gloo
{

/* Of what both ends of a transfer of this operation with a peer know: what this rank gives or what
 * it expects. Never the same for two operations that disagree. Above the lowest three bits, below
 * the highest one. */
uint64_t slot_of_given(const tddp_op &op, int rank, int peer);
uint64_t slot_of_expected(const tddp_op &op, int rank, int peer);

} // namespace tddp_gloo

#endif
