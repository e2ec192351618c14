/*
 * Making a backend's context for a group, with shared memory in its place, or beneath it, where
 * ranks share a host and the backend bears that (TDDP_BACKEND_SHARES_HOSTS); so for each part of a
 * backend of several (devices/devices.h).
 */
#ifndef TDDP_BACKEND_OPEN_H
#define TDDP_BACKEND_OPEN_H

#include <tddp/backend.h>

/*
 * Calls create() of whatever is to carry out the group's operations, and says what it is. Shared
 * memory serves a group whose ranks all share a host; with several hosts and more ranks than hosts
 * it serves together with the backend asked for; if a rank cannot have it, all do without, and one
 * line in rank 0's log says why. TDDP_SHM=0 turns it off. Errors: those of create().
 */
TDDP_NODISCARD tddp_status tddp_backend_open(const tddp_backend_v1 *asked,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             const tddp_backend_v1 **serving, void **context);

#endif
