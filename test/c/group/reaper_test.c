/* Groups whose last reference is dropped where waiting is forbidden: they are shut down before the
 * process exits. */
#include <sys/wait.h>

#include "resumer.h"

static void await_destroyed(int count)
{
    while (atomic_load(&resumer.destroyed) < count) {
        usleep(1000);
    }
    CHECK_INT(atomic_load(&resumer.destroyed), count);
}

TEST(the_last_reference_is_dropped_without_a_wait)
{
    tddp_store *store;
    tddp_group *groups[3];
    atomic_store(&resumer.destroy_held, 1);
    for (int i = 0; i < 3; i++) {
        groups[i] = resumer_group(&store);
        tddp_store_release(store);
    }
    tddp_group_retain(groups[0]);
    tddp_group_release_async(groups[0]);
    CHECK_OK(tddp_barrier(groups[0], NULL));
    for (int i = 0; i < 3; i++) {
        tddp_group_release_async(groups[i]);
    }
    tddp_group_release_async(NULL);
    CHECK_INT(atomic_load(&resumer.destroyed), 0);
    atomic_store(&resumer.destroy_held, 0);
    await_destroyed(3);
}

TEST(a_group_that_has_ended_needs_no_thread)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    tddp_group_shutdown(group, 0);
    CHECK_INT(atomic_load(&resumer.destroyed), 1);
    tddp_group_release_async(group);
    tddp_store_release(store);
}

static void release(void *group)
{
    tddp_group_release_async(group);
}

TEST(a_callback_may_release_its_own_group)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.held, 1);
    tddp_work *work = begin(group);
    CHECK_OK(tddp_work_on_done(work, release, group));
    atomic_store(&resumer.held, 0);
    await_destroyed(1);
    CHECK_OK(tddp_work_status(work));
    tddp_work_release(work);
    tddp_store_release(store);
}

static void *let_destroy_on(void *nothing)
{
    (void)nothing;
    usleep(20000);
    atomic_store(&resumer.destroy_held, 0);
    return NULL;
}

static void at_exit(void)
{
    _exit(atomic_load(&resumer.destroyed) == 1 ? 0 : 7);
}

/* Handlers run in the opposite order: this one after the wait for the group's end. */
TEST(the_processs_exit_waits_for_it)
{
    pid_t child = fork();
    if (child == 0) {
        tddp_store *store;
        CHECK_INT(atexit(at_exit), 0);
        tddp_group *group = resumer_group(&store);
        atomic_store(&resumer.destroy_held, 1);
        tddp_group_release_async(group);
        CHECK_INT(pthread_detach(aside(let_destroy_on, NULL)), 0);
        exit(8);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
}

#ifndef __SANITIZE_THREAD__ /* which allows no threads after a fork beside others */
TEST(a_forked_child_has_a_thread_of_its_own)
{
    tddp_store *store;
    tddp_group *group = resumer_group(&store);
    atomic_store(&resumer.destroy_held, 1);
    tddp_group_release_async(group);
    CHECK_UNTIL(atomic_load(&resumer.destroying) == 1); /* see CHECK_FORK */
    pid_t child = fork();
    if (child == 0) {
        tddp_store *other;
        atomic_store(&resumer.destroy_held, 0);
        tddp_group_release_async(resumer_group(&other));
        await_destroyed(1);
        tddp_store_release(other);
        _exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(atomic_load(&resumer.destroyed), 0);
    atomic_store(&resumer.destroy_held, 0);
    await_destroyed(1);
    tddp_store_release(store);
}
#endif
