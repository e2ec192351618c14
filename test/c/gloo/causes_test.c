/* Who is to blame when operations over Gloo fail: named on every rank, within a second, with host,
 * pid, operation and number. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "world.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static float x[1000];

static tddp_status sum(tddp_group *group, size_t count)
{
    return tddp_all_reduce(group, buffer_of(x, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
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

/* The rank that dies is a child of the test's process, killed as the system would. Its parent does
 * not ask for its end at once: a dead process may stay a zombie. */
static void dies(int rank, int world_size, int port)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        tddp_store *store = open_store(rank, world_size, port);
        tddp_group *group = open_group(store, rank, world_size, 20000);
        if (tddp_barrier(group, NULL) == TDDP_OK) {
            raise(SIGKILL);
        }
        _exit(1);
    }
    int status = -1;
    usleep(1500000);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
}

/* Rank 0 hosts the store, the last rank is killed, the one before comes late. */
static void one_is_killed(int rank, int world_size, int port)
{
    int dead = world_size - 1;
    if (rank == dead) {
        dies(rank, world_size, port);
        return;
    }
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    int late = rank > 0 && rank == dead - 1;
    usleep(late ? 500000 : 0);
    double start = now();
    CHECK_STATUS(sum(group, 7), TDDP_PEER_LOST);
    CHECK(now() - start < 1);
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
    tddp_group_release(group);
    usleep(rank == 0 ? 900000 : 0);
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

/* The store dies with rank 0: what the others see of its process is all there is. */
MULTI_TEST(the_host_of_the_store_is_killed, 3, 30)
{
    if (rank == 0) {
        dies(rank, world_size, port);
        return;
    }
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    double start = now();
    tddp_status status = sum(group, 7);
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK(now() - start < 1);
    CHECK_CONTAINS(tddp_error_message(), name_of(group, 0));
    CHECK_CONTAINS(tddp_error_message(), "ended"); /* so may have the other survivor, by now */
    tddp_group_release(group);
    tddp_store_release(store);
}

/* It ended well, but too early for the others. */
MULTI_TEST(one_leaves_early, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        tddp_group_shutdown(group, 1000);
        usleep(1200000);
    } else {
        usleep(rank == 2 ? 100000 : 0);
        double start = now();
        CHECK_STATUS(sum(group, 7), TDDP_PEER_LOST);
        CHECK(now() - start < 1);
        CHECK_CONTAINS(tddp_error_message(), name_of(group, 1));
        CHECK_CONTAINS(tddp_error_message(),
                       " has destroyed the group: do all ranks make the same");
        usleep(rank == 0 ? 1200000 : 0);
    }
    tddp_group_release(group);
    tddp_store_release(store);
}

/* One rank's call differs; another is not even there. */
MULTI_TEST(a_mismatch_reaches_all_ranks, 4, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    usleep(rank == 3 ? 600000 : 0);
    double start = now();
    CHECK_STATUS(sum(group, rank == 1 ? 9 : 7), TDDP_MISMATCH);
    CHECK(now() - start < 1);
    CHECK_CONTAINS(tddp_error_message(), "9 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "7 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "all_reduce (operation 2");
    CHECK_CONTAINS(tddp_error_message(), "pid ");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_MISMATCH");
    tddp_group_release(group);
    usleep(rank == 0 ? 1000000 : 0);
    tddp_store_release(store);
}

MULTI_TEST(descriptions_that_differ_are_both_shown, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_describe_next(rank == 1 ? "bias [7]" : "weight [7, 1]");
    CHECK_STATUS(sum(group, 7), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "\"bias [7]\"");
    CHECK_CONTAINS(tddp_error_message(), "\"weight [7, 1]\"");
    tddp_group_release(group);
    usleep(rank == 0 ? 1000000 : 0);
    tddp_store_release(store);
}

MULTI_TEST(a_timeout_tells_who_has_arrived, 4, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, rank == 0 ? 400 : 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 3) {
        usleep(1200000);
    }
    tddp_status status = sum(group, 7);
    if (rank == 0) {
        char late[300];
        snprintf(late, sizeof late, "not arrived: %s: in no operation, its last was barrier 1, 0.",
                 name_of(group, 3));
        CHECK_STATUS(status, TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "all_reduce 2 of group \"default_pg\" on rank 0 of 4: "
                                             "not done after 400 ms");
        CHECK_CONTAINS(tddp_error_message(), late);
        CHECK_CONTAINS(tddp_error_message(), "arrived: rank(s) 0, 1, 2");
    } else {
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), name_of(group, 0));
        CHECK_CONTAINS(tddp_error_message(),
                       "failed first, in all_reduce 2: not done after 400 ms");
    }
    tddp_group_release(group);
    usleep(rank == 0 ? 1500000 : 0);
    tddp_store_release(store);
}
