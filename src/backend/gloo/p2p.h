/* Sends and receives between two ranks. They throw Failure. */
#ifndef TDDP_GLOO_P2P_H
#define TDDP_GLOO_P2P_H

#include "mesh.h"

namespace tddp_gloo
{

struct Request;

/* Starts a send or a receive, one at a time. finish() takes the request. */
Request *post(Mesh &mesh, const tddp_op &op);

/* Waits until the message of a receive has arrived, and returns its source; finish() then reads the
 * operation's output, timeout and token again. */
int probe(Mesh &mesh, Request &request);

/* Frees a request that is not finished. The mesh may be gone. */
void drop(Request *request);

/* Waits until the request is complete and frees it; returns the sender's rank for a receive. */
int finish(Mesh &mesh, Request *request);

} // namespace tddp_gloo

#endif
