/*
 * The `fake` backend: another backend with faults on demand, for tests of everything above it.
 *
 * TDDP_FAKE, read when a group is created, says which, separated by commas.
 *
 *     over=NAME       the backend beneath, any that is found by that name; shm unless given
 *     delay_ms=N      each operation takes N milliseconds longer
 *     fail_at=N       the group's Nth operation returns TDDP_NETWORK
 *     drop_at=N       the Nth operation never ends: it waits for its timeout or for abort()
 *     lose_at=N       the Nth operation returns TDDP_PEER_LOST
 *     p2p_fail_at=N   the same for this rank's Nth send or receive, counted together
 *     p2p_drop_at=N
 *     p2p_lose_at=N
 *     post_fail_at=N  the Nth send or receive cannot be posted: TDDP_NETWORK
 *     create_fail=1   the group cannot be created: TDDP_NETWORK
 *     rank=N          only on rank N of the group
 *
 * The context is that of the backend beneath, which doesn't get an operation with a fault (one that
 * goes to a device's queue it gets, but doesn't launch). Without faults its own table serves the
 * group.
 */
#ifndef TDDP_BACKEND_FAKE_H
#define TDDP_BACKEND_FAKE_H

#include "backend/wrapper.h"

/* What a group asks for; open.c opens the backend beneath instead, and wraps it. */
const tddp_backend_v1 *tddp_fake_backend(void);

/* The name of the backend beneath. TDDP_INVALID_ARGUMENT: it can't have faults. */
enum { TDDP_FAKE_NAME_BYTES = 33 };
TDDP_NODISCARD tddp_status tddp_fake_over(int rank, char name[TDDP_FAKE_NAME_BYTES]);

/* Has the open backend served by a table with the faults, if there are any for this rank. Closes it
 * on failure: TDDP_INVALID_ARGUMENT: TDDP_FAKE is malformed; TDDP_NETWORK: asked for. */
TDDP_NODISCARD tddp_status tddp_fake_wrap(int rank, tddp_inner *inner);

#endif
