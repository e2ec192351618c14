/*
 * How the ranks of a group come to share memory, in two meetings of all ranks: before segments are
 * exchanged within each host ("shm/0"), and when each rank has all of its host's ("shm/1"). Where
 * all ranks have the segments of one earlier group (fabric.c), there is no second one. Runs on the
 * thread that creates the group.
 *
 *     yes ...   it can share. In the first meeting: its socket's name, its arena size, its
 * overrides and the place of its view no TEXT   it cannot or must not share: all ranks go without
 *     after     it stopped because of another rank's "no"
 *
 * Invariants: unless it is killed, a rank gives a record in both meetings, or says there why it
 * failed, and only then stops listening, so that no rank waits for one that has. All ranks read the
 * same records, and fail with the same text if one says "no", that of the lowest such rank.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/shm/control.h"

enum { MEETINGS = 2, NAME_BYTES = 8, REPORT_BYTES = 1024, READ_MS = 1000, CHECK_MS = 200 };

typedef struct joining {
    const tddp_backend_opts *opts;
    int64_t deadline;
    tddp_cancel *cancel;
    const char *refusal;
    tddp_meeting *meetings[MEETINGS];
    tddp_shm *shm;
    size_t arena;
    int listen_fd;
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host, as the next */
    tddp_shm_place *places;
    char id[TDDP_SHM_ADDRESS_BYTES]; /* of the group: rank 0's address */
    bool have_views;                 /* all ranks have segments already */
} joining;

static int name_of(const joining *self, int rank)
{
    return self->opts->names ? self->opts->names[rank] : rank;
}

/* Whether a rank of the group is on this rank's host. */
static bool is_here(const tddp_backend_opts *opts, int rank)
{
    return opts->hosts ? opts->hosts[rank] == opts->hosts[opts->rank]
                       : opts->same_host || rank == opts->rank;
}

/* --- meetings -------------------------------------------------------------------------------- */

static bool begins(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Why a rank of this host takes no further part, as the second meeting has it, and TDDP_OK if it
 * has given its record there. */
static tddp_status find_reason(const joining *self, int local)
{
    const tddp_wait wait = {READ_MS, self->cancel};
    const tddp_shm_peer *peer = &self->shm->peers[local];
    tddp_meeting *meeting = self->meetings[1];
    int failed = -1;
    tddp_status status = tddp_meeting_read(meeting, &wait);
    if (status || tddp_meeting_records(meeting)[peer->group_rank].data) {
        return status;
    }
    const char *reason = tddp_meeting_failure(meeting, &failed);
    return reason ? tddp_fail(TDDP_PEER_LOST, "rank %d failed: %s", name_of(self, failed), reason)
                  : tddp_fail(TDDP_PEER_LOST,
                              "lost rank %d, which ended while shared memory was set up",
                              peer->rank_name);
}

/* While records are missing in the second meeting: whether a rank of this host has ended without
 * one. */
static tddp_status check_ended(void *data)
{
    const joining *self = data;
    tddp_status status = TDDP_OK;
    for (int local = 0; local < self->shm->size && status == TDDP_OK; local++) {
        const tddp_shm_peer *peer = &self->shm->peers[local];
        const bool ended = peer->segment ? tddp_shm_segment_owner_ended(peer->segment)
                                         : local != self->shm->rank &&
                                               !tddp_shm_is_listening(self->addresses[local]);
        status = ended ? find_reason(self, local) : TDDP_OK;
    }
    return status;
}

/* `name` is written, and borrowed. */
static tddp_meeting_opts meeting_opts(joining *self, int number, char name[NAME_BYTES])
{
    (void)snprintf(name, NAME_BYTES, "shm/%d", number);
    return (tddp_meeting_opts){.store = self->opts->store,
                               .name = name,
                               .rank = self->opts->rank,
                               .world_size = self->opts->world_size,
                               .sender = TDDP_MEETING_ALL,
                               .names = self->opts->names,
                               .check = number == 0 ? NULL : check_ended,
                               .data = self,
                               .check_ms = CHECK_MS};
}

static tddp_status open_meetings(joining *self)
{
    char name[NAME_BYTES];
    tddp_status status = TDDP_OK;
    for (int number = 0; number < MEETINGS && status == TDDP_OK; number++) {
        const tddp_meeting_opts opts = meeting_opts(self, number, name);
        status = tddp_meeting_open(&opts, &self->meetings[number]);
    }
    return status;
}

static tddp_status give(const joining *self, int number, const char *text)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    return tddp_meeting_give(self->meetings[number], (tddp_slice){text, strlen(text)}, &wait);
}

/* Waits for all records, none of which is a "no" after success. */
static tddp_status await(const joining *self, int number)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    tddp_status status = tddp_meeting_await(self->meetings[number], &wait);
    const tddp_slice *records = tddp_meeting_records(self->meetings[number]);
    for (int rank = 0; rank < self->opts->world_size && status == TDDP_OK; rank++) {
        if (begins(records[rank].data, "no ")) {
            status = tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                               name_of(self, rank), records[rank].data + strlen("no "));
        }
    }
    return status;
}

