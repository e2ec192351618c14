/*
 * What the reducing collectives share: factors, and combining what peers send.
 */
#ifndef TDDP_GLOO_REDUCTION_H
#define TDDP_GLOO_REDUCTION_H

#include <functional>

#include "parts.h"
#include "round.h"

namespace tddp_gloo
{

/* Pieces of one peer's that may be on their way to us. */
constexpr size_t WINDOW = 4;

/* The factor on what a rank contributes, whose own factor for PREMUL_SUM is `premul`. A sum of
 * float16 could overflow before it is divided. */
double factor_before(const Mesh &mesh, const tddp_op &op, double premul);
/* The factor on the result. */
double factor_after(const Mesh &mesh, const tddp_op &op);

void scale(tddp_dtype dtype, void *data, size_t count, double factor);

/* into = (into op from) * factor */
void combine_scaled(const tddp_op &op, char *into, const char *from, size_t bytes, double factor);

/* Whether what ranks contribute has had its factor when it was sent. */
enum class Shares { SCALED, PLAIN };

/*
 * Combines what all ranks sent with their headers, in the order of ranks, so that whoever does it
 * gets the same bits. `data` holds this rank's share, then the result.
 */
void combine_answers(Mesh &mesh, Round &round, const tddp_op &op, char *data, size_t count,
                     Shares shares);

/* A part of the message, to be combined on this rank from what all ranks have of it. */
struct Part {
    const char *own; /* this rank's share; may be `into` itself */
    char *into;
    size_t bytes;
    Shares shares;
};

/* Memory that combine() needs for what arrives. */
size_t inbound_bytes(const Mesh &mesh, size_t bytes);

/*
 * Receives every peer's share of this rank's part, in the phase TO_OWNER, and combines them.
 * `done(at, bytes)` is told of each piece.
 */
void combine(Mesh &mesh, Round &round, const tddp_op &op, const Part &part, char *inbound,
             const std::function<void(size_t at, size_t bytes)> &done);

} // namespace tddp_gloo

#endif
