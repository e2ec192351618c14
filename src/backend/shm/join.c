/*
 * How the ranks of a group come to share memory, in two rounds: before segments are exchanged
 * within each host, and when each rank has all of its host's. In each the ranks of a host meet
 * ("shm/ROUND/HOST"), and then, if there are several, the hosts ("shm/ROUND/hosts"), for each of
 * which its first rank speaks. Where the ranks of every host have the segments of an earlier group
 * (fabric.c), there is no second round. Runs on the thread that creates the group.
 *
 *     yes ...   it can share. Of a rank in the first round: its socket's name, its arena size, its
 *               overrides and the place of its view; of a host: its overrides, and whether its
 *               ranks have segments
 *     no TEXT   it cannot or must not share: all ranks go without. Of a host: no RANK TEXT
 *     after     it stopped because of another rank's "no"
 *
 * Invariants: unless it is killed, a rank gives a record in both rounds, or says there why it
 * failed, so that no rank waits for one that has. All ranks fail with the same text if one says
 * "no", that of the lowest such rank.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/shm/control.h"

enum { REPORT_BYTES = 1024, NAME_BYTES = 32, REASON_MS = 1000, CHECK_MS = 200 };

/* One of the two rounds. */
typedef struct meetings {
    tddp_meeting *ranks; /* of this host; its ranks are places in local_ranks */
    tddp_meeting *hosts; /* NULL: there is one */
} meetings;

typedef struct joining {
    const tddp_backend_opts *opts;
    int64_t deadline;
    tddp_cancel *cancel;
    const char *refusal;
    int *local_ranks; /* the ranks of this host, sorted */
    int size;
    int rank;    /* index in local_ranks */
    int *firsts; /* the first rank of each host, which are numbered in that order */
    int host_count;
    int host; /* this rank's */
    int listen_fd;
    size_t arena;
    char address[TDDP_SHM_ADDRESS_BYTES];
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host */
    char overrides[TDDP_SHM_CHOICES_TEXT];     /* the first rank's, once they were compared */
    tddp_shm_place *places;                    /* by rank of this host */
    bool has_views;                            /* this host's ranks have segments already */
    bool all_have_views;                       /* and so have those of every other host */
    int declined;                              /* the lowest rank that said "no"; -1: none */
    char reason[REPORT_BYTES];                 /* and what it said */
    meetings rounds[2];
    tddp_shm *shm;
} joining;

static int name_of(const joining *self, int rank)
{
    return self->opts->names ? self->opts->names[rank] : rank;
}

static bool begins(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* --- meetings -------------------------------------------------------------------------------- */

/* While ranks are missing in the second round: whether a rank of this host has ended without a
 * word. */
static tddp_status check_local_ranks(void *data)
{
    const joining *self = data;
    const tddp_wait wait = {REASON_MS, self->cancel};
    tddp_meeting *meeting = self->rounds[1].ranks;
    for (int local = 0; local < self->size; local++) {
        const tddp_shm_peer *peer = &self->shm->peers[local];
        int rank = local;
        if (local == self->rank || !peer->segment || peer->same_process ||
            !tddp_shm_segment_owner_ended(peer->segment)) {
            continue;
        }
        tddp_status status = tddp_meeting_read(meeting, &wait);
        if (status) {
            return status;
        }
        if (!tddp_meeting_records(meeting)[local].data && !tddp_meeting_failure(meeting, &rank)) {
            return tddp_fail(TDDP_PEER_LOST,
                             "lost rank %d, which ended while shared memory was set up",
                             name_of(self, self->local_ranks[local]));
        }
    }
    return TDDP_OK;
}

/* Of a round: a meeting of the hosts, or of this host's ranks. `name` is written, and borrowed. */
static tddp_meeting_opts meeting_of(joining *self, int round, bool hosts, char name[NAME_BYTES])
{
    (void)snprintf(name, NAME_BYTES, hosts ? "shm/%d/hosts" : "shm/%d/%d", round, self->host);
    return (tddp_meeting_opts){.store = self->opts->store,
                               .name = name,
                               .rank = hosts ? self->host : self->rank,
                               .world_size = hosts ? self->host_count : self->size,
                               .giver = TDDP_MEETING_ALL,
                               .check = round == 1 && !hosts ? check_local_ranks : NULL,
                               .data = self,
                               .check_ms = CHECK_MS};
}

static tddp_status open_meetings(joining *self)
{
    char name[NAME_BYTES];
    tddp_status status = TDDP_OK;
    for (int round = 0; round < 2 && status == TDDP_OK; round++) {
        meetings *made = &self->rounds[round];
        tddp_meeting_opts opts = meeting_of(self, round, false, name);
        status = tddp_meeting_open(&opts, &made->ranks);
        if (status == TDDP_OK && self->host_count > 1) {
            opts = meeting_of(self, round, true, name);
            status = tddp_meeting_open(&opts, &made->hosts);
        }
    }
    return status;
}

static void close_meetings(joining *self)
{
    for (int round = 0; round < 2; round++) {
        tddp_meeting_close(self->rounds[round].ranks);
        tddp_meeting_close(self->rounds[round].hosts);
    }
}

static tddp_status give(const joining *self, tddp_meeting *meeting, const char *text)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    return tddp_meeting_give(meeting, (tddp_slice){text, strlen(text)}, &wait);
}

