/* Failures in a group: faults injected by the backend `fake`, timeouts, interrupted waits. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "pair.h"

enum { WAITER }; /* an event */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

TEST(the_first_failure_fails_all_later_operations)
{
    tddp_store *store;
    tddp_group *group = lone_group("fail_at=2", 5000, &store);
    tddp_work *works[4];
    for (int i = 0; i < 4; i++) {
        tddp_status status = tddp_barrier(group, &works[i]);
        if (i < 2) {
            CHECK_OK(status);
        } else if (status) {
            CHECK_STATUS(status, TDDP_GROUP_FAILED);
            works[i] = NULL;
        }
    }
    CHECK_OK(tddp_work_wait(works[0], NULL));
    CHECK_STATUS(tddp_work_wait(works[1], NULL), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(),
                   "barrier 2 of group \"default_pg\" on rank 0 of 1: asked to fail");
    CHECK_STATUS(tddp_work_status(works[1]), TDDP_NETWORK);
    for (int i = 2; i < 4; i++) {
        if (works[i]) {
            CHECK_STATUS(tddp_work_wait(works[i], NULL), TDDP_GROUP_FAILED);
        }
    }
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "has failed: barrier 2");
    CHECK_CONTAINS(tddp_error_message(), "TDDP_NETWORK");
    for (int i = 0; i < 4; i++) {
        tddp_work_release(works[i]);
    }
    drop(group, store);
}

TEST(an_operation_times_out)
{
    tddp_store *store;
    tddp_group *group = lone_group("drop_at=1", 100, &store);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "barrier 1");
    CHECK_CONTAINS(tddp_error_message(), "not done after 100 ms");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    drop(group, store);
}

TEST(time_in_the_queue_does_not_count)
{
    tddp_store *store;
    tddp_group *group = lone_group("delay_ms=300", 800, &store);
    tddp_work *works[3];
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_barrier(group, &works[i]));
    }
    for (int i = 2; i >= 0; i--) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    drop(group, store);
}

TEST(an_interrupted_wait_leaves_the_operation_running)
{
    pair self = make_pair(20000);
    tddp_group *group = self.groups[0];
    tddp_work *work;
    CHECK_OK(tddp_barrier(group, &work)); /* the other has not come yet */
    CHECK_STATUS(tddp_work_wait(work, &(tddp_wait){20, NULL}), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "barrier 1 is not done after waiting");
    CHECK_INT(tddp_work_completed(work), 0);
    CHECK_STATUS(tddp_work_wait(work, &(tddp_wait){0, NULL}), TDDP_TIMEOUT);
    CHECK_OK(tddp_work_status(work));
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    CHECK_STATUS(tddp_work_wait(work, &(tddp_wait){20, cancel}), TDDP_TIMEOUT);
    tddp_cancel_trigger(cancel);
    CHECK_STATUS(tddp_work_wait(work, &(tddp_wait){-1, cancel}), TDDP_CANCELED);
    CHECK_CONTAINS(tddp_error_message(), "was interrupted");
    CHECK_INT(tddp_work_completed(work), 0);
    tddp_cancel_reset(cancel);
    tddp_work *other;
    CHECK_OK(tddp_barrier(self.groups[1], &other));
    CHECK_OK(tddp_work_wait(work, &(tddp_wait){-1, cancel}));
    CHECK_OK(tddp_work_wait(other, NULL));
    tddp_cancel_free(cancel);
    tddp_work_release(work);
    tddp_work_release(other);
    drop_pair(&self);
}

static void *trigger_soon(void *cancel)
{
    CHECK_AWAIT_BLOCKED(WAITER);
    tddp_cancel_trigger(cancel);
    return NULL;
}

TEST(a_token_wakes_a_sleeping_waiter)
{
    tddp_store *store;
    tddp_group *group = lone_group("drop_at=1", 20000, &store);
    tddp_work *work;
    tddp_cancel *cancel;
    pthread_t thread;
    CHECK_OK(tddp_barrier(group, &work));
    CHECK_OK(tddp_cancel_create(&cancel));
    CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
    check_will_block(WAITER);
    CHECK_STATUS(tddp_work_wait(work, &(tddp_wait){-1, cancel}), TDDP_CANCELED);
    CHECK_INT(pthread_join(thread, NULL), 0);
    tddp_group_shutdown(group, 0);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
    tddp_work_release(work);
    tddp_cancel_free(cancel);
    drop(group, store);
}

