/*
 * What this rank knows of its peers, for waits that a lost one ends. Any thread.
 *
 * From each peer a receive is posted for the life of the group: it gets the notice that is the
 * peer's last message, why it takes no further part; or it fails when the connection ends without
 * one. Once this rank has sent its own notice it looks at no others': what it ends itself is no
 * loss of a peer.
 *
 * Invariant: a peer leaves ACTIVE once, for one reason. `peers_mutex` guards the states; transports
 * are called with it held.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"

/* A peer may end as soon as it has done its part: what it sent to others may complete their
 * operations. */
#define GRACE_NS (300 * TDDP_NS_PER_MS)

tddp_status tddp_coll_make_peers(tddp_coll *coll)
{
    pthread_mutex_init(&coll->peers_mutex, NULL);
    coll->peers = tddp_alloc_array((size_t)coll->size, sizeof *coll->peers);
    return coll->peers ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_coll_expect_notices(tddp_coll *coll)
{
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < coll->size && status == TDDP_OK; rank++) {
        tddp_coll_peer *peer = &coll->peers[rank];
        if (rank != coll->rank) {
            status = coll->transport->recv(coll->context, rank, NOTICE_TAG, &peer->notice,
                                           sizeof peer->notice, &peer->receive);
        }
    }
    return status;
}

void tddp_coll_free_peers(tddp_coll *coll)
{
    for (int rank = 0; coll->peers && rank < coll->size; rank++) {
        tddp_coll_peer *peer = &coll->peers[rank];
        tddp_coll_release(coll, &peer->receive);
        tddp_coll_release(coll, &peer->send);
        tddp_coll_release(coll, &peer->hellos[0]);
        tddp_coll_release(coll, &peer->hellos[1]);
    }
    free(coll->peers);
    pthread_mutex_destroy(&coll->peers_mutex);
}

/* Looks at what has come from the peers that were active. With the mutex held. */
static void refresh(tddp_coll *coll)
{
    EACH_PEER(coll, rank)
    {
        tddp_coll_peer *peer = &coll->peers[rank];
        int complete = 0;
        if (peer->state != PEER_ACTIVE || !peer->receive) {
            continue;
        }
        const tddp_status status =
            coll->transport->test(coll->context, peer->receive, &complete, NULL);
        if (status == TDDP_GROUP_FAILED) {
            continue; /* this rank's own end */
        }
        if (status != TDDP_OK) {
            tddp_coll_release(coll, &peer->receive);
            peer->notice = (tddp_coll_notice){0};
            tddp_add_text(peer->notice.text, sizeof peer->notice.text, "%s", tddp_error_message());
        }
        if (status != TDDP_OK || complete) {
            const bool left = status == TDDP_OK && peer->notice.status == TDDP_OK;
            peer->notice.text[sizeof peer->notice.text - 1] = '\0';
            peer->state = left ? PEER_LEFT : PEER_LOST;
            peer->since = tddp_now_ns();
        }
    }
}

void tddp_coll_send_notice(tddp_coll *coll, tddp_status status, const char *text)
{
    if (coll->transport->failed && status == TDDP_OK) {
        return;
    }
    pthread_mutex_lock(&coll->peers_mutex);
    if (!atomic_load(&coll->has_noticed)) {
        coll->notice.sequence = atomic_load(&coll->sequence);
        coll->notice.status = (uint32_t)status;
        (void)snprintf(coll->notice.text, sizeof coll->notice.text, "%s", text);
        refresh(coll);
        atomic_store(&coll->has_noticed, true);
        if (coll->transport->failed && coll->context) {
            coll->transport->failed(coll->context);
        }
        EACH_PEER(coll, rank)
        {
            tddp_coll_peer *peer = &coll->peers[rank];
            if (peer->state == PEER_ACTIVE && peer->receive) { /* best effort */
                (void)coll->transport->send(coll->context, rank, NOTICE_TAG, &coll->notice,
                                            sizeof coll->notice, &peer->send);
            }
        }
    }
    pthread_mutex_unlock(&coll->peers_mutex);
}

/* Whether what is waited for, from this peer or from any, will not come. With the mutex held. */
static bool is_in_vain(const tddp_coll *coll, int waited, uint64_t sequence)
{
    const int64_t now = tddp_now_ns();
    int active = 0;
    EACH_PEER(coll, rank)
    {
        const tddp_coll_peer *one = &coll->peers[rank];
        const bool late = one->state == PEER_LEFT && one->notice.sequence < sequence;
        const bool dead = one->state == PEER_LOST && now - one->since >= GRACE_NS;
        if (late || dead || (rank == waited && one->state != PEER_ACTIVE)) {
            return true;
        }
        active += one->state == PEER_ACTIVE;
    }
    return active == 0 && coll->size > 1;
}

/* Reports what was seen of the peers that have ended, and fails with the likeliest cause. */
static tddp_status fail_ended(const tddp_coll *coll, int waited, uint64_t sequence)
{
    tddp_observation cause = {.kind = TDDP_OBSERVED_NOTHING};
    EACH_PEER(coll, rank)
    {
        const tddp_coll_peer *one = &coll->peers[rank];
        const bool late =
            waited == TDDP_ANY_SOURCE || rank == waited || one->notice.sequence < sequence;
        if (one->state == PEER_ACTIVE || (one->state == PEER_LEFT && !late)) {
            continue;
        }
        const tddp_observation seen = {.kind = one->state == PEER_LEFT ? TDDP_OBSERVED_LEFT
                                               : one->notice.status    ? TDDP_OBSERVED_FAILED
                                                                       : TDDP_OBSERVED_CLOSED,
                                       .rank = tddp_coll_rank_name(coll, rank),
                                       .sequence = one->notice.sequence,
                                       .status = (tddp_status)one->notice.status,
                                       .text = one->notice.text,
                                       .seen_ns = one->since};
        tddp_observe(&coll->observer, &seen);
        cause = tddp_observation_precedes(&seen, &cause) ? seen : cause;
    }
    return tddp_observation_fail(&cause);
}

tddp_status tddp_coll_check(tddp_coll *coll, int peer, uint64_t sequence)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&coll->peers_mutex);
    if (!atomic_load(&coll->has_noticed)) {
        refresh(coll);
    }
    if (atomic_load(&coll->aborted)) {
        char who[32] = "any rank";
        if (peer != TDDP_ANY_SOURCE) {
            (void)snprintf(who, sizeof who, "rank %d", tddp_coll_rank_name(coll, peer));
        }
        status = tddp_fail(TDDP_GROUP_FAILED, "aborted while waiting for %s", who);
    } else if (is_in_vain(coll, peer, sequence)) {
        status = fail_ended(coll, peer, sequence);
    } else if (atomic_load(&coll->has_noticed)) {
        status = tddp_fail(TDDP_GROUP_FAILED, "aborted, as another operation failed: %s",
                           coll->notice.text);
    }
    pthread_mutex_unlock(&coll->peers_mutex);
    return status;
}
