/* A job of two nodes that is restarted again and again, with a key of the workers' in each round:
 * no restart is missed, and nothing grows. */
#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"
#include "events.h"
#include "launch/etcd_server.h"
#include "launch/rendezvous/rendezvous.h"
#include <tddp/store.h>

/* Sanitizers keep what was freed. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MOST_GROWN_KB = 1 << 20 };
#else
enum { MOST_GROWN_KB = 512 };
#endif
enum { NODES = 2, OFTEN = 1000, WITH_ETCD = 100, SETTLED = 50 };

static tddp_launch_options options[NODES];
static tddp_launch_endpoint endpoint;
static tddp_launch_times times;
static tddp_launch_rendezvous *nodes[NODES];
static tddp_launch_world world;
static char text[TDDP_LAUNCH_NOTIFICATION_BYTES];

static void start_node(int index, tddp_launch_rendezvous_kind backend, int restarts)
{
    options[index] = (tddp_launch_options){
        .backend = backend,
        .min_nodes = NODES,
        .max_nodes = NODES,
        .max_restarts = restarts,
        .node_rank = -1,
        .endpoint_count = 1,
        .endpoints = {endpoint},
        .conf = {.is_host = index == 0,
                 .join_timeout = 60,
                 .close_timeout = 3,
                 .read_timeout = 60,
                 .heartbeat_timeout = 60,
                 .keep_alive_interval = -1,
                 .keep_alive_max_attempt = -1,
                 .report_interval = 60},
        .role = "default",
    };
    times = tddp_launch_times_of(&options[index]);
    CHECK_OK(tddp_launch_rendezvous_start(&options[index], &times, "job", 1, &nodes[index]));
}

static tddp_launch_notification next_of(int index)
{
    for (;;) {
        tddp_launch_notification news = tddp_launch_rendezvous_next(nodes[index], &world, text);
        if (news == TDDP_LAUNCH_NOTIFICATION_NONE) {
            struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(nodes[index]), .events = POLLIN};
            CHECK_INT(poll(&bell, 1, -1), 1);
        } else if (news != TDDP_LAUNCH_NOTIFICATION_STATUS) {
            return news;
        }
    }
}

static int count_files(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder)) {
        count++;
    }
    CHECK_INT(closedir(folder), 0);
    return count;
}

static long resident_kb(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file != NULL);
    CHECK_INT(fscanf(file, "%*s %ld", &pages), 1);
    CHECK_INT(fclose(file), 0);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* A worker of the round leaves a key, as all do. Returns how many keys there are. */
static int64_t use_store(int round)
{
    char key[64];
    int64_t count = 0;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    tddp_wait wait = {60000, NULL};
    (void)snprintf(key, sizeof key, "of round %d", round);
    opts.host = world.master_addr;
    opts.port = world.master_port;
    CHECK_OK(tddp_tcp_store_open(&opts, &wait, &store));
    CHECK_OK(tddp_store_set(store, (tddp_slice){key, strlen(key)}, (tddp_slice){"x", 1}, &wait));
    CHECK_OK(tddp_store_num_keys(store, &wait, &count));
    tddp_store_release(store);
    return count;
}

static void restart_again_and_again(tddp_launch_rendezvous_kind backend, int restarts)
{
    int files = 0;
    long memory_kb = 0;
    int64_t keys = 0;
    for (int i = 0; i < NODES; i++) {
        start_node(i, backend, restarts);
    }
    for (int restart = 0; restart <= restarts; restart++) {
        for (int i = 0; i < NODES; i++) {
            CHECK_INT(next_of(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
            CHECK_INT(world.restart, restart);
        }
        int64_t now = use_store(restart);
        if (restart == SETTLED) {
            files = count_files();
            memory_kb = resident_kb();
            keys = now;
        }
        if (restart == restarts) {
            CHECK_INT(now, keys);
            CHECK_UNTIL(count_files() <= files);
            CHECK(resident_kb() - memory_kb < MOST_GROWN_KB);
        }
        tddp_launch_rendezvous_request(nodes[restart % NODES], TDDP_LAUNCH_REQUEST_FAILED,
                                       "it failed");
        for (int i = 0; i < NODES && restart < restarts; i++) {
            CHECK_INT(next_of(i), TDDP_LAUNCH_NOTIFICATION_FAILED);
            tddp_launch_rendezvous_request(nodes[i], TDDP_LAUNCH_REQUEST_AGAIN, "");
        }
    }
    for (int i = 0; i < NODES; i++) {
        CHECK_INT(next_of(i), TDDP_LAUNCH_NOTIFICATION_ENDED);
        CHECK_TEXT(text, "it failed");
    }
    for (int i = 0; i < NODES; i++) {
        CHECK_UNTIL(tddp_launch_rendezvous_over(nodes[i]));
        tddp_launch_rendezvous_end(nodes[i]);
    }
}

MULTI_TEST(a_thousand_restarts, 1, 120)
{
    endpoint = (tddp_launch_endpoint){.host = "127.0.0.1", .port = check_free_port()};
    restart_again_and_again(TDDP_LAUNCH_C10D, OFTEN);
    CHECK_INT(world.master_port, endpoint.port); /* as in every round: others may be closed */
}

MULTI_TEST(a_hundred_restarts_with_etcd, 1, 120)
{
    etcd_server server;
    make_etcd(&server);
    endpoint = server.endpoint;
    restart_again_and_again(TDDP_LAUNCH_ETCD, WITH_ETCD);
    remove_etcd(&server);
}
