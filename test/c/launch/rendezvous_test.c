/* A node whose only host is a process that the test can stop, and kill. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"
#include "launch/rendezvous/host.h"
#include "launch/rendezvous/rendezvous.h"

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

static void set_up(int min_nodes, int max_restarts)
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
                 .read_timeout = 60,
                 .heartbeat_timeout = 60,
                 .report_interval = 10},
        .role = "default",
    };
    (void)snprintf(options.endpoints[0].host, sizeof options.endpoints[0].host, "127.0.0.1");
    options.endpoints[0].port = check_free_port();
    times = tddp_launch_times_of(&options.conf);
    times.beat_ms = 50;
    times.read_ms = 200;
    times.last_call_ms = 50;
}

static void host_rendezvous(int ready)
{
    tddp_launch_host *started;
    tddp_launch_host_opts opts = {.options = &options, .times = times, .run_id = "job"};
    CHECK_OK(tddp_launch_host_start(&opts, &started));
    CHECK_INT(write(ready, "x", 1), 1);
    for (;;) {
        (void)pause();
    }
}

static void start_host(void)
{
    int ready[2];
    char byte;
    CHECK_INT(pipe(ready), 0);
    host = fork();
    CHECK(host >= 0);
    if (host == 0) {
        host_rendezvous(ready[1]);
    }
    close(ready[1]);
    CHECK_INT(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

static void signal_host(int number)
{
    int status;
    CHECK_INT(kill(host, number), 0);
    CHECK_INT(waitpid(host, &status, WUNTRACED | WCONTINUED), host);
}

/* The next notification, but for lines about nodes that are waited for. */
static tddp_launch_notification next_notification(void)
{
    for (;;) {
        tddp_launch_notification notification = tddp_launch_rendezvous_next(node, &world, text);
        if (notification == TDDP_LAUNCH_NOTIFICATION_NONE) {
            struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(node), .events = POLLIN};
            CHECK_INT(poll(&bell, 1, -1), 1);
        } else if (notification != TDDP_LAUNCH_NOTIFICATION_STATUS ||
                   strncmp(text, "waiting at", 10) != 0) {
            return notification;
        }
    }
}

/* Host and node, in a round. */
static void start_round(void)
{
    start_host();
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &node));
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(world.restart, 0);
}

static void tear_down(void)
{
    tddp_launch_rendezvous_end(node);
    signal_host(SIGKILL);
}

TEST(a_host_that_stands_still_for_less_than_the_heartbeat_timeout_costs_nothing)
{
    set_up(1, 0);
    start_round();
    signal_host(SIGSTOP);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_CONTAINS(text, "does not answer; after 60 s it counts as lost");
    signal_host(SIGCONT);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_CONTAINS(text, "answers again");
    tddp_launch_rendezvous_report(node, TDDP_LAUNCH_NODE_DONE, "");
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_DONE);
    tear_down();
}

TEST(a_host_that_stands_still_for_longer_costs_a_restart)
{
    set_up(1, 1);
    times.silence_ms = 1000;
    times.margin_ms = 100;
    start_round();
    signal_host(SIGSTOP);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_FAILED);
    CHECK_CONTAINS(text, "is lost: no answer for ");
    signal_host(SIGCONT);
    tddp_launch_rendezvous_again(node);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(world.round, 1);
    CHECK_INT(world.restart, 1);
    tear_down();
}

TEST(without_a_restart_left_it_ends_the_job)
{
    set_up(1, 0);
    times.silence_ms = 1000;
    times.margin_ms = 100;
    start_round();
    signal_host(SIGSTOP);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_ERROR);
    CHECK_CONTAINS(text, "is lost: no answer for ");
    CHECK_CONTAINS(text, "--rdzv-backend=etcd survives that");
    tear_down();
}

/* The kernel says so at once: nobody waits for the heartbeat timeout. While a process ends, its
 * connections are gone before its port is: one that is made then meets a reset. */
TEST(a_host_that_has_ended_is_lost_at_once)
{
    for (int reset = 0; reset < 2; reset++) {
        set_up(1, 1);
        times.read_ms = 60 * 1000;
        times.return_ms = 100;
        start_round();
        atomic_store(&resets, reset);
        signal_host(SIGKILL);
        CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_ERROR);
        CHECK_CONTAINS(text, "is lost: ");
        CHECK_CONTAINS(text, "--rdzv-backend=etcd survives that");
        CHECK_INT(atomic_load(&resets), 0);
        tddp_launch_rendezvous_end(node);
    }
}

TEST(before_a_round_its_return_is_waited_for)
{
    set_up(2, 0);
    times.report_ms = 50; /* that the node is there is seen by the lines about the other one */
    times.silence_ms = 1000;
    times.margin_ms = 100;
    start_host();
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &node));
    do {
        struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(node), .events = POLLIN};
        CHECK_INT(poll(&bell, 1, -1), 1);
    } while (tddp_launch_rendezvous_next(node, &world, text) == TDDP_LAUNCH_NOTIFICATION_NONE);
    CHECK_CONTAINS(text, "waiting at 127.0.0.1:");
    signal_host(SIGSTOP);
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_CONTAINS(text, "does not answer; after 1 s it counts as lost");
    CHECK_INT(next_notification(), TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_CONTAINS(text, "looking for who leads the job \"job\": tried 127.0.0.1:");
    signal_host(SIGCONT);
    tddp_launch_rendezvous *other;
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &other));
    do {
    } while (next_notification() == TDDP_LAUNCH_NOTIFICATION_STATUS);
    CHECK_INT(world.nodes, 2);
    tddp_launch_rendezvous_end(other);
    tear_down();
}

TEST(times_are_made_of_the_settings)
{
    tddp_launch_conf conf = {.join_timeout = 600,
                             .last_call_timeout = 30,
                             .close_timeout = 3,
                             .report_interval = 10,
                             .read_timeout = 60,
                             .heartbeat_timeout = 5,
                             .keep_alive_interval = -1,
                             .keep_alive_max_attempt = -1};
    tddp_launch_times made = tddp_launch_times_of(&conf);
    CHECK_INT(made.beat_ms, 500);
    CHECK_INT(made.silence_ms, 5000);
    CHECK_INT(made.margin_ms, 500);
    CHECK_INT(made.read_ms, 1250);
    CHECK_INT(made.join_ms, 600000);
    CHECK_INT(made.last_call_ms, 30000);
    CHECK_INT(made.close_ms, 3000);
    CHECK_INT(made.report_ms, 10000);
    conf.heartbeat_timeout = 60;
    CHECK_INT(tddp_launch_times_of(&conf).read_ms, 5000);
    conf.read_timeout = 2;
    CHECK_INT(tddp_launch_times_of(&conf).read_ms, 2000);
    conf.heartbeat_timeout = 1;
    CHECK_INT(tddp_launch_times_of(&conf).read_ms, 500);
    CHECK_INT(tddp_launch_times_of(&conf).beat_ms, 333);
    /* PyTorch's: a node is lost after so many intervals. */
    conf.keep_alive_interval = 7;
    made = tddp_launch_times_of(&conf);
    CHECK_INT(made.silence_ms, 21000);
    CHECK_INT(made.beat_ms, 7000);
    conf.keep_alive_max_attempt = 2;
    made = tddp_launch_times_of(&conf);
    CHECK_INT(made.silence_ms, 14000);
    CHECK_INT(made.beat_ms, 4666); /* a beat that is lost loses no node */
    conf.keep_alive_interval = -1;
    CHECK_INT(tddp_launch_times_of(&conf).silence_ms, 10000);
}
