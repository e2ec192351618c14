/*
 * The `fake` backend: correct results in the simplest way, and faults on demand, for tests of
 * everything above backends. It works wherever ranks share a store: threads with a hash store,
 * processes with a file or TCP store. In each operation every rank sets a key, reads all others'
 * and computes the result itself. So it is slow, and a rank's data must fit into a value of the
 * store.
 *
 * TDDP_FAKE, read when a group is created, requests faults, separated by commas.
 *
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
 */
#ifndef TDDP_BACKEND_FAKE_H
#define TDDP_BACKEND_FAKE_H

#include <tddp/backend.h>

const tddp_backend_v1 *tddp_fake_backend(void);

#endif
