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

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_BYTES = 3072, NAMED = 6 };

typedef struct text {
    char data[TEXT_BYTES];
    size_t used;
} text;

static void add(text *to, const char *format, ...) TDDP_PRINTF(2, 3);

static void add(text *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(to->data + to->used, TEXT_BYTES - to->used, format, arguments);
    va_end(arguments);
    to->used += (size_t)length;
    if (to->used >= TEXT_BYTES) {
        to->used = TEXT_BYTES - 1; /* cut */
    }
}

static void add_rank(text *to, const tddp_failure_evidence *evidence, int rank)
{
    char name[TDDP_PEER_NAME_BYTES];
    add(to, "%s", tddp_peers_name(evidence->peers, rank, name));
}

/* The backend may see the end of a process that this one cannot observe. */
static tddp_peer_liveness liveness_of(const tddp_failure_evidence *evidence, int rank)
{
    return tddp_observed_of(evidence->observed, rank).kind == TDDP_OBSERVED_ENDED
               ? TDDP_PEER_ENDED
               : tddp_peers_check_liveness(evidence->peers, evidence->rank, rank);
}

static bool has_not_reported(const tddp_failure_evidence *evidence, int rank)
{
    return rank != evidence->rank && evidence->reports[rank].kind == TDDP_REPORT_NONE;
}

/* Whether all ranks that still can have reported. */
static bool is_complete(const tddp_failure_evidence *evidence)
{
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        tddp_peer_liveness liveness =
            has_not_reported(evidence, rank) ? liveness_of(evidence, rank) : TDDP_PEER_ENDED;
        if (liveness != TDDP_PEER_ENDED && liveness != TDDP_PEER_STOPPED) {
            return false;
        }
    }
    return true;
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
static int first_failure(const tddp_failure_evidence *evidence, bool (*is_wanted)(tddp_status))
{
    int found = -1;
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        const tddp_status_report *each = &evidence->reports[rank];
        bool fits =
            rank != evidence->rank && each->kind == TDDP_REPORT_FAILURE && is_wanted(each->status);
        if (fits && (found < 0 || each->order < evidence->reports[found].order)) {
            found = rank;
        }
    }
    return found;
}

/* --- mismatches ------------------------------------------------------------------------------ */

/* Appends how two ranks described the operation; false if only one description is known yet. */
static bool add_descriptions(text *to, const tddp_failure_evidence *evidence, uint64_t sequence,
                             const char *known, int known_rank)
{
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        const tddp_status_report *each = &evidence->reports[rank];
        if (rank != known_rank && rank != evidence->rank && each->kind != TDDP_REPORT_NONE &&
            each->current.any && each->current.sequence == sequence && each->described[0] &&
            strcmp(each->described, known) != 0) {
            add(to, "; rank %d described it as \"%s\", rank %d as \"%s\"", known_rank, known, rank,
                each->described);
            return true;
        }
    }
    if (known[0] && known_rank != evidence->rank && evidence->op && evidence->described &&
        evidence->op->sequence == sequence && strcmp(evidence->described, known) != 0) {
        add(to, "; rank %d described it as \"%s\", rank %d as \"%s\"", known_rank, known,
            evidence->rank, evidence->described);
        return true;
    }
    if (known[0]) {
        add(to, "; rank %d described it as \"%s\"", known_rank, known);
    }
    return !known[0];
}

/* Appends host and pid of the ranks that a backend's error text of rank `reporter` names. */
static void add_named_peers(text *to, const tddp_failure_evidence *evidence, int reporter,
                            const char *error)
{
    char names[TDDP_PEERS_TEXT_BYTES];
    add(to, "%s", tddp_peers_annotate(evidence->peers, reporter, error, names));
}

static bool explain_local_mismatch(const tddp_failure_evidence *evidence, text *to)
{
    const char *described = evidence->described ? evidence->described : "";
    add(to, "%s", evidence->text);
    bool both = add_descriptions(to, evidence, evidence->op->sequence, described, evidence->rank);
    add_named_peers(to, evidence, evidence->rank, evidence->text);
    return both || evidence->deadline_over || is_complete(evidence);
}

