/*
 * Waiting for another rank's word: spinning, giving way, sleeping. On the thread of the operation;
 * sleep(), wake() and look() on any.
 *
 * Invariant: who sleeps has counted itself among the peer's sleepers before it looked at the word
 * for the last time, and who says something looks at the sleepers after it has said it, so one of
 * them sees the other. Sleep ends after a slice all the same, to look at what nobody rings for: the
 * deadline, a token, a peer's end.
 *
 * No clock is read and no system call made before some rounds of spinning were in vain.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/shm/control.h"

enum {
    ROUNDS = 256,       /* without a clock */
    ROUNDS_BESIDE = 48, /* where others compute: about 2 us */
    ROUNDS_CROWDED = 32,
    ROUNDS_A_LOOK = 64, /* between looks at the clock */
    YIELDS = 32
};
#define SPIN_NS (100 * INT64_C(1000))
#define ALONE_NS (10 * INT64_C(1000))

static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline bool reached(const _Atomic uint64_t *word, unsigned shift, uint64_t goal)
{
    return atomic_load_explicit(word, memory_order_acquire) >> shift >= goal;
}

/* --- sleeping -------------------------------------------------------------------------------- */

void tddp_shm_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / TDDP_NS_PER_S),
                            .tv_nsec = (long)(ns % TDDP_NS_PER_S)};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
}

void tddp_shm_wake(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void tddp_shm_ring(tddp_shm_control *control)
{
    atomic_fetch_add_explicit(&control->bell, 1, memory_order_release);
    tddp_shm_wake(&control->bell);
}

static void sleep_on(tddp_shm_control *control, const _Atomic uint64_t *word, unsigned shift,
                     uint64_t goal, int64_t ns)
{
    atomic_fetch_add_explicit(&control->sleepers, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&control->bell, memory_order_acquire);
    if (!reached(word, shift, goal)) {
        tddp_shm_sleep(&control->bell, seen, ns);
    }
    atomic_fetch_sub_explicit(&control->sleepers, 1, memory_order_seq_cst);
}

/* --- what stands against waiting ------------------------------------------------------------- */

static tddp_status check_here(const tddp_shm *shm)
{
    if (atomic_load_explicit(&shm->aborted, memory_order_acquire)) {
        return TDDP_GROUP_FAILED;
    }
    const tddp_cancel *cancel = shm->op->cancel;
    return cancel && tddp_cancel_triggered(cancel) ? TDDP_CANCELED : TDDP_OK;
}

static tddp_status check(tddp_shm *shm, int rank, int64_t now, int64_t *next_look)
{
    bool locks = now >= *next_look;
    if (locks) {
        *next_look = now + TDDP_SHM_LOOK_NS;
    }
    tddp_shm_look_around(shm, locks);
    tddp_status status = tddp_shm_verdict(shm, rank, shm->turn, now);
    if (status == TDDP_PEER_LOST) {
        /* The one that ended is to be named before those who tell of it. */
        tddp_shm_look_around(shm, true);
    }
    if (status == TDDP_OK) {
        status = check_here(shm);
    }
    return status == TDDP_OK && now >= shm->deadline ? TDDP_TIMEOUT : status;
}

tddp_status tddp_shm_look(tddp_shm *shm, int rank)
{
    char text[TDDP_SHM_FAREWELL_BYTES + 256];
    if (atomic_load_explicit(&shm->aborted, memory_order_acquire)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    tddp_shm_look_around(shm, true);
    tddp_status status = tddp_shm_verdict(shm, rank, 0, tddp_now_ns());
    if (status) {
        status = tddp_shm_who_is_gone(shm, rank, 0, text, sizeof text);
        return tddp_fail(status, "%s", text);
    }
    return TDDP_OK;
}

/* --- waiting --------------------------------------------------------------------------------- */

static void begin_clock(tddp_shm *shm)
{
    if (shm->deadline == 0) {
        shm->deadline = tddp_deadline_after_ms(shm->op->timeout_ms);
    }
}

static bool spin_rounds(const _Atomic uint64_t *word, unsigned shift, uint64_t goal, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        pause_briefly();
        if (reached(word, shift, goal)) {
            return true;
        }
    }
    return false;
}

/* Where there is a core for each rank, and nothing else to do. The system may have put two ranks on
 * one core all the same: after some time the other one gets its turn. */
static bool spin_on(const tddp_shm *shm, const _Atomic uint64_t *word, unsigned shift,
                    uint64_t goal)
{
    const int64_t start = tddp_now_ns();
    for (int64_t now = start; now < start + SPIN_NS; now = tddp_now_ns()) {
        if (now > start + ALONE_NS) {
            (void)sched_yield();
        }
        if (reached(word, shift, goal) || spin_rounds(word, shift, goal, ROUNDS_A_LOOK)) {
            return true;
        }
        if (check_here(shm)) {
            return false;
        }
    }
    return false;
}

/* Others may be waiting for this core, the one waited for among them. */
static bool give_way(const _Atomic uint64_t *word, unsigned shift, uint64_t goal)
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
    const bool crowded = shm->ranks_per_core > 1;
    const int rounds = !shm->op->awaited ? ROUNDS_BESIDE : crowded ? ROUNDS_CROWDED : ROUNDS;
    if (spin_rounds(word, shift, goal, rounds)) {
        return true;
    }
    tddp_shm_settle(shm);
    begin_clock(shm);
    if (!shm->op->awaited) {
        return false;
    }
    return crowded ? give_way(word, shift, goal) : spin_on(shm, word, shift, goal);
}

