/*
 * The root cause of failures over Gloo: reported on every rank, with host, pid, operation and
 * number, before any timeout.
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "args.h"
#include "fixture.h"
#include "recorded.h"

enum { NOTIFIED, LEFT, STARTED, STORE }; /* events */

static float x[1000];

static tddp_status begin_sum(tddp_group *group, size_t count, tddp_work **work)
{
    return tddp_all_reduce(group, buffer_of(x, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, work);
}

static tddp_status sum(tddp_group *group, size_t count)
{
    return begin_sum(group, count, NULL);
}

static const char *name_of(tddp_group *group, int rank)
{
    static char text[256];
    tddp_peer peer;
    CHECK_OK(tddp_group_peer(group, rank, &peer));
    snprintf(text, sizeof text, "rank %d (host %.100s, pid %lld)", rank, peer.host,
             (long long)peer.pid);
    return text;
}

static tddp_store *open_some_store(int rank, int world_size, int port, bool of_rank_0)
{
    return of_rank_0 ? open_store_of_rank_0(rank, world_size, STORE)
                     : open_store(rank, world_size, port);
}

/* The rank that dies is a child of the test's process, killed as by the system, once as many ranks
 * as that are in the next call. Its parent does not wait for it before all other ranks have failed:
 * a dead process may stay a zombie. */
static void dies(int rank, int world_size, int port, bool of_rank_0, int waiting)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        tddp_store *store = open_some_store(rank, world_size, port, of_rank_0);
        tddp_group *group = open_group(store, rank, world_size, 20000);
        if (tddp_barrier(group, NULL) == TDDP_OK) {
            CHECK_AWAIT(STARTED, waiting);
            raise(SIGKILL);
        }
        _exit(1);
    }
    int status = -1;
    CHECK_AWAIT(NOTIFIED, world_size - 1);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
}

/* A sum that a rank is waiting for when it signals that. */
static tddp_status sum_and_signal(tddp_group *group, size_t count)
{
    tddp_work *work;
    CHECK_OK(begin_sum(group, count, &work));
    await_started(group, (int)tddp_work_sequence(work));
    check_signal(STARTED);
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

/* The last rank is killed; the one before it calls when all others have failed. */
static void one_is_killed(int rank, int world_size, int port)
{
    int dead = world_size - 1;
    if (rank == dead) {
        dies(rank, world_size, port, false, dead > 1 ? dead - 1 : 1);
        return;
    }
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    int late = rank > 0 && rank == dead - 1;
    CHECK_AWAIT(NOTIFIED, late ? dead - 1 : 0);
    CHECK_STATUS(late ? sum(group, 7) : sum_and_signal(group, 7), TDDP_PEER_LOST);
    if (!late) {
        char operation[128];
        snprintf(operation, sizeof operation,
                 "all_reduce 2 of group \"default_pg\" on rank %d of %d: ", rank, world_size);
        CHECK_CONTAINS(tddp_error_message(), operation);
    }
    CHECK_CONTAINS(tddp_error_message(), "lost rank");
    CHECK_CONTAINS(tddp_error_message(), name_of(group, dead));
    CHECK_CONTAINS(tddp_error_message(), "its process has ended");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), name_of(group, dead));
    check_signal(NOTIFIED);
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(one_of_two_is_killed, 2, 30)
{
    one_is_killed(rank, world_size, port);
}

MULTI_TEST(one_of_three_is_killed, 3, 30)
{
    one_is_killed(rank, world_size, port);
}

MULTI_TEST(one_of_four_is_killed, 4, 30)
{
    one_is_killed(rank, world_size, port);
}

/* The store dies with rank 0: the others only see the end of its process. */
MULTI_TEST(the_rank_that_hosts_the_store_is_killed, 3, 30)
{
    if (rank == 0) {
        dies(rank, world_size, port, true, world_size - 1);
        return;
    }
    tddp_store *store = open_some_store(rank, world_size, port, true);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_STATUS(sum_and_signal(group, 7), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), name_of(group, 0));
    CHECK_CONTAINS(tddp_error_message(),
                   "ended"); /* the other survivor may have failed by now, too */
    check_signal(NOTIFIED);
    tddp_group_release(group);
    tddp_store_release(store);
}

/* It exited without an error, but before the others' last operation. */
MULTI_TEST(a_rank_leaves_early, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        tddp_group_shutdown(group, 1000);
        check_signal(LEFT);
        CHECK_AWAIT(NOTIFIED, 2); /* its process lives */
    } else {
        CHECK_AWAIT(LEFT, rank == 2);
        CHECK_STATUS(sum(group, 7), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), name_of(group, 1));
        CHECK_CONTAINS(tddp_error_message(),
                       " has destroyed the group: do all ranks make the same");
        check_signal(NOTIFIED);
    }
    tddp_group_release(group);
    tddp_store_release(store);
}

/* One rank's call differs; another rank hasn't called yet. */
MULTI_TEST(a_mismatch_reaches_all_ranks, 4, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_AWAIT(NOTIFIED, rank == 3 ? 3 : 0);
    CHECK_STATUS(sum(group, rank == 1 ? 9 : 7), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "9 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "7 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "all_reduce (operation 2");
    CHECK_CONTAINS(tddp_error_message(), "pid ");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_MISMATCH");
    check_signal(NOTIFIED);
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(fingerprints_that_differ_are_both_shown, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_STATUS(described_sum(group, buffer_of(x, 7, TDDP_FLOAT32),
                               rank == 1 ? "bias [7]" : "weight [7, 1]"),
                 TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "\"bias [7]\"");
    CHECK_CONTAINS(tddp_error_message(), "\"weight [7, 1]\"");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(a_timeout_lists_the_ranks_that_arrived, 4, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    const double start = now();
    CHECK_OK(tddp_barrier(group, NULL));
    limit_to(group, rank == 0 ? 400 : 20000);
    CHECK_AWAIT(STARTED, rank == 0 ? 2 : 0); /* ranks 1 and 2 have arrived */
    CHECK_AWAIT(NOTIFIED, rank == 3);
    tddp_work *work = NULL;
    tddp_status status = begin_sum(group, 7, &work);
    if (rank == 1 || rank == 2) {
        await_started(group, 2);
        check_signal(STARTED);
    }
    status = status ? status : tddp_work_wait(work, NULL);
    tddp_work_release(work);
    if (rank == 0) {
        check_signal(NOTIFIED);
        char late[300];
        snprintf(late, sizeof late, "not arrived: %s: in no operation, its last was barrier 1, ",
                 name_of(group, 3));
        CHECK_STATUS(status, TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "all_reduce 2 of group \"default_pg\" on rank 0 of 4: "
                                             "not done after 400 ms");
        CHECK_CONTAINS(tddp_error_message(), late);
        CHECK_CONTAINS(tddp_error_message(), "arrived: rank(s) 0, 1, 2");
        double ago = -1;
        CHECK_INT(sscanf(strstr(tddp_error_message(), late) + strlen(late), "%lf s ago", &ago), 1);
        CHECK(ago >= 0 && ago <= now() - start + 0.1); /* it is rounded */
    } else {
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), name_of(group, 0));
        CHECK_CONTAINS(tddp_error_message(),
                       "failed first, in all_reduce 2: not done after 400 ms");
    }
    tddp_group_release(group);
    tddp_store_release(store);
}
