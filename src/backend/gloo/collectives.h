/* The collectives of this backend. They throw Failure. */
#ifndef TDDP_GLOO_COLLECTIVES_H
#define TDDP_GLOO_COLLECTIVES_H

#include "mesh.h"

namespace tddp_gloo
{

void all_reduce(Mesh &mesh, const tddp_op &op);
void broadcast(Mesh &mesh, const tddp_op &op);
void barrier(Mesh &mesh, const tddp_op &op);
/* all_gather, gather, scatter, all_to_all */
void move_parts(Mesh &mesh, const tddp_op &op);
void reduce_scatter(Mesh &mesh, const tddp_op &op);
void reduce(Mesh &mesh, const tddp_op &op);

/* Whether all_reduce sends this with the headers, from each rank to every other. */
inline bool is_small(const Mesh &mesh, size_t bytes)
{
    return mesh.size == 1 || bytes <= EAGER_BYTES / static_cast<size_t>(mesh.size - 1);
}

/* Whether an operation waits only for headers, and may be interrupted then and run again; see
 * OpMessages::exchange_headers(). */
bool resumes(const Mesh &mesh, const tddp_op &op);

} // namespace tddp_gloo

#endif