/* " in all_reduce 7"; the rank may have failed before its group existed. */
static void add_failed_operation(text *to, const tddp_status_report *report)
{
    char op[TDDP_REPORT_OP_NAME_BYTES];
    const tddp_status_report_op *in = &report->current;
    add(to, " in %s",
        in->any ? tddp_status_report_op_name(in->kind, in->sequence, in->peer, op)
                : "making the group");
}

static bool explain_remote_mismatch(const tddp_failure_evidence *evidence, int rank, text *to)
{
    const tddp_status_report *report = &evidence->reports[rank];
    add(to, "ranks disagree, which ");
    add_rank(to, evidence, rank);
    add(to, " found");
    add_failed_operation(to, report);
    add(to, ": %s", report->text);
    bool both = add_descriptions(to, evidence, report->current.sequence, report->described, rank);
    add_named_peers(to, evidence, rank, report->text);
    return both || evidence->deadline_over || is_complete(evidence);
}

/* --- lost ranks ------------------------------------------------------------------------------ */

static bool has_ended_unreported(const tddp_failure_evidence *evidence, int rank)
{
    return has_not_reported(evidence, rank) && liveness_of(evidence, rank) == TDDP_PEER_ENDED;
}

/* Appends the ranks that fit, "A, B and 3 more"; returns how many they are. */
static int add_ranks(text *to, const tddp_failure_evidence *evidence,
                     bool (*fits)(const tddp_failure_evidence *, int))
{
    int found = 0;
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        if (fits(evidence, rank) && found++ < NAMED) {
            add(to, "%s", found > 1 ? ", " : "");
            add_rank(to, evidence, rank);
        }
    }
    if (found > NAMED) {
        add(to, " and %d more", found - NAMED);
    }
    return found;
}

static bool any(const tddp_failure_evidence *evidence,
                bool (*fits)(const tddp_failure_evidence *, int))
{
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        if (fits(evidence, rank)) {
            return true;
        }
    }
    return false;
}

/* Whether a rank that left after collective `last` has left before the operation that failed here.
 */
static bool is_early(const tddp_failure_evidence *evidence, uint64_t last)
{
    bool collective = evidence->op && !tddp_op_is_p2p(evidence->op->kind);
    return !collective || last < evidence->op->sequence;
}

static bool has_left_early(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *report = &evidence->reports[rank];
    return report->kind == TDDP_REPORT_LEFT &&
           is_early(evidence, report->last.any ? report->last.sequence : 0);
}

/* The same without its report, which would also say why. */
static bool was_seen_leaving_early(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_observation seen = tddp_observed_of(evidence->observed, rank);
    return has_not_reported(evidence, rank) && seen.kind == TDDP_OBSERVED_LEFT &&
           is_early(evidence, seen.sequence);
}

static bool has_left_with_reason(const tddp_failure_evidence *evidence, int rank)
{
    return has_left_early(evidence, rank) && evidence->reports[rank].text[0];
}

static void add_left(text *to, const tddp_failure_evidence *evidence,
                     bool (*fits)(const tddp_failure_evidence *, int))
{
    int ranks = add_ranks(to, evidence, fits);
    add(to, " %s destroyed the group: do all ranks make the same calls?",
        ranks > 1 ? "have" : "has");
}

/* An exception that ended a rank's part says more than that others have left, too, because of it.
 */
static void add_reported_left(text *to, const tddp_failure_evidence *evidence)
{
    if (any(evidence, has_left_with_reason)) {
        int named = 0;
        for (int rank = 0; rank < evidence->peers->count; rank++) {
            if (has_left_with_reason(evidence, rank) && named++ < NAMED) {
                add(to, "%s", named > 1 ? "; " : "");
                add_rank(to, evidence, rank);
                add(to, " has left the group because of an error: %s",
                    evidence->reports[rank].text);
            }
        }
        return;
    }
    add_left(to, evidence, has_left_early);
}

