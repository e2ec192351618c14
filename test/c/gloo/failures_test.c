/*
 * Failures between ranks over Gloo: peers that die or stall, calls that differ, invalid addresses;
 * and a process that exits with a live group.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/backend.h>

#include "fixture.h"
#include "recorded.h"

enum { LARGE = 4000000 };
enum { GAVE_UP, DONE, PROGRAM }; /* events */

static float large[LARGE];

/* Run at exit, for the leak checker. */
static volatile world kept;

MULTI_TEST(a_dead_peer_is_reported, 3, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 2) {
        CHECK_AWAIT_BLOCKED(0);
        CHECK_AWAIT_BLOCKED(1);
        die();
    }
    float x[3] = {0};
    check_will_block(rank);
    CHECK_STATUS(tddp_all_reduce(group, buffer_of(x, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce 2 of group \"default_pg\"");
    CHECK_CONTAINS(tddp_error_message(), "lost rank");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_PEER_LOST");
    abandon_world(here);
}

/* The other rank is in the middle of sending or receiving: Gloo itself never reports that. */
MULTI_TEST(a_peer_that_dies_half_way_is_noticed, 2, 40)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        tddp_work *works[20];
        for (int i = 0; i < 20; i++) {
            CHECK_OK(tddp_all_reduce(group, buffer_of(large, LARGE, TDDP_FLOAT32), TDDP_REDUCE_SUM,
                                     0, &works[i]));
        }
        CHECK_OK(tddp_work_wait(works[2], NULL)); /* the next operation runs */
        die();
    }
    tddp_status status = TDDP_OK;
    for (int i = 0; i < 20 && status == TDDP_OK; i++) {
        status =
            tddp_all_reduce(group, buffer_of(large, LARGE, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
    }
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1");
    abandon_world(here);
}

MULTI_TEST(a_peer_that_stalls_times_out, 2, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    limit_to(group, rank == 0 ? 300 : 20000);
    double start = now();
    if (rank == 0) {
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_TIMEOUT);
        CHECK(now() - start > 0.25);
        CHECK_CONTAINS(tddp_error_message(), "barrier 2");
        CHECK_CONTAINS(tddp_error_message(), "not done after 300 ms; rank 1 has not done its part");
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
        check_signal(GAVE_UP);
    } else {
        CHECK_AWAIT(GAVE_UP, 1);
        /* Rank 0 has given up, which is reported here too. */
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    }
    abandon_world(here);
}

static void expect_mismatch(tddp_status status, const char *mine, const char *theirs)
{
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), mine);
    CHECK_CONTAINS(tddp_error_message(), theirs);
}

MULTI_TEST(different_sizes_are_a_mismatch_small, 2, 20)
{
    world here = open_world(rank, world_size, port, 10000);
    tddp_group *group = here.group;
    expect_mismatch(tddp_all_reduce(group, buffer_of(large, rank ? 10 : 12, TDDP_FLOAT32),
                                    TDDP_REDUCE_SUM, 0, NULL),
                    "10 elements of float32", "12 elements of float32");
    abandon_world(here);
}

MULTI_TEST(different_sizes_are_a_mismatch_large, 2, 20)
{
    world here = open_world(rank, world_size, port, 10000);
    tddp_group *group = here.group;
    expect_mismatch(tddp_all_reduce(group, buffer_of(large, rank ? 10 : LARGE, TDDP_FLOAT32),
                                    TDDP_REDUCE_SUM, 0, NULL),
                    "10 elements of float32", "4000000 elements of float32");
    abandon_world(here);
}

MULTI_TEST(different_operations_are_a_mismatch, 2, 20)
{
    world here = open_world(rank, world_size, port, 10000);
    tddp_group *group = here.group;
    tddp_buffer buffer = buffer_of(large, LARGE, TDDP_FLOAT32);
    tddp_status status = rank ? tddp_broadcast(group, buffer, 1, NULL)
                              : tddp_all_reduce(group, buffer, TDDP_REDUCE_MAX, 0, NULL);
    expect_mismatch(status, "runs broadcast (operation 1, 4000000 elements of float32, root 1)",
                    "runs all_reduce (operation 1, 4000000 elements of float32, max)");
    abandon_world(here);
}

MULTI_TEST(shutdown_ends_a_blocked_operation, 2, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        tddp_work *work;
        CHECK_OK(tddp_barrier(group, &work));
        await_started(group, 2);
        tddp_group_shutdown(group, 0);
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
        check_signal(DONE);
    } else {
        CHECK_AWAIT(DONE, 1);
    }
    abandon_world(here);
}

