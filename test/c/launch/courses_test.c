/*
 * Jobs by chance: nodes, each a process, come, are stopped, go on, are killed and leave, and their
 * workers fail; in the end all that are left are to agree. With c10d, whose host stays, and with
 * etcd. TDDP_RANDOM_CASES and TDDP_RANDOM_SEED: how many, from which on.
 */
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "base/base.h"
#include "check.h"
#include "events.h"
#include "launch/etcd_server.h"
#include "launch/rendezvous/rendezvous.h"

enum { NODES = 6, STEPS = 14, RECORDS = 4096, LEFT = 77 };

/* What a node has told, in memory that all share. */
typedef struct record {
    int node;
    int64_t generation;
    int round;
    int rank;
    int nodes;
    int restart;
} record;

typedef struct shared {
    atomic_bool finish; /* workers succeed */
    atomic_int count;
    record records[RECORDS];
} shared;

static shared *common;
static tddp_launch_options options;
static tddp_launch_times times;
static pid_t pids[NODES]; /* 0: it is not there */
static bool stopped[NODES];
static uint64_t seed;

static int any(int below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((seed >> 33) % (uint64_t)below);
}

static void pause_ms(int ms)
{
    (void)poll(NULL, 0, ms);
}

/* --- a node ---------------------------------------------------------------------------------- */

static void note(int node, const tddp_launch_world *world)
{
    int at = atomic_fetch_add(&common->count, 1);
    CHECK(at < RECORDS);
    common->records[at] = (record){.node = node,
                                   .generation = world->generation,
                                   .round = world->round,
                                   .rank = world->node_rank,
                                   .nodes = world->nodes,
                                   .restart = world->restart};
}

/* Its workers run until they are to succeed, or fail by chance; it leaves after `most_ms`. */
static void be_node(int index, bool hosts, int most_ms)
{
    static char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    tddp_launch_rendezvous *self;
    tddp_launch_world world = {0};
    bool works = false;
    bool told = false;
    int64_t leaves_at = tddp_deadline_after_ms(most_ms);
    int64_t fails_at = INT64_MAX;
    options.conf.is_host = options.backend == TDDP_LAUNCH_ETCD ? -1 : hosts;
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &self));
    for (;;) {
        struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(self), .events = POLLIN};
        tddp_launch_notification news = tddp_launch_rendezvous_next(self, &world, text);
        if (news == TDDP_LAUNCH_NOTIFICATION_NONE) {
            (void)poll(&bell, 1, 10);
        } else if (news == TDDP_LAUNCH_NOTIFICATION_JOINED) {
            note(index, &world);
            works = true;
            told = false;
            fails_at = any(6) ? INT64_MAX : tddp_deadline_after_ms(any(300));
        } else if (news == TDDP_LAUNCH_NOTIFICATION_FAILED ||
                   news == TDDP_LAUNCH_NOTIFICATION_CHANGED) {
            CHECK(works);
            works = false;
            pause_ms(any(20));
            tddp_launch_rendezvous_request(self, TDDP_LAUNCH_REQUEST_AGAIN, "");
        } else if (news != TDDP_LAUNCH_NOTIFICATION_STATUS) {
            CHECK_UNTIL(tddp_launch_rendezvous_over(self)); /* the others have read it too */
            tddp_launch_rendezvous_end(self);
            _exit((int)news);
        }
        if (works && !told && tddp_now_ns() >= fails_at) {
            told = true;
            tddp_launch_rendezvous_request(self, TDDP_LAUNCH_REQUEST_FAILED, "a worker failed");
        } else if (works && !told && atomic_load(&common->finish)) {
            told = true;
            tddp_launch_rendezvous_request(self, TDDP_LAUNCH_REQUEST_DONE, "");
        }
        if (tddp_now_ns() >= leaves_at) {
            tddp_launch_rendezvous_request(self, TDDP_LAUNCH_REQUEST_LEAVE, "told to end");
            CHECK_UNTIL(tddp_launch_rendezvous_over(self));
            tddp_launch_rendezvous_end(self);
            _exit(LEFT);
        }
    }
}

/* --- the course ------------------------------------------------------------------------------ */

static void start_node(int index, bool hosts)
{
    int most_ms = hosts || any(4) ? 3600 * 1000 : any(2000);
    uint64_t its = seed ^ (uint64_t)index;
    pids[index] = fork();
    CHECK(pids[index] >= 0);
    stopped[index] = false;
    if (pids[index] == 0) {
        seed = its;
        be_node(index, hosts, most_ms);
    }
}

