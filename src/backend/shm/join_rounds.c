/*
 * The meetings of a group that joins (join.c says which there are), and what their records make
 * known: which rank cannot share memory, and why. Runs on the thread that creates the group.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "backend/shm/join.h"

enum { NAME_BYTES = 32, REASON_MS = 1000, CHECK_MS = 200 };

/* --- meetings -------------------------------------------------------------------------------- */

/* While records are missing in the second round: whether a rank of this host has ended without a
 * word of its own, or, among hosts, of its host. */
static tddp_status check_ended(const tddp_shm_joining *self, tddp_meeting *meeting, bool hosts)
{
    const tddp_wait wait = {REASON_MS, self->cancel};
    for (int local = 0; local < self->size; local++) {
        const tddp_shm_peer *peer = &self->shm->peers[local];
        int speaks = hosts ? self->host : local;
        if (local == self->rank || !peer->segment || peer->same_process ||
            !tddp_shm_segment_owner_ended(peer->segment)) {
            continue;
        }
        tddp_status status = tddp_meeting_read(meeting, &wait);
        if (status) {
            return status;
        }
        if (!tddp_meeting_records(meeting)[speaks].data &&
            !tddp_meeting_failure(meeting, &speaks)) {
            return tddp_fail(TDDP_PEER_LOST,
                             "lost rank %d, which ended while shared memory was set up",
                             self->names[local]);
        }
    }
    return TDDP_OK;
}

static tddp_status check_ranks(void *data)
{
    const tddp_shm_joining *self = data;
    return check_ended(self, self->rounds[1].ranks, false);
}

static tddp_status check_hosts(void *data)
{
    const tddp_shm_joining *self = data;
    return check_ended(self, self->rounds[1].hosts, true);
}

/* Of a round: a meeting of the hosts, or of this host's ranks. `name` is written, and borrowed. */
static tddp_meeting_opts meeting_of(tddp_shm_joining *self, int round, bool hosts,
                                    char name[NAME_BYTES])
{
    (void)snprintf(name, NAME_BYTES, hosts ? "shm/%d/hosts" : "shm/%d/%d", round, self->host);
    return (tddp_meeting_opts){.store = self->opts->store,
                               .name = name,
                               .rank = hosts ? self->host : self->rank,
                               .world_size = hosts ? self->host_count : self->size,
                               .sender = TDDP_MEETING_ALL,
                               .names = hosts ? self->host_names : self->names,
                               .check = round == 0 ? NULL
                                        : hosts    ? check_hosts
                                                   : check_ranks,
                               .data = self,
                               .check_ms = CHECK_MS};
}

tddp_status tddp_shm_join_open(tddp_shm_joining *self)
{
    char name[NAME_BYTES];
    tddp_status status = TDDP_OK;
    for (int round = 0; round < 2 && status == TDDP_OK; round++) {
        tddp_shm_join_round *made = &self->rounds[round];
        tddp_meeting_opts opts = meeting_of(self, round, false, name);
        status = tddp_meeting_open(&opts, &made->ranks);
        if (status == TDDP_OK && self->host_count > 1) {
            opts = meeting_of(self, round, true, name);
            status = tddp_meeting_open(&opts, &made->hosts);
        }
    }
    return status;
}

void tddp_shm_join_close(tddp_shm_joining *self)
{
    for (int round = 0; round < 2; round++) {
        tddp_meeting_close(self->rounds[round].ranks);
        tddp_meeting_close(self->rounds[round].hosts);
    }
}

tddp_status tddp_shm_join_give(const tddp_shm_joining *self, tddp_meeting *meeting,
                               const char *text)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    return tddp_meeting_give(meeting, (tddp_slice){text, strlen(text)}, &wait);
}

/* TDDP_PEER_LOST if a rank has failed, as was read last. */
tddp_status tddp_shm_join_check_failures(const tddp_meeting *meeting)
{
    int rank = -1;
    const char *reason = tddp_meeting_failure(meeting, &rank);
    return reason ? tddp_fail(TDDP_PEER_LOST, "%s", reason) : TDDP_OK;
}

