/*
 * The join: the ranks of a group agree on sharing memory, and exchange their segments. Runs on the
 * thread that creates the group.
 *
 * Each rank publishes two reports in the store, which all others read: one before segments are
 * exchanged ("shm/RANK"), one when it has them all ("shm/RANK/mapped"). Where all ranks of a host
 * have the segments of an earlier group (fabric.c), they need only the first.
 *
 *     yes ...       it can share; the first has its socket's name, its arena size, its overrides
 *                   and the place of its view
 *     no TEXT       it cannot or must not share: all ranks go without
 *     after         it stopped because of another rank's "no"
 *     a failure     it failed for another reason, and so do the others: published by
 *                   tddp_backend_publish_failure()
 *
 * Invariants: unless it is killed, a rank publishes both reports whatever happens, so that no rank
 * waits for one that gave up. All ranks that see a "no" fail with the same text, that of the lowest
 * such rank.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/control.h"

enum { REPORT_BYTES = TDDP_SHM_REPORT_BYTES, REASON_MS = 1000, SLICE_MS = 200 };

typedef struct join {
    tddp_shm_join_store reports;
    const tddp_backend_opts *opts;
    const char *refusal;
    int *local_ranks; /* the ranks of this host, sorted */
    int size;
    int rank; /* index in local_ranks */
    int listen_fd;
    size_t arena;
    char address[TDDP_SHM_ADDRESS_BYTES];
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    tddp_shm_place *places; /* by rank of the group */
    bool *has_views;        /* by rank of the group: its host's ranks have earlier segments */
    tddp_shm *shm;
} join;

/* --- round 0 --------------------------------------------------------------------------------- */

static int host_of(const tddp_backend_opts *opts, int group_rank)
{
    return opts->hosts ? opts->hosts[group_rank] : opts->same_host ? 0 : group_rank;
}

static tddp_status find_local_ranks(join *self)
{
    const tddp_backend_opts *opts = self->opts;
    const size_t count = (size_t)opts->world_size;
    self->local_ranks = tddp_alloc_array(count, sizeof *self->local_ranks);
    self->addresses = tddp_alloc_array(count, sizeof *self->addresses);
    self->places = tddp_alloc_array(count, sizeof *self->places);
    self->has_views = tddp_alloc_array(count, sizeof *self->has_views);
    if (!self->local_ranks || !self->addresses || !self->places || !self->has_views) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
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
static tddp_status prepare(join *self)
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
        tddp_shm_fabric_take_view(self->opts->fabric, self->shm, &self->places[self->opts->rank]);
    }
    if (self->shm->view) {
        tddp_shm_publish_cores(tddp_shm_self(self->shm)->control);
    }
    return status;
}

static tddp_status publish_first(join *self)
{
    char text[REPORT_BYTES];
    if (prepare(self)) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    } else {
        const tddp_shm_place *mine = &self->places[self->opts->rank];
        (void)snprintf(text, sizeof text, "yes %s %zu %s %s %d %zu",
                       self->size > 1 ? self->address : "-", self->arena,
                       self->overrides[0] ? self->overrides : "-", mine->id, mine->rank, mine->at);
    }
    return tddp_shm_join_publish(&self->reports, 0, text);
}

static int local_rank_of(const join *self, int group_rank)
{
    for (int i = 0; i < self->size; i++) {
        if (self->local_ranks[i] == group_rank) {
            return i;
        }
    }
    return -1;
}

static tddp_status apply_first(join *self, int group_rank, const tddp_shm_join_report *report)
{
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    size_t arena;
    int local = local_rank_of(self, group_rank);
    tddp_shm_place *place = &self->places[group_rank];
    if (sscanf(report->text, "yes %63s %zu %255s %63s %d %zu", address, &arena, overrides,
               place->id, &place->rank, &place->at) != 6) {
        return tddp_fail(
            TDDP_PROTOCOL,
            "rank %d published \"%.100s\" in the store: expected one version of libtddp on "
            "all ranks",
            tddp_shm_join_rank_name(&self->reports, group_rank), report->text);
    }
    if (group_rank == 0) {
        (void)snprintf(self->overrides, sizeof self->overrides, "%s", overrides);
    } else if (strcmp(self->overrides, overrides) != 0) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "TDDP_SHM_ALGORITHM is \"%s\" on rank %d, \"%s\" on rank %d: expected the "
                         "same on all ranks",
                         self->overrides, tddp_shm_join_rank_name(&self->reports, 0), overrides,
                         tddp_shm_join_rank_name(&self->reports, group_rank));
    }
    if (local >= 0) {
        memcpy(self->addresses[local], address, sizeof address);
        self->arena = arena < self->arena ? arena : self->arena;
    }
    return TDDP_OK;
}

