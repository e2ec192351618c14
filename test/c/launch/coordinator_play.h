/* A coordinator on a clock of the test's, with nodes played by their entries. A node's entry is
 * there from describe() on, until it vanishes. What changes in the document becomes a list of
 * lines. For one test file each. */
#ifndef TDDP_TEST_COORDINATOR_PLAY_H
#define TDDP_TEST_COORDINATOR_PLAY_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "launch/rendezvous/coordinator.h"

#define SECOND INT64_C(1000000000)
#define MS INT64_C(1000000)

enum { SLOTS = 12, MOST_LINES = 4096 };

static tddp_launch_coordinator *coordinator;
static tddp_launch_options options;
static tddp_launch_times times;
static tddp_launch_coordinator_opts opts;
static int64_t now;
static tddp_launch_entry nodes[SLOTS + 1]; /* by slot, which is the number in the id */
static bool there[SLOTS + 1];
static bool answers[SLOTS + 1];  /* probes, at once */
static tddp_launch_state before; /* the document that was looked at last */
static tddp_bytes before_text;
static char *lines[MOST_LINES];
static int line_count;
static int heard; /* lines that were looked at */

static inline void say(const char *format, ...) TDDP_PRINTF(1, 2);

static inline void say(const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (char *at = text; *at; at++) {
        *at = *at == '\n' ? ' ' : *at;
    }
    CHECK(line_count < MOST_LINES);
    lines[line_count++] = strdup(text);
}

static inline int slot_of(const char *id)
{
    return atoi(id + 2);
}

static inline const tddp_launch_state *doc(void)
{
    return tddp_launch_coordinator_state(coordinator);
}

/* A copy, through its text. */
static inline void remember(void)
{
    tddp_bytes text = {0};
    tddp_bytes again = {0};
    tddp_launch_state_free(&before);
    tddp_bytes_free(&before_text);
    CHECK_OK(tddp_launch_state_write(doc(), &text));
    CHECK_OK(tddp_launch_state_read(text.data, text.size, &before));
    CHECK_OK(tddp_launch_state_write(&before, &again));
    CHECK(again.size == text.size && memcmp(again.data, text.data, text.size) == 0);
    before_text = text;
    tddp_bytes_free(&again);
}

static inline bool is_same(void)
{
    tddp_bytes text = {0};
    CHECK_OK(tddp_launch_state_write(doc(), &text));
    bool same =
        text.size == before_text.size && memcmp(text.data, before_text.data, text.size) == 0;
    tddp_bytes_free(&text);
    return same;
}

static inline const tddp_launch_note *old_note(const char *id)
{
    for (int i = 0; i < before.note_count; i++) {
        if (strcmp(before.notes[i].id, id) == 0) {
            return &before.notes[i];
        }
    }
    return NULL;
}

static inline void say_round(void)
{
    char text[256];
    int used = snprintf(text, sizeof text, "round %d restart %d:", doc()->round, doc()->restart);
    for (int rank = 0; rank < doc()->count; rank++) {
        used += snprintf(text + used, sizeof text - (size_t)used, " %d",
                         slot_of(doc()->members[rank].id));
    }
    say("%s", text);
}

/* Says what has changed. */
static inline void look(void)
{
    static const char *const hows[] = {"done", "failed", "stopped", "changed"};
    if (is_same()) {
        return;
    }
    if (doc()->over != before.over) {
        say("over %d %s %s", doc()->over, hows[doc()->how], doc()->text);
    }
    for (int i = 0; i < doc()->note_count; i++) {
        const tddp_launch_note *note = &doc()->notes[i];
        const tddp_launch_note *old = old_note(note->id);
        if (!old || strcmp(old->text, note->text) != 0) {
            say("%s %d %s", note->refused ? "refuse" : "spare", slot_of(note->id), note->text);
        }
    }
    if (doc()->round != before.round) {
        say_round();
    }
    if (doc()->master_port != before.master_port && doc()->master_port != 0) {
        say("master %d %s %d", doc()->round, doc()->master_addr, doc()->master_port);
    }
    if (doc()->stage == TDDP_LAUNCH_STAGE_ENDED && before.stage != TDDP_LAUNCH_STAGE_ENDED) {
        say("end %s %s", hows[doc()->how], doc()->text);
    }
    if (doc()->report != before.report) {
        say("status %s", doc()->status);
    }
    remember();
}

/* Shows the coordinator all entries that are there. */
static inline void take(void)
{
    tddp_launch_entry shown[SLOTS];
    int64_t asked;
    now++;
    do {
        int count = 0;
        for (int slot = 1; slot <= SLOTS; slot++) {
            if (there[slot]) {
                nodes[slot].probe = answers[slot] ? doc()->probe : nodes[slot].probe;
                shown[count++] = nodes[slot];
            }
        }
        asked = doc()->probe;
        CHECK_OK(tddp_launch_coordinator_take(coordinator, shown, count, now));
        look();
    } while (asked != doc()->probe);
}

