/*
 * Who is gone, and how it is put: by the word that a rank leaves in its segment, or by the lock
 * that ends with its process. Any thread.
 *
 * Invariant: a rank that is gone stays gone, and the moment when that was seen first does not
 * change. One that is not waited for itself gets a little time before its end counts: what it did
 * before may be all that is missing.
 */
#include "backend/shm/control.h"

#define GRACE_NS (300 * TDDP_NS_PER_MS)

static uint32_t state_of(const tddp_shm_peer *peer)
{
    return atomic_load_explicit(&peer->control->state, memory_order_acquire);
}

static void note(tddp_shm_peer *peer)
{
    int64_t never = 0;
    int64_t now = tddp_now_ns();
    (void)atomic_compare_exchange_strong(&peer->gone_since, &never, now ? now : 1);
}

void tddp_shm_look_around(tddp_shm *shm, bool locks)
{
    for (int rank = 0; rank < shm->size; rank++) {
        tddp_shm_peer *peer = &shm->peers[rank];
        if (rank == shm->rank || atomic_load(&peer->gone_since) != 0) {
            continue;
        }
        uint32_t state = state_of(peer);
        if (state == TDDP_SHM_HERE && locks && !peer->inside &&
            tddp_shm_segment_is_orphan(peer->segment)) {
            /* It may have said something just before. */
            state = state_of(peer);
            if (state == TDDP_SHM_HERE) {
                atomic_store(&peer->ended, 1);
                note(peer);
            }
        }
        if (state == TDDP_SHM_FAILED) {
            note(peer);
        }
    }
}

static bool has_left(const tddp_shm_peer *peer)
{
    return state_of(peer) == TDDP_SHM_LEFT;
}

/* Left without doing its part in this operation of all. */
static bool is_missed(const tddp_shm_peer *peer, uint64_t turn)
{
    return has_left(peer) && turn > 0 && peer->control->left_after < turn;
}

tddp_status tddp_shm_verdict(const tddp_shm *shm, int rank, uint64_t turn, int64_t now)
{
    int gone = 0;
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each == shm->rank) {
            continue;
        }
        int64_t since = atomic_load(&peer->gone_since);
        bool left = has_left(peer);
        bool lost = since != 0 && now - since >= GRACE_NS;
        if (((since != 0 || left) && each == rank) || lost || is_missed(peer, turn)) {
            return TDDP_PEER_LOST;
        }
        gone += since != 0 || left;
    }
    return rank < 0 && gone > 0 && gone == shm->size - 1 ? TDDP_PEER_LOST : TDDP_OK;
}

/* --- words ----------------------------------------------------------------------------------- */

/* How sure it is that this peer is the cause, the surest first: it ended without a word; it says
 * that something failed; it says that it has lost another. */
static int order_of(const tddp_shm_peer *peer)
{
    return atomic_load(&peer->ended) ? 0 : peer->control->status == TDDP_PEER_LOST ? 2 : 1;
}

static bool comes_before(const tddp_shm_peer *one, const tddp_shm_peer *other)
{
    int difference = order_of(one) - order_of(other);
    return difference < 0 ||
           (difference == 0 && atomic_load(&one->gone_since) < atomic_load(&other->gone_since));
}

static const tddp_shm_peer *likely_cause(const tddp_shm *shm)
{
    const tddp_shm_peer *cause = NULL;
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && atomic_load(&peer->gone_since) != 0 &&
            (!cause || comes_before(peer, cause))) {
            cause = peer;
        }
    }
    return cause;
}

tddp_status tddp_shm_who_is_gone(const tddp_shm *shm, int rank, uint64_t turn, char *text,
                                 size_t bytes)
{
    const tddp_shm_peer *cause = likely_cause(shm);
    text[0] = 0;
    if (cause && atomic_load(&cause->ended)) {
        tddp_add_text(text, bytes, "lost rank %d (its process has ended)", cause->name);
    } else if (cause) {
        tddp_add_text(text, bytes, "lost rank %d, which gave up: %s", cause->name,
                      cause->control->text);
    }
    const char *before = "; gone as well: ";
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && peer != cause && atomic_load(&peer->gone_since) != 0) {
            tddp_add_text(text, bytes, "%srank %d", before, peer->name);
            before = ", ";
        }
    }
    for (int each = 0; each < shm->size; each++) {
        const tddp_shm_peer *peer = &shm->peers[each];
        if (each != shm->rank && has_left(peer) &&
            (rank < 0 || each == rank || is_missed(peer, turn))) {
            tddp_add_text(text, bytes, "%srank %d has left the group", text[0] ? "; " : "",
                          peer->name);
        }
    }
    bool differs = cause && !atomic_load(&cause->ended) && cause->control->status == TDDP_MISMATCH;
    return differs ? TDDP_MISMATCH : TDDP_PEER_LOST;
}
