/* A send or receive request, shared by p2p.c, matching.c and rndv.c. */
#ifndef TDDP_SHM_P2P_REQUEST_H
#define TDDP_SHM_P2P_REQUEST_H

#include "backend/shm/p2p_region.h"

struct tddp_shm_request {
    const tddp_op *op;
    int64_t deadline;
    int64_t checked_at; /* when the peer's liveness was last checked */
    int peer;           /* of a wildcard receive: valid once matched */
    /* A send's header is in the ring; a receive has its message's header. */
    _Atomic bool matched;
    tddp_shm_header header;
    bool started;              /* both sides have arrived */
    tddp_shm_rndv *rndv;       /* named by the header */
    tddp_shm_channel *channel; /* named by rndv */
    uint64_t step;             /* chunks that passed through the channel */
    tddp_shm_request *next;
};

/* --- matching.c ------------------------------------------------------------------------------ */

/* Makes progress for all requests: sends pending headers and matches those that arrived. */
TDDP_NODISCARD tddp_status tddp_shm_matching_progress(tddp_shm *shm);
/* Sends the request's header, now or when the ring has space. */
void tddp_shm_matching_add_send(tddp_shm *shm, tddp_shm_request *self);
/* Matches the receive with the first unexpected message that fits, or posts it. */
void tddp_shm_matching_add_receive(tddp_shm *shm, tddp_shm_request *self);
/* A message that did not come through a ring. */
TDDP_NODISCARD tddp_status tddp_shm_matching_deliver(tddp_shm *shm, int from,
                                                     const tddp_shm_header *header);
/* Removes a request, matched or not. */
void tddp_shm_matching_remove(tddp_shm *shm, const tddp_shm_request *self);

/* From this rank's pool, see tddp_shm_block_alloc(). */
uint32_t tddp_shm_matching_alloc(tddp_shm *shm, tddp_shm_block_kind kind);

/* Whether no send to the peer has checked its liveness for a while; the caller then does. */
bool tddp_shm_matching_check_due(tddp_shm *shm, int peer, int64_t now);

/* --- p2p.c ----------------------------------------------------------------------------------- */

/* Waits until `reached` returns true. Errors: TDDP_TIMEOUT, those of tddp_shm_check_peer(), and
 * without a text TDDP_CANCELED. */
TDDP_NODISCARD tddp_status tddp_shm_request_wait(tddp_shm *shm, tddp_shm_request *self,
                                                 bool (*reached)(tddp_shm *shm,
                                                                 tddp_shm_request *self));

/* Sets the text for a message whose size or dtype isn't the expected one, on either side. The
 * sender finds the receiver's expectation in the rendezvous block. Returns TDDP_MISMATCH. */
tddp_status tddp_shm_request_mismatch(const tddp_shm *shm, const tddp_shm_request *self, int sender,
                                      int receiver);

/* --- rndv.c ---------------------------------------------------------------------------------- */

/* The sender's and the receiver's part of the rendezvous protocol. */
TDDP_NODISCARD tddp_status tddp_shm_rndv_send(tddp_shm *shm, tddp_shm_request *self);
TDDP_NODISCARD tddp_status tddp_shm_rndv_recv(tddp_shm *shm, tddp_shm_request *self);
/* Called by a receiver that expects something else. */
void tddp_shm_rndv_reject(tddp_shm *shm, tddp_shm_request *self);

#endif
