/* A coordinator on a clock of the test's, with nodes played by events. For one test file each. */
#ifndef TDDP_TEST_COORDINATOR_PLAY_H
#define TDDP_TEST_COORDINATOR_PLAY_H

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/rendezvous/coordinator.h"

#define SECOND INT64_C(1000000000)
#define MS INT64_C(1000000)

static tddp_launch_coordinator *coordinator;
static tddp_launch_messages messages;
static size_t heard; /* messages that were looked at */
static int64_t now;
static tddp_launch_event event;

/* A coordinator for min to max nodes. */
static inline void open_coordinator_of(int min, int max, int restarts, bool hands_over, bool fixed)
{
    static tddp_launch_coordinator_opts opts;
    opts = (tddp_launch_coordinator_opts){
        .min_nodes = min,
        .max_nodes = max,
        .max_restarts = restarts,
        .elastic = min < max,
        .fixed = fixed,
        .hands_over = hands_over,
        .run_id = "job",
        .where = "here:29400",
        .node_timeout_ns = 4500 * MS,
        .join_timeout_ns = 600 * SECOND,
        .last_call_ns = 30 * SECOND,
        .settle_ns = 2 * SECOND,
        .report_every_ns = 10 * SECOND,
        .goodbye_ns = 3 * SECOND,
    };
    now = 1000 * SECOND;
    CHECK_OK(tddp_launch_coordinator_create(&opts, now, &coordinator));
}

static inline void open_coordinator(int min, int max, int restarts, bool hands_over)
{
    open_coordinator_of(min, max, restarts, hands_over, false);
}

static inline void close_coordinator(void)
{
    tddp_launch_coordinator_free(coordinator);
    tddp_launch_messages_free(&messages);
    heard = 0;
}

static inline void take(void)
{
    CHECK_OK(tddp_launch_coordinator_take(coordinator, &event, ++now, &messages));
}

static inline void tick(void)
{
    CHECK_OK(tddp_launch_coordinator_tick(coordinator, ++now, &messages));
}

/* A node's description; further fields are the test's to set before come(). */
static inline tddp_launch_joiner *describe(int slot, const char *host)
{
    event = (tddp_launch_event){.kind = TDDP_LAUNCH_EVENT_JOIN, .slot = slot};
    tddp_launch_joiner *joiner = &event.joiner;
    *joiner = (tddp_launch_joiner){
        .pid = 100 + slot, .local_size = slot, .node_rank = -1, .last_rank = -1, .round = -1};
    (void)snprintf(joiner->host, sizeof joiner->host, "%s", host);
    (void)snprintf(joiner->id, sizeof joiner->id, "id%d", slot);
    (void)snprintf(joiner->role, sizeof joiner->role, "trainer");
    (void)snprintf(joiner->addr, sizeof joiner->addr, "10.0.0.%d", slot);
    return joiner;
}

static inline void send(tddp_launch_event_kind kind, int slot, int round, const char *text)
{
    event = (tddp_launch_event){.kind = kind, .slot = slot, .round = round, .port = 4000 + slot};
    (void)snprintf(event.addr, sizeof event.addr, "10.0.0.%d", slot);
    (void)snprintf(event.text, sizeof event.text, "%s", text);
    take();
}

#define ready(slot, round) send(TDDP_LAUNCH_EVENT_READY, slot, round, "")
#define beat(slot) send(TDDP_LAUNCH_EVENT_BEAT, slot, 0, "")
#define failed(slot, round, text) send(TDDP_LAUNCH_EVENT_FAILED, slot, round, text)
#define done(slot, round) send(TDDP_LAUNCH_EVENT_DONE, slot, round, "")
#define leave(slot, text) send(TDDP_LAUNCH_EVENT_LEAVE, slot, 0, text)
#define bye(slot) send(TDDP_LAUNCH_EVENT_BYE, slot, 0, "")

/* A fresh node comes and is ready. */
static inline void come(int slot, const char *host)
{
    (void)describe(slot, host);
    take();
    ready(slot, 0);
}

/* `seconds` go by in which the nodes of `alive` (slots up to 9 as digits) beat. */
static inline void pass(int seconds, const char *alive)
{
    for (int half = 0; half < 2 * seconds; half++) {
        now += SECOND / 2;
        for (const char *slot = alive; *slot; slot++) {
            beat(*slot - '0');
        }
        tick();
    }
}

/* The next message, as one line. */
static inline const char *hear(void)
{
    static char line[1024];
    if (heard == messages.count) {
        return "";
    }
    const tddp_launch_message *message = &messages.messages[heard++];
    tddp_bytes text = {0};
    tddp_launch_message copy;
    CHECK_OK(tddp_launch_message_encode(message, &text));
    CHECK_OK(tddp_launch_message_decode(text.data, text.size, &copy));
    CHECK_INT(copy.kind, message->kind);
    if (message->kind == TDDP_LAUNCH_MESSAGE_ROUND) {
        int used =
            snprintf(line, sizeof line, "round %d restart %d:", message->round, message->restart);
        for (int rank = 0; rank < message->count; rank++) {
            CHECK_INT(copy.members[rank].slot, message->members[rank].slot);
            used += snprintf(line + used, sizeof line - (size_t)used, " %d",
                             message->members[rank].slot);
        }
    } else {
        size_t size = text.size < sizeof line ? text.size : sizeof line - 1;
        memcpy(line, text.data, size);
        line[size] = '\0';
        for (char *at = line; *at; at++) {
            *at = *at == '\n' ? ' ' : *at;
        }
    }
    tddp_launch_message_free(&copy);
    tddp_bytes_free(&text);
    return line;
}

/* Nodes 1 to `nodes` on hosts a, b, c...; in round 0. */
static inline void start(int min, int max, int restarts, int nodes)
{
    open_coordinator(min, max, restarts, false);
    for (int slot = 1; slot <= nodes; slot++) {
        char host[2] = {(char)('a' + slot - 1), '\0'};
        come(slot, host);
    }
    if (nodes < max) {
        char alive[10] = "123456789";
        alive[nodes] = '\0';
        pass(31, alive);
    }
    heard = messages.count - 1;
    CHECK_CONTAINS(hear(), "round 0 restart 0: 1");
}

#endif
