/*
 * Failed waits: peers that die, leave, fail, stall or disagree; abort, cancel tokens and timeouts.
 */
#include <sys/syscall.h>

#include "kills.h"

enum { LARGE = 1 << 20 };
enum { DONE, CHILD, REPORTED, CHECKED, ENTERED, RANK }; /* events; one for each rank from RANK on */

static void die(void)
{
    syscall(SYS_exit_group, 0);
}

/* `*op` must live as long as the operation runs. */
static void begin(shm_rank *it, tddp_op *op)
{
    *op = shm_op(it, TDDP_OP_BARRIER);
    tddp_shm_enter(it->shm, op, NULL, 0);
}

/* --- dying ----------------------------------------------------------------------------------- */

static void dead_before(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        die();
    }
    tddp_op op;
    begin(it, &op);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "lost rank 1 (its process has ended)");
}

TEST(a_dead_rank_is_reported)
{
    for (int size = 2; size <= 4; size++) {
        run_shm(SHM_PROCESSES, size, dead_before, NULL);
    }
}

/* The others sleep while it dies; one waits for another that waits for it. */
static void dead_meanwhile(shm_rank *it)
{
    barrier_once(it);
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    op.awaited = it->rank == 2;
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_OK(tddp_shm_sync(it->shm));
    if (it->rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK + 0);
        CHECK_AWAIT_BLOCKED(RANK + 2);
        die();
    }
    check_will_block(RANK + it->rank);
    CHECK_STATUS(tddp_shm_wait_step(it->shm, it->rank == 0 ? 2 : 0, 1), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (its process has ended)");
}

TEST(a_rank_that_dies_while_others_sleep)
{
    run_shm(SHM_PROCESSES, 3, dead_meanwhile, NULL);
}

/* The child lives until the death is noticed. */
static void hidden(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            check_signal(CHILD);
            CHECK_AWAIT(DONE, 1);
            _exit(0);
        }
        CHECK_AWAIT(CHILD, 1);
        die();
    }
    tddp_op op;
    begin(it, &op);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
    check_signal(DONE);
}

TEST(a_forked_child_does_not_hide_a_death)
{
    run_shm(SHM_PROCESSES, 2, hidden, NULL);
}

/* What a rank published before it died counts. */
static void dead_after(shm_rank *it)
{
    barrier_once(it);
    int32_t mine = it->rank;
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    if (it->rank == 0) {
        CHECK_AWAIT_END(1);
    }
    tddp_shm_enter(it->shm, &op, &mine, sizeof mine);
    memcpy(tddp_shm_staging(it->shm, it->rank), &mine, sizeof mine);
    tddp_shm_publish_step(it->shm, 3);
    if (it->rank == 1) {
        die();
    }
    CHECK_OK(tddp_shm_sync(it->shm));
    CHECK_OK(tddp_shm_wait_step(it->shm, 1, 3));
    CHECK_INT(*(const int32_t *)tddp_shm_payload(it->shm, 1), 1);
    CHECK_INT(*(const int32_t *)tddp_shm_staging(it->shm, 1), 1);
    CHECK_STATUS(tddp_shm_wait_step(it->shm, 1, 4), TDDP_PEER_LOST);
}

TEST(steps_of_a_dead_rank_count)
{
    run_shm(SHM_PROCESSES, 2, dead_after, NULL);
}

/* A stopped process is alive. */
static void stopped(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        raise(SIGSTOP);
        barrier_once(it);
        return;
    }
    CHECK_AWAIT_STOPPED(check_rank_pid(1));
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    op.timeout_ms = 300;
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_TIMEOUT);
    CHECK_INT(kill(check_rank_pid(1), SIGCONT), 0);
}

TEST(a_stopped_rank_is_not_dead)
{
    run_shm(SHM_PROCESSES, 2, stopped, NULL);
}

/* --- leaving and failing --------------------------------------------------------------------- */

static void leaves(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK + 0);
        CHECK_AWAIT_BLOCKED(RANK + 2);
        return;
    }
    tddp_op op;
    begin(it, &op);
    check_will_block(RANK + it->rank);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 1 has left the group");
}

