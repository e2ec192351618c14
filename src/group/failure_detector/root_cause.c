/*
 * Finds the root cause of a group's failure in the ranks' status reports and what this rank's
 * backend has seen, and words it. Runs on the watcher thread, or on the thread whose operation
 * failed; keeps no state.
 *
 * Order of precedence: a mismatch between ranks; a process that has ended without a report, since
 * the other failures follow from it; the first rank that failed by itself; a rank that has left the
 * group. A rank that merely lost another rank is never the root cause.
 */
#include "group/failure_detector/root_cause.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_BYTES = 3072, NAMED = 6 };

/* The evidence, and the text that is made of it. */
typedef struct finding {
    const tddp_failure_evidence *of;
    tddp_failure failure; /* all zero but for its texts: another rank's operation failed */
    int count;
    tddp_status_report *reports; /* by rank */
    char text[TEXT_BYTES];
} finding;

/* Whether a rank is meant, and what is said of it. */
typedef bool filter(const finding *self, int rank);
typedef void words(finding *self, int rank);

static void add(finding *self, const char *format, ...) TDDP_PRINTF(2, 3);

static void add(finding *self, const char *format, ...)
{
    const size_t used = strlen(self->text);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(self->text + used, TEXT_BYTES - used, format, arguments);
    va_end(arguments);
}

static void add_rank(finding *self, int rank)
{
    char name[TDDP_PEER_NAME_BYTES];
    add(self, "%s", tddp_peers_name(self->of->peers, rank, name));
}

static bool any(const finding *self, filter *fits)
{
    int rank = 0;
    while (rank < self->count && !fits(self, rank)) {
        rank++;
    }
    return rank < self->count;
}

/* Adds what is to be said of the first `most` ranks that fit, and the number of the others; returns
 * how many fit. */
static int add_each(finding *self, filter *fits, words *say, const char *separator, int most)
{
    int found = 0;
    for (int rank = 0; rank < self->count; rank++) {
        if (fits(self, rank) && found++ < most) {
            add(self, "%s", found > 1 ? separator : "");
            say(self, rank);
        }
    }
    if (found > most) {
        add(self, "%sand %d more", separator[0] == ';' ? "; " : " ", found - most);
    }
    return found;
}

static int add_ranks(finding *self, filter *fits)
{
    return add_each(self, fits, add_rank, ", ", NAMED);
}

/* Adds host and pid of the ranks that a backend's error text of rank `reporter` names. */
static void add_named_peers(finding *self, int reporter, const char *error)
{
    char names[TDDP_PEERS_TEXT_BYTES];
    add(self, "%s", tddp_peers_annotate(self->of->peers, reporter, error, names));
}

/* The backend may see the end of a process that this one cannot observe. */
static tddp_peer_liveness liveness_of(const finding *self, int rank)
{
    return tddp_observed_of(self->of->observed, rank).kind == TDDP_OBSERVED_ENDED
               ? TDDP_PEER_ENDED
               : tddp_peers_check_liveness(self->of->peers, self->of->rank, rank);
}

static bool has_not_reported(const finding *self, int rank)
{
    return rank != self->of->rank && self->reports[rank].kind == TDDP_REPORT_NONE;
}

static bool may_report(const finding *self, int rank)
{
    const tddp_peer_liveness liveness =
        has_not_reported(self, rank) ? liveness_of(self, rank) : TDDP_PEER_ENDED;
    return liveness != TDDP_PEER_ENDED && liveness != TDDP_PEER_STOPPED;
}

/* Whether nothing more is to be waited for. */
static bool is_complete(const finding *self)
{
    return self->of->deadline_over || !any(self, may_report);
}

static bool is_victim(tddp_status status)
{
    return status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED || status == TDDP_GROUP_CLOSED;
}

static bool is_cause(tddp_status status)
{
    return !is_victim(status);
}

static bool is_mismatch(tddp_status status)
{
    return status == TDDP_MISMATCH;
}

/* The other rank whose failure is the earliest that fits, -1 if there is none. */
static int first_failure(const finding *self, bool (*is_wanted)(tddp_status))
{
    int found = -1;
    for (int rank = 0; rank < self->count; rank++) {
        const tddp_status_report *each = &self->reports[rank];
        bool fits =
            rank != self->of->rank && each->kind == TDDP_REPORT_FAILURE && is_wanted(each->status);
        if (fits && (found < 0 || each->order < self->reports[found].order)) {
            found = rank;
        }
    }
    return found;
}

/* --- mismatches ------------------------------------------------------------------------------ */

/* Adds how two ranks described the operation; false if only one description is known yet. */
static bool add_descriptions(finding *self, uint64_t sequence, const char *known, int known_rank)
{
    for (int rank = 0; rank < self->count; rank++) {
        const tddp_status_report *each = &self->reports[rank];
        const bool own = rank == self->of->rank;
        const char *described = own ? self->failure.described : each->described;
        const uint64_t current = own ? self->failure.op.sequence : each->current;
        if (rank != known_rank && current == sequence && described && described[0] &&
            strcmp(described, known) != 0) {
            add(self, "; rank %d described it as \"%s\", rank %d as \"%s\"", known_rank, known,
                rank, described);
            return true;
        }
    }
    if (known[0]) {
        add(self, "; rank %d described it as \"%s\"", known_rank, known);
    }
    return !known[0];
}