/* A program started by the process that dies lives on; it must not keep the connections open. */
/* It lives much longer than the operation's timeout: if it kept connections open, that would end
 * in a timeout. */
static pid_t start_sleeper(void)
{
    int exec_done[2];
    char byte;
    CHECK_INT(pipe2(exec_done, O_CLOEXEC), 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        execlp("sleep", "sleep", "600", (char *)NULL);
        _exit(1);
    }
    CHECK_INT(close(exec_done[1]), 0);
    CHECK_INT(read(exec_done[0], &byte, 1), 0);
    return pid;
}

MULTI_TEST(a_started_program_does_not_hide_a_death, 2, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        check_post(PROGRAM, start_sleeper());
        die();
    }
    tddp_status status = tddp_barrier(group, NULL);
    CHECK_AWAIT(PROGRAM, 1);
    CHECK_INT(kill(check_signals(PROGRAM), SIGKILL), 0);
    CHECK_STATUS(status, TDDP_PEER_LOST);
    abandon_world(here);
}

MULTI_TEST(exit_with_a_group_alive, 2, 20)
{
    world here = open_world(rank, world_size, port, 20000);
    tddp_group *group = here.group;
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        tddp_work *work;
        CHECK_OK(tddp_barrier(group, &work));
        await_started(group, 2);
    }
    /* An operation is running on rank 0; nothing is cleaned up. */
    kept = here;
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
        /* The root has finished once its data have left; the other rank still reads while the
         * root exits. */
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

MULTI_TEST(an_unknown_interface_is_reported, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    setenv("GLOO_SOCKET_IFNAME", "wlan99,eth77", 1);
    expect_create(store, rank, world_size, TDDP_INVALID_ARGUMENT,
                  "GLOO_SOCKET_IFNAME=\"wlan99,eth77\": no such network interface");
    CHECK_CONTAINS(tddp_error_message(), "lo (127.0.0.1)");
    tddp_store_release(store);
}

MULTI_TEST(a_failure_to_connect_is_reported_to_all, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    if (rank == 1) {
        setenv("GLOO_SOCKET_IFNAME", "eth77", 1);
        expect_create(store, rank, world_size, TDDP_INVALID_ARGUMENT, "no such network interface");
        unsetenv("GLOO_SOCKET_IFNAME");
    } else {
        expect_create(store, rank, world_size, TDDP_PEER_LOST,
                      "rank 1 failed: GLOO_SOCKET_IFNAME=\"eth77\"");
    }
    /* The next try is a new one. */
    tddp_group *group = open_group(store, rank, world_size, 5000);
    leave(group, store);
}

/* The backend's own create(): a group would synchronise all ranks first. */
static tddp_status create_at(const char *address, tddp_store *store, int rank, void **context)
{
    const tddp_backend_v1 *gloo;
    tddp_backend_opts opts = {.size = sizeof opts,
                              .rank = rank,
                              .world_size = 2,
                              .store = store,
                              .timeout_ms = 20000,
                              .device_index = -1,
                              .same_host = 1,
                              .group = "alone",
                              .address = address};
    CHECK_OK(tddp_backend_find("gloo", &gloo));
    opts.backend = gloo;
    return gloo->create(&opts, NULL, context);
}

static tddp_status create_alone(tddp_store *store, int rank, void **context)
{
    return create_at("127.0.0.1", store, rank, context);
}

/* After this process has published its addresses. */
static void *die_when_published(void *store)
{
    int64_t keys = 0;
    tddp_store *private_store;
    CHECK_OK(tddp_store_clone(store, NULL, &private_store));
    while (keys == 0) {
        tddp_blob_list list;
        CHECK_OK(tddp_store_list_keys(private_store, NULL, &list));
        keys = (int64_t)list.count;
        tddp_blob_list_free(&list);
    }
    die();
    return NULL;
}

/* Each pair of ranks is a world. Gloo decides which side waits for the other's connection, so
 * there are several. */
MULTI_TEST(a_rank_that_dies_while_connecting_is_noticed, 6, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    for (int other = 1; other < world_size; other++) {
        if (rank != 0 && rank != other) {
            continue;
        }
        char name[16];
        snprintf(name, sizeof name, "pair%d", other);
        tddp_store *private_store;
        void *context;
        CHECK_OK(tddp_prefix_store_create(name, store, &private_store));
        int role = (rank == 0) == (other % 2 == 0);
        if (rank != 0) {
            pthread_t thread;
            CHECK_INT(pthread_create(&thread, NULL, die_when_published, private_store), 0);
            (void)create_alone(private_store, role, &context);
            check_failed(__FILE__, __LINE__, "nobody should have come");
        }
        CHECK_AWAIT_END(other);
        CHECK_STATUS(create_alone(private_store, role, &context), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), role == 0 ? "rank 1" : "rank 0");
        tddp_store_release(private_store);
    }
    tddp_store_release(store);
}