static void reap(int index, bool wait)
{
    int status;
    pid_t ended = waitpid(pids[index], &status, wait ? 0 : WNOHANG);
    CHECK(ended >= 0);
    if (ended == 0) {
        return;
    }
    pids[index] = 0;
    if (WIFSIGNALED(status)) {
        CHECK_INT(WTERMSIG(status), SIGKILL);
        return;
    }
    /* It may have been too late, or too many. */
    int how = WEXITSTATUS(status);
    CHECK(how == TDDP_LAUNCH_NOTIFICATION_DONE || how == TDDP_LAUNCH_NOTIFICATION_ENDED ||
          how == TDDP_LAUNCH_NOTIFICATION_STOPPED || how == TDDP_LAUNCH_NOTIFICATION_ERROR ||
          how == LEFT);
}

static void any_step(void)
{
    int index = any(NODES);
    bool host = index == 0 && options.backend != TDDP_LAUNCH_ETCD;
    if (pids[index] > 0) {
        reap(index, false);
    }
    if (pids[index] == 0) {
        if (!host) {
            start_node(index, false);
        }
    } else if (stopped[index]) {
        CHECK_INT(kill(pids[index], SIGCONT), 0);
        stopped[index] = false;
    } else if (any(3) == 0 && !host) {
        CHECK_INT(kill(pids[index], SIGKILL), 0);
        reap(index, true);
    } else if (any(2)) {
        CHECK_INT(kill(pids[index], SIGSTOP), 0);
        stopped[index] = true;
    }
    pause_ms(any(250));
}

/* All rounds that nodes were in: one world each. */
static void check_records(void)
{
    int count = atomic_load(&common->count);
    for (int i = 0; i < count; i++) {
        const record *one = &common->records[i];
        CHECK(one->rank >= 0 && one->rank < one->nodes);
        CHECK(one->nodes >= options.min_nodes && one->nodes <= options.max_nodes);
        CHECK(one->restart <= options.max_restarts);
        for (int j = 0; j < i; j++) {
            const record *other = &common->records[j];
            if (one->generation == other->generation) {
                CHECK_INT(one->round, other->round);
                CHECK_INT(one->nodes, other->nodes);
                CHECK_INT(one->restart, other->restart);
                CHECK(one->rank != other->rank);
            }
        }
    }
}

static void run_course(uint64_t number)
{
    seed = number;
    common->count = 0;
    atomic_store(&common->finish, false);
    options.min_nodes = 1 + any(2);
    options.max_nodes = options.min_nodes + any(3);
    options.max_restarts = any(4);
    memset(pids, 0, sizeof pids);
    start_node(0, true);
    for (int step = 0; step < STEPS; step++) {
        any_step();
    }
    for (int i = 0; i < NODES; i++) {
        if (pids[i] > 0 && stopped[i]) {
            CHECK_INT(kill(pids[i], SIGCONT), 0);
        }
    }
    atomic_store(&common->finish, true);
    /* As many as a round needs are to be there, lest the rest waits for others. */
    for (int i = 1; i < NODES; i++) {
        if (pids[i] == 0) {
            start_node(i, false);
        }
    }
    for (int i = 0; i < NODES; i++) {
        if (pids[i] > 0) {
            reap(i, true);
        }
    }
    check_records();
}

static void run_courses(tddp_launch_rendezvous_kind backend, const tddp_launch_endpoint *endpoint)
{
    const char *cases = getenv("TDDP_RANDOM_CASES");
    const char *first = getenv("TDDP_RANDOM_SEED");
    int count = cases ? atoi(cases) : 2;
    uint64_t number = first ? strtoull(first, NULL, 10) : 0;
    common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(common != MAP_FAILED);
    for (int i = 0; i < count; i++, number++) {
        options = (tddp_launch_options){
            .backend = backend,
            .node_rank = -1,
            .endpoint_count = 1,
            .conf = {.join_timeout = 20,
                     .read_timeout = 60,
                     .close_timeout = 3,
                     .heartbeat_timeout = 3,
                     .keep_alive_interval = -1,
                     .keep_alive_max_attempt = -1,
                     .report_interval = 10},
            .role = "default",
        };
        if (endpoint) {
            options.endpoints[0] = *endpoint;
        } else {
            (void)snprintf(options.endpoints[0].host, sizeof options.endpoints[0].host,
                           "127.0.0.1");
            options.endpoints[0].port = check_free_port();
        }
        times = tddp_launch_times_of(&options);
        times.last_call_ms = 50;
        printf("seed %llu\n", (unsigned long long)number);
        (void)fflush(stdout);
        run_course(number);
    }
    (void)munmap(common, sizeof *common);
}

MULTI_TEST(with_c10d, 1, 3600)
{
    run_courses(TDDP_LAUNCH_C10D, NULL);
}

MULTI_TEST(with_etcd, 1, 3600)
{
    etcd_server server;
    make_etcd(&server);
    run_courses(TDDP_LAUNCH_ETCD, &server.endpoint);
    remove_etcd(&server);
}