/* TDDP_PEER_LOST if a rank has failed, as was read last. */
static tddp_status check_failures(const tddp_meeting *meeting)
{
    int rank = -1;
    const char *reason = tddp_meeting_failure(meeting, &rank);
    return reason ? tddp_fail(TDDP_PEER_LOST, "%s", reason) : TDDP_OK;
}

static tddp_status await(const joining *self, tddp_meeting *meeting)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    tddp_status status = tddp_meeting_await(meeting, &wait);
    if (status == TDDP_PEER_LOST) {
        const tddp_status failed = check_failures(meeting);
        status = failed ? failed : status;
    }
    return status;
}

/* --- what is made of the records ------------------------------------------------------------- */

static tddp_status fail_malformed(const joining *self, int rank, const char *text)
{
    return tddp_fail(TDDP_PROTOCOL,
                     "rank %d published \"%.100s\" in the store: expected one version of libtddp "
                     "on all ranks",
                     name_of(self, rank), text);
}

static void note_no(joining *self, int rank, const char *text)
{
    if (self->declined < 0 || rank < self->declined) {
        self->declined = rank;
        (void)snprintf(self->reason, sizeof self->reason, "%s", text);
    }
}

static tddp_status check_declined(const joining *self)
{
    return self->declined < 0 ? TDDP_OK
                              : tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                                          name_of(self, self->declined), self->reason);
}

/* Compares with the overrides of the rank `first`, which are taken over. */
static tddp_status compare_overrides(joining *self, int first, int rank, const char *overrides)
{
    if (rank == first) {
        (void)snprintf(self->overrides, sizeof self->overrides, "%s", overrides);
    }
    if (strcmp(self->overrides, overrides) == 0) {
        return TDDP_OK;
    }
    (void)snprintf(self->reason, sizeof self->reason,
                   "TDDP_SHM_ALGORITHM is \"%s\" on rank %d, \"%s\" on rank %d: expected the same "
                   "on all ranks",
                   self->overrides, name_of(self, first), overrides, name_of(self, rank));
    self->declined = rank;
    return tddp_fail(TDDP_UNAVAILABLE, "%s", self->reason);
}

/* What this host's ranks made of a round. */
static tddp_status give_host(const joining *self, int round, tddp_status local)
{
    char text[REPORT_BYTES];
    if (local) {
        (void)snprintf(text, sizeof text, "no %d %.900s", self->declined, self->reason);
    } else {
        (void)snprintf(text, sizeof text, "yes %s %d", self->overrides, self->has_views);
    }
    return give(self, self->rounds[round].hosts, text);
}

static tddp_status take_host(joining *self, int host, const char *text)
{
    char overrides[TDDP_SHM_CHOICES_TEXT];
    int has_views;
    int rank;
    int used;
    if (sscanf(text, "no %d %n", &rank, &used) == 1 && rank >= 0 && rank < self->opts->world_size) {
        note_no(self, rank, text + used);
        return TDDP_OK; /* a later host may have a lower rank that says "no" */
    }
    if (sscanf(text, "yes %255s %d", overrides, &has_views) != 2) {
        return fail_malformed(self, self->firsts[host], text);
    }
    self->all_have_views &= has_views != 0;
    return self->declined >= 0 ? TDDP_OK
                               : compare_overrides(self, 0, self->firsts[host], overrides);
}

