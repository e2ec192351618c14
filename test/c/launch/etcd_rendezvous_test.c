/*
 * The rendezvous over a real etcd: who leads, what is left of a job, and that a leader without a
 * lease decides nothing.
 */
#include <poll.h>
#include <signal.h>

#include "base/base.h"
#include "events.h"
#include "launch/etcd_server.h"
#include "launch/rendezvous/backend.h"
#include "launch/rendezvous/rendezvous.h"

enum { NODES = 3 };

static etcd_server server;
static tddp_launch_options options;
static tddp_launch_times times;
static tddp_launch_rendezvous *nodes[NODES];
static tddp_launch_world worlds[NODES];
static char text[TDDP_LAUNCH_NOTIFICATION_BYTES];

static void set_up(int min_nodes, int max_nodes, int heartbeat_timeout)
{
    make_etcd(&server);
    options = (tddp_launch_options){
        .backend = TDDP_LAUNCH_ETCD,
        .min_nodes = min_nodes,
        .max_nodes = max_nodes,
        .max_restarts = 0,
        .node_rank = -1,
        .endpoint_count = 1,
        .endpoints = {server.endpoint},
        .conf = {.is_host = -1,
                 .keep_alive_interval = -1,
                 .keep_alive_max_attempt = -1,
                 .join_timeout = 600,
                 .last_call_timeout = 600,
                 .close_timeout = 600,
                 .read_timeout = 60,
                 .report_interval = 600,
                 .heartbeat_timeout = heartbeat_timeout},
        .role = "default",
    };
    times = tddp_launch_times_of(&options);
    times.last_call_ms = 50;
    times.takeover_ms = 100;
}

static void start_node(int index)
{
    CHECK_OK(tddp_launch_rendezvous_start(&options, &times, "job", 1, &nodes[index]));
}

/* The next notification of a node, but for lines about what is waited for. */
static tddp_launch_notification next_notification(int index)
{
    for (;;) {
        tddp_launch_notification notification =
            tddp_launch_rendezvous_next(nodes[index], &worlds[index], text);
        if (notification == TDDP_LAUNCH_NOTIFICATION_NONE) {
            struct pollfd bell = {.fd = tddp_launch_rendezvous_fd(nodes[index]), .events = POLLIN};
            CHECK_INT(poll(&bell, 1, -1), 1);
        } else if (notification != TDDP_LAUNCH_NOTIFICATION_STATUS) {
            return notification;
        }
    }
}

static void end_node(int index)
{
    tddp_launch_rendezvous_end(nodes[index]);
    nodes[index] = NULL;
}

/* Waits for the node's part to be over by itself, which takes its leases with it. */
static void await_over(int index)
{
    CHECK_UNTIL(tddp_launch_rendezvous_over(nodes[index]));
    end_node(index);
}

/* The job's keys that begin so, asked over a client of the test's. */
static tddp_etcd_answer keys(const char *first, const char *end)
{
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    tddp_etcd_answer answer = keys_between(client, first, end);
    close_client(client);
    return answer;
}

/* The revision in which the leader's key was made, or 0. */
static int64_t term(void)
{
    return key_number(&server, "/torchrun/job/leader", "create_revision");
}

static void finish(int count)
{
    for (int i = 0; i < count; i++) {
        tddp_launch_rendezvous_request(nodes[i], TDDP_LAUNCH_REQUEST_DONE, "");
    }
    for (int i = 0; i < count; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_DONE);
    }
    for (int i = 0; i < count; i++) {
        await_over(i);
    }
}

TEST(a_job_leaves_nothing_but_its_end)
{
    set_up(NODES, NODES, 60);
    for (int i = 0; i < NODES; i++) {
        start_node(i);
    }
    int ranks = 0;
    for (int i = 0; i < NODES; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
        CHECK_INT(worlds[i].nodes, NODES);
        CHECK_INT(worlds[i].generation, worlds[0].generation);
        ranks |= 1 << worlds[i].node_rank;
    }
    CHECK_INT(ranks, (1 << NODES) - 1);
    finish(NODES);
    tddp_etcd_answer left = keys("/torchrun/job/", "/torchrun/job0");
    CHECK_INT(left.count, 1);
    CHECK_TEXT(left.pairs[0].key.data, "/torchrun/job/state");
    tddp_launch_state doc;
    CHECK_OK(tddp_launch_state_read(left.pairs[0].value.data, left.pairs[0].value.size, &doc));
    CHECK_INT(doc.stage, TDDP_LAUNCH_STAGE_ENDED);
    CHECK_INT(doc.how, TDDP_LAUNCH_HOW_DONE);
    tddp_launch_state_free(&doc);
    CHECK(key_number(&server, "/torchrun/job/state", "lease") != 0); /* it goes by itself */
    tddp_etcd_answer_free(&left);
    /* The job's name may be used again. */
    int64_t before = worlds[0].generation;
    for (int i = 0; i < NODES; i++) {
        start_node(i);
    }
    for (int i = 0; i < NODES; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
        CHECK(worlds[i].generation > before);
    }
    finish(NODES);
    remove_etcd(&server);
}

