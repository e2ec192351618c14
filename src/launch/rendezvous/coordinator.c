/*
 * The coordinator's rules: what the entries, and time, make of the state (the picture is in
 * coordinator_state.h). Called by one thread. Keeps: at most `max` members, no two of which asked
 * for the same rank; none of them in a running round that was not there when it started; after the
 * end nothing changes but refusals.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

/* A job of which nothing has happened yet. */
static void begin_job(tddp_launch_coordinator *c, int64_t generation)
{
    tddp_launch_state_free(&c->doc);
    c->doc = (tddp_launch_state){
        .started = c->opts.started, .generation = generation, .round = -1, .over = -1};
    (void)snprintf(c->doc.job, sizeof c->doc.job, "%s", c->opts.job);
    c->stage_ns = c->report_ns = c->now_ns;
}

tddp_status tddp_launch_coordinator_create(const tddp_launch_coordinator_opts *opts, int64_t now_ns,
                                           tddp_launch_coordinator **out)
{
    tddp_launch_coordinator *c = tddp_alloc(sizeof *c);
    if (!c) {
        return TDDP_OUT_OF_MEMORY;
    }
    c->opts = *opts;
    c->elastic = tddp_launch_is_elastic(opts->options);
    c->needed = c->elastic ? opts->options->min_nodes : opts->options->max_nodes;
    c->now_ns = now_ns;
    begin_job(c, opts->started);
    *out = c;
    return TDDP_OK;
}

void tddp_launch_coordinator_free(tddp_launch_coordinator *c)
{
    if (c) {
        tddp_launch_state_free(&c->doc);
        free(c->nodes);
        free(c);
    }
}

const tddp_launch_state *tddp_launch_coordinator_state(const tddp_launch_coordinator *c)
{
    return &c->doc;
}

int64_t tddp_launch_coordinator_due(const tddp_launch_coordinator *c)
{
    return c->due_ns;
}

bool tddp_launch_coordinator_over(const tddp_launch_coordinator *c, int64_t now_ns)
{
    bool all = true;
    for (int i = 0; i < c->count; i++) {
        all = all && (c->nodes[i].entry.ended || c->nodes[i].status == TDDP_LAUNCH_OUT);
    }
    return c->doc.stage == TDDP_LAUNCH_STAGE_ENDED &&
           (all || now_ns >= tddp_deadline_from(c->stage_ns, c->opts.times->close_ms));
}

void tddp_launch_coordinator_forgive(tddp_launch_coordinator *c, int64_t now_ns)
{
    c->patient_ns = tddp_deadline_from(now_ns, c->opts.times->takeover_ms);
}

/* --- nodes ----------------------------------------------------------------------------------- */

static tddp_launch_participant *find_node(const tddp_launch_coordinator *c, const char *id)
{
    int i = c->count - 1;
    while (i >= 0 && strcmp(c->nodes[i].entry.self.id, id) != 0) {
        i--;
    }
    return i >= 0 ? &c->nodes[i] : NULL;
}

/* One more; NULL: short memory, which is noted. */
static tddp_launch_participant *add_node(tddp_launch_coordinator *c, const tddp_launch_entry *entry,
                                         tddp_launch_node_status status)
{
    tddp_launch_participant *nodes = tddp_grow(c->nodes, (size_t)c->count, sizeof *nodes);
    if (!nodes) {
        c->status = TDDP_OUT_OF_MEMORY;
        return NULL;
    }
    c->nodes = nodes;
    nodes[c->count].entry = *entry;
    nodes[c->count].status = status;
    nodes[c->count].rank = entry->rank;
    nodes[c->count].round = entry->round;
    memcpy(nodes[c->count].note.id, entry->self.id, sizeof entry->self.id);
    return &nodes[c->count++];
}

/* Has a node become what `status` says, and told why; "": nothing is to be said. */
static void decide(tddp_launch_participant *node, tddp_launch_node_status status,
                   const char *format, ...) TDDP_PRINTF(3, 4);

static void decide(tddp_launch_participant *node, tddp_launch_node_status status,
                   const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(node->note.text, sizeof node->note.text, format, arguments);
    va_end(arguments);
    node->note.refused = status == TDDP_LAUNCH_OUT;
    node->status = status;
}

