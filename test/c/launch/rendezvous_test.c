/* A node whose host is a process that the test can stop, and kill: a node too. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp/store.h>

#include "base/base.h"
#include "check.h"
#include "events.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/rendezvous/state.h"

static tddp_launch_options options;
static tddp_launch_times times;
static tddp_launch_rendezvous *node;
static pid_t host;
static tddp_launch_world world;
static char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
static atomic_int resets; /* of the connections that follow: how many meet a reset */

int __real_connect(int fd, const struct sockaddr *address, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length);

/* The linker sends the rooms' calls here. */
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length)
{
    if (atomic_load(&resets) > 0) {
        atomic_fetch_sub(&resets, 1);
        errno = ECONNRESET;
        return -1;
    }
    return __real_connect(fd, address, length);
}

/* A job of two nodes, or of one or two. */
static void set_up(int min_nodes, int max_restarts, int heartbeat_timeout)
{
    options = (tddp_launch_options){
        .backend = TDDP_LAUNCH_C10D,
        .min_nodes = min_nodes,
        .max_nodes = 2,
        .max_restarts = max_restarts,
        .node_rank = -1,
        .endpoint_count = 1,
        .conf = {.is_host = 0,
                 .join_timeout = 20,
                 .close_timeout = 3,
                 .read_timeout = 60,
                 .heartbeat_timeout = heartbeat_timeout,
                 .keep_alive_interval = -1,
                 .keep_alive_max_attempt = -1,
                 .report_interval = 10},
        .role = "default",
    };
    (void)snprintf(options.endpoints[0].host, sizeof options.endpoints[0].host, "127.0.0.1");
    options.endpoints[0].port = check_free_port();
    times = tddp_launch_times_of(&options);
    times.beat_ms = 50;
    times.read_ms = 200;
    times.last_call_ms = 50;
    /* However long this machine holds a process up: no node is lost here but those that have ended.
     */
    times.reconnect_ms = times.takeover_ms = 20 * 1000;
}

/* The next notification of a node, but for lines about nodes that are waited for. */
static tddp_launch_notification next_of(tddp_launch_rendezvous *which)
{
    for (;;) {
        tddp_launch_notification notification = tddp_launch_rendezvous_next(which, &world, text);
        if (notification == TDDP_LAUNCH_NOTIFICATION_NONE) {
            struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(which), .events = POLLIN};
            CHECK_INT(poll(&bell, 1, -1), 1);
        } else if (notification != TDDP_LAUNCH_NOTIFICATION_STATUS ||
                   strncmp(text, "waiting at", 10) != 0) {
            return notification;
        }
    }
}

static tddp_launch_notification next_notification(void)
{
    return next_of(node);
}

/* The next one that is more than a line. */
static tddp_launch_notification after_status(void)
{
    tddp_launch_notification notification = next_notification();
    while (notification == TDDP_LAUNCH_NOTIFICATION_STATUS) {
        notification = next_notification();
    }
    return notification;
}

/* The hosting node, in a process of its own: it starts again whenever a round is over. */
static void host_rendezvous(void)
{
    tddp_launch_rendezvous *hosting;
    options.conf.is_host = 1;
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &hosting));
    for (;;) {
        tddp_launch_notification notification = next_of(hosting);
        if (notification == TDDP_LAUNCH_NOTIFICATION_FAILED ||
            notification == TDDP_LAUNCH_NOTIFICATION_CHANGED) {
            tddp_launch_rendezvous_request(hosting, TDDP_LAUNCH_REQUEST_AGAIN, "");
        } else if (notification == TDDP_LAUNCH_NOTIFICATION_JOINED) {
            tddp_launch_rendezvous_request(hosting, TDDP_LAUNCH_REQUEST_DONE, "");
        } else if (notification != TDDP_LAUNCH_NOTIFICATION_STATUS) {
            CHECK_UNTIL(tddp_launch_rendezvous_over(hosting)); /* the others have read it too */
            tddp_launch_rendezvous_end(hosting);
            _exit(0);
        }
    }
}

static pid_t fork_host(void)
{
    pid_t made = fork();
    CHECK(made >= 0);
    if (made == 0) {
        host_rendezvous();
    }
    return made;
}

static void signal_host(int number)
{
    int status;
    CHECK_INT(kill(host, number), 0);
    CHECK_INT(waitpid(host, &status, WUNTRACED | WCONTINUED), host);
}

/* Host and node, in a round. */
static void start_round(void)
{
    host = fork_host();
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &node));
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(world.restart, 0);
}

static void end_host(int number)
{
    int status;
    CHECK_INT(kill(host, number), 0);
    CHECK_INT(waitpid(host, &status, 0), host);
}