tddp_status tddp_shm_join_await(const tddp_shm_joining *self, tddp_meeting *meeting)
{
    const tddp_wait wait = {tddp_deadline_poll_ms(self->deadline), self->cancel};
    tddp_status status = tddp_meeting_await(meeting, &wait);
    if (status == TDDP_PEER_LOST) {
        const tddp_status failed = tddp_shm_join_check_failures(meeting);
        status = failed ? failed : status;
    }
    return status;
}

/* --- what is made of the records ------------------------------------------------------------- */

tddp_status tddp_shm_join_malformed(const tddp_shm_joining *self, int rank, const char *text)
{
    return tddp_fail(TDDP_PROTOCOL,
                     "rank %d published \"%.100s\" in the store: expected one version of libtddp "
                     "on all ranks",
                     tddp_shm_join_name(self, rank), text);
}

static void note_no(tddp_shm_joining *self, int rank, const char *text)
{
    if (self->declined < 0 || rank < self->declined) {
        self->declined = rank;
        (void)snprintf(self->reason, sizeof self->reason, "%s", text);
    }
}

static tddp_status check_declined(const tddp_shm_joining *self)
{
    return self->declined < 0 ? TDDP_OK
                              : tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                                          tddp_shm_join_name(self, self->declined), self->reason);
}

/* Compares with the overrides of the rank `first`, which are taken over. */
tddp_status tddp_shm_join_compare_overrides(tddp_shm_joining *self, int first, int rank,
                                            const char *overrides)
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
                   self->overrides, tddp_shm_join_name(self, first), overrides,
                   tddp_shm_join_name(self, rank));
    self->declined = rank;
    return tddp_fail(TDDP_UNAVAILABLE, "%s", self->reason);
}

/* What this host's ranks made of a round. */
static tddp_status give_host(const tddp_shm_joining *self, int round, tddp_status local)
{
    char text[TDDP_SHM_REPORT_BYTES];
    if (local) {
        (void)snprintf(text, sizeof text, "no %d %.900s", self->declined, self->reason);
    } else {
        (void)snprintf(text, sizeof text, "yes %s %d", self->overrides, self->has_views);
    }
    return tddp_shm_join_give(self, self->rounds[round].hosts, text);
}

static tddp_status take_host(tddp_shm_joining *self, int host, const char *text)
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
        return tddp_shm_join_malformed(self, self->firsts[host], text);
    }
    self->all_have_views &= has_views != 0;
    return self->declined >= 0
               ? TDDP_OK
               : tddp_shm_join_compare_overrides(self, 0, self->firsts[host], overrides);
}

/* What all ranks make of a round, of which this host's made `local`; its text is the thread's. */
tddp_status tddp_shm_join_agree(tddp_shm_joining *self, int round, tddp_status local)
{
    tddp_meeting *hosts = self->rounds[round].hosts;
    if (!hosts || (local && local != TDDP_UNAVAILABLE)) {
        return local;
    }
    tddp_status status = self->rank == 0 ? give_host(self, round, local) : TDDP_OK;
    status = status ? status : tddp_shm_join_await(self, hosts);
    for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
        status = take_host(self, host, tddp_meeting_records(hosts)[host].data);
    }
    return status ? status : check_declined(self);
}

/* The "no"s of this host's ranks. */
tddp_status tddp_shm_join_check_records(tddp_shm_joining *self, int round)
{
    const tddp_slice *records = tddp_meeting_records(self->rounds[round].ranks);
    for (int local = 0; local < self->size; local++) {
        if (tddp_shm_join_begins(records[local].data, "no ")) {
            note_no(self, self->local_ranks[local], records[local].data + strlen("no "));
        }
    }
    return check_declined(self);
}

/* --- failures -------------------------------------------------------------------------------- */

/* All ranks wait for this one, or its host, at one of the meetings. TDDP_UNAVAILABLE needs no word:
 * every rank arrives at it itself. */
void tddp_shm_join_fail(tddp_shm_joining *self, tddp_status status)
{
    char saved[TDDP_SHM_REPORT_BYTES];
    char text[TDDP_SHM_REPORT_BYTES];
    char name[NAME_BYTES];
    (void)snprintf(saved, sizeof saved, "%s", tddp_error_message());
    (void)snprintf(text, sizeof text, "rank %d failed while shared memory was set up: %.900s",
                   tddp_shm_join_name(self, self->opts->rank), saved);
    for (int round = 1; round >= 0 && status != TDDP_UNAVAILABLE; round--) {
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