static bool explain_local_mismatch(finding *self)
{
    const tddp_failure *failure = &self->failure;
    const char *described = failure->described ? failure->described : "";
    add(self, "%s", failure->text);
    bool both = add_descriptions(self, failure->op.sequence, described, self->of->rank);
    add_named_peers(self, self->of->rank, failure->text);
    return both || is_complete(self);
}

static bool explain_remote_mismatch(finding *self, int rank)
{
    const tddp_status_report *report = &self->reports[rank];
    add(self, "ranks disagree, which ");
    add_rank(self, rank);
    add(self, " found in %s: %s", report->where, report->text);
    bool both = add_descriptions(self, report->current, report->described, rank);
    add_named_peers(self, rank, report->text);
    return both || is_complete(self);
}

/* --- lost ranks ------------------------------------------------------------------------------ */

static bool has_ended_unreported(const finding *self, int rank)
{
    return has_not_reported(self, rank) && liveness_of(self, rank) == TDDP_PEER_ENDED;
}

/* Whether a rank that left after collective `last` has left before the operation that failed here.
 */
static bool is_early(const finding *self, uint64_t last)
{
    bool collective = self->of->failure && !tddp_op_is_p2p(self->failure.op.kind);
    return !collective || last < self->failure.op.sequence;
}

static bool has_left_early(const finding *self, int rank)
{
    const tddp_status_report *report = &self->reports[rank];
    return report->kind == TDDP_REPORT_LEFT && is_early(self, report->last);
}

/* The same without its report, which would also say why. */
static bool was_seen_leaving_early(const finding *self, int rank)
{
    const tddp_observation seen = tddp_observed_of(self->of->observed, rank);
    return has_not_reported(self, rank) && seen.kind == TDDP_OBSERVED_LEFT &&
           is_early(self, seen.sequence);
}

static bool has_left_with_reason(const finding *self, int rank)
{
    return has_left_early(self, rank) && self->reports[rank].text[0];
}

static void add_reason(finding *self, int rank)
{
    add_rank(self, rank);
    add(self, " has left the group because of an error: %s", self->reports[rank].text);
}

/* An exception that ended a rank's part says more than that others have left, too, because of it.
 */
static void add_left(finding *self, filter *fits)
{
    if (any(self, has_left_with_reason)) {
        (void)add_each(self, has_left_with_reason, add_reason, "; ", NAMED);
        return;
    }
    int ranks = add_ranks(self, fits);
    add(self, " %s destroyed the group: do all ranks make the same calls?",
        ranks > 1 ? "have" : "has");
}

static void add_failure(finding *self, int rank)
{
    const tddp_status_report *report = &self->reports[rank];
    add_rank(self, rank);
    add(self, " failed first, in %s: %s (%s)", report->where, report->text,
        tddp_status_name(report->status));
    add_named_peers(self, rank, report->text);
}

/* The backend's error, with all that it has seen of other ranks. */
static void add_seen(finding *self)
{
    char seen[TEXT_BYTES];
    tddp_observed_describe(self->of->observed, self->failure.text, seen, sizeof seen);
    add(self, "%s", seen);
}

/* Where all live, and none has failed by itself: a rank was lost that has not reported. */
static void add_victim(finding *self)
{
    const bool own = self->failure.text[0];
    const int victim = own ? -1 : first_failure(self, is_victim);
    if (own) {
        add_seen(self);
        add_named_peers(self, self->of->rank, self->text);
    } else if (victim >= 0) {
        add_failure(self, victim); /* the rank that lost it knows most */
    } else {
        add(self, "another rank's operation failed");
    }
}

static bool explain_loss(finding *self)
{
    int failed = first_failure(self, is_cause);
    if (any(self, has_ended_unreported)) {
        add(self, "lost ");
        int ranks = add_ranks(self, has_ended_unreported);
        add(self, ranks > 1 ? ": their processes have ended" : ": its process has ended");
        if (failed >= 0 && self->reports[failed].status != TDDP_TIMEOUT) {
            add(self, "; ");
            add_failure(self, failed);
        }
    } else if (failed >= 0) {
        add_failure(self, failed);
    } else if (any(self, has_left_early)) {
        add_left(self, has_left_early);
    } else if (!is_complete(self)) {
        return false;
    } else if (any(self, was_seen_leaving_early)) {
        add_left(self, was_seen_leaving_early);
    } else if (any(self, has_not_reported) && !self->of->store_lost) {
        add(self, "no sign of life from ");
        (void)add_ranks(self, has_not_reported);
    } else {
        add_victim(self);
        return true;
    }
    if (self->failure.status == TDDP_PEER_LOST && self->failure.text[0]) {
        add(self, "; seen here: ");
        add_seen(self);
    }
    return true;
}

