/*
 * Formats and parses the lines of a group's log: one rank's status report, as fields separated by
 * tabs. Nothing here waits or uses a store. Other ranks' lines are not trusted: malformed ones are
 * skipped.
 *
 *     kind rank status  CURRENT  LAST  MESSAGE  described other_groups text
 *
 * where each of the three operations is: whether there is one, its kind, number, peer, age in ms.
 */
#include "group/failure_detector/status_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { FIELDS = 21, OP_FIELDS = 5, NUMBERS = 3 + 3 * OP_FIELDS };

const char *tddp_status_report_op_name(tddp_op_kind kind, uint64_t sequence, int peer,
                                       char text[TDDP_REPORT_OP_NAME_BYTES])
{
    const char *name = tddp_op_name(kind);
    if (!tddp_op_is_p2p(kind)) {
        (void)snprintf(text, TDDP_REPORT_OP_NAME_BYTES, "%s %" PRIu64, name, sequence);
    } else if (kind == TDDP_OP_RECV && peer == TDDP_ANY_SOURCE) {
        (void)snprintf(text, TDDP_REPORT_OP_NAME_BYTES, "%s %" PRIu64 " from any rank", name,
                       sequence);
    } else {
        (void)snprintf(text, TDDP_REPORT_OP_NAME_BYTES, "%s %" PRIu64 " %s rank %d", name, sequence,
                       kind == TDDP_OP_SEND ? "to" : "from", peer);
    }
    return text;
}

/* --- writing --------------------------------------------------------------------------------- */

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

static tddp_status put_op(tddp_bytes *line, const tddp_recorder_op_summary *op)
{
    char text[112];
    int length = snprintf(text, sizeof text, "\t%d\t%d\t%" PRIu64 "\t%d\t%" PRId64, op->any,
                          (int)op->kind, op->sequence, op->peer,
                          op->any ? (tddp_now_ns() - op->at_ns) / TDDP_NS_PER_MS : 0);
    return tddp_bytes_append(line, text, (size_t)length);
}

tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind, int rank,
                                     tddp_status status, const tddp_recorder_position *position,
                                     const char *other_groups, const char *text, size_t bytes)
{
    char head[48];
    int length = snprintf(head, sizeof head, "%d\t%d\t%d", (int)kind, rank, (int)status);
    const tddp_recorder_op_summary *described =
        position->current.any ? &position->current : &position->message;
    tddp_status written = tddp_bytes_append(line, head, (size_t)length);
    written = written ? written : put_op(line, &position->current);
    written = written ? written : put_op(line, &position->last);
    written = written ? written : put_op(line, &position->message);
    written = written ? written : put_field(line, described->any ? described->text : "", bytes);
    written = written ? written : put_field(line, other_groups, bytes);
    written = written ? written : put_field(line, text, bytes);
    return written ? written : tddp_bytes_append(line, "\n", 1);
}

/* --- reading --------------------------------------------------------------------------------- */

/* Splits a line at its tabs; false if it has not exactly FIELDS fields. */
static bool split(char *line, char *fields[FIELDS])
{
    int count = 0;
    while (count < FIELDS) {
        fields[count++] = line;
        line = strchr(line, '\t');
        if (!line) {
            break;
        }
        *line++ = '\0';
    }
    return count == FIELDS && !line;
}

static bool parse_op(const int64_t *numbers, tddp_status_report_op *out)
{
    out->any = numbers[0] == 1;
    out->kind = (tddp_op_kind)numbers[1];
    out->sequence = (uint64_t)numbers[2];
    out->peer = (int)numbers[3];
    out->age_ms = numbers[4];
    return numbers[1] >= 0 && numbers[1] < TDDP_OP_COUNT && numbers[2] >= 0 &&
           numbers[3] >= INT32_MIN && numbers[3] <= INT32_MAX;
}

