/*
 * Waits for another rank: spins, yields the core, then sleeps until that rank publishes something.
 * Runs on the operation's thread; tddp_shm_check_peer() on any.
 *
 * A sleep is limited, to check what wakes nobody: the deadline, a cancel token, a peer's end. A
 * wait whose token ends it leaves this rank among the awaited one's pollers: what that rank
 * publishes then is an event here, upon which the operation is tried again. Invariant: a poller
 * adds itself before its last check of the word, and a publisher reads their number after it stored
 * the word, so at least one of them sees the other.
 *
 * The first spins read no clock and make no system call.
 */
#include <sched.h>

#include "backend/shm/control.h"

enum {
    SPINS = 256,           /* before the clock is read */
    SPINS_BACKGROUND = 48, /* while other threads compute: about 2 us */
    SPINS_OVERSUBSCRIBED = 32,
    SPINS_PER_CLOCK_READ = 64,
    YIELDS = 32
};
#define SPIN_NS (100 * INT64_C(1000))
#define YIELD_AFTER_NS (10 * INT64_C(1000))

static inline bool reached(const _Atomic uint64_t *word, unsigned shift, uint64_t goal)
{
    return atomic_load_explicit(word, memory_order_acquire) >> shift >= goal;
}

/* --- pollers --------------------------------------------------------------------------------- */

void tddp_shm_stop_polling(tddp_shm *shm)
{
    if (shm->polled_rank >= 0) {
        atomic_fetch_sub(&shm->peers[shm->polled_rank].control->pollers, 1);
        shm->polled_rank = -1;
    }
}

static void start_polling(tddp_shm *shm, int rank)
{
    if (shm->polled_rank != rank) {
        tddp_shm_stop_polling(shm);
        atomic_fetch_add(&shm->peers[rank].control->pollers, 1);
        shm->polled_rank = rank;
    }
}

void tddp_shm_notify_pollers(const tddp_shm *shm)
{
    for (int rank = 0; rank < shm->size; rank++) {
        if (rank != shm->rank) {
            tddp_eventcount_notify(tddp_shm_events(shm, rank));
        }
    }
}

/* --- reasons not to wait --------------------------------------------------------------------- */

static tddp_status check_local(const tddp_shm *shm, int64_t now)
{
    if (atomic_load_explicit(&shm->aborted, memory_order_acquire)) {
        return TDDP_GROUP_FAILED;
    }
    if (now >= shm->deadline) {
        return TDDP_TIMEOUT;
    }
    const tddp_cancel *cancel = shm->op->cancel;
    return cancel && tddp_cancel_triggered(cancel) ? TDDP_CANCELED : TDDP_OK;
}

static tddp_status check(tddp_shm *shm, int rank, int64_t now)
{
    bool check_locks = now >= shm->next_check;
    if (check_locks) {
        shm->next_check = now + TDDP_SHM_CHECK_INTERVAL_NS;
    }
    tddp_shm_update_liveness(shm, check_locks);
    tddp_status status = tddp_shm_check_liveness(shm, rank, shm->epoch, now);
    if (status == TDDP_PEER_LOST) {
        /* A process that ended is the root cause, before ranks that report it. */
        tddp_shm_update_liveness(shm, true);
    }
    return status ? status : check_local(shm, now);
}