static void add_failure(text *to, const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *report = &evidence->reports[rank];
    add_rank(to, evidence, rank);
    add(to, " failed first,");
    add_failed_operation(to, report);
    add(to, ": %s (%s)", report->text, tddp_status_name(report->status));
    add_named_peers(to, evidence, rank, report->text);
}

/* The backend's error, with all that it has seen of other ranks. */
static void add_seen(text *to, const tddp_failure_evidence *evidence)
{
    char seen[TEXT_BYTES];
    tddp_observed_describe(evidence->observed, evidence->text, seen, sizeof seen);
    add(to, "%s", seen);
}

static void add_local_error(text *to, const tddp_failure_evidence *evidence)
{
    if (evidence->status == TDDP_PEER_LOST && evidence->text[0]) {
        add(to, "; seen here: ");
        add_seen(to, evidence);
    }
}

static bool explain_loss(const tddp_failure_evidence *evidence, text *to)
{
    int failed = first_failure(evidence, is_cause);
    if (any(evidence, has_ended_unreported)) {
        add(to, "lost ");
        int ranks = add_ranks(to, evidence, has_ended_unreported);
        add(to, ranks > 1 ? ": their processes have ended" : ": its process has ended");
        if (failed >= 0 && evidence->reports[failed].status != TDDP_TIMEOUT) {
            add(to, "; ");
            add_failure(to, evidence, failed);
        }
        add_local_error(to, evidence);
        return true;
    }
    if (failed >= 0) {
        add_failure(to, evidence, failed);
        add_local_error(to, evidence);
        return true;
    }
    if (any(evidence, has_left_early)) {
        add_reported_left(to, evidence);
        add_local_error(to, evidence);
        return true;
    }
    if (!evidence->deadline_over && !is_complete(evidence)) {
        return false;
    }
    if (any(evidence, was_seen_leaving_early)) {
        add_left(to, evidence, was_seen_leaving_early);
        add_local_error(to, evidence);
        return true;
    }
    if (any(evidence, has_not_reported) && !evidence->store_lost) {
        add(to, "no sign of life from ");
        (void)add_ranks(to, evidence, has_not_reported);
        add_local_error(to, evidence);
        return true;
    }
    /* A rank was lost that has not reported: the rank that lost it knows most. */
    int victim = evidence->text[0] ? -1 : first_failure(evidence, is_victim);
    if (victim >= 0) {
        add_failure(to, evidence, victim);
        return true;
    }
    if (evidence->text[0]) {
        size_t start = to->used;
        add_seen(to, evidence);
        add_named_peers(to, evidence, evidence->rank, to->data + start);
    } else {
        add(to, "another rank's operation failed");
    }
    return true;
}

/* --- ranks that do not arrive ---------------------------------------------------------------- */

static bool reached(const tddp_status_report_op *reported, const tddp_op *op)
{
    return reported->any && !tddp_op_is_p2p(reported->kind) &&
           (reported->sequence > op->sequence ||
            (reported->sequence == op->sequence && reported->kind == op->kind));
}

static bool has_arrived(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *report = &evidence->reports[rank];
    return rank == evidence->rank ||
           (report->kind != TDDP_REPORT_NONE &&
            (reached(&report->current, evidence->op) || reached(&report->last, evidence->op)));
}

/* Of a send or receive only its peer is awaited. */
static bool is_awaited(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_op *op = evidence->op;
    if (tddp_op_is_p2p(op->kind)) {
        return rank != evidence->rank && (op->peer == TDDP_ANY_SOURCE || op->peer == rank);
    }
    return !has_arrived(evidence, rank);
}

/* False for a rank of which there is neither a report nor a process that can be observed. */
static bool is_known(const tddp_failure_evidence *evidence, int rank)
{
    tddp_peer_liveness liveness = liveness_of(evidence, rank);
    return !evidence->store_lost || evidence->reports[rank].kind != TDDP_REPORT_NONE ||
           liveness == TDDP_PEER_ENDED || liveness == TDDP_PEER_STOPPED;
}