/* The node's part is over: the host ends by itself. */
static void tear_down(void)
{
    int status;
    tddp_launch_rendezvous_end(node);
    CHECK_INT(waitpid(host, &status, 0), host);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* It costs nothing, however long: with static and where all nodes are needed no silence ends what
 * runs. */
TEST(a_host_that_stands_still)
{
    for (int is_static = 0; is_static < 2; is_static++) {
        set_up(2, 0, is_static ? 0 : 1);
        times.silence_ms = is_static ? 0 : 500;
        start_round();
        signal_host(SIGSTOP);
        tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_DONE, "");
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
        CHECK_CONTAINS(text, "does not answer: ");
        signal_host(SIGCONT);
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
        CHECK_CONTAINS(text, "answers again");
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_DONE);
        tear_down();
    }
}

/* An elastic job has begun another round by then. */
TEST(a_host_of_an_elastic_job_that_stands_still)
{
    set_up(1, 0, 1);
    times.silence_ms = 1000;
    start_round();
    signal_host(SIGSTOP);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_CHANGED);
    CHECK_CONTAINS(text, "the other nodes go on without it");
    signal_host(SIGCONT);
    tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_AGAIN, "");
    CHECK_INT(after_status(), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(world.restart, 0);
    tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_DONE, "");
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_DONE);
    tear_down();
}

/* A worker fails meanwhile: without a restart left nobody waits for the host's consent. */
TEST(a_failure_while_the_host_stands_still)
{
    for (int restarts = 0; restarts < 2; restarts++) {
        set_up(2, restarts, 60);
        start_round();
        signal_host(SIGSTOP);
        tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_FAILED, "rank 1: exit code 3");
        CHECK_INT(after_status(),
                  restarts ? TDDP_LAUNCH_NOTIFICATION_FAILED : TDDP_LAUNCH_NOTIFICATION_ENDED);
        CHECK_TEXT(text, "rank 1: exit code 3");
        if (restarts) {
            signal_host(SIGCONT);
            tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_AGAIN, "");
            CHECK_INT(after_status(), TDDP_LAUNCH_NOTIFICATION_JOINED);
            CHECK_INT(world.restart, 1);
        }
        tddp_launch_rendezvous_end(node);
        end_host(SIGKILL);
    }
}

/* The kernel says so at once: nobody waits for the heartbeat timeout. While a process ends, its
 * connections are gone before its port is: one that is made then meets a reset. */
TEST(a_host_that_has_ended_is_lost_at_once)
{
    for (int reset = 0; reset < 2; reset++) {
        set_up(2, 1, 60);
        times.read_ms = 60 * 1000;
        start_round();
        atomic_store(&resets, reset);
        end_host(SIGKILL);
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_CHANGED);
        CHECK_CONTAINS(text, "the torchrun that hosts the rendezvous at 127.0.0.1:");
        CHECK_CONTAINS(text, " is lost: ");
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_ERROR);
        CHECK_CONTAINS(text, "--rdzv-backend=etcd survives that");
        CHECK_INT(atomic_load(&resets), 0);
        tddp_launch_rendezvous_end(node);
    }
}

static tddp_slice slice(const char *value)
{
    return (tddp_slice){value, strlen(value)};
}

/* What the node is, once it can start a round. */
static tddp_launch_member await_ready(tddp_store *store, int round)
{
    static tddp_launch_entry entry;
    tddp_wait wait = {20 * 1000, NULL};
    do {
        tddp_store_entries found = {0};
        CHECK_OK(tddp_store_watch(store, slice("node/"), &wait, &found));
        if (found.keys.count > 0) {
            const tddp_blob *value = &found.values.blobs[0];
            CHECK_OK(tddp_launch_entry_read(value->data, value->size, &entry));
        }
        tddp_store_entries_free(&found);
    } while (entry.self.id[0] == '\0' || entry.ready < round);
    CHECK_INT(entry.ready, round);
    return entry.self;
}

/* The test leads. A node that was slow reads only that the round is over, in which it had a place;
 * it has no workers, and takes part in the next one. */
TEST(a_round_that_was_over_before_the_node_read_of_it)
{
    tddp_store_server_opts serves = TDDP_STORE_SERVER_OPTS_INIT;
    tddp_tcp_store_opts reaches = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store_server *server;
    tddp_store *whole;
    tddp_store *store;
    tddp_bytes document = {0};
    set_up(2, 1, 60);
    serves.host = reaches.host = "127.0.0.1";
    serves.port = reaches.port = options.endpoints[0].port;
    reaches.wait_for_workers = 0;
    CHECK_OK(tddp_store_server_start(&serves, &server));
    CHECK_OK(tddp_tcp_store_open(&reaches, NULL, &whole));
    CHECK_OK(tddp_prefix_store_create("torchrun/job", whole, &store));
    CHECK_OK(tddp_store_set(store, slice("leader"), slice("the test"), NULL));
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &node));
    tddp_launch_member member = await_ready(store, 0);
    tddp_launch_state state = {.started = 1,
                               .stage = TDDP_LAUNCH_STAGE_GATHERING,
                               .how = TDDP_LAUNCH_HOW_CHANGED,
                               .text = "a node has come",
                               .members = &member,
                               .count = 1};
    CHECK_OK(tddp_launch_state_write(&state, &document));
    CHECK_OK(
        tddp_store_set(store, slice("state"), (tddp_slice){document.data, document.size}, NULL));
    (void)await_ready(store, 1);
    tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_QUIT, "");
    CHECK_UNTIL(tddp_launch_rendezvous_over(node));
    tddp_launch_rendezvous_end(node);
    tddp_bytes_free(&document);
    tddp_store_release(store);
    tddp_store_release(whole);
    tddp_store_server_stop(server);
}

