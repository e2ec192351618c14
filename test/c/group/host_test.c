/*
 * The process that hosts the store ends last: its shutdown waits until the other ranks have shut
 * down or ended, at most until its timeout.
 */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"
#include "hosted_store.h"

enum { HOSTED }; /* the event by which the store's port is known */

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static tddp_group *group_at(tddp_store *store, int rank, int world_size)
{
    return make_group("fake", rank, world_size, store, 20000);
}

/* Until rank 0 has ended its group, as the store tells. */
static void await_rank_0(tddp_store *store)
{
    tddp_slice left = slice("default_pg/left/1/0");
    CHECK_OK(tddp_store_wait(store, &left, 1, NULL));
}

static void use(tddp_store *store)
{
    for (int i = 0; i < 20; i++) {
        int64_t count;
        CHECK_OK(tddp_store_add(store, slice("uses"), 1, NULL, &count));
    }
}

static void end_as_host(tddp_group *group, tddp_store *store, tddp_status expected)
{
    const tddp_wait wait = {20000, NULL};
    CHECK_STATUS(tddp_group_shutdown_host(group, 1000, &wait), expected);
    CHECK_INT(tddp_group_closed(group), 1);
    CHECK_OK(tddp_group_shutdown_host(group, 1000, &wait)); /* once is enough */
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(the_host_stays_while_others_use_the_store, 3, 60)
{
    tddp_store *store = open_store_of_rank_0(rank, world_size, HOSTED);
    tddp_group *group = group_at(store, rank, world_size);
    if (rank == 0) {
        end_as_host(group, store, TDDP_OK);
        return;
    }
    await_rank_0(store);
    use(store);
    end_as_host(group, store, TDDP_OK); /* waits for nobody: rank 0 waits for it */
}

/* Each of the others forks the process that takes part, since the test's own must end well. */
MULTI_TEST(a_rank_that_is_killed_is_not_waited_for, 2, 60)
{
    if (rank == 0) {
        tddp_store *store = open_store_of_rank_0(0, world_size, HOSTED);
        end_as_host(group_at(store, 0, world_size), store, TDDP_OK);
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        tddp_store *store = open_store_of_rank_0(1, world_size, HOSTED);
        (void)group_at(store, 1, world_size);
        await_rank_0(store);
        (void)kill(getpid(), SIGKILL);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
}

MULTI_TEST(a_host_stays_no_longer_than_it_is_told, 2, 60)
{
    tddp_store *store = open_store_of_rank_0(rank, world_size, HOSTED);
    tddp_group *group = group_at(store, rank, world_size);
    if (rank == 0) {
        const tddp_wait wait = {20, NULL};
        CHECK_STATUS(tddp_group_shutdown_host(group, 0, &wait), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "waiting for the store's clients to leave");
        CHECK_OK(tddp_store_set(store, slice("ended"), slice("1"), NULL));
        tddp_group_release(group);
        CHECK_OK(tddp_store_await_clients(store, NULL, 0, NULL));
    } else {
        tddp_slice ended = slice("ended");
        CHECK_OK(tddp_store_wait(store, &ended, 1, NULL));
        tddp_group_release(group);
    }
    tddp_store_release(store);
}

/* The shutdown of a group with a parent does not wait: the parent's does. */
MULTI_TEST(a_group_of_some_ranks_is_not_waited_for, 2, 60)
{
    tddp_store *store = open_store_of_rank_0(rank, world_size, HOSTED);
    tddp_group *world = group_at(store, rank, world_size);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *part;
    opts.backend = "fake";
    opts.name = "part";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.parent = world;
    CHECK_OK(tddp_group_create(&opts, NULL, &part));
    if (rank == 0) {
        const tddp_wait wait = {20000, NULL};
        CHECK_OK(tddp_group_shutdown_host(part, 0, &wait));
        CHECK_OK(tddp_store_set(store, slice("went on"), slice("1"), NULL));
    } else {
        tddp_slice went_on = slice("went on");
        CHECK_OK(tddp_store_wait(store, &went_on, 1, NULL));
        tddp_group_shutdown(part, 0);
    }
    tddp_group_release(part);
    end_as_host(world, store, TDDP_OK);
}
