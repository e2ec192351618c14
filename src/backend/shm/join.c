/*
 * The join: the ranks of a group agree on sharing memory, and exchange their segments. Runs on the
 * thread that creates the group.
 *
 * join.h describes the reports by which they agree.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/join.h"

enum { REPORT_BYTES = TDDP_SHM_REPORT_BYTES, REASON_MS = 1000 };

/* --- round 0 --------------------------------------------------------------------------------- */

static int host_of(const tddp_backend_opts *opts, int group_rank)
{
    return opts->hosts ? opts->hosts[group_rank] : opts->same_host ? 0 : group_rank;
}

static tddp_status find_local_ranks(tddp_shm_joining *self)
{
    const tddp_backend_opts *opts = self->opts;
    const size_t count = (size_t)opts->world_size;
    self->local_ranks = tddp_alloc_array(count, sizeof *self->local_ranks);
    self->hosts = tddp_alloc_array(count, sizeof *self->hosts);
    self->firsts = tddp_alloc_array(count, sizeof *self->firsts);
    self->addresses = tddp_alloc_array(count, sizeof *self->addresses);
    self->places = tddp_alloc_array(count, sizeof *self->places);
    self->has_views = tddp_alloc_array(count, sizeof *self->has_views);
    if (!self->local_ranks || !self->hosts || !self->firsts || !self->addresses || !self->places ||
        !self->has_views) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        self->hosts[rank] = host_of(opts, rank);
        if (self->hosts[rank] == self->host_count) {
            self->firsts[self->host_count++] = rank;
        }
        if (rank == opts->rank) {
            self->rank = self->size;
        }
        if (host_of(opts, rank) == host_of(opts, opts->rank)) {
            self->local_ranks[self->size++] = rank;
        }
    }
    return TDDP_OK;
}

/* Any failure here is a reason to go without shared memory. */
static tddp_status prepare(tddp_shm_joining *self)
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

static tddp_status publish_first(tddp_shm_joining *self)
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
    return tddp_shm_join_publish(self, TDDP_SHM_RANKS, 0, text);
}

static tddp_status apply_first(tddp_shm_joining *self, int local,
                               const tddp_shm_join_report *report)
{
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    size_t arena;
    const int group_rank = self->local_ranks[local];
    tddp_shm_place *place = &self->places[local];
    if (sscanf(report->text, "yes %63s %zu %255s %63s %d %zu", address, &arena, overrides,
               place->id, &place->rank, &place->at) != 6) {
        return tddp_shm_join_fail_malformed(self, group_rank, report);
    }
    memcpy(self->addresses[local], address, sizeof address);
    self->arena = arena < self->arena ? arena : self->arena;
    return tddp_shm_join_compare_overrides(self, self->local_ranks[0], group_rank, overrides);
}

/* Whether all ranks of this host have the segments of the same group. */
static bool all_have_views(const tddp_shm_joining *self)
{
    const char *id = self->places[0].id;
    bool all = strcmp(id, "-") != 0;
    for (int local = 1; local < self->size; local++) {
        all = all && strcmp(id, self->places[local].id) == 0;
    }
    return all;
}

/* Reads all reports before it applies any, so that all ranks name the lowest rank that said
 * "no". */
static tddp_status read_first(tddp_shm_joining *self)
{
    tddp_shm_join_report *reports = tddp_alloc_array((size_t)self->size, sizeof *reports);
    if (!reports) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status =
        tddp_shm_join_collect(self, TDDP_SHM_RANKS, 0, self->local_ranks, self->size, reports);
    for (int local = 0; local < self->size && status == TDDP_OK; local++) {
        status = apply_first(self, local, &reports[local]);
    }
    free(reports);
    self->has_views[tddp_shm_join_host(self)] = status == TDDP_OK && all_have_views(self);
    return tddp_shm_join_agree(self, 0, status);
}

/* --- views ----------------------------------------------------------------------------------- */

static tddp_status attach_views(const tddp_shm_joining *self)
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

static tddp_status make_segment(tddp_shm_joining *self)
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