/* All ranks wait for this one at one of the meetings. TDDP_UNAVAILABLE needs no report: every rank
 * arrives at it itself. */
static tddp_status fail(joining *self, tddp_status status)
{
    char saved[REPORT_BYTES];
    char text[REPORT_BYTES];
    char name[NAME_BYTES];
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    (void)snprintf(text, sizeof text, "while shared memory was set up: %.900s", saved);
    for (int number = MEETINGS - 1; number >= 0 && status != TDDP_UNAVAILABLE; number--) {
        const tddp_meeting_opts opts = meeting_opts(self, number, name);
        tddp_meeting_fail(&opts, text);
    }
    if (self->shm && tddp_shm_self(self->shm)->control) {
        tddp_shm_report_failure(self->shm, status, saved);
    }
    tddp_shm_stop_listening(&self->listen_fd);
    return tddp_fail(status, "%s", saved);
}

/* --- the first meeting ----------------------------------------------------------------------- */

/* Any failure here is a reason to go without shared memory. */
static tddp_status prepare(joining *self, char address[TDDP_SHM_ADDRESS_BYTES],
                           char overrides[TDDP_SHM_CHOICES_TEXT], tddp_shm_place *view)
{
    tddp_shm *shm = self->shm;
    if (self->refusal) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s", self->refusal);
    }
    if (shm->size > TDDP_SHM_MAX_RANKS) {
        return tddp_fail(TDDP_UNAVAILABLE, "%d ranks on its host: expected at most %d", shm->size,
                         TDDP_SHM_MAX_RANKS);
    }
    tddp_status status = tddp_shm_choices_parse(&shm->choices);
    status = status ? status : tddp_shm_arena_limit(shm->size, &self->arena);
    status = status ? status : tddp_shm_listen(shm->size, &self->listen_fd, address);
    if (status == TDDP_OK) {
        tddp_shm_choices_text(&shm->choices, overrides, TDDP_SHM_CHOICES_TEXT);
        tddp_shm_fabric_take_view(self->opts->fabric, shm, view);
    }
    if (shm->view) {
        tddp_shm_publish_cores(tddp_shm_self(shm)->control);
    }
    return status;
}

static tddp_status give_first(joining *self)
{
    char text[REPORT_BYTES];
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    tddp_shm_place view;
    if (prepare(self, address, overrides, &view)) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    } else {
        (void)snprintf(text, sizeof text, "yes %s %zu %s %s %d %zu", address, self->arena,
                       overrides[0] ? overrides : "-", view.id, view.rank, view.at);
    }
    return give(self, 0, text);
}

/* The records of all ranks; keeps those of this host's. */
static tddp_status read_first(joining *self)
{
    char first[TDDP_SHM_CHOICES_TEXT] = "";
    char fabric[TDDP_SHM_FABRIC_ID_BYTES] = "";
    int local = 0;
    self->have_views = true;
    for (int rank = 0; rank < self->opts->world_size; rank++) {
        const char *text = tddp_meeting_records(self->meetings[0])[rank].data;
        char address[TDDP_SHM_ADDRESS_BYTES];
        char overrides[TDDP_SHM_CHOICES_TEXT];
        tddp_shm_place view;
        size_t arena;
        if (sscanf(text, "yes %63s %zu %255s %63s %d %zu", address, &arena, overrides, view.id,
                   &view.rank, &view.at) != 6) {
            return tddp_fail(TDDP_PROTOCOL,
                             "rank %d published \"%.100s\" in the store: expected one version of "
                             "libtddp on all ranks",
                             name_of(self, rank), text);
        }
        if (rank == 0) {
            memcpy(self->id, address, sizeof address);
            memcpy(first, overrides, sizeof overrides);
            memcpy(fabric, view.id, sizeof fabric);
        }
        if (strcmp(first, overrides) != 0) {
            return tddp_fail(TDDP_UNAVAILABLE,
                             "TDDP_SHM_ALGORITHM is \"%s\" on rank %d, \"%s\" on rank %d: expected "
                             "the same on all ranks",
                             first, name_of(self, 0), overrides, name_of(self, rank));
        }
        self->have_views &= strcmp(view.id, "-") != 0 && strcmp(view.id, fabric) == 0;
        if (is_here(self->opts, rank)) {
            self->arena = arena < self->arena ? arena : self->arena;
            memcpy(self->addresses[local], address, sizeof address);
            self->places[local++] = view;
        }
    }
    return TDDP_OK;
}

/* --- views and segments ---------------------------------------------------------------------- */

static tddp_status attach_views(const joining *self)
{
    tddp_shm *shm = self->shm;
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        if (rank != shm->rank) {
            status = tddp_shm_fabric_attach(shm, rank, &self->places[rank]);
        }
    }
    return status;
}

