/*
 * Detects lost ranks and reports them. A rank that leaves or fails publishes a state in its
 * segment; the kernel releases the lock of a rank whose process ends. Any thread.
 *
 * Invariant: a lost rank stays lost, and `lost_since` does not change. A lost rank fails a wait for
 * another rank only after a grace period: what it did before may be all that is missing.
 */
#include "backend/shm/control.h"

#define GRACE_NS (300 * TDDP_NS_PER_MS)

static uint32_t state_of(const tddp_shm_peer *peer)
{
    return atomic_load_explicit(&peer->control->state, memory_order_acquire);
}

static void mark_lost(tddp_shm_peer *peer)
{
    int64_t never = 0;
    int64_t now = tddp_now_ns();
    (void)atomic_compare_exchange_strong(&peer->lost_since, &never, now ? now : 1);
}

void tddp_shm_update_liveness(tddp_shm *shm, bool check_locks)
{
    for (int rank = 0; rank < shm->size; rank++) {
        tddp_shm_peer *peer = &shm->peers[rank];
        if (rank == shm->rank || atomic_load(&peer->lost_since) != 0) {
            continue;
        }
        uint32_t state = state_of(peer);
        if (state == TDDP_SHM_ACTIVE && check_locks &&
            tddp_shm_segment_owner_ended(peer->segment)) {
            /* It may have published its state just before. */
            state = state_of(peer);
            if (state == TDDP_SHM_ACTIVE) {
                atomic_store(&peer->process_ended, 1);
                mark_lost(peer);
            }
        }
        if (state == TDDP_SHM_FAILED) {
            mark_lost(peer);
        }
    }
}

/* Left without entering this collective. */
static bool left_before(const tddp_shm_peer *peer, uint64_t epoch)
{
    return state_of(peer) == TDDP_SHM_LEFT && epoch > 0 && peer->control->last_epoch < epoch;
}

static bool is_gone(const tddp_shm_peer *peer)
{
    return atomic_load(&peer->lost_since) != 0 || state_of(peer) == TDDP_SHM_LEFT;
}

tddp_status tddp_shm_check_liveness(const tddp_shm *shm, int rank, uint64_t epoch, int64_t now)
{
    int gone = 0;
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each == shm->rank || !is_gone(peer)) {
            continue;
        }
        int64_t since = atomic_load(&peer->lost_since);
        bool lost = since != 0 && now - since >= GRACE_NS;
        if (each == rank || lost || left_before(peer, epoch)) {
            return TDDP_PEER_LOST;
        }
        gone++;
    }
    return rank < 0 && gone > 0 && gone == shm->size - 1 ? TDDP_PEER_LOST : TDDP_OK;
}

/* What a wait for `rank` that fails has seen of a rank that is gone. */
static tddp_observation observe(const tddp_shm *shm, int each, int rank, uint64_t epoch)
{
    const tddp_shm_peer *peer = &shm->peers[each];
    const tddp_shm_control *control = peer->control;
    tddp_observation seen = {.rank = peer->rank_name, .seen_ns = atomic_load(&peer->lost_since)};
    if (atomic_load(&peer->process_ended)) {
        seen.kind = TDDP_OBSERVED_ENDED;
    } else if (seen.seen_ns != 0) {
        seen.kind = TDDP_OBSERVED_FAILED;
        seen.status = (tddp_status)control->status;
        seen.text = control->text;
    } else if (rank < 0 || each == rank || left_before(peer, epoch)) {
        seen.kind = TDDP_OBSERVED_LEFT;
        seen.sequence = tddp_shm_sequence_of(shm, each, control->last_epoch);
    }
    return seen;
}

tddp_status tddp_shm_fail_lost(const tddp_shm *shm, int rank, uint64_t epoch)
{
    tddp_observation cause = {.kind = TDDP_OBSERVED_NOTHING};
    for (int each = 0; each < shm->size; each++) {
        if (each != shm->rank && is_gone(&shm->peers[each])) {
            const tddp_observation seen = observe(shm, each, rank, epoch);
            tddp_observe(&shm->observer, &seen);
            cause = tddp_observation_precedes(&seen, &cause) ? seen : cause;
        }
    }
    return tddp_observation_fail(&cause);
}