static void parse_line(char *line, tddp_status_report *reports, int count, int *failures)
{
    char *fields[FIELDS];
    int64_t numbers[NUMBERS];
    if (!split(line, fields)) {
        return;
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (!tddp_parse_int(fields[i], INT64_MIN, INT64_MAX, &numbers[i])) {
            return;
        }
    }
    tddp_status_report report = {.kind = (tddp_status_report_kind)numbers[0],
                                 .status = (tddp_status)numbers[2],
                                 .described = fields[NUMBERS],
                                 .other_groups = fields[NUMBERS + 1],
                                 .text = fields[NUMBERS + 2]};
    const int64_t *ops = numbers + 3;
    if (numbers[0] <= TDDP_REPORT_NONE || numbers[0] > TDDP_REPORT_LEFT || numbers[1] < 0 ||
        numbers[1] >= count || !parse_op(ops, &report.current) ||
        !parse_op(ops + OP_FIELDS, &report.last) ||
        !parse_op(ops + (ptrdiff_t)2 * OP_FIELDS, &report.message)) {
        return;
    }
    tddp_status_report *known = &reports[numbers[1]];
    if (known->kind == TDDP_REPORT_FAILURE) {
        return; /* its position after the failure is of no use */
    }
    if (report.kind == TDDP_REPORT_FAILURE) {
        report.order = ++*failures;
    }
    *known = report;
}

void tddp_status_report_read(char *log, tddp_status_report *reports, int count)
{
    int failures = 0;
    for (int rank = 0; rank < count; rank++) {
        reports[rank] = (tddp_status_report){.described = "", .other_groups = "", .text = ""};
    }
    for (char *line = log; line && *line;) {
        char *end = strchr(line, '\n');
        if (end) {
            *end = '\0';
        }
        parse_line(line, reports, count, &failures);
        line = end ? end + 1 : NULL;
    }
}

/* --- formatting ------------------------------------------------------------------------------ */

static int format_op(char *text, size_t size, const tddp_status_report_op *op,
                     const char *described)
{
    char name[TDDP_REPORT_OP_NAME_BYTES];
    (void)tddp_status_report_op_name(op->kind, op->sequence, op->peer, name);
    return described[0] ? snprintf(text, size, "%s (\"%.120s\")", name, described)
                        : snprintf(text, size, "%s", name);
}

static int format_running(char *text, size_t size, const tddp_status_report_op *op,
                          const char *described)
{
    int used = snprintf(text, size, "in ");
    used += format_op(text + used, size - (size_t)used, op, described);
    used += snprintf(text + used, size - (size_t)used, " for %.1f s", (double)op->age_ms / 1e3);
    return used;
}

const char *tddp_status_report_position(const tddp_status_report *report,
                                        char text[TDDP_REPORT_POSITION_BYTES])
{
    enum { OTHER_GROUPS = 200 };
    const size_t size = TDDP_REPORT_POSITION_BYTES;
    int used;
    if (report->kind == TDDP_REPORT_FAILURE) {
        used = snprintf(text, size, "failed: %.200s (%s)", report->text,
                        tddp_status_name(report->status));
    } else if (report->current.any) {
        used = format_running(text, size, &report->current, report->described);
    } else if (report->message.any) {
        used = format_running(text, size, &report->message, report->described);
    } else if (report->last.any) {
        used = snprintf(text, size, "in no operation, its last was ");
        used += format_op(text + used, size - (size_t)used, &report->last, "");
        used += snprintf(text + used, size - (size_t)used, ", %.1f s ago",
                         (double)report->last.age_ms / 1e3);
    } else {
        used = snprintf(text, size, "in no operation yet");
    }
    if (report->kind == TDDP_REPORT_LEFT) {
        used += report->text[0]
                    ? snprintf(text + used, size - (size_t)used,
                               "; it has left the group because of an error: %.200s", report->text)
                    : snprintf(text + used, size - (size_t)used, "; it has destroyed the group");
    }
    if (report->other_groups[0] && (size_t)used < size) {
        (void)snprintf(text + used, size - (size_t)used, "; %.*s", OTHER_GROUPS,
                       report->other_groups);
    }
    return text;
}