/* The waiting ranks report the reason that a rank has published. */
MULTI_TEST(a_rank_that_gives_up_while_connecting_reports_why, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    void *context;
    if (rank == 1) {
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        const tddp_backend_v1 *gloo;
        tddp_backend_opts opts = {.size = sizeof opts,
                                  .rank = 1,
                                  .world_size = 2,
                                  .store = store,
                                  .timeout_ms = 20000,
                                  .device_index = -1,
                                  .same_host = 1,
                                  .group = "alone",
                                  .address = "127.0.0.1"};
        CHECK_OK(tddp_backend_find("gloo", &gloo));
        opts.backend = gloo;
        tddp_wait wait = {200, cancel};
        CHECK_STATUS(gloo->create(&opts, &wait, &context), TDDP_TIMEOUT);
        tddp_cancel_free(cancel);
        check_signal(GAVE_UP);
        CHECK_AWAIT(DONE, 1); /* its end isn't the cause */
    } else {
        CHECK_AWAIT(GAVE_UP, 1);
        CHECK_STATUS(create_alone(store, 0, &context), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 1 failed: ");
        CHECK_CONTAINS(tddp_error_message(), "rank(s) 0 of 2 did not arrive in time");
        check_signal(DONE);
    }
    tddp_store_release(store);
}

MULTI_TEST(the_peer_timeout_is_validated, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    setenv("TDDP_PEER_TIMEOUT", "soon", 1);
    expect_create(store, rank, world_size, TDDP_INVALID_ARGUMENT,
                  "TDDP_PEER_TIMEOUT=\"soon\": expected seconds from 1 to 86400, or 0 for never");
    setenv("TDDP_PEER_TIMEOUT", rank ? "0" : "7", 1);
    tddp_group *group = open_group(store, rank, world_size, 5000);
    leave(group, store);
}

/* Returns how many of this process's connections end after so many milliseconds without an
 * answer. */
static int connections_ending_after(unsigned ms)
{
    int found = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    for (struct dirent *each = readdir(folder); each; each = readdir(folder)) {
        unsigned user_timeout;
        socklen_t length = sizeof user_timeout;
        int fd = atoi(each->d_name);
        found += getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, &length) == 0 &&
                 user_timeout == ms;
    }
    closedir(folder);
    return found;
}

MULTI_TEST(the_peer_timeout_sets_keepalive, 2, 30)
{
    static const char *const settings[] = {NULL, "60", "0"};
    (void)unsetenv("TDDP_PEER_TIMEOUT");
    tddp_store *store = open_store(rank, world_size, port);
    for (int i = 0; i < 3; i++) {
        char name[16];
        tddp_store *private_store;
        if (settings[i]) {
            CHECK_INT(setenv("TDDP_PEER_TIMEOUT", settings[i], 1), 0);
        }
        (void)snprintf(name, sizeof name, "setting%d", i);
        CHECK_OK(tddp_prefix_store_create(name, store, &private_store));
        tddp_group *group = open_group(private_store, rank, world_size, 5000);
        CHECK_OK(tddp_barrier(group, NULL));
        CHECK_INT(connections_ending_after(15000) > 0, i == 0);
        CHECK_INT(connections_ending_after(60000) > 0, i == 1);
        leave(group, private_store);
    }
    tddp_store_release(store);
}

static void keep_address(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level;
    const char *address = strstr(text, "uses address ");
    if (strcmp(room, "gloo") == 0 && address) {
        (void)snprintf(data, 32, "%s", address + strlen("uses address "));
    }
}

/* Instead of the address passed to the group. */
MULTI_TEST(the_first_interface_that_exists_is_used, 2, 20)
{
    char used[32] = "";
    void *context;
    const tddp_backend_v1 *gloo;
    tddp_store *store = open_store(rank, world_size, port);
    setenv("GLOO_SOCKET_IFNAME", "wlan99,lo", 1);
    tddp_log_set_level(TDDP_LOG_INFO);
    tddp_log_set_sink(keep_address, used);
    CHECK_OK(tddp_backend_find("gloo", &gloo));
    CHECK_OK(create_at("127.0.0.2", store, rank, &context));
    tddp_log_set_sink(NULL, NULL);
    CHECK_TEXT(used, "127.0.0.1");
    gloo->destroy(context);
    tddp_store_release(store);
}

MULTI_TEST(missing_ranks_are_reported_and_the_wait_can_be_cancelled, 1, 20)
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