/* Puts into the document what single nodes are told. */
static void write_notes(tddp_launch_coordinator *c)
{
    tddp_launch_state *doc = &c->doc;
    tddp_launch_note *notes = tddp_resize(doc->notes, (size_t)(c->count + 1) * sizeof *notes);
    if (!notes) {
        c->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    doc->notes = notes;
    doc->note_count = 0;
    for (int i = 0; i < c->count; i++) {
        if (c->nodes[i].note.text[0]) {
            notes[doc->note_count++] = c->nodes[i].note;
        }
    }
}

/* --- entries --------------------------------------------------------------------------------- */

static void read_entries(tddp_launch_coordinator *c, const tddp_launch_entry *entries, int count)
{
    for (int i = 0; i < c->count; i++) {
        int64_t *missing_ns = &c->nodes[i].missing_ns;
        *missing_ns = *missing_ns ? *missing_ns : c->now_ns;
    }
    for (int i = 0; i < 2 * count; i++) { /* the hosting node comes before the others */
        const tddp_launch_entry *entry = &entries[i % count];
        tddp_launch_participant *node = find_node(c, entry->self.id);
        if (node) {
            node->entry = *entry;
            node->missing_ns = 0;
        } else if (!entry->leaves && (entry->self.hosting || i >= count)) {
            node = add_node(c, entry, TDDP_LAUNCH_WAITING);
            if (node && c->doc.stage == TDDP_LAUNCH_STAGE_ENDED && entry->round < 0) {
                /* It is of a job that begins when this one's host has gone. (One of an earlier
                 * round has lost its way to the document, and reads the end there.) */
                decide(node, TDDP_LAUNCH_WAITING,
                       "the job \"%.200s\" at %.200s has ended: this node waits for it to begin "
                       "again",
                       c->opts.run_id, c->opts.where);
                node->status = TDDP_LAUNCH_OUT;
            }
        }
        if (node && node->status != TDDP_LAUNCH_MEMBER) { /* nothing is known but what it says */
            node->rank = entry->rank;
            node->round = entry->round;
        }
    }
}

/* --- another coordinator's document ---------------------------------------------------------- */

tddp_status tddp_launch_coordinator_adopt(tddp_launch_coordinator *c, tddp_launch_state *state,
                                          int64_t now_ns)
{
    tddp_launch_state_free(&c->doc);
    c->doc = *state;
    *state = (tddp_launch_state){0};
    c->stage_ns = c->report_ns = now_ns;
    c->adopted = c->doc.stage != TDDP_LAUNCH_STAGE_ENDED;
    c->doc.probe++; /* all are to answer; and the document is written, to stay with this leader */
    tddp_launch_coordinator_forgive(c, now_ns);
    tddp_launch_entry entry = TDDP_LAUNCH_ENTRY_INIT;
    for (int i = 0; i < c->doc.note_count; i++) {
        const tddp_launch_note *note = &c->doc.notes[i];
        memcpy(entry.self.id, note->id, sizeof note->id);
        tddp_launch_participant *node =
            add_node(c, &entry, note->refused ? TDDP_LAUNCH_OUT : TDDP_LAUNCH_WAITING);
        if (node) {
            node->note = *note;
        }
    }
    for (int rank = 0; rank < c->doc.count; rank++) {
        entry.self = c->doc.members[rank];
        entry.round = c->doc.round;
        entry.rank = rank;
        if (!find_node(c, entry.self.id)) { /* else it was lost, and has come too late */
            (void)add_node(c, &entry, TDDP_LAUNCH_MEMBER);
        }
    }
    return c->status;
}

/* Looks whether the document's job lives; if it doesn't, another one begins. */
static void confirm_takeover(tddp_launch_coordinator *c, const tddp_launch_entry *entries,
                             int count)
{
    c->adopted = tddp_launch_coordinator_count(c).here == 0;
    if (c->adopted && tddp_launch_coordinator_passed(c, c->stage_ns, c->opts.times->takeover_ms)) {
        c->adopted = false;
        c->count = 0;
        begin_job(c, c->doc.generation + 1);
        read_entries(c, entries, count);
    }
}

/* --- the running round ----------------------------------------------------------------------- */

/* Takes what a node of the running round reports: the workers' store, a failure, its workers' end.
 */
static void follow_progress(tddp_launch_coordinator *c, const tddp_launch_participant *node)
{
    tddp_launch_state *doc = &c->doc;
    const tddp_launch_entry *entry = &node->entry;
    char name[TDDP_LAUNCH_LIST_BYTES];
    if (node->rank == 0 && doc->master_port == 0 && entry->master_round == doc->round &&
        entry->master_port > 0) {
        doc->master_port = entry->master_port;
        memcpy(doc->master_addr, entry->master_addr, sizeof doc->master_addr);
    }
    if (entry->failed == doc->round) {
        tddp_launch_coordinator_end(c, TDDP_LAUNCH_HOW_FAILED, "%s", entry->text);
    } else if (entry->ready > doc->round && entry->done != doc->round) {
        tddp_launch_coordinator_end(c, TDDP_LAUNCH_HOW_CHANGED, "%s has ended its workers",
                                    tddp_launch_coordinator_name(node, name));
    }
}

/* Ends the round, or the job, if it needs a node that is lost or has left, as its entry says. */
static void do_without(tddp_launch_coordinator *c, const tddp_launch_participant *node)
{
    const tddp_launch_entry *entry = &node->entry;
    tddp_launch_rendezvous_kind backend = c->opts.options->backend;
    bool hosts = entry->leaves && entry->self.hosting && backend != TDDP_LAUNCH_ETCD;
    bool stops = hosts || (entry->leaves && tddp_launch_coordinator_is_final(c));
    /* Before the first round another may come in its place. */
    bool needed = c->doc.stage == TDDP_LAUNCH_STAGE_RUNNING
                      ? entry->done != c->doc.round
                      : stops && (c->doc.round >= 0 || backend == TDDP_LAUNCH_STATIC);
    int silence_s = (int)(c->opts.times->silence_ms / 1000);
    char silence[64] = "";
    char text[2 * TDDP_LAUNCH_NAME_BYTES];
    bool matters = hosts || (needed && node->status == TDDP_LAUNCH_MEMBER);
    if (!matters || c->doc.stage == TDDP_LAUNCH_STAGE_ENDED) {
        return;
    }
    if (silence_s > 0) {
        (void)snprintf(silence, sizeof silence, ", or has been silent for %d s", silence_s);
    }
    (void)snprintf(text, sizeof text, "node %d is lost: its torchrun is gone%s (%.200s pid %lld)",
                   node->rank, silence, entry->self.host, (long long)entry->self.pid);
    if (entry->leaves) { /* the others would go on, but for the store that it takes along */
        (void)snprintf(text, sizeof text, "%s%s", entry->leave_text,
                       hosts && c->elastic ? ", and with it the coordinator; a job with "
                                             "--rdzv-backend=etcd survives that"
                                           : "");
    }
    tddp_launch_coordinator_end(c, stops ? TDDP_LAUNCH_HOW_STOPPED : TDDP_LAUNCH_HOW_CHANGED, "%s",
                                text);
}

/* Takes that a node leaves, or that its entry is missing; false: it is lost. */
static bool follow_leave(tddp_launch_coordinator *c, tddp_launch_participant *node)
{
    const tddp_launch_times *times = c->opts.times;
    bool out = node->status == TDDP_LAUNCH_OUT;
    bool patient = node->missing_ns < c->patient_ns;
    int64_t granted_ms = patient ? times->takeover_ms : times->reconnect_ms;
    bool lost = node->missing_ns != 0 &&
                (out || tddp_launch_coordinator_passed(c, node->missing_ns, granted_ms));
    if (lost || (node->entry.leaves && !out)) {
        do_without(c, node);
        decide(node, TDDP_LAUNCH_OUT, "%s", "");
    }
    return !lost;
}

/* What fails comes before who goes, which may be for that. */
static void follow_nodes(tddp_launch_coordinator *c)
{
    for (int i = 0; i < c->count; i++) {
        bool member = c->nodes[i].status == TDDP_LAUNCH_MEMBER;
        if (member && c->doc.stage == TDDP_LAUNCH_STAGE_RUNNING) {
            follow_progress(c, &c->nodes[i]);
        }
    }
    for (int i = 0; i < c->count;) {
        if (follow_leave(c, &c->nodes[i])) {
            i++;
        } else {
            memmove(&c->nodes[i], &c->nodes[i + 1], (size_t)(--c->count - i) * sizeof *c->nodes);
        }
    }
}

/* --- newcomers ------------------------------------------------------------------------------- */

/* Finds the node that has, or waits for, the rank that a newcomer asks for. Returns whether that
 * one, or where there is none all members, have answered since the newcomer came: they live. */
static bool all_answered(const tddp_launch_coordinator *c, const tddp_launch_participant *newcomer,
                         const tddp_launch_participant **same_rank)
{
    int wanted = newcomer->entry.self.node_rank;
    bool answered = true;
    bool same_answered = false;
    for (int i = 0; i < c->count; i++) {
        const tddp_launch_participant *node = &c->nodes[i];
        bool member = node->status == TDDP_LAUNCH_MEMBER;
        bool same = wanted >= 0 && node->entry.self.node_rank == wanted && node != newcomer &&
                    (member || (node->status == TDDP_LAUNCH_WAITING && node->note.text[0]));
        bool here = node->missing_ns == 0 && node->entry.probe >= newcomer->probe;
        *same_rank = same ? node : *same_rank;
        same_answered |= same && here;
        answered &= !member || here;
    }
    return *same_rank ? same_answered : answered;
}

/* The rank that a node of this host had in the last round, if that node has gone; or -1. */
static int free_rank_of_host(const tddp_launch_coordinator *c, const char *host)
{
    for (int rank = 0; rank < c->doc.count; rank++) {
        if (strcmp(c->doc.members[rank].host, host) == 0 &&
            !tddp_launch_coordinator_has_rank(c, rank)) {
            return rank;
        }
    }
    return -1;
}

static void admit(tddp_launch_coordinator *c, tddp_launch_participant *node)
{
    char name[TDDP_LAUNCH_LIST_BYTES];
    if (node->rank < 0 && node->entry.self.node_rank < 0) {
        node->rank = free_rank_of_host(c, node->entry.self.host);
    }
    decide(node, TDDP_LAUNCH_MEMBER, "%s", "");
    if (c->doc.stage == TDDP_LAUNCH_STAGE_RUNNING) {
        tddp_launch_coordinator_end(c, TDDP_LAUNCH_HOW_CHANGED, "%s has come",
                                    tddp_launch_coordinator_name(node, name));
    }
}

/* Tells a node why there is no place for it, and whether it may wait for one. */
static void turn_away(tddp_launch_coordinator *c, tddp_launch_participant *node,
                      const tddp_launch_participant *other, bool full)
{
    const tddp_launch_coordinator_opts *opts = &c->opts;
    bool final = tddp_launch_coordinator_is_final(c);
    if (other) {
        decide(node, TDDP_LAUNCH_OUT,
               "--node-rank=%d is taken already by %.200s pid %lld; expected another rank on each "
               "node",
               node->entry.self.node_rank, other->entry.self.host,
               (long long)other->entry.self.pid);
    } else if (full) {
        decide(node, final ? TDDP_LAUNCH_OUT : TDDP_LAUNCH_WAITING,
               "the job \"%.200s\" at %.200s has its %d nodes%s", opts->run_id, opts->where,
               opts->options->max_nodes,
               final ? " already; start more with a larger --nnodes on all of them"
                     : ": this one waits for a place that comes free");
    } else {
        decide(node, TDDP_LAUNCH_WAITING,
               "some nodes of the job \"%.200s\" at %.200s are done already: this one waits for "
               "the others' end",
               opts->run_id, opts->where);
    }
}

/* Gives a node a place, if there is one; else asks whether those in its way are alive. */
static void place(tddp_launch_coordinator *c, tddp_launch_participant *node)
{
    tddp_launch_counts counts = tddp_launch_coordinator_count(c);
    const tddp_launch_participant *other = NULL;
    bool answered = all_answered(c, node, &other);
    bool running = c->doc.stage == TDDP_LAUNCH_STAGE_RUNNING;
    bool full = counts.members >= c->opts.options->max_nodes;
    bool finishing = running && counts.undone < c->doc.count;
    if (strcmp(node->entry.job, c->doc.job) != 0) {
        decide(node, TDDP_LAUNCH_OUT,
               "the job at %.200s was started with %s, this node with %s; expected the same on all "
               "nodes",
               c->opts.where, c->doc.job, node->entry.job);
    } else if (!other && !full && !finishing) {
        /* While workers of another round still end there, the others may go on. */
        if (!running || tddp_launch_participant_ready(node)) {
            admit(c, node);
        }
    } else if (node->probe == 0) { /* all are asked whether they live */
        node->probe = ++c->doc.probe;
    } else if (answered) {
        turn_away(c, node, other, full);
    }
}

static void place_nodes(tddp_launch_coordinator *c)
{
    for (int i = 0; i < c->count && !c->adopted && c->doc.stage != TDDP_LAUNCH_STAGE_ENDED; i++) {
        tddp_launch_participant *node = &c->nodes[i];
        if (node->missing_ns == 0 && node->status == TDDP_LAUNCH_WAITING) {
            place(c, node);
        }
    }
}

tddp_status tddp_launch_coordinator_take(tddp_launch_coordinator *c,
                                         const tddp_launch_entry *entries, int count,
                                         int64_t now_ns)
{
    c->now_ns = now_ns;
    c->due_ns = INT64_MAX;
    read_entries(c, entries, count);
    if (c->adopted) {
        confirm_takeover(c, entries, count);
    }
    if (c->doc.stage == TDDP_LAUNCH_STAGE_RUNNING && !c->adopted &&
        tddp_launch_coordinator_count(c).undone == 0) {
        tddp_launch_coordinator_end(c, TDDP_LAUNCH_HOW_DONE, "%s", "");
    }
    follow_nodes(c);
    place_nodes(c);
    if (c->doc.stage == TDDP_LAUNCH_STAGE_GATHERING) {
        tddp_launch_coordinator_gather(c);
    } else if (c->doc.stage == TDDP_LAUNCH_STAGE_ENDED) {
        (void)tddp_launch_coordinator_passed(c, c->stage_ns, c->opts.times->close_ms);
    }
    write_notes(c);
    return c->status;
}