TEST(a_rank_that_leaves)
{
    run_shm(SHM_THREADS, 3, leaves, NULL);
    run_shm(SHM_PROCESSES, 3, leaves, NULL);
}

/* A rank that leaves after its part isn't lost to ranks that still run the operation. */
static void leaves_after(shm_rank *it)
{
    tddp_op op;
    begin(it, &op);
    CHECK_OK(tddp_shm_sync(it->shm));
    if (it->rank == 1) {
        return;
    }
    CHECK_AWAIT_END(1);
    if (it->rank == 2) {
        CHECK_AWAIT_BLOCKED(RANK + 0);
        tddp_shm_publish_step(it->shm, 1);
    }
    check_will_block(RANK + it->rank);
    CHECK_OK(tddp_shm_wait_step(it->shm, 2, 1));
    CHECK_OK(tddp_shm_check_peer(it->shm, it->rank == 0 ? 2 : 0));
    CHECK_OK(tddp_shm_check_peer(it->shm, -1));
    CHECK_STATUS(tddp_shm_check_peer(it->shm, 1), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 1 has left the group");
    CHECK_MEET(CHECKED, 2);
    if (it->rank == 0) {
        CHECK_STATUS(tddp_shm_wait_step(it->shm, 2, 2), TDDP_PEER_LOST);
        CHECK_STATUS(tddp_shm_check_peer(it->shm, -1), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "rank 1 has left the group");
        CHECK_SEEN(it, 1, TDDP_OBSERVED_LEFT, 1, TDDP_OK, "");
        CHECK_SEEN(it, 2, TDDP_OBSERVED_LEFT, 1, TDDP_OK, "");
    }
}

TEST(a_rank_that_leaves_after_its_part)
{
    run_shm(SHM_THREADS, 3, leaves_after, NULL);
    run_shm(SHM_PROCESSES, 3, leaves_after, NULL);
}

static void fails(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK + 0);
        CHECK_AWAIT_BLOCKED(RANK + 2);
        tddp_shm_report_failure(it->shm, TDDP_TIMEOUT, "tired of waiting");
        tddp_shm_report_failure(it->shm, TDDP_INTERNAL, "not heard");
        CHECK_AWAIT(DONE, 2);
        return;
    }
    tddp_op op;
    begin(it, &op);
    check_will_block(RANK + it->rank);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
    check_signal(DONE);
    CHECK_TEXT(tddp_error_message(), "lost rank 1, which gave up: tired of waiting");
}

TEST(a_rank_that_fails)
{
    run_shm(SHM_THREADS, 3, fails, NULL);
    run_shm(SHM_PROCESSES, 3, fails, NULL);
}

/* A process that ended without a report is the root cause; a rank that reports it is observed too.
 */
static void chain(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 2) {
        die();
    }
    if (it->rank == 1) {
        CHECK_AWAIT_END(2);
        tddp_shm_report_failure(it->shm, TDDP_PEER_LOST, "lost rank 2");
        check_signal(REPORTED);
        CHECK_AWAIT(DONE, 1);
        return;
    }
    CHECK_AWAIT(REPORTED, 1);
    tddp_op op;
    begin(it, &op);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "lost rank 2 (its process has ended)");
    CHECK_SEEN(it, 2, TDDP_OBSERVED_ENDED, 0, TDDP_OK, "");
    CHECK_SEEN(it, 1, TDDP_OBSERVED_FAILED, 0, TDDP_PEER_LOST, "lost rank 2");
    check_signal(DONE);
}

TEST(the_root_cause_is_reported_first)
{
    run_shm(SHM_PROCESSES, 3, chain, NULL);
}

/* --- abort, tokens, time --------------------------------------------------------------------- */

static void *abort_soon(void *shm)
{
    CHECK_AWAIT_BLOCKED(RANK + 0);
    tddp_shm_abort(shm);
    return NULL;
}

