/* Messages between two ranks over a mesh. These throw Failure. */
#ifndef TDDP_GLOO_P2P_H
#define TDDP_GLOO_P2P_H

#include "mesh.h"

namespace tddp_gloo
{

struct Request;

/* Begins a send or a receive, one at a time; the request is for finish(). */
Request *post(Mesh &mesh, const tddp_op &op);

/* Waits until it is done and frees the request; returns the sender's rank for a receive. */
int finish(Mesh &mesh, Request *request);

} // namespace tddp_gloo

#endif