/* --- ranks that do not arrive ---------------------------------------------------------------- */

static bool reached(const tddp_op *op, int kind, uint64_t sequence)
{
    return sequence != 0 && !tddp_op_is_p2p((tddp_op_kind)kind) &&
           (sequence > op->sequence || (sequence == op->sequence && kind == (int)op->kind));
}

static bool has_arrived(const finding *self, int rank)
{
    const tddp_status_report *report = &self->reports[rank];
    const tddp_op *op = &self->failure.op;
    return rank == self->of->rank || reached(op, report->current_kind, report->current) ||
           reached(op, report->last_kind, report->last);
}

/* False for a rank of which there is neither a report nor a process that can be observed. */
static bool is_known(const finding *self, int rank)
{
    return !self->of->store_lost || !may_report(self, rank);
}

/* Of a send or receive only its peer is awaited. */
static bool is_awaited(const finding *self, int rank)
{
    const tddp_op *op = &self->failure.op;
    const bool awaited =
        !tddp_op_is_p2p(op->kind)
            ? !has_arrived(self, rank)
            : rank != self->of->rank && (op->peer == TDDP_ANY_SOURCE || op->peer == rank);
    return awaited && is_known(self, rank);
}

static void add_position(finding *self, int rank)
{
    static const char *const states[] = {
        [TDDP_PEER_UNKNOWN] = "gives no sign of life",
        [TDDP_PEER_ALIVE] = "its process lives but gives no answer",
        [TDDP_PEER_STOPPED] = "its process is stopped",
        [TDDP_PEER_ENDED] = "its process has ended",
    };
    const tddp_status_report *report = &self->reports[rank];
    add_rank(self, rank);
    if (report->kind == TDDP_REPORT_NONE) {
        add(self, ": %s", states[liveness_of(self, rank)]);
    } else if (report->kind == TDDP_REPORT_FAILURE) {
        add(self, ": failed: %.200s (%s)", report->text, tddp_status_name(report->status));
    } else {
        add(self, ": %s", report->where);
    }
    if (report->kind == TDDP_REPORT_LEFT && report->text[0]) {
        add(self, "; it has left the group because of an error: %.200s", report->text);
    } else if (report->kind == TDDP_REPORT_LEFT) {
        add(self, "; it has destroyed the group");
    }
}

static void add_number(finding *self, int rank)
{
    add(self, "%d", rank);
}

static bool explain_timeout(finding *self)
{
    if (!is_complete(self) && !self->of->store_lost) {
        return false;
    }
    const bool message = tddp_op_is_p2p(self->failure.op.kind);
    if (self->of->store_lost) {
        add_seen(self);
    } else {
        add(self, "%s", self->failure.text);
    }
    const bool awaits = any(self, is_awaited);
    if (awaits) {
        add(self, message ? "; the other end: " : "; not arrived: ");
        (void)add_each(self, is_awaited, add_position, "; ", NAMED);
    }
    if (self->of->store_lost) {
        add_named_peers(self, self->of->rank, self->failure.text);
        add(self, "; the store cannot be asked where the other ranks are");
    } else if (!message) {
        add(self, awaits ? "; arrived: rank(s) " : "; all have arrived: rank(s) ");
        (void)add_each(self, has_arrived, add_number, ", ", 2 * NAMED);
    }
    return true;
}

/* The status with which operations fail, once it is `*found`. */
static tddp_status explain(finding *self, bool *found)
{
    const tddp_status status = self->failure.status;
    const int mismatch = first_failure(self, is_mismatch);
    const bool lost = status == TDDP_OK || is_victim(status);
    *found = true;
    if (status == TDDP_MISMATCH) {
        *found = explain_local_mismatch(self);
    } else if (mismatch >= 0 && (lost || status == TDDP_TIMEOUT)) {
        *found = explain_remote_mismatch(self, mismatch);
        return TDDP_MISMATCH;
    } else if (lost) {
        *found = explain_loss(self);
        return TDDP_PEER_LOST;
    } else if (status == TDDP_TIMEOUT) {
        *found = explain_timeout(self);
    } else {
        add(self, "%s", self->failure.text);
    }
    return status;
}

bool tddp_root_cause_find(const tddp_failure_evidence *evidence, char *log, tddp_status *status)
{
    const tddp_failure *failure = evidence->failure;
    finding self = {.of = evidence,
                    .failure = failure ? *failure : (tddp_failure){.text = ""},
                    .count = evidence->peers->count};
    self.reports = tddp_alloc_array((size_t)self.count, sizeof *self.reports);
    if (!self.reports) {
        *status = tddp_fail(failure ? failure->status : TDDP_PEER_LOST, "%s",
                            failure ? failure->text : "out of memory");
        return true;
    }
    tddp_status_report_read(log, self.reports, self.count);
    bool found;
    const tddp_status cause = explain(&self, &found);
    if (found) {
        *status = tddp_fail(cause, "%s", self.text);
    }
    free(self.reports);
    return found;
}