static void add_position(text *to, const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *report = &evidence->reports[rank];
    char position[TDDP_REPORT_POSITION_BYTES];
    add_rank(to, evidence, rank);
    if (report->kind != TDDP_REPORT_NONE) {
        add(to, ": %s", tddp_status_report_position(report, position));
        return;
    }
    switch (liveness_of(evidence, rank)) {
    case TDDP_PEER_ENDED:
        add(to, ": its process has ended");
        break;
    case TDDP_PEER_STOPPED:
        add(to, ": its process is stopped");
        break;
    case TDDP_PEER_ALIVE:
        add(to, ": its process lives but gives no answer");
        break;
    default:
        add(to, ": gives no sign of life");
        break;
    }
}

static void add_arrived(text *to, const tddp_failure_evidence *evidence, bool all)
{
    int arrived = 0;
    add(to, all ? "; all have arrived: rank(s) " : "; arrived: rank(s) ");
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        if (has_arrived(evidence, rank) && arrived++ < 2 * NAMED) {
            add(to, "%s%d", arrived > 1 ? ", " : "", rank);
        }
    }
    if (arrived > 2 * NAMED) {
        add(to, " and %d more", arrived - 2 * NAMED);
    }
}

static bool explain_timeout(const tddp_failure_evidence *evidence, text *to)
{
    if (!evidence->deadline_over && !evidence->store_lost && !is_complete(evidence)) {
        return false;
    }
    bool message = tddp_op_is_p2p(evidence->op->kind);
    int awaited = 0;
    if (evidence->store_lost) {
        add_seen(to, evidence);
    } else {
        add(to, "%s", evidence->text);
    }
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        if (is_awaited(evidence, rank) && is_known(evidence, rank) && awaited++ < NAMED) {
            add(to, "%s", awaited > 1 ? "; " : message ? "; the other end: " : "; not arrived: ");
            add_position(to, evidence, rank);
        }
    }
    if (awaited > NAMED) {
        add(to, "; and %d more", awaited - NAMED);
    }
    if (evidence->store_lost) {
        add_named_peers(to, evidence, evidence->rank, evidence->text);
        add(to, "; the store cannot be asked where the other ranks are");
    } else if (!message) {
        add_arrived(to, evidence, awaited == 0);
    }
    return true;
}

static bool explain(const tddp_failure_evidence *evidence, tddp_status *status)
{
    text cause = {.used = 0};
    tddp_status result = evidence->status;
    bool found = true;
    int mismatch = first_failure(evidence, is_mismatch);
    bool lost = result == TDDP_OK || is_victim(result);
    if (result == TDDP_MISMATCH) {
        found = explain_local_mismatch(evidence, &cause);
    } else if (mismatch >= 0 && (lost || result == TDDP_TIMEOUT)) {
        result = TDDP_MISMATCH;
        found = explain_remote_mismatch(evidence, mismatch, &cause);
    } else if (lost) {
        result = TDDP_PEER_LOST;
        found = explain_loss(evidence, &cause);
    } else if (result == TDDP_TIMEOUT) {
        found = explain_timeout(evidence, &cause);
    } else {
        add(&cause, "%s", evidence->text);
    }
    if (found) {
        *status = tddp_fail(result, "%s", cause.data);
    }
    return found;
}

bool tddp_root_cause_find(tddp_failure_evidence evidence, char *log, tddp_status *status)
{
    tddp_status_report *reports = tddp_alloc_array((size_t)evidence.peers->count, sizeof *reports);
    if (!reports) {
        *status = tddp_fail(evidence.status ? evidence.status : TDDP_PEER_LOST, "%s",
                            evidence.text[0] ? evidence.text : "out of memory");
        return true;
    }
    tddp_status_report_read(log, reports, evidence.peers->count);
    evidence.reports = reports;
    bool found = explain(&evidence, status);
    free(reports);
    return found;
}