static void aborts(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        CHECK_AWAIT(REPORTED, 1);
        tddp_op op;
        begin(it, &op);
        CHECK_OK(tddp_shm_sync(it->shm)); /* rank 0 had entered */
        CHECK_STATUS(tddp_shm_wait_step(it->shm, 0, 1), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "lost rank 0, which gave up: it aborted the group");
        check_signal(DONE);
        return;
    }
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, abort_soon, it->shm), 0);
    tddp_op op;
    begin(it, &op);
    check_will_block(RANK + 0);
    CHECK_STATUS(tddp_shm_wait_step(it->shm, 1, 1), TDDP_GROUP_FAILED);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_GROUP_FAILED);
    CHECK_STATUS(tddp_shm_check_peer(it->shm, 1), TDDP_GROUP_FAILED);
    CHECK_INT(pthread_join(thread, NULL), 0);
    check_signal(REPORTED);
    CHECK_AWAIT(DONE, 1);
}

TEST(abort_ends_waits)
{
    run_shm(SHM_THREADS, 2, aborts, NULL);
    run_shm(SHM_PROCESSES, 2, aborts, NULL);
}

static void *trigger_soon(void *cancel)
{
    CHECK_AWAIT_BLOCKED(RANK + 0);
    tddp_cancel_trigger(cancel);
    return NULL;
}

/* An interrupted operation resumes where it was, maybe on another thread: what it published
 * stays published, and the rest is done once. */
static void interrupted(shm_rank *it)
{
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    barrier_once(it);
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    op.cancel = it->rank == 0 ? cancel : NULL;
    int64_t mine = 40 + it->rank;
    if (it->rank == 1) {
        CHECK_AWAIT(REPORTED, 1); /* rank 0's first wait is over */
    }
    tddp_shm_enter(it->shm, &op, &mine, sizeof mine);
    tddp_status status = TDDP_OK;
    if (it->rank == 0) {
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
        tddp_shm_cursor_of(it->shm)->index = 17;
        check_will_block(RANK + 0);
        CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_CANCELED);
        check_signal(REPORTED);
        CHECK_INT(pthread_join(thread, NULL), 0);
        tddp_cancel_reset(cancel);
        mine = 0;
        tddp_shm_enter(it->shm, &op, &mine, sizeof mine);
        CHECK_INT(tddp_shm_cursor_of(it->shm)->index, 17);
    }
    status = tddp_shm_sync(it->shm);
    CHECK_OK(status);
    CHECK_INT(*(const int64_t *)tddp_shm_payload(it->shm, 0), 40);
    tddp_shm_publish_step(it->shm, 5);
    tddp_shm_publish_step(it->shm, 3); /* published already */
    for (int rank = 0; rank < it->size; rank++) {
        CHECK_OK(tddp_shm_wait_step(it->shm, rank, 5));
    }
    barrier_once(it);
    CHECK_INT(tddp_shm_cursor_of(it->shm)->index, 0);
    tddp_cancel_free(cancel);
}

TEST(an_interrupted_operation_resumes)
{
    run_shm(SHM_THREADS, 3, interrupted, NULL);
    run_shm(SHM_PROCESSES, 3, interrupted, NULL);
}

static void late(shm_rank *it)
{
    barrier_once(it);
    if (it->rank == 1) {
        CHECK_AWAIT(DONE, 3);
        return;
    }
    CHECK_AWAIT(ENTERED, it->rank == 0 ? 2 : 0);
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    op.timeout_ms = it->rank == 0 ? 300 : 20000;
    double start = shm_now();
    tddp_shm_enter(it->shm, &op, NULL, 0);
    check_signal(ENTERED);
    if (it->rank == 0) {
        CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_TIMEOUT);
        CHECK(shm_now() - start > 0.25);
        CHECK_TEXT(tddp_error_message(), "not done after 300 ms; rank 1 has not done its part");
        CHECK_SEEN(it, 1, TDDP_OBSERVED_NOT_ENTERED, 1, TDDP_OK, "barrier");
        CHECK_SEEN(it, 2, TDDP_OBSERVED_ENTERED, 0, TDDP_OK, "");
        CHECK_SEEN(it, 3, TDDP_OBSERVED_ENTERED, 0, TDDP_OK, "");
        tddp_shm_report_failure(it->shm, TDDP_TIMEOUT, tddp_error_message());
    } else {
        CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 0, which gave up: not done after 300 ms");
    }
    CHECK_MEET(DONE, 3);
}