/* A process that is a node of the job, and leads; its workers are done at once. */
static void lead(int told)
{
    start_node(0);
    for (;;) {
        tddp_launch_notification notification = next_notification(0);
        if (notification == TDDP_LAUNCH_NOTIFICATION_JOINED) {
            CHECK_INT(write(told, "x", 1), 1);
        } else if (notification == TDDP_LAUNCH_NOTIFICATION_CHANGED) {
            CHECK_INT(write(told, "c", 1), 1);
            tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_AGAIN, "");
        } else {
            CHECK_INT(notification, TDDP_LAUNCH_NOTIFICATION_DONE);
            end_node(0);
            _exit(0);
        }
    }
}

/* Another node goes on with the round's end; the stopped one reads it, and comes again. */
TEST(a_leader_that_was_stopped_beyond_its_lease_decides_nothing)
{
    int told[2];
    char byte;
    int status;
    set_up(1, 2, 3);
    CHECK_INT(pipe(told), 0);
    pid_t leader = fork();
    CHECK(leader >= 0);
    if (leader == 0) {
        lead(told[1]);
    }
    CHECK_INT(read(told[0], &byte, 1), 1);
    int64_t first = term();
    start_node(0);
    CHECK_INT(read(told[0], &byte, 1), 1);
    CHECK_INT(byte, 'c');
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(worlds[0].round, 1);
    CHECK_INT(worlds[0].nodes, 2);
    int64_t generation = worlds[0].generation;
    CHECK_INT(term(), first);
    CHECK_INT(read(told[0], &byte, 1), 1);
    CHECK_INT(kill(leader, SIGSTOP), 0);
    CHECK_INT(waitpid(leader, &status, WUNTRACED), leader);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_CHANGED);
    CHECK_CONTAINS(text, "node 0 is lost: its torchrun is gone, or has been silent for 3 s");
    int64_t second = term();
    CHECK(second > first);
    tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_AGAIN, "");
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(worlds[0].round, 2);
    CHECK_INT(worlds[0].restart, 0);
    CHECK_INT(worlds[0].nodes, 1);
    CHECK(worlds[0].generation > generation);
    CHECK_INT(kill(leader, SIGCONT), 0);
    CHECK_INT(read(told[0], &byte, 1), 1); /* it knows now */
    CHECK_INT(byte, 'c');
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_CHANGED); /* and comes again */
    tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_AGAIN, "");
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(worlds[0].nodes, 2);
    CHECK_INT(term(), second);
    tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_LEAVE, "told");
    await_over(0);
    CHECK_INT(kill(leader, SIGKILL), 0);
    CHECK_INT(waitpid(leader, &status, 0), leader);
    close(told[0]);
    close(told[1]);
    remove_etcd(&server);
}

TEST(a_server_that_stands_still_for_less_than_the_heartbeat_timeout_costs_nothing)
{
    set_up(2, 2, 600);
    for (int i = 0; i < 2; i++) {
        start_node(i);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
    }
    stop_etcd(&server);
    for (int i = 0; i < 2; i++) {
        tddp_launch_rendezvous_request(nodes[i], TDDP_LAUNCH_REQUEST_DONE, "");
    }
    CHECK_INT(kill(server.pid, SIGCONT), 0);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_DONE);
        await_over(i);
    }
    remove_etcd(&server);
}

/* What was stored is there again, leases included. */
TEST(a_server_that_is_started_again_costs_nothing)
{
    set_up(2, 2, 600);
    for (int i = 0; i < 2; i++) {
        start_node(i);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
    }
    kill_etcd(&server);
    for (int i = 0; i < 2; i++) {
        tddp_launch_rendezvous_request(nodes[i], TDDP_LAUNCH_REQUEST_DONE, "");
    }
    start_etcd(&server);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_DONE);
        await_over(i);
    }
    remove_etcd(&server);
}

