/*
 * A machine that disappears: two ranks in their own network namespaces, and a cut of the link
 * between them. Needs root and ip(8); the namespaces end with the processes.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "fixture.h"

enum { LARGE_BYTES = 8 * 1024 * 1024 };

static uint8_t out[LARGE_BYTES];
static uint8_t in[LARGE_BYTES];

static int run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int run(const char *format, ...)
{
    char command[256];
    va_list list;
    va_start(list, format);
    vsnprintf(command, sizeof command, format, list);
    va_end(list);
    return system(command);
}

enum { PID, ANSWER }; /* events: exchanged before the ranks can use the network */
enum { JOINED = 1, NOT_JOINED };

/* Moves this rank to a namespace that is linked to the other's. */
static void move_out(int rank)
{
    if (run("ip -V >/dev/null 2>&1") != 0) {
        check_skip("ip(8) is not here (package iproute2)");
    }
    if (unshare(CLONE_NEWNET | CLONE_NEWNS) != 0) {
        check_skip(errno == EPERM ? "making network namespaces needs root" : strerror(errno));
    }
    /* /sys shows the interfaces of the namespace in which it was mounted. */
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", "/sys", "sysfs", 0, NULL) != 0) {
        check_skip("/sys cannot be mounted");
    }
    CHECK_INT(run("ip link set lo up"), 0);
    if (rank == 1) {
        check_post(PID, getpid());
        CHECK_AWAIT(ANSWER, 1);
    } else {
        CHECK_AWAIT(PID, 1);
        int failed =
            run("ip link add cable0 type veth peer name cable1 netns %d", check_signals(PID));
        check_post(ANSWER, failed ? NOT_JOINED : JOINED);
    }
    if (check_signals(ANSWER) == NOT_JOINED) {
        check_skip("this system has no veth devices");
    }
    if (run("ip address add 10.213.7.%d/24 dev cable%d && ip link set cable%d up", rank + 1, rank,
            rank) != 0) {
        check_skip("the namespaces cannot be joined");
    }
    CHECK_UNTIL(run("grep -q up /sys/class/net/cable%d/operstate", rank) == 0);
}

static world open_world_in_namespace(int rank, int port)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    world here;
    move_out(rank);
    setenv("TDDP_PEER_TIMEOUT", "3", 1);
    at.host = "10.213.7.1";
    at.port = port;
    at.is_server = rank == 0;
    at.world_size = 2;
    at.timeout_ms = 10000;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &here.store));
    here.group = open_group(here.store, rank, 2, 60000);
    return here;
}

/* From then on nothing arrives at either end. */
static void *cut_soon(void *unused)
{
    (void)unused;
    usleep(500000);
    if (run("ip link set cable1 down") != 0) {
        abort();
    }
    return NULL;
}

static void vanish(int rank, int port, tddp_status (*step)(tddp_group *group, int rank))
{
    world here = open_world_in_namespace(rank, port);
    pthread_t cutter;
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 1) {
        CHECK_INT(pthread_create(&cutter, NULL, cut_soon, NULL), 0);
    }
    double start = now();
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK) {
        status = step(here.group, rank);
    }
    double took = now() - start;
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), rank == 0 ? "lost rank 1 (" : "lost rank 0 (");
    /* 3 seconds after the last answer, not at once. The kernel reports a timeout or, when the
     * neighbour can't be resolved, an unreachable host. */
    CHECK(took > 2);
    if (rank == 1) {
        /* Its store is unreachable. */
        pthread_join(cutter, NULL);
        die();
    }
    abandon_world(here);
}

static tddp_status wait_for_the_other(tddp_group *group, int rank)
{
    return tddp_recv(group, bytes_of(in, 8), 1 - rank, 0, NULL);
}

static tddp_status send_much(tddp_group *group, int rank)
{
    return rank == 0 ? tddp_send(group, bytes_of(out, LARGE_BYTES), 1, 0, NULL)
                     : tddp_recv(group, bytes_of(in, LARGE_BYTES), 0, 0, NULL);
}

MULTI_TEST(a_dead_machine_is_noticed_on_an_idle_connection, 2, 40)
{
    vanish(rank, port, wait_for_the_other);
}

MULTI_TEST(a_dead_machine_is_noticed_during_a_transfer, 2, 40)
{
    vanish(rank, port, send_much);
}