TEST(a_late_rank_is_reported)
{
    run_shm(SHM_THREADS, 4, late, NULL);
    run_shm(SHM_PROCESSES, 4, late, NULL);
}

/* --- disagreement ---------------------------------------------------------------------------- */

static void disagrees(shm_rank *it)
{
    static float data[12];
    barrier_once(it);
    tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
    op.input = op.output = shm_buffer(data, it->rank == 1 ? 10 : 12, TDDP_FLOAT32);
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "12 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "10 elements of float32");
}

TEST(ranks_that_disagree)
{
    run_shm(SHM_THREADS, 3, disagrees, NULL);
    run_shm(SHM_PROCESSES, 3, disagrees, NULL);
}

/* A fingerprint that only some ranks have agrees with all; two different ones don't. */
static void with_fingerprints(shm_rank *it)
{
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    op.fingerprint = it->rank == 1 ? 77 : 0;
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_OK(tddp_shm_sync(it->shm));
    op = shm_op(it, TDDP_OP_BARRIER);
    op.fingerprint = it->rank == 1 ? 77 : 78;
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_STATUS(tddp_shm_sync(it->shm), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "shapes or names differ");
}

TEST(fingerprints_are_compared)
{
    run_shm(SHM_THREADS, 2, with_fingerprints, NULL);
}

/* Parts of different sizes are compared one by one, equal ones by their digest. */
static void with_parts(shm_rank *it)
{
    static float data[64];
    for (int round = 0; round < 3; round++) {
        tddp_buffer parts[SHM_MAX_RANKS];
        size_t local_count = 0;
        for (int rank = 0; rank < it->size; rank++) {
            size_t count = round == 0 ? 3 : (size_t)rank;
            count += round == 2 && it->rank == 0 && rank == 1;
            parts[rank] = shm_buffer(data, count, TDDP_FLOAT32);
            local_count = rank == it->rank ? count : local_count;
        }
        tddp_op op = shm_op(it, TDDP_OP_ALL_GATHER);
        op.input = shm_buffer(data, local_count, TDDP_FLOAT32);
        op.output_parts = parts;
        tddp_shm_enter(it->shm, &op, NULL, 0);
        if (round < 2) {
            CHECK_OK(tddp_shm_sync(it->shm));
        } else {
            /* Rank 2 has no mismatch of its own. */
            CHECK_STATUS(tddp_shm_sync(it->shm), it->rank < 2 ? TDDP_MISMATCH : TDDP_OK);
        }
    }
    if (it->rank < 2) {
        CHECK_CONTAINS(tddp_error_message(),
                       "rank 1 sends 1 elements of float32, rank 0 expects 2");
    }
}

TEST(parts_are_compared)
{
    run_shm(SHM_THREADS, 3, with_parts, NULL);
    run_shm(SHM_PROCESSES, 3, with_parts, NULL);
}

/* --- as the group tells it ------------------------------------------------------------------- */

static void group_loses(shm_rank *it)
{
    float *x = calloc(LARGE, sizeof *x);
    CHECK(x != NULL);
    tddp_buffer buffer = shm_buffer(x, LARGE, TDDP_FLOAT32);
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank == 1) {
        for (int i = 0; i < 3; i++) {
            CHECK_OK(tddp_all_reduce(it->group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        }
        die();
    }
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK) {
        status = tddp_all_reduce(it->group, buffer, TDDP_REDUCE_SUM, 0, NULL);
    }
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank");
    CHECK_STATUS(tddp_barrier(it->group, NULL), TDDP_GROUP_FAILED);
    free(x);
}

TEST(a_group_that_loses_a_rank)
{
    run_shm_groups(SHM_PROCESSES, 2, group_loses, NULL);
    run_shm_groups(SHM_PROCESSES, 3, group_loses, NULL);
}

MULTI_TEST(killed_at_random_moments, 1, 100)
{
    run_kills(24, 1);
}
