/*
 * What the ranks make of each other's reports while they join: within a host, then between the
 * hosts. join.h describes the reports. Runs on the thread that joins.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/join.h"

bool tddp_shm_report_begins(const tddp_shm_join_report *report, const char *prefix)
{
    return strncmp(report->text, prefix, strlen(prefix)) == 0;
}

static tddp_status fail_declined(const tddp_shm_joining *self)
{
    return tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                     tddp_shm_join_rank_name(self, self->declined), self->reason);
}

tddp_status tddp_shm_join_fail_malformed(const tddp_shm_joining *self, int rank,
                                         const tddp_shm_join_report *report)
{
    return tddp_fail(TDDP_PROTOCOL,
                     "rank %d published \"%.100s\" in the store: expected one version of libtddp "
                     "on all ranks",
                     tddp_shm_join_rank_name(self, rank), report->text);
}

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
                   self->overrides, tddp_shm_join_rank_name(self, first), overrides,
                   tddp_shm_join_rank_name(self, rank));
    self->declined = rank;
    return tddp_fail(TDDP_UNAVAILABLE, "%s", self->reason);
}

tddp_status tddp_shm_join_check(tddp_shm_joining *self, tddp_shm_join_scope scope, int number,
                                const tddp_shm_join_report *report)
{
    const char *text = report->text;
    const int reporter = scope == TDDP_SHM_HOSTS ? self->firsts[number] : number;
    const char *failure = tddp_backend_published_failure((tddp_slice){text, strlen(text)});
    if (failure) {
        return tddp_fail(TDDP_PEER_LOST, "%s", failure);
    }
    if (tddp_shm_report_begins(report, "no ")) {
        int rank = number;
        int used = (int)strlen("no ");
        if (scope == TDDP_SHM_HOSTS && (sscanf(text, "no %d %n", &rank, &used) != 1 || rank < 0 ||
                                        rank >= self->opts->world_size)) {
            return tddp_shm_join_fail_malformed(self, reporter, report);
        }
        if (self->declined < 0 || rank < self->declined) {
            self->declined = rank;
            (void)snprintf(self->reason, sizeof self->reason, "%s", text + used);
        }
        return fail_declined(self);
    }
    return tddp_shm_report_begins(report, "yes") || tddp_shm_report_begins(report, "after")
               ? TDDP_OK
               : tddp_shm_join_fail_malformed(self, reporter, report);
}

/* --- waiting --------------------------------------------------------------------------------- */

/* Whether a rank of this host whose segment is mapped has ended: the one whose report is awaited,
 * or any, on which its host's report depends. */
static tddp_status check_local_ranks(const tddp_shm_joining *self, tddp_shm_join_scope scope,
                                     int number)
{
    for (int local = 0; local < self->size; local++) {
        const tddp_shm_peer *peer = &self->shm->peers[local];
        const bool counts = scope == TDDP_SHM_HOSTS || self->local_ranks[local] == number;
        if (counts && local != self->rank && peer->segment && !peer->same_process &&
            tddp_shm_segment_owner_ended(peer->segment)) {
            return tddp_fail(TDDP_PEER_LOST,
                             "lost rank %d, which ended while shared memory was set up",
                             tddp_shm_join_rank_name(self, self->local_ranks[local]));
        }
    }
    return TDDP_OK;
}

static tddp_status read_one(const tddp_shm_joining *self, tddp_shm_join_scope scope, int round,
                            int number, tddp_shm_join_report *out)
{
    for (;;) {
        tddp_status status = tddp_shm_join_read(self, scope, round, number, TDDP_SHM_SLICE_MS, out);
        if (status != TDDP_TIMEOUT || tddp_deadline_poll_ms(self->deadline) == 0) {
            return status;
        }
        status = check_local_ranks(self, scope, number);
        if (status) {
            /* It may have reported just before it ended. */
            char *text = tddp_copy_string(tddp_error_message());
            tddp_status reported = tddp_shm_join_read(self, scope, round, number, 1, out);
            if (reported) {
                (void)tddp_fail(status, "%s", text ? text : "lost a rank of this host");
            }
            free(text);
            return reported ? status : TDDP_OK;
        }
    }
}

