/*
 * Finds the cause of a group's failure among what the ranks tell of themselves. Runs on the watch's
 * thread, or on the one whose operation failed; keeps nothing.
 *
 * Who comes first: ranks that disagree; then a process that has ended without a word, since all
 * others are its victims; then the first that failed by itself; then one that has left the group.
 * A rank that merely lost another is never the cause.
 */
#include "group/failure_detector/root_cause.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
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

static tddp_peer_liveness see(const tddp_failure_evidence *evidence, int rank)
{
    return tddp_peers_check_liveness(evidence->peers, evidence->rank, rank);
}

static bool is_silent(const tddp_failure_evidence *evidence, int rank)
{
    return rank != evidence->rank && evidence->accounts[rank].kind == TDDP_REPORT_NONE;
}

/* Whether everybody has spoken who still can. */
static bool is_complete(const tddp_failure_evidence *evidence)
{
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        tddp_peer_liveness sight =
            is_silent(evidence, rank) ? see(evidence, rank) : TDDP_PEER_ENDED;
        if (sight != TDDP_PEER_ENDED && sight != TDDP_PEER_STOPPED) {
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

/* The earliest of the other ranks' failures that fits, -1 if there is none. */
static int first_failure(const tddp_failure_evidence *evidence, bool (*is_wanted)(tddp_status))
{
    int found = -1;
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        const tddp_status_report *each = &evidence->accounts[rank];
        bool fits =
            rank != evidence->rank && each->kind == TDDP_REPORT_FAILURE && is_wanted(each->status);
        if (fits && (found < 0 || each->order < evidence->accounts[found].order)) {
            found = rank;
        }
    }
    return found;
}

/* --- ranks that disagree --------------------------------------------------------------------- */

/* Adds what two ranks said that the operation is; false if only one has told so far. */
static bool add_descriptions(text *to, const tddp_failure_evidence *evidence, uint64_t sequence,
                             const char *known, int known_rank)
{
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        const tddp_status_report *each = &evidence->accounts[rank];
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

/* Who the ranks are that a backend's words speak of, but for the one that said them. */
static void add_mentioned(text *to, const tddp_failure_evidence *evidence, int speaker,
                          const char *words)
{
    char names[TDDP_PEERS_TEXT_BYTES];
    add(to, "%s", tddp_peers_annotate(evidence->peers, speaker, words, names));
}

static bool judge_own_mismatch(const tddp_failure_evidence *evidence, text *to)
{
    const char *described = evidence->described ? evidence->described : "";
    add(to, "%s", evidence->text);
    bool both = add_descriptions(to, evidence, evidence->op->sequence, described, evidence->rank);
    add_mentioned(to, evidence, evidence->rank, evidence->text);
    return both || evidence->last || is_complete(evidence);
}

/* " in all_reduce 7"; its group may never have been made. */
static void add_failed_operation(text *to, const tddp_status_report *account)
{
    char op[TDDP_REPORT_OP_NAME_BYTES];
    const tddp_status_report_op *in = &account->current;
    add(to, " in %s",
        in->any ? tddp_status_report_op_name(in->kind, in->sequence, in->peer, op)
                : "making the group");
}

static bool judge_mismatch(const tddp_failure_evidence *evidence, int rank, text *to)
{
    const tddp_status_report *account = &evidence->accounts[rank];
    add(to, "ranks disagree, which ");
    add_rank(to, evidence, rank);
    add(to, " found");
    add_failed_operation(to, account);
    add(to, ": %s", account->text);
    bool both = add_descriptions(to, evidence, account->current.sequence, account->described, rank);
    add_mentioned(to, evidence, rank, account->text);
    return both || evidence->last || is_complete(evidence);
}

/* --- ranks that are gone --------------------------------------------------------------------- */

static bool has_ended_silently(const tddp_failure_evidence *evidence, int rank)
{
    return is_silent(evidence, rank) && see(evidence, rank) == TDDP_PEER_ENDED;
}

/* Adds those that fit, "A, B and 3 more"; the number of them. */
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

/* Gone before it came to the operation that failed here. */
static bool has_left_early(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *account = &evidence->accounts[rank];
    bool collective = evidence->op && !tddp_op_is_p2p(evidence->op->kind);
    return account->kind == TDDP_REPORT_LEFT &&
           !(collective && account->last.any && account->last.sequence >= evidence->op->sequence);
}

static void add_left(text *to, const tddp_failure_evidence *evidence)
{
    int ranks = add_ranks(to, evidence, has_left_early);
    add(to, " %s destroyed the group: do all ranks make the same calls?",
        ranks > 1 ? "have" : "has");
}

static void add_failure(text *to, const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *account = &evidence->accounts[rank];
    add_rank(to, evidence, rank);
    add(to, " failed first,");
    add_failed_operation(to, account);
    add(to, ": %s (%s)", account->text, tddp_status_name(account->status));
    add_mentioned(to, evidence, rank, account->text);
}

static void add_own_words(text *to, const tddp_failure_evidence *evidence)
{
    if (evidence->status == TDDP_PEER_LOST && evidence->text[0]) {
        add(to, "; seen here: %s", evidence->text);
    }
}

static bool judge_loss(const tddp_failure_evidence *evidence, text *to)
{
    int failed = first_failure(evidence, is_cause);
    if (any(evidence, has_ended_silently)) {
        add(to, "lost ");
        int ranks = add_ranks(to, evidence, has_ended_silently);
        add(to, ranks > 1 ? ": their processes have ended" : ": its process has ended");
        if (failed >= 0 && evidence->accounts[failed].status != TDDP_TIMEOUT) {
            add(to, "; ");
            add_failure(to, evidence, failed);
        }
        add_own_words(to, evidence);
        return true;
    }
    if (failed >= 0) {
        add_failure(to, evidence, failed);
        add_own_words(to, evidence);
        return true;
    }
    if (any(evidence, has_left_early)) {
        add_left(to, evidence);
        add_own_words(to, evidence);
        return true;
    }
    if (!evidence->last && !is_complete(evidence)) {
        return false;
    }
    if (any(evidence, is_silent) && !evidence->deaf) {
        add(to, "no sign of life from ");
        (void)add_ranks(to, evidence, is_silent);
        add_own_words(to, evidence);
        return true;
    }
    /* Somebody was lost who has not told yet: whoever met that knows most. */
    int victim = evidence->text[0] ? -1 : first_failure(evidence, is_victim);
    if (victim >= 0) {
        add_failure(to, evidence, victim);
        return true;
    }
    add(to, "%s", evidence->text[0] ? evidence->text : "another rank's operation failed");
    add_mentioned(to, evidence, evidence->rank, evidence->text);
    return true;
}

/* --- ranks that do not come ------------------------------------------------------------------ */

static bool reached(const tddp_status_report_op *moment, const tddp_op *op)
{
    return moment->any && !tddp_op_is_p2p(moment->kind) &&
           (moment->sequence > op->sequence ||
            (moment->sequence == op->sequence && moment->kind == op->kind));
}

static bool has_arrived(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *account = &evidence->accounts[rank];
    return rank == evidence->rank ||
           (account->kind != TDDP_REPORT_NONE &&
            (reached(&account->current, evidence->op) || reached(&account->last, evidence->op)));
}

/* Of a message only its other end is of interest. */
static bool is_awaited(const tddp_failure_evidence *evidence, int rank)
{
    const tddp_op *op = evidence->op;
    if (tddp_op_is_p2p(op->kind)) {
        return rank != evidence->rank && (op->peer == TDDP_ANY_SOURCE || op->peer == rank);
    }
    return !has_arrived(evidence, rank);
}

/* Nothing can be said of a rank that is not heard and not seen. */
static bool is_known(const tddp_failure_evidence *evidence, int rank)
{
    tddp_peer_liveness sight = see(evidence, rank);
    return !evidence->deaf || evidence->accounts[rank].kind != TDDP_REPORT_NONE ||
           sight == TDDP_PEER_ENDED || sight == TDDP_PEER_STOPPED;
}

static void add_place(text *to, const tddp_failure_evidence *evidence, int rank)
{
    const tddp_status_report *account = &evidence->accounts[rank];
    char place[TDDP_REPORT_POSITION_BYTES];
    add_rank(to, evidence, rank);
    if (account->kind != TDDP_REPORT_NONE) {
        add(to, ": %s", tddp_status_report_position(account, place));
        return;
    }
    switch (see(evidence, rank)) {
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

static bool judge_timeout(const tddp_failure_evidence *evidence, text *to)
{
    if (!evidence->last && !evidence->deaf && !is_complete(evidence)) {
        return false;
    }
    bool message = tddp_op_is_p2p(evidence->op->kind);
    int awaited = 0;
    add(to, "%s", evidence->text);
    for (int rank = 0; rank < evidence->peers->count; rank++) {
        if (is_awaited(evidence, rank) && is_known(evidence, rank) && awaited++ < NAMED) {
            add(to, "%s", awaited > 1 ? "; " : message ? "; the other end: " : "; not arrived: ");
            add_place(to, evidence, rank);
        }
    }
    if (awaited > NAMED) {
        add(to, "; and %d more", awaited - NAMED);
    }
    if (evidence->deaf) {
        add_mentioned(to, evidence, evidence->rank, evidence->text);
        add(to, "; the store cannot be asked where the other ranks are");
    } else if (!message) {
        add_arrived(to, evidence, awaited == 0);
    }
    return true;
}

bool tddp_root_cause_find(const tddp_failure_evidence *evidence, tddp_status *status)
{
    text verdict = {.used = 0};
    tddp_status found = evidence->status;
    bool clear = true;
    int disagrees = first_failure(evidence, is_mismatch);
    bool lost = found == TDDP_OK || is_victim(found);
    if (found == TDDP_MISMATCH) {
        clear = judge_own_mismatch(evidence, &verdict);
    } else if (disagrees >= 0 && (lost || found == TDDP_TIMEOUT)) {
        found = TDDP_MISMATCH;
        clear = judge_mismatch(evidence, disagrees, &verdict);
    } else if (lost) {
        found = TDDP_PEER_LOST;
        clear = judge_loss(evidence, &verdict);
    } else if (found == TDDP_TIMEOUT) {
        clear = judge_timeout(evidence, &verdict);
    } else {
        add(&verdict, "%s", evidence->text);
    }
    if (clear) {
        *status = tddp_fail(found, "%s", verdict.data);
    }
    return clear;
}
