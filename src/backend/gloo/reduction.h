/* The common part of reductions: factors, and combining the data of peers. */
#ifndef TDDP_GLOO_REDUCTION_H
#define TDDP_GLOO_REDUCTION_H

#include <functional>

#include "op_messages.h"
#include "partition.h"

namespace tddp_gloo
{

/* Chunks of one peer that may be in transit to this rank. */
constexpr size_t WINDOW = 4;

/* The factor on the data of a rank whose factor for PREMUL_SUM is `premul`. For AVG of float16
 * it divides, since the sum could overflow. */
double factor_before(const Mesh &mesh, const tddp_op &op, double premul);
/* The factor on the result. */
double factor_after(const Mesh &mesh, const tddp_op &op);

void scale(tddp_dtype dtype, void *data, size_t count, double factor);

/* Whether a rank's data were multiplied by its factor before they were sent. */
enum class Scaling { SCALED, UNSCALED };

/* Combines the data in all ranks' headers, in the order of ranks, so that the bits don't depend
 * on the rank. `data` has this rank's data, then the result. */
void combine_inline(Mesh &mesh, OpMessages &messages, const tddp_op &op, char *data, size_t count,
                    Scaling scaling);

/* A part that this rank combines from all ranks' data. */
struct LocalPart {
    const char *local; /* this rank's data; may be the same as `into` */
    char *into;
    size_t bytes;
    Scaling scaling;
};

/* The memory that combine() needs for received data. */
size_t window_bytes(const Mesh &mesh, size_t bytes);

/* Receives all peers' data of this rank's part, in phase TO_OWNER, and combines them. Calls
 * `done(at, bytes)` after each chunk. */
void combine(Mesh &mesh, OpMessages &messages, const tddp_op &op, const LocalPart &part,
             char *incoming, const std::function<void(size_t at, size_t bytes)> &done);

} // namespace tddp_gloo

#endif