tddp_status tddp_shm_join_collect(tddp_shm_joining *self, tddp_shm_join_scope scope, int round,
                                  const int *numbers, int count, tddp_shm_join_report *out)
{
    tddp_status status =
        tddp_shm_join_read_all(self, scope, round, numbers, (size_t)count, TDDP_SHM_SLICE_MS, out);
    /* If one is late, the others' may say why. */
    const bool one_by_one = status == TDDP_TIMEOUT;
    bool declined = false;
    status = one_by_one ? TDDP_OK : status;
    for (int i = 0; i < count && status == TDDP_OK; i++) {
        if (one_by_one) {
            status = read_one(self, scope, round, numbers[i], &out[i]);
        }
        if (status == TDDP_OK) {
            status = tddp_shm_join_check(self, scope, numbers[i], &out[i]);
        }
        if (status == TDDP_UNAVAILABLE && scope == TDDP_SHM_HOSTS) {
            declined = true; /* a later host may have a lower rank that says "no" */
            status = TDDP_OK;
        }
    }
    return status == TDDP_OK && declined ? fail_declined(self) : status;
}

/* --- between hosts --------------------------------------------------------------------------- */

/* The first rank of a host reports what its ranks made of the round. */
static tddp_status publish_host(tddp_shm_joining *self, int round, tddp_status local)
{
    char text[TDDP_SHM_REPORT_BYTES];
    if (local) {
        (void)snprintf(text, sizeof text, "no %d %.900s", self->declined, self->reason);
    } else {
        (void)snprintf(text, sizeof text, "yes %s %d", self->overrides,
                       self->has_views[tddp_shm_join_host(self)]);
    }
    return tddp_shm_join_publish(self, TDDP_SHM_HOSTS, round, text);
}

/* What another host said in round 0. */
static tddp_status apply_host(tddp_shm_joining *self, int host, const tddp_shm_join_report *report)
{
    char overrides[TDDP_SHM_CHOICES_TEXT];
    int has_views;
    if (sscanf(report->text, "yes %255s %d", overrides, &has_views) != 2) {
        return tddp_shm_join_fail_malformed(self, self->firsts[host], report);
    }
    self->has_views[host] = has_views != 0;
    return tddp_shm_join_compare_overrides(self, 0, self->firsts[host], overrides);
}

static tddp_status read_hosts(tddp_shm_joining *self, int round, int *numbers,
                              tddp_shm_join_report *reports)
{
    int count = 0;
    for (int host = 0; host < self->host_count; host++) {
        if (round == 0 || !self->has_views[host]) {
            numbers[count++] = host;
        }
    }
    tddp_status status =
        count > 0 ? tddp_shm_join_collect(self, TDDP_SHM_HOSTS, round, numbers, count, reports)
                  : TDDP_OK;
    for (int i = 0; i < count && status == TDDP_OK && round == 0; i++) {
        status = apply_host(self, numbers[i], &reports[i]);
    }
    return status;
}

tddp_status tddp_shm_join_agree(tddp_shm_joining *self, int round, tddp_status local)
{
    const bool needs_hosts = self->host_count > 1 && (!local || local == TDDP_UNAVAILABLE);
    if (!needs_hosts) {
        return local;
    }
    const size_t count = (size_t)self->host_count;
    int *numbers = tddp_alloc_array(count, sizeof *numbers);
    tddp_shm_join_report *reports = tddp_alloc_array(count, sizeof *reports);
    tddp_status status = numbers && reports ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    const bool reports_itself = round == 0 || !self->has_views[tddp_shm_join_host(self)];
    if (status == TDDP_OK && self->rank == 0 && reports_itself) {
        status = publish_host(self, round, local);
    }
    if (status == TDDP_OK) {
        status = read_hosts(self, round, numbers, reports);
    }
    free(numbers);
    free(reports);
    return status;
}
