/* Operations that waiting threads execute: when they fail, when the group is shut down or fails
 * meanwhile, and in a forked child. */
#include <sys/wait.h>

#include "resumer.h"

TEST(failures_are_the_same_on_any_thread)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.fails, TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_all_reduce(group, floats(0, 2), TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 1 of group \"default_pg\" on rank 0 of 1");
    tddp_work *work = begin_inline(group, -1, NULL);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 2 of group");
    CHECK_INT(ran_here(1), 1);
    tddp_work_release(work);
    atomic_store(&resumer.fails, TDDP_PEER_LOST);
    atomic_store(&resumer.held, 1);
    work = begin_inline(group, 1000, NULL);
    tddp_work *behind = begin(group);
    atomic_store(&resumer.held, 0);
    CHECK_STATUS(tddp_work_wait(behind, NULL), TDDP_GROUP_FAILED);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 3 of group \"default_pg\" on rank 0 of 1: ");
    for (int i = 0; i < atomic_load(&resumer.count); i++) {
        CHECK(resumer.runs[i].sequence <= 3); /* the one behind it was not executed */
    }
    CHECK_INT(atomic_load(&resumer.aborted), 1);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    tddp_work_release(work);
    tddp_work_release(behind);
    drop(group, store);
}

TEST(a_group_fails_on_its_callers_thread)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.fails, TDDP_PEER_LOST);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "barrier 1 of group \"default_pg\" on rank 0 of 1: ");
    CHECK_INT(ran_here(0), 1);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_INT(atomic_load(&resumer.count), 1);
    drop(group, store);
}

TEST(the_group_may_be_shut_down_once_the_last_work_is_done)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    CHECK_OK(tddp_work_on_done(work, await_ending, group));
    atomic_store(&resumer.held, 0);
    CHECK_UNTIL(tddp_work_completed(work));
    tddp_group_shutdown(group, 0);
    CHECK_INT(atomic_load(&resumer.aborted), 0);
    CHECK_OK(tddp_work_status(work));
    tddp_work_release(work);
    drop(group, store);
}

static void *shut_down_soon(void *group)
{
    await_runs(1);
    tddp_group_shutdown(group, 20);
    return NULL;
}

TEST(a_shutdown_aborts_what_a_caller_executes)
{
    tddp_store *store;
    for (int how = 0; how < 3; how++) {
        tddp_group *group = resumer_group(&store);
        atomic_store(&resumer.count, 0);
        atomic_store(&resumer.aborted, 0);
        atomic_store(&resumer.held, 1);
        pthread_t thread = aside(shut_down_soon, group);
        tddp_status status;
        if (how == 0) {
            status = tddp_barrier(group, NULL);
        } else {
            tddp_cancel *cancel = NULL;
            if (how == 2) {
                CHECK_OK(tddp_cancel_create(&cancel));
            }
            tddp_work *work = begin_inline(group, -1, cancel);
            status = tddp_work_wait(work, NULL);
            tddp_work_release(work);
            tddp_cancel_free(cancel);
        }
        CHECK_STATUS(status, TDDP_GROUP_CLOSED);
        CHECK_INT(ran_here(0), 1);
        CHECK_INT(pthread_join(thread, NULL), 0);
        drop(group, store);
    }
}

static void *fail_soon(void *group)
{
    await_runs(1);
    tddp_group_fail(group, TDDP_PEER_LOST, "rank 7 has gone");
    return NULL;
}

TEST(a_remote_failure_aborts_what_a_caller_executes)
{
    tddp_store *store;
    for (int how = 0; how < 2; how++) {
        tddp_group *group = resumer_group(&store);
        atomic_store(&resumer.count, 0);
        atomic_store(&resumer.aborted, 0);
        atomic_store(&resumer.held, 1);
        pthread_t thread = aside(fail_soon, group);
        tddp_status status;
        if (how == 0) {
            status = tddp_barrier(group, NULL);
        } else {
            tddp_work *work = begin_inline(group, -1, NULL);
            status = tddp_work_wait(work, NULL);
            tddp_work_release(work);
        }
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 7 has gone");
        CHECK_INT(pthread_join(thread, NULL), 0);
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
        drop(group, store);
    }
}

TEST(a_child_leaves_the_parents_queue_alone)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    await_runs(1);
    pid_t child = fork();
    if (child == 0) {
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_FORKED);
        tddp_work *none;
        CHECK_STATUS(inline_sum(group, floats(0, 2), -1, NULL, &none), TDDP_FORKED);
        tddp_work_release(work);
        tddp_group_release(group);
        _exit(atomic_load(&resumer.count) - 1);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(atomic_load(&resumer.count), 1);
    atomic_store(&resumer.held, 0);
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    drop(group, store);
}