/* A coordinator for min to max nodes. */
static inline void open_coordinator_of(int min, int max, int restarts,
                                       tddp_launch_rendezvous_kind backend)
{
    options = (tddp_launch_options){
        .min_nodes = min, .max_nodes = max, .max_restarts = restarts, .backend = backend};
    times = (tddp_launch_times){.silence_ms = 30000,
                                .reconnect_ms = 200,
                                .join_ms = 600000,
                                .last_call_ms = 30000,
                                .takeover_ms = 2000,
                                .report_ms = 10000,
                                .close_ms = 3000};
    opts = (tddp_launch_coordinator_opts){.options = &options,
                                          .times = &times,
                                          .run_id = "job",
                                          .where = "here:29400",
                                          .job = "--nnodes",
                                          .started = 17};
    now = 1000 * SECOND;
    memset(there, 0, sizeof there);
    for (int slot = 1; slot <= SLOTS; slot++) {
        answers[slot] = true;
    }
    CHECK_OK(tddp_launch_coordinator_create(&opts, now, &coordinator));
    remember();
}

static inline void open_coordinator(int min, int max, int restarts, bool hands_over)
{
    open_coordinator_of(min, max, restarts, hands_over ? TDDP_LAUNCH_ETCD : TDDP_LAUNCH_C10D);
}

static inline void close_coordinator(void)
{
    tddp_launch_coordinator_free(coordinator);
    tddp_launch_state_free(&before);
    tddp_bytes_free(&before_text);
    for (int i = 0; i < line_count; i++) {
        free(lines[i]);
    }
    line_count = heard = 0;
}

/* A node's entry, which the next take() shows; further fields are the test's to set. */
static inline tddp_launch_entry *describe(int slot, const char *host)
{
    tddp_launch_entry *entry = &nodes[slot];
    *entry = (tddp_launch_entry)TDDP_LAUNCH_ENTRY_INIT;
    entry->self.pid = 100 + slot;
    entry->self.local_size = slot;
    (void)snprintf(entry->self.host, sizeof entry->self.host, "%s", host);
    (void)snprintf(entry->self.id, sizeof entry->self.id, "id%d", slot);
    (void)snprintf(entry->job, sizeof entry->job, "%s", opts.job);
    (void)snprintf(entry->self.role, sizeof entry->self.role, "trainer");
    (void)snprintf(entry->self.addr, sizeof entry->self.addr, "10.0.0.%d", slot);
    there[slot] = true;
    return entry;
}

static inline void ready(int slot, int round)
{
    nodes[slot].ready = round;
    nodes[slot].round = round - 1;
    take();
}

static inline void failed(int slot, int round, const char *text)
{
    nodes[slot].failed = round;
    (void)snprintf(nodes[slot].text, sizeof nodes[slot].text, "%s", text);
    take();
}

static inline void done(int slot, int round)
{
    nodes[slot].done = round;
    take();
}

static inline void leave(int slot, const char *text)
{
    nodes[slot].leaves = true;
    (void)snprintf(nodes[slot].leave_text, sizeof nodes[slot].leave_text, "%s", text);
    take();
    there[slot] = false;
    take();
}

static inline void master(int slot, int round)
{
    nodes[slot].master_round = round;
    nodes[slot].master_port = 4000 + slot;
    (void)snprintf(nodes[slot].master_addr, sizeof nodes[slot].master_addr, "10.0.0.%d", slot);
    take();
}

/* It has read the end. */
static inline void bye(int slot)
{
    nodes[slot].ended = true;
    take();
}

/* A fresh node comes and is ready. */
static inline void come(int slot, const char *host)
{
    (void)describe(slot, host);
    ready(slot, 0);
}

/* `seconds` go by. */
static inline void pass(int seconds)
{
    for (int half = 0; half < 2 * seconds; half++) {
        now += SECOND / 2;
        take();
    }
}

/* A node's entry goes, and is missing for long enough. */
static inline void vanish(int slot)
{
    there[slot] = false;
    take();
    now += 250 * MS;
    take();
}

/* The next line; "": there is none. */
static inline const char *hear(void)
{
    return heard == line_count ? "" : lines[heard++];
}

static inline void skip(void)
{
    heard = line_count;
}

static inline void skip_kind(const char *kind)
{
    while (heard < line_count && strncmp(lines[heard], kind, strlen(kind)) == 0) {
        heard++;
    }
}

/* Passes over lines about what is waited for, and about a round's end before those. */
static inline void skip_status(void)
{
    skip_kind("status ");
}

static inline void skip_over(void)
{
    skip_kind("over ");
    skip_status();
}

/* Nodes 1 to `count` on hosts a, b, c...; in round 0. */
static inline void start(int min, int max, int restarts, int count)
{
    open_coordinator(min, max, restarts, false);
    for (int slot = 1; slot <= count; slot++) {
        char host[2] = {(char)('a' + slot - 1), '\0'};
        come(slot, host);
    }
    if (count < max) {
        pass(31);
    }
    heard = line_count - 1;
    CHECK_CONTAINS(hear(), "round 0 restart 0: 1");
}

#endif
