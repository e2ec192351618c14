/*
 * The coordinator's rules: what the entries, and time, make of the state (the picture is in
 * coordinator_state.h). Called by one thread. Keeps: at most `max` members; none of them in a
 * running round that was not there when it started; after the end nothing changes but refusals.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/coordinator_state.h"

/* A job of which nothing has happened yet. */
static void begin_job(tddp_launch_coordinator *coordinator, int64_t version, int64_t generation)
{
    tddp_launch_state_free(&coordinator->doc);
    coordinator->doc = (tddp_launch_state){.version = version,
                                           .started = coordinator->opts.started,
                                           .generation = generation,
                                           .round = -1,
                                           .over = -1};
    (void)snprintf(coordinator->doc.job, sizeof coordinator->doc.job, "%s", coordinator->opts.job);
    coordinator->changed = true;
    tddp_launch_coordinator_gather(coordinator);
}

tddp_status tddp_launch_coordinator_create(const tddp_launch_coordinator_opts *opts, int64_t now_ns,
                                           tddp_launch_coordinator **out)
{
    tddp_launch_coordinator *coordinator = tddp_alloc(sizeof *coordinator);
    if (!coordinator) {
        return TDDP_OUT_OF_MEMORY;
    }
    coordinator->opts = *opts;
    coordinator->elastic = tddp_launch_is_elastic(opts->options);
    coordinator->now_ns = now_ns;
    begin_job(coordinator, 0, opts->started);
    *out = coordinator;
    return TDDP_OK;
}

void tddp_launch_coordinator_free(tddp_launch_coordinator *coordinator)
{
    if (coordinator) {
        tddp_launch_state_free(&coordinator->doc);
        free(coordinator->nodes);
        free(coordinator);
    }
}

const tddp_launch_state *tddp_launch_coordinator_state(const tddp_launch_coordinator *coordinator)
{
    return &coordinator->doc;
}

bool tddp_launch_coordinator_over(const tddp_launch_coordinator *coordinator, int64_t now_ns)
{
    if (coordinator->doc.stage != TDDP_LAUNCH_STAGE_ENDED) {
        return false;
    }
    bool all = true;
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        all = all && (node->entry.ended || node->status == TDDP_LAUNCH_OUT);
    }
    return all ||
           now_ns >= tddp_deadline_from(coordinator->ended_ns, coordinator->opts.times->close_ms);
}

tddp_launch_participant *tddp_launch_coordinator_add(tddp_launch_coordinator *coordinator,
                                                     const tddp_launch_entry *entry)
{
    void *nodes = coordinator->nodes;
    if (tddp_launch_grow(&nodes, coordinator->count, sizeof *coordinator->nodes) != TDDP_OK) {
        coordinator->status = TDDP_OUT_OF_MEMORY;
        return NULL;
    }
    coordinator->nodes = nodes;
    tddp_launch_participant *node = &coordinator->nodes[coordinator->count++];
    node->entry = *entry;
    node->rank = entry->rank;
    node->round = entry->round;
    return node;
}

/* --- another coordinator's document ---------------------------------------------------------- */

tddp_status tddp_launch_coordinator_adopt(tddp_launch_coordinator *coordinator,
                                          tddp_launch_state *state, int64_t now_ns)
{
    int64_t version = coordinator->doc.version;
    tddp_launch_state_free(&coordinator->doc);
    coordinator->doc = *state;
    *state = (tddp_launch_state){0};
    tddp_launch_state *doc = &coordinator->doc;
    doc->version = doc->version > version ? doc->version : version;
    coordinator->now_ns = coordinator->gathering_ns = coordinator->ended_ns = now_ns;
    coordinator->adopted = coordinator->changed = true;
    for (int rank = 0; rank < doc->count; rank++) {
        const tddp_launch_member *member = &doc->members[rank];
        if (tddp_launch_coordinator_has_refused(coordinator, member->id)) {
            continue; /* it was in, was lost, and came too late */
        }
        tddp_launch_entry entry = TDDP_LAUNCH_ENTRY_INIT;
        entry.self = *member;
        entry.round = doc->round;
        entry.rank = rank;
        tddp_launch_participant *node = tddp_launch_coordinator_add(coordinator, &entry);
        if (node) {
            node->status = TDDP_LAUNCH_MEMBER;
            node->missing_ns = now_ns;
            node->adopted = true;
            node->in = doc->stage == TDDP_LAUNCH_STAGE_RUNNING;
        }
    }
    return coordinator->status;
}

