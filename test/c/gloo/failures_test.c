/* What goes wrong between ranks over Gloo: peers that die or stall, calls that differ, addresses
 * that are none; and the end of a process with a group alive. */
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "world.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

enum { LARGE = 4000000 };

static float large[LARGE];

/* What a process ends with; the leak checker finds it here. */
static tddp_group *volatile kept_group;
static tddp_store *volatile kept_store;

/* Ends this process at once, as a kill would, but well for the test's runner. _exit would let a
 * sanitizer linger, with the connections open. */
static void die(void)
{
    syscall(SYS_exit_group, 0);
}

MULTI_TEST(a_dead_peer_is_named_within_a_second, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 2) {
        die();
    }
    float x[3] = {0};
    double start = now();
    CHECK_STATUS(tddp_all_reduce(group, buffer_of(x, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_PEER_LOST);
    CHECK(now() - start < 1);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 2 of group \"default_pg\"");
    CHECK_CONTAINS(tddp_error_message(), "lost rank");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_PEER_LOST");
    tddp_group_release(group);
    tddp_store_release(store);
}

/* The other is in the middle of sending or receiving: Gloo itself never reports that. */
MULTI_TEST(a_peer_that_dies_half_way_is_noticed, 2, 40)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    tddp_work *work;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        for (int i = 0; i < 20; i++) {
            CHECK_OK(tddp_all_reduce(group, buffer_of(large, LARGE, TDDP_FLOAT32), TDDP_REDUCE_SUM,
                                     0, &work));
        }
        usleep(60000);
        die();
    }
    tddp_status status = TDDP_OK;
    double start = 0;
    for (int i = 0; i < 20 && status == TDDP_OK; i++) {
        start = now();
        status =
            tddp_all_reduce(group, buffer_of(large, LARGE, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
    }
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK(now() - start < 2);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(a_peer_that_stalls_times_out, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, rank == 0 ? 300 : 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    double start = now();
    if (rank == 0) {
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_TIMEOUT);
        CHECK(now() - start > 0.25 && now() - start < 1.5);
        CHECK_CONTAINS(tddp_error_message(), "barrier 2");
        CHECK_CONTAINS(tddp_error_message(), "not done after 300 ms; rank 1 has not done its part");
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    } else {
        usleep(700000);
        /* Rank 0 has given up: that is news here too. */
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    }
    tddp_group_release(group);
    tddp_store_release(store);
}

static void expect_mismatch(tddp_status status, const char *mine, const char *theirs)
{
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), mine);
    CHECK_CONTAINS(tddp_error_message(), theirs);
}

MULTI_TEST(different_sizes_are_a_mismatch_small, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 10000);
    expect_mismatch(tddp_all_reduce(group, buffer_of(large, rank ? 10 : 12, TDDP_FLOAT32),
                                    TDDP_REDUCE_SUM, 0, NULL),
                    "10 elements of float32", "12 elements of float32");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(different_sizes_are_a_mismatch_large, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 10000);
    expect_mismatch(tddp_all_reduce(group, buffer_of(large, rank ? 10 : LARGE, TDDP_FLOAT32),
                                    TDDP_REDUCE_SUM, 0, NULL),
                    "10 elements of float32", "4000000 elements of float32");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(different_operations_are_a_mismatch, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 10000);
    tddp_buffer buffer = buffer_of(large, LARGE, TDDP_FLOAT32);
    tddp_status status = rank ? tddp_broadcast(group, buffer, 1, NULL)
                              : tddp_all_reduce(group, buffer, TDDP_REDUCE_MAX, 0, NULL);
    expect_mismatch(status, "runs broadcast (operation 1, 4000000 elements of float32, root 1)",
                    "runs all_reduce (operation 1, 4000000 elements of float32, max)");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(shutdown_ends_a_blocked_operation, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        tddp_work *work;
        CHECK_OK(tddp_barrier(group, &work));
        usleep(100000);
        double start = now();
        tddp_group_shutdown(group, 0);
        CHECK(now() - start < 1);
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
    } else {
        usleep(800000);
    }
    tddp_group_release(group);
    tddp_store_release(store);
}

