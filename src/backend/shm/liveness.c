/*
 * Detects lost ranks and describes them. A rank that leaves or fails publishes a state in its
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
        if (state == TDDP_SHM_ACTIVE && check_locks && !peer->same_process &&
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

static bool has_left(const tddp_shm_peer *peer)
{
    return state_of(peer) == TDDP_SHM_LEFT;
}

/* Left without entering this collective. */
static bool left_before(const tddp_shm_peer *peer, uint64_t epoch)
{
    return has_left(peer) && epoch > 0 && peer->control->last_epoch < epoch;
}

tddp_status tddp_shm_check_liveness(const tddp_shm *shm, int rank, uint64_t epoch, int64_t now)
{
    int inactive = 0;
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each == shm->rank) {
            continue;
        }
        int64_t since = atomic_load(&peer->lost_since);
        bool left = has_left(peer);
        bool lost = since != 0 && now - since >= GRACE_NS;
        if (((since != 0 || left) && each == rank) || lost || left_before(peer, epoch)) {
            return TDDP_PEER_LOST;
        }
        inactive += since != 0 || left;
    }
    return rank < 0 && inactive > 0 && inactive == shm->size - 1 ? TDDP_PEER_LOST : TDDP_OK;
}

/* --- descriptions ---------------------------------------------------------------------------- */

/* The order in which lost ranks are considered the root cause: processes that ended without a
 * report, then ranks that report a failure, then ranks that report another lost rank. */
static int cause_priority(const tddp_shm_peer *peer)
{
    return atomic_load(&peer->process_ended) ? 0 : peer->control->status == TDDP_PEER_LOST ? 2 : 1;
}

static bool is_likelier_cause(const tddp_shm_peer *one, const tddp_shm_peer *other)
{
    int difference = cause_priority(one) - cause_priority(other);
    return difference < 0 ||
           (difference == 0 && atomic_load(&one->lost_since) < atomic_load(&other->lost_since));
}

static const tddp_shm_peer *root_cause(const tddp_shm *shm)
{
    const tddp_shm_peer *cause = NULL;
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && atomic_load(&peer->lost_since) != 0 &&
            (!cause || is_likelier_cause(peer, cause))) {
            cause = peer;
        }
    }
    return cause;
}

tddp_status tddp_shm_describe_lost(const tddp_shm *shm, int rank, uint64_t epoch, char *text,
                                   size_t bytes)
{
    const tddp_shm_peer *cause = root_cause(shm);
    text[0] = 0;
    if (cause && atomic_load(&cause->process_ended)) {
        tddp_add_text(text, bytes, "lost rank %d (its process has ended)", cause->rank_name);
    } else if (cause) {
        tddp_add_text(text, bytes, "lost rank %d, which gave up: %s", cause->rank_name,
                      cause->control->text);
    }
    const char *before = "; also lost: ";
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && peer != cause && atomic_load(&peer->lost_since) != 0) {
            tddp_add_text(text, bytes, "%srank %d", before, peer->rank_name);
            before = ", ";
        }
    }
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && has_left(peer) &&
            (rank < 0 || each == rank || left_before(peer, epoch))) {
            tddp_add_text(text, bytes, "%srank %d has left the group", text[0] ? "; " : "",
                          peer->rank_name);
        }
    }
    bool differs =
        cause && !atomic_load(&cause->process_ended) && cause->control->status == TDDP_MISMATCH;
    return differs ? TDDP_MISMATCH : TDDP_PEER_LOST;
}