/* A rank that lost its peer is out before the one that failed, and its node has cleared away by
 * then: nothing of that is known to others before they had time to say what they know. */
TEST(who_knows_the_cause_of_a_failure_is_heard_first)
{
    enum { A_WHILE_MS = 300 }; /* several signs of life */
    static tddp_launch_options hosts;
    tddp_launch_rendezvous *hosting;
    set_up(2, 1, 60);
    times.read_ms = 60 * 1000;
    hosts = options;
    hosts.conf.is_host = 1;
    CHECK_OK(tddp_launch_rendezvous_start(&hosts, &times, "job", 1, &hosting));
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &node));
    CHECK_INT(next_of(hosting), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(next_of(node), TDDP_LAUNCH_NOTIFICATION_JOINED);
    tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER, "lost its peer");
    tddp_launch_rendezvous_request(node, TDDP_LAUNCH_REQUEST_AGAIN, "");
    struct pollfd news = {.fd = tddp_launch_rendezvous_fd(hosting), .events = POLLIN};
    while (poll(&news, 1, A_WHILE_MS) == 1) { /* what woke it last was that it joined */
        CHECK_INT(tddp_launch_rendezvous_next(hosting, &world, text),
                  TDDP_LAUNCH_NOTIFICATION_NONE);
    }
    tddp_launch_rendezvous_request(hosting, TDDP_LAUNCH_REQUEST_FAILED, "rank 0: exit code 3");
    tddp_launch_rendezvous_request(hosting, TDDP_LAUNCH_REQUEST_AGAIN, "");
    CHECK_INT(next_of(hosting), TDDP_LAUNCH_NOTIFICATION_FAILED);
    CHECK_INT(next_of(node), TDDP_LAUNCH_NOTIFICATION_FAILED);
    CHECK_TEXT(text, "rank 0: exit code 3");
    CHECK_INT(next_of(hosting), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(next_of(node), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(world.restart, 1);
    tddp_launch_rendezvous_end(node);
    tddp_launch_rendezvous_end(hosting);
}

TEST(times_are_made_of_the_settings)
{
    tddp_launch_options given = {.backend = TDDP_LAUNCH_C10D,
                                 .conf = {.join_timeout = 600,
                                          .last_call_timeout = 30,
                                          .close_timeout = 3,
                                          .report_interval = 10,
                                          .read_timeout = 60,
                                          .heartbeat_timeout = -1,
                                          .keep_alive_interval = -1,
                                          .keep_alive_max_attempt = -1}};
    tddp_launch_conf *conf = &given.conf;
    tddp_launch_times made = tddp_launch_times_of(&given);
    CHECK_INT(made.silence_ms, 30000);
    CHECK_INT(made.beat_ms, 5000);
    CHECK_INT(made.read_ms, 5000);
    CHECK_INT(made.join_ms, 600000);
    CHECK_INT(made.last_call_ms, 30000);
    CHECK_INT(made.close_ms, 3000);
    CHECK_INT(made.report_ms, 10000);
    given.backend = TDDP_LAUNCH_STATIC;
    made = tddp_launch_times_of(&given);
    CHECK_INT(made.silence_ms, 0);
    CHECK_INT(made.beat_ms, 5000);
    CHECK_INT(made.read_ms, 5000);
    conf->heartbeat_timeout = 5;
    CHECK_INT(tddp_launch_times_of(&given).silence_ms, 5000);
    CHECK_INT(tddp_launch_times_of(&given).read_ms, 1250);
    conf->heartbeat_timeout = 60;
    conf->read_timeout = 2;
    CHECK_INT(tddp_launch_times_of(&given).read_ms, 2000);
    conf->heartbeat_timeout = 1;
    CHECK_INT(tddp_launch_times_of(&given).read_ms, 500);
    CHECK_INT(tddp_launch_times_of(&given).beat_ms, 166);
    /* PyTorch's: a node is lost after so many intervals. */
    conf->keep_alive_interval = 7;
    made = tddp_launch_times_of(&given);
    CHECK_INT(made.silence_ms, 21000);
    CHECK_INT(made.beat_ms, 3500); /* a beat that is lost loses no node */
    conf->keep_alive_max_attempt = 20;
    CHECK_INT(tddp_launch_times_of(&given).silence_ms, 140000);
    CHECK_INT(tddp_launch_times_of(&given).beat_ms, 5000);
    conf->keep_alive_interval = -1;
    CHECK_INT(tddp_launch_times_of(&given).silence_ms, 100000);
}