/* Whether all ranks of a host have the segments of the same group; for each host. */
static tddp_status find_views(join *self)
{
    const tddp_backend_opts *opts = self->opts;
    int *first = tddp_alloc_array((size_t)opts->world_size, sizeof *first); /* rank + 1, by host */
    if (!first) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        int *leader = &first[host_of(opts, rank)];
        *leader = *leader ? *leader : rank + 1;
        const char *id = self->places[*leader - 1].id;
        bool *together = &self->has_views[*leader - 1];
        *together = (rank + 1 == *leader || *together) && strcmp(id, "-") != 0 &&
                    strcmp(id, self->places[rank].id) == 0;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        self->has_views[rank] = self->has_views[first[host_of(opts, rank)] - 1];
    }
    free(first);
    return TDDP_OK;
}

/* Reads all reports before it applies any, so that all ranks name the lowest rank that said
 * "no". */
static tddp_status read_first(join *self)
{
    const int count = self->opts->world_size;
    tddp_shm_join_report *reports = tddp_alloc_array((size_t)count, sizeof *reports);
    if (!reports) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status =
        tddp_shm_join_read_all(&self->reports, 0, self->has_views, SLICE_MS, reports);
    /* If one is late, the others' may say why. */
    const bool one_by_one = status == TDDP_TIMEOUT;
    status = one_by_one ? TDDP_OK : status;
    for (int group_rank = 0; group_rank < count && status == TDDP_OK; group_rank++) {
        if (one_by_one) {
            status =
                tddp_shm_join_read(&self->reports, group_rank, 0, INT64_MAX, &reports[group_rank]);
        }
        if (status == TDDP_OK) {
            status = tddp_shm_join_check(&self->reports, group_rank, &reports[group_rank]);
        }
    }
    for (int group_rank = 0; group_rank < count && status == TDDP_OK; group_rank++) {
        status = apply_first(self, group_rank, &reports[group_rank]);
    }
    free(reports);
    return status ? status : find_views(self);
}

/* --- views ----------------------------------------------------------------------------------- */

static tddp_status attach_views(const join *self)
{
    tddp_shm *shm = self->shm;
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < shm->size && status == TDDP_OK; rank++) {
        if (rank != shm->rank) {
            status = tddp_shm_fabric_attach(shm, rank, &self->places[shm->peers[rank].group_rank]);
        }
    }
    if (status == TDDP_OK) {
        tddp_shm_count_cores(shm);
        status = tddp_shm_matching_create(shm, &shm->matching);
    }
    return status;
}

/* --- segments -------------------------------------------------------------------------------- */