TEST(another_kind_of_job_is_refused)
{
    set_up(1, 2, 60);
    start_node(0);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    options.max_restarts = 7;
    start_node(1);
    CHECK_INT(next_notification(1), TDDP_LAUNCH_NOTIFICATION_ERROR);
    CHECK_CONTAINS(text, "was started with --nnodes=1:2 --max-restarts=0");
    CHECK_CONTAINS(text, "this node with --nnodes=1:2 --max-restarts=7");
    end_node(1);
    finish(1);
    remove_etcd(&server);
}

/* A node that goes hands over at once; the other one leads on. */
TEST(the_leaders_node_leaves)
{
    set_up(1, 2, 60);
    start_node(0);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    start_node(1);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_CHANGED);
    tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_AGAIN, "");
    for (int i = 0; i < 2; i++) {
        CHECK_INT(next_notification(i), TDDP_LAUNCH_NOTIFICATION_JOINED);
    }
    int64_t first = term();
    tddp_launch_rendezvous_request(nodes[0], TDDP_LAUNCH_REQUEST_LEAVE, "node 0 was told to end");
    CHECK_INT(next_notification(1), TDDP_LAUNCH_NOTIFICATION_CHANGED);
    CHECK_TEXT(text, "node 0 was told to end");
    await_over(0);
    tddp_launch_rendezvous_request(nodes[1], TDDP_LAUNCH_REQUEST_AGAIN, "");
    CHECK_INT(next_notification(1), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(worlds[1].nodes, 1);
    CHECK_INT(worlds[1].round, 2);
    CHECK(term() > first);
    nodes[0] = nodes[1];
    finish(1);
    remove_etcd(&server);
}

/* All nodes are killed at once. The same job may be started again, and is another one. */
TEST(a_job_that_was_killed_is_started_again)
{
    int told[2];
    char byte;
    int status;
    set_up(1, 1, 3);
    CHECK_INT(pipe(told), 0);
    pid_t killed = fork();
    CHECK(killed >= 0);
    if (killed == 0) {
        lead(told[1]);
    }
    CHECK_INT(read(told[0], &byte, 1), 1);
    CHECK_INT(kill(killed, SIGKILL), 0);
    CHECK_INT(waitpid(killed, &status, 0), killed);
    CHECK(key_number(&server, "/torchrun/job/state", "create_revision") > 0);
    start_node(0);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    CHECK_INT(worlds[0].round, 0);
    CHECK_INT(worlds[0].restart, 0);
    finish(1);
    close(told[0]);
    close(told[1]);
    remove_etcd(&server);
}

/* Whatever has become of it. */
TEST(a_document_that_has_gone_is_written_again)
{
    set_up(1, 1, 60);
    start_node(0);
    CHECK_INT(next_notification(0), TDDP_LAUNCH_NOTIFICATION_JOINED);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    (void)delete_key(client, "/torchrun/job/state");
    close_client(client);
    CHECK_UNTIL(key_number(&server, "/torchrun/job/state", "create_revision") > 0);
    finish(1);
    remove_etcd(&server);
}

/* A request of the agent may come at any moment: also between a change that is seen and its
 * reading. */
TEST(a_change_is_not_missed_where_a_wait_is_canceled)
{
    tddp_launch_view view = {.count = 0};
    tddp_launch_entry self = TDDP_LAUNCH_ENTRY_INIT;
    tddp_bytes entry = {0};
    tddp_cancel *cancel;
    set_up(1, 1, 60);
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_launch_link link = {.backend = &tddp_launch_etcd,
                             .options = &options,
                             .run_id = "job",
                             .times = times,
                             .cancel = cancel,
                             .id = "me"};
    (void)snprintf(self.self.id, sizeof self.self.id, "me");
    CHECK_OK(tddp_launch_entry_write(&self, &entry));
    CHECK_UNTIL(link.backend->connect(&link, 10000) == TDDP_OK);
    CHECK_OK(link.backend->watch(&link, 10000, &view));
    CHECK_INT(view.count, 0);
    CHECK_OK(link.backend->put_entry(&link, (tddp_slice){entry.data, entry.size}, false, false));
    tddp_cancel_trigger(cancel);
    tddp_status status = TDDP_CANCELED;
    for (int i = 0; i < 200 && status == TDDP_CANCELED; i++) {
        status = link.backend->watch(&link, 10000, &view);
        (void)usleep(1000);
    }
    if (status == TDDP_CANCELED) {
        tddp_cancel_reset(cancel);
        status = link.backend->watch(&link, 60000, &view);
    }
    CHECK_STATUS(status, TDDP_OK); /* all of it was there before the wait was canceled, or now */
    CHECK_INT(view.count, 1);
    tddp_launch_view_free(&view);
    tddp_bytes_free(&entry);
    link.backend->close(&link);
    tddp_cancel_free(cancel);
    remove_etcd(&server);
}