/* What all ranks make of a round, of which this host's made `local`; its text is the thread's. */
static tddp_status agree(joining *self, int round, tddp_status local)
{
    tddp_meeting *hosts = self->rounds[round].hosts;
    if (!hosts || (local && local != TDDP_UNAVAILABLE)) {
        return local;
    }
    tddp_status status = self->rank == 0 ? give_host(self, round, local) : TDDP_OK;
    status = status ? status : await(self, hosts);
    for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
        status = take_host(self, host, tddp_meeting_records(hosts)[host].data);
    }
    return status ? status : check_declined(self);
}

/* --- the first round ------------------------------------------------------------------------- */

static int host_of(const tddp_backend_opts *opts, int group_rank)
{
    return opts->hosts ? opts->hosts[group_rank] : opts->same_host ? 0 : group_rank;
}

/* What is needed to say that this rank has failed, which is done before memory is asked for. */
static void count_ranks(joining *self)
{
    const tddp_backend_opts *opts = self->opts;
    self->host = host_of(opts, opts->rank);
    for (int rank = 0; rank < opts->world_size; rank++) {
        const int host = host_of(opts, rank);
        self->rank = rank == opts->rank ? self->size : self->rank;
        self->size += host == self->host;
        self->host_count += host == self->host_count;
    }
}

static tddp_status find_local_ranks(joining *self)
{
    const tddp_backend_opts *opts = self->opts;
    const size_t count = (size_t)opts->world_size;
    int local = 0;
    int hosts = 0;
    self->local_ranks = tddp_alloc_array(count, sizeof *self->local_ranks);
    self->firsts = tddp_alloc_array(count, sizeof *self->firsts);
    self->addresses = tddp_alloc_array(count, sizeof *self->addresses);
    self->places = tddp_alloc_array(count, sizeof *self->places);
    if (!self->local_ranks || !self->firsts || !self->addresses || !self->places) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        if (host_of(opts, rank) == hosts) {
            self->firsts[hosts++] = rank;
        }
        if (host_of(opts, rank) == self->host) {
            self->local_ranks[local++] = rank;
        }
    }
    return open_meetings(self);
}

/* Any failure here is a reason to go without shared memory. */
static tddp_status prepare(joining *self)
{
    if (self->refusal) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s", self->refusal);
    }
    if (self->size > TDDP_SHM_MAX_RANKS) {
        return tddp_fail(TDDP_UNAVAILABLE, "%d ranks on its host: expected at most %d", self->size,
                         TDDP_SHM_MAX_RANKS);
    }
    tddp_status status = tddp_shm_choices_parse(&self->shm->choices);
    if (status == TDDP_OK) {
        tddp_shm_choices_text(&self->shm->choices, self->overrides, sizeof self->overrides);
        status = tddp_shm_arena_limit(self->size, &self->arena);
    }
    if (status == TDDP_OK && self->size > 1) {
        status = tddp_shm_listen(self->size, &self->listen_fd, self->address);
    }
    if (status == TDDP_OK) {
        tddp_shm_fabric_take_view(self->opts->fabric, self->shm, &self->places[self->rank]);
    }
    if (self->shm->view) {
        tddp_shm_publish_cores(tddp_shm_self(self->shm)->control);
    }
    return status;
}

static tddp_status give_first(joining *self)
{
    char text[REPORT_BYTES];
    if (prepare(self)) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    } else {
        const tddp_shm_place *mine = &self->places[self->rank];
        (void)snprintf(text, sizeof text, "yes %s %zu %s %s %d %zu",
                       self->size > 1 ? self->address : "-", self->arena,
                       self->overrides[0] ? self->overrides : "-", mine->id, mine->rank, mine->at);
    }
    return give(self, self->rounds[0].ranks, text);
}

static tddp_status take_first(joining *self, int local, const char *text)
{
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    size_t arena;
    const int rank = self->local_ranks[local];
    tddp_shm_place *place = &self->places[local];
    if (sscanf(text, "yes %63s %zu %255s %63s %d %zu", address, &arena, overrides, place->id,
               &place->rank, &place->at) != 6) {
        return fail_malformed(self, rank, text);
    }
    memcpy(self->addresses[local], address, sizeof address);
    self->arena = arena < self->arena ? arena : self->arena;
    self->has_views &= strcmp(place->id, "-") != 0 && strcmp(place->id, self->places[0].id) == 0;
    return compare_overrides(self, self->local_ranks[0], rank, overrides);
}