static tddp_status make_segment(join *self)
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
static tddp_status find_reason(const join *self, int lost, tddp_status status)
{
    char saved[REPORT_BYTES];
    tddp_shm_join_report report;
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    if (tddp_shm_join_read(&self->reports, self->local_ranks[lost], 1, REASON_MS, &report) ==
        TDDP_OK) {
        tddp_status checked = tddp_shm_join_check(&self->reports, self->local_ranks[lost], &report);
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
static tddp_status decline(join *self, const char *text)
{
    tddp_status status = tddp_shm_join_publish(&self->reports, 1, text);
    tddp_close(self->listen_fd);
    self->listen_fd = -1;
    return status;
}

static tddp_status get_segments(join *self)
{
    int lost = -1;
    tddp_shm_segment_exchange params = {self->shm, self->listen_fd, self->addresses,
                                        self->reports.deadline,
                                        tddp_cancel_fd(self->reports.cancel)};
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
        return tddp_shm_join_publish(&self->reports, 1, "yes");
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED || status == TDDP_PEER_LOST) {
        return status;
    }
    char text[REPORT_BYTES];
    (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    return decline(self, text);
}

/* --- round 1 --------------------------------------------------------------------------------- */

/* Whether a rank of this host whose segment is mapped has ended. */
static tddp_status check_local_peer(const join *self, int group_rank)
{
    int local = local_rank_of(self, group_rank);
    const tddp_shm_peer *peer = local >= 0 ? &self->shm->peers[local] : NULL;
    if (peer && local != self->rank && peer->segment && !peer->same_process &&
        tddp_shm_segment_owner_ended(peer->segment)) {
        return tddp_fail(TDDP_PEER_LOST, "lost rank %d, which ended while shared memory was set up",
                         tddp_shm_join_rank_name(&self->reports, group_rank));
    }
    return TDDP_OK;
}

static tddp_status read_second_of(const join *self, int group_rank, tddp_shm_join_report *report)
{
    for (;;) {
        tddp_status status = tddp_shm_join_read(&self->reports, group_rank, 1, SLICE_MS, report);
        if (status != TDDP_TIMEOUT || tddp_deadline_poll_ms(self->reports.deadline) == 0) {
            return status ? status : tddp_shm_join_check(&self->reports, group_rank, report);
        }
        status = check_local_peer(self, group_rank);
        if (status) {
            return status;
        }
    }
}

static tddp_status read_second(const join *self)
{
    const int count = self->opts->world_size;
    tddp_shm_join_report *reports = tddp_alloc_array((size_t)count, sizeof *reports);
    if (!reports) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status =
        tddp_shm_join_read_all(&self->reports, 1, self->has_views, SLICE_MS, reports);
    const bool one_by_one = status == TDDP_TIMEOUT;
    status = one_by_one ? TDDP_OK : status;
    bool follower = false;
    for (int group_rank = 0; group_rank < count && status == TDDP_OK; group_rank++) {
        tddp_shm_join_report *report = &reports[group_rank];
        if (self->has_views[group_rank]) {
            continue;
        }
        status = one_by_one ? read_second_of(self, group_rank, report)
                            : tddp_shm_join_check(&self->reports, group_rank, report);
        follower = follower || (status == TDDP_OK && tddp_shm_report_begins(report, "after"));
    }
    free(reports);
    if (status == TDDP_OK && follower) {
        status =
            tddp_fail(TDDP_INTERNAL, "a rank goes without shared memory, and no rank reported why");
    }
    return status;
}

static tddp_status run(join *self)
{
    tddp_status status = publish_first(self);
    if (status == TDDP_OK) {
        status = read_first(self);
    }
    if (status == TDDP_OK) {
        status = self->has_views[self->opts->rank] ? attach_views(self) : get_segments(self);
    }
    return status ? status : read_second(self);
}

/* All ranks wait for this one's reports. TDDP_UNAVAILABLE needs none: every rank arrives at it
 * itself. */
static void publish_failure(join *self, tddp_status status)
{
    char saved[REPORT_BYTES];
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    if (status != TDDP_UNAVAILABLE) {
        tddp_shm_join_publish_failure(&self->reports, saved);
    }
    if (self->shm && self->shm->peers && tddp_shm_self(self->shm)->control) {
        tddp_shm_report_failure(self->shm, status, saved);
    }
    (void)tddp_fail(status, "%s", saved);
}

static tddp_status make_context(join *self)
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
        shm->peers[i].rank_name = tddp_shm_join_rank_name(&self->reports, self->local_ranks[i]);
    }
    return shm->peers ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal, const tddp_wait *wait,
                          tddp_shm **out)
{
    join self = {.opts = opts, .refusal = refusal, .listen_fd = -1};
    self.reports = (tddp_shm_join_store){.opts = opts,
                                         .deadline = tddp_wait_deadline(wait, opts->timeout_ms),
                                         .cancel = tddp_wait_cancel(wait)};
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
    free(self.addresses);
    free(self.places);
    free(self.has_views);
    return status;
}