tddp_status tddp_shm_wait_for(tddp_shm *shm, int rank, const _Atomic uint64_t *word, unsigned shift,
                              uint64_t goal)
{
    tddp_shm_control *control = shm->peers[rank].control;
    if (spin(shm, word, shift, goal)) {
        return TDDP_OK;
    }
    int64_t now = tddp_now_ns();
    int64_t next_look = now + TDDP_SHM_LOOK_NS;
    for (;;) {
        tddp_status status = check(shm, rank, now, &next_look);
        /* Who is gone may have done its part before. */
        if (status && !reached(word, shift, goal)) {
            return tddp_shm_explain(shm, status, rank);
        }
        int64_t end = tddp_cancel_deadline(shm->op->cancel);
        int64_t left = (end < shm->deadline ? end : shm->deadline) - now;
        sleep_on(control, word, shift, goal, left < TDDP_SHM_LOOK_NS ? left : TDDP_SHM_LOOK_NS);
        if (reached(word, shift, goal)) {
            return TDDP_OK;
        }
        now = tddp_now_ns();
    }
}

/* --- steps ----------------------------------------------------------------------------------- */

static uint64_t moment(const tddp_shm *shm, uint32_t step)
{
    return shm->turn << TDDP_SHM_STEP_BITS | step;
}

void tddp_shm_publish(tddp_shm *shm, uint32_t step)
{
    tddp_shm_control *control = tddp_shm_self(shm)->control;
    uint64_t now = moment(shm, step);
    if (atomic_load_explicit(&control->progress, memory_order_relaxed) >= now) {
        return; /* said before it was interrupted */
    }
    atomic_store_explicit(&control->progress, now, memory_order_release);
    shm->announced = true;
    tddp_shm_announce(control);
}

tddp_status tddp_shm_await(tddp_shm *shm, int rank, uint32_t step)
{
    const _Atomic uint64_t *word = &shm->peers[rank].control->progress;
    uint64_t goal = moment(shm, step);
    return reached(word, 0, goal) ? TDDP_OK : tddp_shm_wait_for(shm, rank, word, 0, goal);
}

tddp_status tddp_shm_await_all(tddp_shm *shm, uint32_t step)
{
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        if (rank != shm->rank) {
            status = tddp_shm_await(shm, rank, step);
        }
    }
    return status;
}