/* The "no"s of this host's ranks. */
static tddp_status check_local_records(joining *self, int round)
{
    const tddp_slice *records = tddp_meeting_records(self->rounds[round].ranks);
    for (int local = 0; local < self->size; local++) {
        if (begins(records[local].data, "no ")) {
            note_no(self, self->local_ranks[local], records[local].data + strlen("no "));
        }
    }
    return check_declined(self);
}

static tddp_status take_all_first(joining *self)
{
    tddp_meeting *meeting = self->rounds[0].ranks;
    tddp_status status = await(self, meeting);
    status = status ? status : check_local_records(self, 0);
    self->has_views = true;
    for (int local = 0; local < self->size && status == TDDP_OK; local++) {
        status = take_first(self, local, tddp_meeting_records(meeting)[local].data);
    }
    self->has_views &= status == TDDP_OK;
    self->all_have_views = self->has_views;
    return agree(self, 0, status);
}

/* --- views ----------------------------------------------------------------------------------- */

static tddp_status attach_views(const joining *self)
{
    tddp_shm *shm = self->shm;
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        if (rank != shm->rank) {
            status = tddp_shm_fabric_attach(shm, rank, &self->places[rank]);
        }
    }
    if (status == TDDP_OK) {
        tddp_shm_count_cores(shm);
        status = tddp_shm_matching_create(shm, &shm->matching);
    }
    return status;
}

/* --- segments -------------------------------------------------------------------------------- */

static tddp_status make_segment(joining *self)
{
    tddp_shm *shm = self->shm;
    tddp_shm_segment *segment;
    tddp_status status = tddp_shm_check_memory(self->size, shm->layout.p2p);
    if (status == TDDP_OK) {
        status = tddp_shm_segment_create(&shm->layout, self->arena, &segment);
    }
    if (status == TDDP_OK) {
        tddp_shm_attach(shm, shm->rank, segment, 0);
        tddp_shm_publish_cores(tddp_shm_self(shm)->control);
    }
    return status;
}

/* Why a lost rank failed, if it says so: it does before it closes its sockets. */
static tddp_status find_reason(const joining *self, int lost, tddp_status status)
{
    char saved[REPORT_BYTES];
    const tddp_wait wait = {REASON_MS, NULL};
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    tddp_meeting *meeting = self->rounds[1].ranks;
    if (tddp_meeting_read(meeting, &wait) == TDDP_OK) {
        const tddp_slice record = tddp_meeting_records(meeting)[lost];
        const tddp_status failed = check_failures(meeting);
        if (failed) {
            return failed;
        }
        if (record.data && !begins(record.data, "yes")) {
            return TDDP_UNAVAILABLE;
        }
    }
    return tddp_fail(status, "%s", saved);
}

/* The others need not wait for this rank's segment. The record precedes the closed socket that
 * shows it. */
static tddp_status decline(joining *self, const char *text)
{
    tddp_status status = give(self, self->rounds[1].ranks, text);
    tddp_close(self->listen_fd);
    self->listen_fd = -1;
    return status;
}

