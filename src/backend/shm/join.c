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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/join.h"
#include "net/net.h"

enum { REASON_MS = 1000, PAUSE_MS = 20 };

/* --- the first round ------------------------------------------------------------------------- */

static int host_of(const tddp_backend_opts *opts, int group_rank)
{
    return opts->hosts ? opts->hosts[group_rank] : opts->same_host ? 0 : group_rank;
}

/* What is needed to say that this rank has failed, which is done before memory is asked for. */
static void count_ranks(tddp_shm_joining *self)
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

static tddp_status find_local_ranks(tddp_shm_joining *self)
{
    const tddp_backend_opts *opts = self->opts;
    const size_t count = (size_t)opts->world_size;
    int local = 0;
    int hosts = 0;
    self->local_ranks = tddp_alloc_array(count, sizeof *self->local_ranks);
    self->firsts = tddp_alloc_array(count, sizeof *self->firsts);
    self->names = tddp_alloc_array(count, sizeof *self->names);
    self->host_names = tddp_alloc_array(count, sizeof *self->host_names);
    self->addresses = tddp_alloc_array(count, sizeof *self->addresses);
    self->places = tddp_alloc_array(count, sizeof *self->places);
    if (!self->local_ranks || !self->firsts || !self->names || !self->host_names ||
        !self->addresses || !self->places) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        if (host_of(opts, rank) == hosts) {
            self->host_names[hosts] = tddp_shm_join_name(self, rank);
            self->firsts[hosts++] = rank;
        }
        if (host_of(opts, rank) == self->host) {
            self->names[local] = tddp_shm_join_name(self, rank);
            self->local_ranks[local++] = rank;
        }
    }
    return tddp_shm_join_open(self);
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
        tddp_shm_choices_text(&self->shm->choices, self->overrides);
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

static tddp_status give_first(tddp_shm_joining *self)
{
    char text[TDDP_SHM_REPORT_BYTES];
    if (prepare(self)) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    } else {
        const tddp_shm_place *mine = &self->places[self->rank];
        (void)snprintf(text, sizeof text, "yes %s %zu %s %s %d %zu",
                       self->size > 1 ? self->address : "-", self->arena,
                       self->overrides[0] ? self->overrides : "-", mine->id, mine->rank, mine->at);
    }
    return tddp_shm_join_give(self, self->rounds[0].ranks, text);
}

static tddp_status take_first(tddp_shm_joining *self, int local, const char *text)
{
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    size_t arena;
    const int rank = self->local_ranks[local];
    tddp_shm_place *place = &self->places[local];
    if (sscanf(text, "yes %63s %zu %255s %63s %d %zu", address, &arena, overrides, place->id,
               &place->rank, &place->at) != 6) {
        return tddp_shm_join_malformed(self, rank, text);
    }
    memcpy(self->addresses[local], address, sizeof address);
    self->arena = arena < self->arena ? arena : self->arena;
    self->has_views &= strcmp(place->id, "-") != 0 && strcmp(place->id, self->places[0].id) == 0;
    return tddp_shm_join_compare_overrides(self, self->local_ranks[0], rank, overrides);
}

static tddp_status take_all_first(tddp_shm_joining *self)
{
    tddp_meeting *meeting = self->rounds[0].ranks;
    tddp_status status = tddp_shm_join_await(self, meeting);
    status = status ? status : tddp_shm_join_check_records(self, 0);
    self->has_views = true;
    for (int local = 0; local < self->size && status == TDDP_OK; local++) {
        status = take_first(self, local, tddp_meeting_records(meeting)[local].data);
    }
    self->has_views &= status == TDDP_OK;
    self->all_have_views = self->has_views;
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

/* Why a lost rank failed, if it says so: it does soon after it has closed its sockets. */
static tddp_status find_reason(const tddp_shm_joining *self, int lost, tddp_status status)
{
    char saved[TDDP_SHM_REPORT_BYTES];
    tddp_meeting *meeting = self->rounds[1].ranks;
    const int64_t until = tddp_deadline_after_ms(REASON_MS);
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    do {
        const tddp_wait wait = {tddp_deadline_poll_ms(until), self->cancel};
        if (tddp_meeting_read(meeting, &wait)) {
            break;
        }
        const tddp_slice record = tddp_meeting_records(meeting)[lost];
        const tddp_status failed = tddp_shm_join_check_failures(meeting);
        if (failed) {
            return failed;
        }
        if (record.data) {
            return tddp_shm_join_begins(record.data, "yes") ? tddp_fail(status, "%s", saved)
                                                            : TDDP_UNAVAILABLE;
        }
    } while (tddp_now_ns() < until && tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS),
                                                     tddp_cancel_fd(self->cancel)) == TDDP_OK);
    return tddp_fail(status, "%s", saved);
}

/* The others need not wait for this rank's segment. The record precedes the closed socket that
 * shows it. */
static tddp_status decline(tddp_shm_joining *self, const char *text)
{
    tddp_status status = tddp_shm_join_give(self, self->rounds[1].ranks, text);
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
        return tddp_shm_join_give(self, self->rounds[1].ranks, "yes");
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED || status == TDDP_PEER_LOST) {
        return status;
    }
    char text[TDDP_SHM_REPORT_BYTES];
    (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    return decline(self, text);
}

/* --- the second round ------------------------------------------------------------------------ */

static tddp_status take_all_second(tddp_shm_joining *self)
{
    tddp_meeting *meeting = self->rounds[1].ranks;
    tddp_status status = TDDP_OK;
    if (!self->has_views) {
        status = tddp_shm_join_await(self, meeting);
        status = status ? status : tddp_shm_join_check_records(self, 1);
        for (int local = 0; local < self->size && status == TDDP_OK; local++) {
            if (!tddp_shm_join_begins(tddp_meeting_records(meeting)[local].data, "yes")) {
                status = tddp_fail(TDDP_INTERNAL, "a rank goes without shared memory, and no rank "
                                                  "reported why");
            }
        }
    }
    return tddp_shm_join_agree(self, 1, status);
}

static tddp_status run(tddp_shm_joining *self)
{
    tddp_status status = give_first(self);
    status = status ? status : take_all_first(self);
    if (status == TDDP_OK) {
        status = self->has_views ? attach_views(self) : get_segments(self);
    }
    return status || self->all_have_views ? status : take_all_second(self);
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
    shm->observer = self->opts->observer;
    shm->layout = tddp_shm_layout_of(self->size);
    shm->peers = tddp_alloc_array((size_t)self->size, sizeof *shm->peers);
    for (int i = 0; shm->peers && i < self->size; i++) {
        shm->peers[i].group_rank = self->local_ranks[i];
        shm->peers[i].rank_name = self->names[i];
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
    count_ranks(&self);
    tddp_status status = find_local_ranks(&self);
    if (status == TDDP_OK) {
        status = make_context(&self);
    }
    if (status == TDDP_OK) {
        status = run(&self);
    }
    if (status) {
        tddp_shm_join_fail(&self, status);
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
    free(self.names);
    free(self.host_names);
    tddp_shm_join_close(&self);
    return status;
}