tddp_status tddp_shm_check_peer(tddp_shm *shm, int rank)
{
    if (atomic_load_explicit(&shm->aborted, memory_order_acquire)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    tddp_shm_update_liveness(shm, true);
    return tddp_shm_check_liveness(shm, rank, 0, tddp_now_ns()) ? tddp_shm_fail_lost(shm, rank, 0)
                                                                : TDDP_OK;
}

/* --- waiting --------------------------------------------------------------------------------- */

static void start_deadline(tddp_shm *shm)
{
    if (shm->deadline == 0) {
        const int64_t now = tddp_now_ns();
        shm->deadline = tddp_deadline_from(now, shm->op->timeout_ms);
        shm->next_check = now + TDDP_SHM_CHECK_INTERVAL_NS;
    }
}

static bool spin_times(const _Atomic uint64_t *word, unsigned shift, uint64_t goal, int times)
{
    for (int i = 0; i < times; i++) {
        tddp_cpu_pause();
        if (reached(word, shift, goal)) {
            return true;
        }
    }
    return false;
}

/* If every rank has a core, and the thread nothing else to do. The kernel may still have put two
 * ranks on one core: yield after a while. */
static bool spin_until_timeout(const tddp_shm *shm, const _Atomic uint64_t *word, unsigned shift,
                               uint64_t goal)
{
    const int64_t start = tddp_now_ns();
    for (int64_t now = start; now < start + SPIN_NS; now = tddp_now_ns()) {
        if (now > start + YIELD_AFTER_NS) {
            (void)sched_yield();
        }
        if (reached(word, shift, goal) || spin_times(word, shift, goal, SPINS_PER_CLOCK_READ)) {
            return true;
        }
        if (check_local(shm, now)) {
            return false;
        }
    }
    return false;
}

/* Other threads may wait for this core, the awaited rank's among them. */
static bool yield_core(const _Atomic uint64_t *word, unsigned shift, uint64_t goal)
{
    for (int i = 0; i < YIELDS; i++) {
        (void)sched_yield();
        if (reached(word, shift, goal)) {
            return true;
        }
    }
    return false;
}

static bool spin(tddp_shm *shm, const _Atomic uint64_t *word, unsigned shift, uint64_t goal)
{
    const bool oversubscribed = shm->ranks_per_core > 1;
    const int times = tddp_cancel_at_once(shm->op->cancel) ? 0
                      : !shm->op->awaited                  ? SPINS_BACKGROUND
                      : oversubscribed                     ? SPINS_OVERSUBSCRIBED
                                                           : SPINS;
    if (spin_times(word, shift, goal, times)) {
        return true;
    }
    tddp_shm_announce_entry(shm);
    start_deadline(shm);
    if (!shm->op->awaited) {
        return false;
    }
    return oversubscribed ? yield_core(word, shift, goal)
                          : spin_until_timeout(shm, word, shift, goal);
}

tddp_status tddp_shm_wait_word(tddp_shm *shm, int rank, const _Atomic uint64_t *word,
                               unsigned shift, uint64_t goal)
{
    tddp_eventcount *published = &shm->peers[rank].control->published;
    if (spin(shm, word, shift, goal)) {
        return TDDP_OK;
    }
    int64_t now = tddp_now_ns();
    for (;;) {
        tddp_status status = check(shm, rank, now);
        if (status == TDDP_CANCELED) {
            start_polling(shm, rank);
        }
        /* The rank may have published the word before it was lost. */
        if (status && !reached(word, shift, goal)) {
            return tddp_shm_fail_wait(shm, status, rank);
        }
        int64_t end = tddp_cancel_deadline(shm->op->cancel);
        int64_t left = (end < shm->deadline ? end : shm->deadline) - now;
        uint32_t seen = tddp_eventcount_read(published);
        if (!reached(word, shift, goal)) {
            tddp_eventcount_wait(published, seen, 0,
                                 left < TDDP_SHM_CHECK_INTERVAL_NS ? left
                                                                   : TDDP_SHM_CHECK_INTERVAL_NS);
        }
        if (reached(word, shift, goal)) {
            return TDDP_OK;
        }
        now = tddp_now_ns();
    }
}

/* --- steps ----------------------------------------------------------------------------------- */

static uint64_t progress_value(const tddp_shm *shm, uint32_t step)
{
    return shm->epoch << TDDP_SHM_STEP_BITS | step;
}

void tddp_shm_publish_step(tddp_shm *shm, uint32_t step)
{
    tddp_shm_control *control = tddp_shm_self(shm)->control;
    uint64_t now = progress_value(shm, step);
    if (atomic_load_explicit(&control->progress, memory_order_relaxed) >= now) {
        return; /* published before the interruption */
    }
    atomic_store_explicit(&control->progress, now, memory_order_release);
    shm->entry_announced = true;
    tddp_shm_notify(shm);
}

tddp_status tddp_shm_wait_step(tddp_shm *shm, int rank, uint32_t step)
{
    const _Atomic uint64_t *word = &shm->peers[rank].control->progress;
    uint64_t goal = progress_value(shm, step);
    return reached(word, 0, goal) ? TDDP_OK : tddp_shm_wait_word(shm, rank, word, 0, goal);
}

tddp_status tddp_shm_wait_step_all(tddp_shm *shm, uint32_t step)
{
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        if (rank != shm->rank) {
            status = tddp_shm_wait_step(shm, rank, step);
        }
    }
    return status;
}