static tddp_status get_segments(joining *self)
{
    int lost = -1;
    tddp_shm_segment_exchange params = {self->shm, self->listen_fd, self->addresses, self->deadline,
                                        tddp_cancel_fd(self->cancel)};
    tddp_shm_fabric_drop_view(self->shm);
    tddp_status status = make_segment(self);
    if (status == TDDP_OK && self->size > 1) {
        status = tddp_shm_exchange_segments(&params, &lost);
    }
    if (status == TDDP_PEER_LOST && lost >= 0) {
        status = find_reason(self, lost, status);
        if (status == TDDP_UNAVAILABLE) {
            return decline(self, "after");
        }
        return status;
    }
    if (status == TDDP_OK) {
        tddp_shm_count_cores(self->shm);
        status = tddp_shm_matching_create(self->shm, &self->shm->matching);
    }
    if (status == TDDP_OK) {
        return give(self, self->rounds[1].ranks, "yes");
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED || status == TDDP_PEER_LOST) {
        return status;
    }
    char text[REPORT_BYTES];
    (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    return decline(self, text);
}

/* --- the second round ------------------------------------------------------------------------ */

static tddp_status take_all_second(joining *self)
{
    tddp_meeting *meeting = self->rounds[1].ranks;
    tddp_status status = TDDP_OK;
    if (!self->has_views) {
        status = await(self, meeting);
        status = status ? status : check_local_records(self, 1);
        for (int local = 0; local < self->size && status == TDDP_OK; local++) {
            if (!begins(tddp_meeting_records(meeting)[local].data, "yes")) {
                status = tddp_fail(TDDP_INTERNAL, "a rank goes without shared memory, and no rank "
                                                  "reported why");
            }
        }
    }
    return agree(self, 1, status);
}

static tddp_status run(joining *self)
{
    tddp_status status = give_first(self);
    status = status ? status : take_all_first(self);
    if (status == TDDP_OK) {
        status = self->has_views ? attach_views(self) : get_segments(self);
    }
    return status || self->all_have_views ? status : take_all_second(self);
}

/* All ranks wait for this one, or its host, at one of the meetings. TDDP_UNAVAILABLE needs no word:
 * every rank arrives at it itself. */
static void tell_failure(joining *self, tddp_status status)
{
    char saved[REPORT_BYTES];
    char text[REPORT_BYTES];
    char name[NAME_BYTES];
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    (void)snprintf(text, sizeof text, "rank %d failed while shared memory was set up: %.900s",
                   name_of(self, self->opts->rank), saved);
    for (int round = 0; round < 2 && status != TDDP_UNAVAILABLE; round++) {
        tddp_meeting_opts opts = meeting_of(self, round, false, name);
        tddp_meeting_fail(&opts, text);
        if (self->host_count > 1) {
            opts = meeting_of(self, round, true, name);
            tddp_meeting_fail(&opts, text);
        }
    }
    if (self->shm && self->shm->peers && tddp_shm_self(self->shm)->control) {
        tddp_shm_report_failure(self->shm, status, saved);
    }
    (void)tddp_fail(status, "%s", saved);
}

static tddp_status make_context(joining *self)
{
    tddp_shm *shm = tddp_alloc(sizeof *shm);
    if (!shm) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->shm = shm;
    shm->rank = self->rank;
    shm->size = self->size;
    shm->pid = tddp_process_id();
    shm->polled_rank = -1;
    shm->layout = tddp_shm_layout_of(self->size);
    shm->peers = tddp_alloc_array((size_t)self->size, sizeof *shm->peers);
    for (int i = 0; shm->peers && i < self->size; i++) {
        shm->peers[i].group_rank = self->local_ranks[i];
        shm->peers[i].rank_name = name_of(self, self->local_ranks[i]);
    }
    return shm->peers ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal, const tddp_wait *wait,
                          tddp_shm **out)
{
    joining self = {.opts = opts,
                    .deadline = tddp_wait_deadline(wait, opts->timeout_ms),
                    .cancel = tddp_wait_cancel(wait),
                    .refusal = refusal,
                    .listen_fd = -1,
                    .declined = -1};
    count_ranks(&self);
    tddp_status status = find_local_ranks(&self);
    if (status == TDDP_OK) {
        status = make_context(&self);
    }
    if (status == TDDP_OK) {
        status = run(&self);
    }
    if (status) {
        tell_failure(&self, status);
        if (status == TDDP_UNAVAILABLE && self.shm) {
            tddp_shm_fabric_drop_view(self.shm); /* all ranks go without */
        }
        tddp_shm_destroy(self.shm);
    } else {
        const tddp_shm_segment *segment = tddp_shm_self(self.shm)->segment;
        tddp_log(TDDP_LOG_DEBUG, "shm", "%d ranks on this host, %d per core; %s, arenas of %zu MiB",
                 self.size, self.shm->ranks_per_core,
                 self.shm->view ? "segments of an earlier group" : "segments of their own",
                 (segment->bytes - segment->arena) >> 20);
        if (!self.shm->view && self.size > 1) {
            tddp_shm_fabric_fill(opts->fabric, self.shm, self.addresses[0]);
        }
        *out = self.shm;
    }
    tddp_close(self.listen_fd);
    free(self.local_ranks);
    free(self.addresses);
    free(self.places);
    free(self.firsts);
    close_meetings(&self);
    return status;
}