/* The whole job of the document is gone: another one begins. */
static void forget_dead_job(tddp_launch_coordinator *coordinator)
{
    begin_job(coordinator, coordinator->doc.version, coordinator->doc.generation + 1);
    int left = 0;
    for (int i = 0; i < coordinator->count; i++) {
        if (!coordinator->nodes[i].adopted) {
            coordinator->nodes[left++] = coordinator->nodes[i];
        }
    }
    coordinator->count = left;
    coordinator->adopted = false;
}

static void confirm_takeover(tddp_launch_coordinator *coordinator)
{
    bool waits = coordinator->now_ns < tddp_deadline_from(coordinator->gathering_ns,
                                                          coordinator->opts.times->takeover_ms);
    if (!coordinator->adopted || coordinator->doc.stage == TDDP_LAUNCH_STAGE_ENDED) {
        return;
    }
    for (int i = 0; i < coordinator->count; i++) {
        const tddp_launch_participant *node = &coordinator->nodes[i];
        if (!node->adopted && node->round == coordinator->doc.round && node->round >= 0) {
            coordinator->adopted = false;
        }
    }
    if (coordinator->adopted && !waits) {
        forget_dead_job(coordinator);
    }
}

/* --- entries --------------------------------------------------------------------------------- */

static tddp_launch_participant *find_node(tddp_launch_coordinator *coordinator, const char *id)
{
    for (int i = 0; i < coordinator->count; i++) {
        if (strcmp(coordinator->nodes[i].entry.self.id, id) == 0) {
            return &coordinator->nodes[i];
        }
    }
    return NULL;
}

static void take_master(tddp_launch_coordinator *coordinator, const tddp_launch_entry *entry)
{
    tddp_launch_state *doc = &coordinator->doc;
    if (doc->master_port == 0 && entry->master_round == doc->round && entry->master_port > 0) {
        doc->master_port = entry->master_port;
        (void)snprintf(doc->master_addr, sizeof doc->master_addr, "%s", entry->master_addr);
        coordinator->changed = true;
    }
}

/* What the entry of a node of the running round says of it. */
static void take_progress(tddp_launch_coordinator *coordinator, tddp_launch_participant *node)
{
    const tddp_launch_entry *entry = &node->entry;
    char name[TDDP_LAUNCH_LIST_BYTES];
    char text[TDDP_LAUNCH_LIST_BYTES + 64];
    if (node->rank == 0) {
        take_master(coordinator, entry);
    }
    if (entry->failed == coordinator->doc.round) {
        tddp_launch_coordinator_charge_restart(coordinator, TDDP_LAUNCH_HOW_FAILED, entry->text);
    } else if (entry->done == coordinator->doc.round) {
        coordinator->finishing = true;
        tddp_launch_coordinator_check_done(coordinator);
    } else if (entry->ready > coordinator->doc.round) {
        (void)snprintf(text, sizeof text, "%s has ended its workers",
                       tddp_launch_coordinator_name(node, name));
        tddp_launch_coordinator_lose_round(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
    }
}

/* A node that is known. */
static void take_entry(tddp_launch_coordinator *coordinator, tddp_launch_participant *node,
                       const tddp_launch_entry *entry)
{
    node->entry = *entry;
    node->missing_ns = 0;
    node->adopted = false;
    if (node->status == TDDP_LAUNCH_OUT) {
        return;
    }
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_RUNNING && node->in) {
        take_progress(coordinator, node);
    }
    if (coordinator->doc.stage != TDDP_LAUNCH_STAGE_ENDED && entry->leaves) {
        tddp_launch_coordinator_leave(coordinator, node);
    }
}

/* Newcomers at the same time: the hosting one first, then by host and process. */
static int compare_new(const void *a, const void *b)
{
    const tddp_launch_entry *left = *(const tddp_launch_entry *const *)a;
    const tddp_launch_entry *right = *(const tddp_launch_entry *const *)b;
    if (left->self.hosting != right->self.hosting) {
        return left->self.hosting ? -1 : 1;
    }
    int by_host = strcmp(left->self.host, right->self.host);
    return by_host ? by_host
                   : (left->self.pid > right->self.pid) - (left->self.pid < right->self.pid);
}