/* A program started by the one that dies lives on; it must not hold the connections. */
MULTI_TEST(a_started_program_does_not_hide_a_death, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        if (fork() == 0) {
            execlp("sleep", "sleep", "5", (char *)NULL);
            _exit(1);
        }
        usleep(200000);
        die();
    }
    double start = now();
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    CHECK(now() - start < 2);
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(exit_with_a_group_alive, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        tddp_work *work;
        CHECK_OK(tddp_barrier(group, &work));
        usleep(200000);
    }
    /* An operation is under way on rank 0; nothing is cleaned up. */
    kept_group = group;
    kept_store = store;
    exit(0);
}

MULTI_TEST(the_last_data_arrive_before_the_end, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    for (int i = 0; i < 5; i++) {
        char name[2] = {(char)('a' + i), 0};
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        opts.backend = "gloo";
        opts.store = store;
        opts.name = name;
        opts.rank = rank;
        opts.world_size = world_size;
        tddp_group *group;
        CHECK_OK(tddp_group_create(&opts, NULL, &group));
        large[LARGE - 1] = rank == 0 ? (float)(i + 1) : 0;
        CHECK_OK(tddp_broadcast(group, buffer_of(large, LARGE, TDDP_FLOAT32), 0, NULL));
        CHECK_DOUBLE(large[LARGE - 1], i + 1, 0);
        /* The root is done once its data have left it; the other reads while it goes. */
        tddp_group_release(group);
    }
    tddp_group *group = open_group(store, rank, world_size, 20000);
    leave(group, store);
}

static void expect_create(tddp_store *store, int rank, int world_size, tddp_status status,
                          const char *text)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "gloo";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 5000;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), status);
    CHECK_CONTAINS(tddp_error_message(), text);
}

MULTI_TEST(an_unknown_interface_is_named, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    setenv("GLOO_SOCKET_IFNAME", "wlan99,eth77", 1);
    expect_create(store, rank, world_size, TDDP_INVALID_ARGUMENT,
                  "GLOO_SOCKET_IFNAME=\"wlan99,eth77\": no such network interface");
    CHECK_CONTAINS(tddp_error_message(), "lo (127.0.0.1)");
    /* The store is hosted by rank 0. */
    usleep(rank == 0 ? 300000 : 0);
    tddp_store_release(store);
}

MULTI_TEST(a_rank_that_cannot_connect_tells_the_others, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    if (rank == 1) {
        setenv("GLOO_SOCKET_IFNAME", "eth77", 1);
        expect_create(store, rank, world_size, TDDP_INVALID_ARGUMENT, "no such network interface");
        unsetenv("GLOO_SOCKET_IFNAME");
    } else {
        double start = now();
        expect_create(store, rank, world_size, TDDP_PEER_LOST,
                      "rank 1 could not connect: GLOO_SOCKET_IFNAME=\"eth77\"");
        CHECK(now() - start < 2);
    }
    /* The next try is a new one. */
    tddp_group *group = open_group(store, rank, world_size, 5000);
    leave(group, store);
}

MULTI_TEST(the_first_interface_that_exists_is_used, 2, 20)
{
    setenv("GLOO_SOCKET_IFNAME", "wlan99,lo", 1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 5000);
    leave(group, store);
}

MULTI_TEST(missing_ranks_are_named_and_the_wait_can_be_cancelled, 1, 20)
{
    tddp_store *store = open_store(0, 1, port);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "gloo";
    opts.store = store;
    opts.world_size = 2;
    opts.timeout_ms = 300;
    tddp_group *group;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "in vain for rank(s) 1 of 2");
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    CHECK_STATUS(tddp_group_create(&opts, &(tddp_wait){-1, cancel}, &group), TDDP_CANCELED);
    tddp_cancel_free(cancel);
    tddp_store_release(store);
}
