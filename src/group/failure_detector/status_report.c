/*
 * Formats and parses the lines of a group's log: one rank's status report, as fields separated by
 * tabs. Nothing here waits or uses a store. Other ranks' lines are not trusted: malformed ones are
 * skipped.
 *
 *     kind rank status  CURRENT  LAST  where described text
 *
 * where each of the two operations is: its kind, its number.
 */
#include "group/failure_detector/status_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { TEXTS = 3, WHERE_BYTES = 900 };

const char *tddp_status_report_op_name(tddp_op_kind kind, uint64_t sequence, int peer,
                                       char text[TDDP_REPORT_OP_NAME_BYTES])
{
    char other[32] = "";
    if (kind == TDDP_OP_RECV && peer == TDDP_ANY_SOURCE) {
        (void)snprintf(other, sizeof other, " from any rank");
    } else if (tddp_op_is_p2p(kind)) {
        (void)snprintf(other, sizeof other, " %s rank %d", kind == TDDP_OP_SEND ? "to" : "from",
                       peer);
    }
    (void)snprintf(text, TDDP_REPORT_OP_NAME_BYTES, "%s %" PRIu64 "%s", tddp_op_name(kind),
                   sequence, other);
    return text;
}

/* --- writing --------------------------------------------------------------------------------- */

/* "in broadcast 3 ("weights") for 5.1 s". */
static void add_position(char *text, size_t size, const tddp_recorder_position *position)
{
    char name[TDDP_REPORT_OP_NAME_BYTES];
    const bool runs = position->current.any || position->message.any;
    const tddp_recorder_op_summary *op = position->current.any ? &position->current
                                         : runs                ? &position->message
                                                               : &position->last;
    const double seconds = (double)(tddp_now_ns() - op->at_ns) / 1e9;
    (void)tddp_status_report_op_name(op->kind, op->sequence, op->peer, name);
    if (runs && op->text[0]) {
        tddp_add_text(text, size, "in %s (\"%.120s\") for %.1f s", name, op->text, seconds);
    } else if (runs) {
        tddp_add_text(text, size, "in %s for %.1f s", name, seconds);
    } else if (op->any) {
        tddp_add_text(text, size, "in no operation, its last was %s, %.1f s ago", name, seconds);
    } else {
        tddp_add_text(text, size, "in no operation yet");
    }
}

static void add_failed(char *text, size_t size, const tddp_recorder_op_summary *op)
{
    char name[TDDP_REPORT_OP_NAME_BYTES];
    tddp_add_text(text, size, "%s",
                  op->any ? tddp_status_report_op_name(op->kind, op->sequence, op->peer, name)
                          : "making the group");
}

/* Replaces control characters: tabs separate fields, and a newline ends the line. */
static tddp_status put_field(tddp_bytes *line, const char *text, size_t most)
{
    size_t start = line->size;
    tddp_status status = tddp_bytes_append(line, "\t", 1);
    if (status == TDDP_OK) {
        status = tddp_bytes_append(line, text, strnlen(text, most));
    }
    for (size_t i = start + 1; status == TDDP_OK && i < line->size; i++) {
        if ((unsigned char)line->data[i] < 0x20) {
            line->data[i] = ' ';
        }
    }
    return status;
}

tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind, int rank,
                                     tddp_status status, const tddp_recorder_position *position,
                                     const char *other_groups, const char *text, size_t bytes)
{
    char head[128];
    char where[WHERE_BYTES] = "";
    const tddp_recorder_op_summary *in = &position->current;
    const tddp_recorder_op_summary *last = &position->last;
    int length = snprintf(head, sizeof head, "%d\t%d\t%d\t%d\t%" PRIu64 "\t%d\t%" PRIu64, (int)kind,
                          rank, (int)status, (int)in->kind, in->any ? in->sequence : 0,
                          (int)last->kind, last->any ? last->sequence : 0);
    if (kind == TDDP_REPORT_FAILURE) {
        add_failed(where, sizeof where, in);
    } else {
        add_position(where, sizeof where, position);
        tddp_add_text(where, sizeof where, "%s%s", other_groups[0] ? "; " : "", other_groups);
    }
    tddp_status written = tddp_bytes_append(line, head, (size_t)length);
    written = written ? written : put_field(line, where, bytes);
    written = written ? written : put_field(line, in->any ? in->text : "", bytes);
    written = written ? written : put_field(line, text, bytes);
    return written ? written : tddp_bytes_append(line, "\n", 1);
}

/* --- reading --------------------------------------------------------------------------------- */

static void read_line(char *line, tddp_status_report *reports, int count, int *failures)
{
    tddp_status_report report = {.kind = TDDP_REPORT_NONE};
    const char **const texts[TEXTS] = {&report.where, &report.described, &report.text};
    int kind;
    int rank;
    int status;
    int used = 0;
    bool good = sscanf(line, "%d %d %d %d %" SCNu64 " %d %" SCNu64 " %n", &kind, &rank, &status,
                       &report.current_kind, &report.current, &report.last_kind, &report.last,
                       &used) == 7 &&
                kind > TDDP_REPORT_NONE && kind <= TDDP_REPORT_LEFT && rank >= 0 && rank < count;
    line += used;
    for (int i = 0; i < TEXTS && good; i++) {
        *texts[i] = strsep(&line, "\t");
        good = *texts[i] != NULL;
    }
    /* A rank's position after its failure is of no use. */
    if (!good || line || reports[rank].kind == TDDP_REPORT_FAILURE) {
        return;
    }
    report.kind = (tddp_status_report_kind)kind;
    report.status = (tddp_status)status;
    report.order = report.kind == TDDP_REPORT_FAILURE ? ++*failures : 0;
    reports[rank] = report;
}

void tddp_status_report_read(char *log, tddp_status_report *reports, int count)
{
    int failures = 0;
    for (int rank = 0; rank < count; rank++) {
        reports[rank] = (tddp_status_report){.where = "", .described = "", .text = ""};
    }
    while (log) {
        read_line(strsep(&log, "\n"), reports, count, &failures);
    }
}