static void take_new(tddp_launch_coordinator *coordinator, const tddp_launch_entry *entries,
                     int count)
{
    int found = 0;
    const tddp_launch_entry **fresh = tddp_alloc_array((size_t)count + 1, sizeof(void *));
    if (!fresh) {
        coordinator->status = TDDP_OUT_OF_MEMORY;
        return;
    }
    for (int i = 0; i < count; i++) {
        tddp_launch_participant *node = find_node(coordinator, entries[i].self.id);
        if (node) {
            take_entry(coordinator, node, &entries[i]);
        } else if (!entries[i].leaves) {
            fresh[found++] = &entries[i];
        }
    }
    qsort(fresh, (size_t)found, sizeof(void *), compare_new);
    for (int i = 0; i < found && coordinator->status == TDDP_OK; i++) {
        tddp_launch_coordinator_join(coordinator, fresh[i]);
    }
    free(fresh);
}

static void note_missing(tddp_launch_coordinator *coordinator, const tddp_launch_entry *entries,
                         int count)
{
    for (int i = 0; i < coordinator->count; i++) {
        tddp_launch_participant *node = &coordinator->nodes[i];
        bool there = false;
        for (int j = 0; j < count && !there && node->missing_ns == 0; j++) {
            there = strcmp(entries[j].self.id, node->entry.self.id) == 0;
        }
        if (!there && node->missing_ns == 0) {
            node->missing_ns = coordinator->now_ns;
        }
    }
}

void tddp_launch_coordinator_forgive(tddp_launch_coordinator *coordinator, int64_t now_ns)
{
    coordinator->patient_ns = tddp_deadline_from(now_ns, coordinator->opts.times->takeover_ms);
}

/* --- time ------------------------------------------------------------------------------------ */

static void look_at_time(tddp_launch_coordinator *coordinator)
{
    char text[TDDP_LAUNCH_TEXT_BYTES];
    if (coordinator->doc.stage != TDDP_LAUNCH_STAGE_GATHERING) {
        return;
    }
    if (coordinator->now_ns >=
        tddp_deadline_from(coordinator->gathering_ns, coordinator->opts.times->join_ms)) {
        tddp_launch_coordinator_describe_missing(coordinator, text);
        tddp_launch_coordinator_end_job(coordinator, TDDP_LAUNCH_HOW_FAILED, text);
    } else if (coordinator->now_ns >= coordinator->report_ns) {
        tddp_launch_coordinator_report_waiting(coordinator);
        coordinator->report_ns =
            tddp_deadline_from(coordinator->now_ns, coordinator->opts.times->report_ms);
    }
}

static void sooner(int64_t *due, int64_t since_ns, int64_t ms)
{
    int64_t at = tddp_deadline_from(since_ns, ms);
    *due = at < *due ? at : *due;
}

int64_t tddp_launch_coordinator_due(const tddp_launch_coordinator *coordinator)
{
    int64_t due = INT64_MAX;
    const tddp_launch_times *times = coordinator->opts.times;
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_ENDED) {
        sooner(&due, coordinator->ended_ns, times->close_ms);
    }
    if (coordinator->doc.stage == TDDP_LAUNCH_STAGE_GATHERING) {
        sooner(&due, coordinator->gathering_ns, times->join_ms);
        sooner(&due, coordinator->report_ns, 0);
        if (coordinator->enough_ns != 0) {
            sooner(&due, coordinator->enough_ns, times->last_call_ms);
        }
    }
    if (coordinator->adopted) {
        sooner(&due, coordinator->gathering_ns, times->takeover_ms);
    }
    for (int i = 0; i < coordinator->count; i++) {
        if (coordinator->nodes[i].missing_ns != 0) {
            sooner(&due, tddp_launch_coordinator_lost_at(coordinator, &coordinator->nodes[i]), 0);
        }
    }
    return due;
}

tddp_status tddp_launch_coordinator_take(tddp_launch_coordinator *coordinator,
                                         const tddp_launch_entry *entries, int count,
                                         int64_t now_ns)
{
    coordinator->now_ns = now_ns;
    note_missing(coordinator, entries, count);
    take_new(coordinator, entries, count);
    confirm_takeover(coordinator);
    tddp_launch_coordinator_remove_lost(coordinator);
    tddp_launch_coordinator_place(coordinator);
    tddp_launch_coordinator_try_start(coordinator);
    look_at_time(coordinator);
    coordinator->doc.version += coordinator->changed;
    coordinator->changed = false;
    return coordinator->status;
}
