/*
 * Creates the context of a group's backend. Shared memory replaces the backend, or is combined with
 * it, if ranks share a host and the backend allows it (TDDP_BACKEND_SHARES_HOSTS).
 */
#ifndef TDDP_BACKEND_OPEN_H
#define TDDP_BACKEND_OPEN_H

#include "backend/wrapper.h"

/*
 * Creates the context that runs the group's operations. Shared memory serves a group whose ranks
 * all share a host. With several hosts and more ranks than hosts it serves together with the
 * requested backend. If a rank can't share memory, all ranks go without, and rank 0 logs the
 * reason. TDDP_SHM=0 turns it off. Sets the backend and context of `*out`, on success only; the
 * table lives as long as the context. Errors: those of create().
 */
TDDP_NODISCARD tddp_status tddp_backend_open(const tddp_backend_v1 *requested,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             tddp_inner *out);

#endif