TEST(shutdown_drains_then_aborts)
{
    tddp_store *store;
    tddp_group *group = lone_group("delay_ms=10,drop_at=3", 300000, &store);
    tddp_work *works[4];
    for (int i = 0; i < 4; i++) {
        CHECK_OK(tddp_barrier(group, &works[i]));
    }
    double start = now();
    tddp_group_shutdown(group, 400);
    CHECK(now() - start > 0.35);
    CHECK_OK(tddp_work_status(works[0]));
    CHECK_OK(tddp_work_status(works[1]));
    for (int i = 2; i < 4; i++) {
        CHECK_INT(tddp_work_completed(works[i]), 1);
        CHECK_STATUS(tddp_work_status(works[i]), TDDP_GROUP_CLOSED);
    }
    for (int i = 0; i < 4; i++) {
        tddp_work_release(works[i]);
    }
    drop(group, store);
}

static void count_call(void *data)
{
    ++*(int *)data;
}

TEST(a_callback_runs_once_also_after_a_failure)
{
    tddp_store *store;
    tddp_group *group = lone_group("delay_ms=30,lose_at=2", 5000, &store);
    int calls = 0;
    tddp_work *works[2];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tddp_barrier(group, &works[i]));
        CHECK_OK(tddp_work_on_done(works[i], count_call, &calls));
    }
    CHECK_OK(tddp_work_wait(works[0], NULL));
    CHECK_STATUS(tddp_work_wait(works[1], NULL), TDDP_PEER_LOST);
    tddp_group_shutdown(group, 0);
    CHECK_INT(calls, 2);
    for (int i = 0; i < 2; i++) {
        tddp_work_release(works[i]);
    }
    drop(group, store);
}

static void disagree(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    float x[4] = {0};
    tddp_status status = tddp_all_reduce(group, buffer_of(x, rank == 0 ? 3 : 4, TDDP_FLOAT32),
                                         TDDP_REDUCE_SUM, 0, NULL);
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "3 elements of");
    CHECK_CONTAINS(tddp_error_message(), "4 elements of");
    tddp_group_release(group);
}

TEST(a_mismatch_is_raised)
{
    run_ranks(2, disagree, NULL);
}

TEST(unknown_faults_are_refused)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "fake";
    opts.store = store;
    tddp_group *group;
    setenv("TDDP_FAKE", "delay_ms=5,burn=1", 1);
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"burn=1\"");
    setenv("TDDP_FAKE", "create_fail=1", 1);
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_NETWORK);
    setenv("TDDP_FAKE", "create_fail=1,rank=3", 1);
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    drop(group, store);
}

/* From base's private header: the nth allocation from now fails. */
bool tddp_fail_allocation(long nth);

TEST(every_allocation_may_fail)
{
    int failures = 0;
    unsetenv("TDDP_FAKE");
    for (long nth = 1; nth < 60; nth++) {
        tddp_store *store;
        tddp_group *group = NULL;
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        CHECK_OK(tddp_hash_store_create(5000, &store));
        opts.backend = "fake";
        opts.store = store;
        tddp_fail_allocation(nth);
        tddp_status status = tddp_group_create(&opts, NULL, &group);
        if (status == TDDP_OK) {
            float x = 1;
            status =
                tddp_all_reduce(group, buffer_of(&x, 1, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
        }
        tddp_fail_allocation(0);
        if (status) {
            failures++;
            CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
            CHECK_CONTAINS(tddp_error_message(), "out of memory");
        }
        drop(group, store);
    }
    CHECK(failures > 20);
}

TEST(an_operation_may_have_a_timeout_of_its_own)
{
    tddp_store *store;
    tddp_group *group = lone_group("drop_at=2", 20000, &store);
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_BARRIER;
    CHECK_OK(tddp_submit(group, &args, NULL));
    args.timeout_ms = 100;
    CHECK_STATUS(tddp_submit(group, &args, NULL), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "not done after 100 ms");
    CHECK_INT(tddp_group_timeout(group), 20000);
    drop(group, store);
}
