/*
 * Lines of a group's log: one rank's word on itself, as fields separated by tabs. Nothing here
 * waits or touches a store. What others have written is not trusted to be well formed: a line that
 * is not is passed over.
 *
 *     kind rank status  CURRENT  LAST  MESSAGE  described elsewhere text
 *
 * where each of the three operations is: whether there is one, its kind, number, peer, age in ms.
 */
#include "group/failure_detector/status_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { FIELDS = 21, MOMENT_FIELDS = 5, NUMBERS = 3 + 3 * MOMENT_FIELDS };

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

/* A field has no tab and its line no end but its own. */
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

static tddp_status put_moment(tddp_bytes *line, const tddp_recorder_op_summary *moment)
{
    char text[112];
    int length = snprintf(text, sizeof text, "\t%d\t%d\t%" PRIu64 "\t%d\t%" PRId64, moment->any,
                          (int)moment->kind, moment->sequence, moment->peer,
                          moment->any ? (tddp_now_ns() - moment->at_ns) / TDDP_NS_PER_MS : 0);
    return tddp_bytes_append(line, text, (size_t)length);
}

tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind, int rank,
                                     tddp_status status, const tddp_recorder_position *position,
                                     const char *elsewhere, const char *text, size_t bytes)
{
    char head[48];
    int length = snprintf(head, sizeof head, "%d\t%d\t%d", (int)kind, rank, (int)status);
    const tddp_recorder_op_summary *described =
        position->current.any ? &position->current : &position->message;
    tddp_status written = tddp_bytes_append(line, head, (size_t)length);
    written = written ? written : put_moment(line, &position->current);
    written = written ? written : put_moment(line, &position->last);
    written = written ? written : put_moment(line, &position->message);
    written = written ? written : put_field(line, described->any ? described->text : "", bytes);
    written = written ? written : put_field(line, elsewhere, bytes);
    written = written ? written : put_field(line, text, bytes);
    return written ? written : tddp_bytes_append(line, "\n", 1);
}

/* --- reading --------------------------------------------------------------------------------- */

/* Cuts a line at its tabs; false if there are not as many fields as there must be. */
static bool cut(char *line, char *fields[FIELDS])
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

static bool read_moment(const int64_t *numbers, tddp_status_report_op *out)
{
    out->any = numbers[0] == 1;
    out->kind = (tddp_op_kind)numbers[1];
    out->sequence = (uint64_t)numbers[2];
    out->peer = (int)numbers[3];
    out->age_ms = numbers[4];
    return numbers[1] >= 0 && numbers[1] < TDDP_OP_COUNT && numbers[2] >= 0 &&
           numbers[3] >= INT32_MIN && numbers[3] <= INT32_MAX;
}

static void read_line(char *line, tddp_status_report *accounts, int count, int *failures)
{
    char *fields[FIELDS];
    int64_t numbers[NUMBERS];
    if (!cut(line, fields)) {
        return;
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (!tddp_parse_int(fields[i], INT64_MIN, INT64_MAX, &numbers[i])) {
            return;
        }
    }
    tddp_status_report account = {.kind = (tddp_status_report_kind)numbers[0],
                                  .status = (tddp_status)numbers[2],
                                  .described = fields[NUMBERS],
                                  .elsewhere = fields[NUMBERS + 1],
                                  .text = fields[NUMBERS + 2]};
    const int64_t *moments = numbers + 3;
    if (numbers[0] <= TDDP_REPORT_NONE || numbers[0] > TDDP_REPORT_LEFT || numbers[1] < 0 ||
        numbers[1] >= count || !read_moment(moments, &account.current) ||
        !read_moment(moments + MOMENT_FIELDS, &account.last) ||
        !read_moment(moments + (ptrdiff_t)2 * MOMENT_FIELDS, &account.message)) {
        return;
    }
    tddp_status_report *known = &accounts[numbers[1]];
    if (known->kind == TDDP_REPORT_FAILURE) {
        return; /* where it is after its failure helps nobody */
    }
    if (account.kind == TDDP_REPORT_FAILURE) {
        account.order = ++*failures;
    }
    *known = account;
}

void tddp_status_report_read(char *log, tddp_status_report *accounts, int count)
{
    int failures = 0;
    for (int rank = 0; rank < count; rank++) {
        accounts[rank] = (tddp_status_report){.described = "", .elsewhere = "", .text = ""};
    }
    for (char *line = log; line && *line;) {
        char *end = strchr(line, '\n');
        if (end) {
            *end = '\0';
        }
        read_line(line, accounts, count, &failures);
        line = end ? end + 1 : NULL;
    }
}

/* --- telling --------------------------------------------------------------------------------- */

static int show(char *text, size_t room, const tddp_status_report_op *moment, const char *described)
{
    char op[TDDP_REPORT_OP_NAME_BYTES];
    (void)tddp_status_report_op_name(moment->kind, moment->sequence, moment->peer, op);
    return described[0] ? snprintf(text, room, "%s (\"%.120s\")", op, described)
                        : snprintf(text, room, "%s", op);
}

static int show_now(char *text, size_t room, const tddp_status_report_op *moment,
                    const char *described)
{
    int used = snprintf(text, room, "in ");
    used += show(text + used, room - (size_t)used, moment, described);
    used += snprintf(text + used, room - (size_t)used, " for %.1f s", (double)moment->age_ms / 1e3);
    return used;
}

const char *tddp_status_report_position(const tddp_status_report *account,
                                        char text[TDDP_REPORT_POSITION_BYTES])
{
    enum { ELSEWHERE = 200 };
    const size_t room = TDDP_REPORT_POSITION_BYTES;
    int used;
    if (account->kind == TDDP_REPORT_FAILURE) {
        used = snprintf(text, room, "failed: %.200s (%s)", account->text,
                        tddp_status_name(account->status));
    } else if (account->current.any) {
        used = show_now(text, room, &account->current, account->described);
    } else if (account->message.any) {
        used = show_now(text, room, &account->message, account->described);
    } else if (account->last.any) {
        used = snprintf(text, room, "in no operation, its last was ");
        used += show(text + used, room - (size_t)used, &account->last, "");
        used += snprintf(text + used, room - (size_t)used, ", %.1f s ago",
                         (double)account->last.age_ms / 1e3);
    } else {
        used = snprintf(text, room, "in no operation yet");
    }
    if (account->kind == TDDP_REPORT_LEFT) {
        used += snprintf(text + used, room - (size_t)used, "; it has destroyed the group");
    }
    if (account->elsewhere[0] && (size_t)used < room) {
        (void)snprintf(text + used, room - (size_t)used, "; %.*s", ELSEWHERE, account->elsewhere);
    }
    return text;
}
