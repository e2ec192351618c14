/* Operations of many ranks on little data. */
#ifndef TDDP_GLOO_DOUBLING_H
#define TDDP_GLOO_DOUBLING_H

#include "mesh.h"

namespace tddp_gloo
{

/* Whether this is the better way for so many bytes: with few ranks one step is. */
inline bool doubles(const Mesh &mesh, size_t bytes)
{
    return mesh.size > 8 && bytes <= EAGER_BYTES;
}

/* Combines all ranks' `op.output` there, without factors; without data a barrier. */
void all_reduce_doubling(Mesh &mesh, const tddp_op &op);

} // namespace tddp_gloo

#endif