/* `*lost`: a rank that does not listen; its reason is in the second meeting. */
static tddp_status make_segments(joining *self, int *lost)
{
    tddp_shm *shm = self->shm;
    tddp_shm_segment *segment;
    tddp_shm_exchange exchange = {.shm = shm,
                                  .listen_fd = self->listen_fd,
                                  .addresses = self->addresses,
                                  .deadline = self->deadline,
                                  .cancel_fd = tddp_cancel_fd(self->cancel),
                                  .lost = -1};
    tddp_shm_fabric_drop_view(shm);
    tddp_status status = tddp_shm_check_memory(shm->size, shm->layout.p2p);
    status = status ? status : tddp_shm_segment_create(&shm->layout, self->arena, &segment);
    if (status == TDDP_OK) {
        tddp_shm_attach(shm, shm->rank, segment, 0);
        tddp_shm_publish_cores(tddp_shm_self(shm)->control);
        status = tddp_shm_exchange_segments(&exchange);
    }
    *lost = exchange.lost;
    return status;
}

static tddp_status finish(tddp_shm *shm)
{
    tddp_shm_count_cores(shm);
    return tddp_shm_matching_create(shm, &shm->matching);
}

static tddp_status meet_again(joining *self)
{
    char text[REPORT_BYTES] = "yes";
    int lost;
    tddp_status status = make_segments(self, &lost);
    status = status ? status : finish(self->shm);
    if (lost >= 0) {
        status = find_reason(self, lost);
        (void)snprintf(text, sizeof text, "after");
    } else if (status && status != TDDP_TIMEOUT && status != TDDP_CANCELED) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
        status = TDDP_OK;
    }
    status = status ? status : give(self, 1, text);
    if (status) {
        return status;
    }
    tddp_shm_stop_listening(&self->listen_fd);
    status = await(self, 1);
    const tddp_slice *records = tddp_meeting_records(self->meetings[1]);
    for (int rank = 0; rank < self->opts->world_size && status == TDDP_OK; rank++) {
        if (strcmp(records[rank].data, "yes") != 0) {
            status = tddp_fail(TDDP_INTERNAL,
                               "rank %d goes without shared memory, and no rank "
                               "reported why",
                               name_of(self, rank));
        }
    }
    return status;
}

static tddp_status meet(joining *self)
{
    tddp_status status = give_first(self);
    status = status ? status : await(self, 0);
    status = status ? status : read_first(self);
    if (status || !self->have_views) {
        return status ? status : meet_again(self);
    }
    status = attach_views(self);
    return status ? status : finish(self->shm);
}

/* --- joining --------------------------------------------------------------------------------- */

static tddp_status make_context(joining *self)
{
    const tddp_backend_opts *opts = self->opts;
    const size_t count = (size_t)opts->world_size;
    tddp_shm *shm = tddp_alloc(sizeof *shm);
    tddp_shm_peer *peers = tddp_alloc_array(count, sizeof *peers);
    self->addresses = tddp_alloc_array(count, sizeof *self->addresses);
    self->places = tddp_alloc_array(count, sizeof *self->places);
    if (!shm || !peers || !self->addresses || !self->places) {
        free(shm);
        free(peers);
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        if (is_here(opts, rank)) {
            shm->rank = rank == opts->rank ? shm->size : shm->rank;
            peers[shm->size].group_rank = rank;
            peers[shm->size++].rank_name = name_of(self, rank);
        }
    }
    shm->peers = peers;
    shm->pid = tddp_process_id();
    shm->polled_rank = -1;
    shm->observer = opts->observer;
    shm->layout = tddp_shm_layout_of(shm->size);
    self->shm = shm;
    return TDDP_OK;
}

tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal, const tddp_wait *wait,
                          tddp_shm **out)
{
    joining self = {.opts = opts,
                    .deadline = tddp_wait_deadline(wait, opts->timeout_ms),
                    .cancel = tddp_wait_cancel(wait),
                    .refusal = refusal,
                    .listen_fd = -1};
    tddp_status status = make_context(&self);
    status = status ? status : open_meetings(&self);
    status = status ? status : meet(&self);
    if (status) {
        status = fail(&self, status);
        if (status == TDDP_UNAVAILABLE && self.shm) {
            tddp_shm_fabric_drop_view(self.shm); /* all ranks go without */
        }
        tddp_shm_destroy(self.shm);
    } else {
        const tddp_shm *shm = self.shm;
        const tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
        tddp_log(TDDP_LOG_DEBUG, "shm", "%d ranks on this host, %d per core; %s, arenas of %zu MiB",
                 shm->size, shm->ranks_per_core,
                 shm->view ? "segments of an earlier group" : "segments of their own",
                 (segment->bytes - segment->arena) >> 20);
        if (!shm->view) {
            tddp_shm_fabric_fill(opts->fabric, shm, self.id);
        }
        *out = self.shm;
    }
    tddp_shm_stop_listening(&self.listen_fd);
    for (int number = 0; number < MEETINGS; number++) {
        tddp_meeting_close(self.meetings[number]);
    }
    free(self.addresses);
    free(self.places);
    return status;
}