/* Why a lost rank failed, if it published a reason: it does so before it closes its sockets. */
static tddp_status find_reason(tddp_shm_joining *self, int lost, tddp_status status)
{
    char saved[REPORT_BYTES];
    tddp_shm_join_report report;
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    const int rank = self->local_ranks[lost];
    if (tddp_shm_join_read(self, TDDP_SHM_RANKS, 1, rank, REASON_MS, &report) == TDDP_OK) {
        tddp_status checked = tddp_shm_join_check(self, TDDP_SHM_RANKS, rank, &report);
        if (checked) {
            return checked;
        }
        if (tddp_shm_report_begins(&report, "after")) {
            return TDDP_UNAVAILABLE;
        }
    }
    return tddp_fail(status, "%s", saved);
}

/* The others need not wait for this rank's segment. The report precedes the closed socket that
 * shows it. */
static tddp_status decline(tddp_shm_joining *self, const char *text)
{
    tddp_status status = tddp_shm_join_publish(self, TDDP_SHM_RANKS, 1, text);
    tddp_close(self->listen_fd);
    self->listen_fd = -1;
    return status;
}

static tddp_status get_segments(tddp_shm_joining *self)
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
        return tddp_shm_join_publish(self, TDDP_SHM_RANKS, 1, "yes");
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED || status == TDDP_PEER_LOST) {
        return status;
    }
    char text[REPORT_BYTES];
    (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    return decline(self, text);
}

/* --- round 1 --------------------------------------------------------------------------------- */

static tddp_status read_second(tddp_shm_joining *self)
{
    if (self->has_views[tddp_shm_join_host(self)]) {
        return tddp_shm_join_agree(self, 1, TDDP_OK);
    }
    tddp_shm_join_report *reports = tddp_alloc_array((size_t)self->size, sizeof *reports);
    if (!reports) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status =
        tddp_shm_join_collect(self, TDDP_SHM_RANKS, 1, self->local_ranks, self->size, reports);
    for (int local = 0; local < self->size && status == TDDP_OK; local++) {
        if (tddp_shm_report_begins(&reports[local], "after")) {
            status = tddp_fail(TDDP_INTERNAL,
                               "a rank goes without shared memory, and no rank reported why");
        }
    }
    free(reports);
    return tddp_shm_join_agree(self, 1, status);
}

static tddp_status run(tddp_shm_joining *self)
{
    tddp_status status = publish_first(self);
    if (status == TDDP_OK) {
        status = read_first(self);
    }
    if (status == TDDP_OK) {
        status =
            self->has_views[tddp_shm_join_host(self)] ? attach_views(self) : get_segments(self);
    }
    return status ? status : read_second(self);
}

/* All ranks wait for this one's reports. TDDP_UNAVAILABLE needs none: every rank arrives at it
 * itself. */
static void publish_failure(tddp_shm_joining *self, tddp_status status)
{
    char saved[REPORT_BYTES];
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    if (status != TDDP_UNAVAILABLE) {
        tddp_shm_join_publish_failure(self, saved);
    }
    if (self->shm && self->shm->peers && tddp_shm_self(self->shm)->control) {
        tddp_shm_report_failure(self->shm, status, saved);
    }
    (void)tddp_fail(status, "%s", saved);
}

static tddp_status make_context(tddp_shm_joining *self)
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
        shm->peers[i].rank_name = tddp_shm_join_rank_name(self, self->local_ranks[i]);
    }
    return shm->peers ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal, const tddp_wait *wait,
                          tddp_shm **out)
{
    tddp_shm_joining self = {.opts = opts,
                             .deadline = tddp_wait_deadline(wait, opts->timeout_ms),
                             .cancel = tddp_wait_cancel(wait),
                             .refusal = refusal,
                             .listen_fd = -1,
                             .declined = -1};
    tddp_status status = find_local_ranks(&self);
    if (status == TDDP_OK) {
        status = make_context(&self);
    }
    if (status == TDDP_OK) {
        status = run(&self);
    }
    if (status) {
        publish_failure(&self, status);
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
    free(self.hosts);
    free(self.firsts);
    free(self.addresses);
    free(self.places);
    free(self.has_views);
    return status;
}
