/*
 * A rank's status report: that it failed and how, where it is in its operations, or that it has
 * left the group. Each is a line in the group's log in the store; appending keeps the order in
 * which the ranks reported. Plain functions on text; any thread.
 */
#ifndef TDDP_GROUP_STATUS_REPORT_H
#define TDDP_GROUP_STATUS_REPORT_H

#include "group/recorder/recorder.h"

typedef enum tddp_status_report_kind {
    TDDP_REPORT_NONE,
    TDDP_REPORT_POSITION, /* it is alive, and is there */
    TDDP_REPORT_FAILURE,  /* an operation of its own failed */
    TDDP_REPORT_LEFT,     /* it has destroyed the group */
} tddp_status_report_kind;

/* An operation of the reporting rank. */
typedef struct tddp_status_report_op {
    bool any; /* false: there is none, and the rest means nothing */
    tddp_op_kind kind;
    uint64_t sequence;
    int peer;
    int64_t age_ms; /* since it started or ended, when the line was written */
} tddp_status_report_op;

/* What is known of one rank. Texts point into the log that was read, or are "". */
typedef struct tddp_status_report {
    tddp_status_report_kind kind; /* a failure stays one; else the latest */
    int order;                    /* of its failure among all failures of the log, from 1 */
    tddp_status status;           /* of its failure */
    tddp_status_report_op current;
    tddp_status_report_op last;
    tddp_status_report_op message;
    const char *described;    /* how the caller described its current operation */
    const char *other_groups; /* its operations in other groups */
    const char *text;         /* of its failure, without the operation */
} tddp_status_report;

/* "all_reduce 2", "recv 3 from rank 1", "recv 3 from any rank"; returns `text`. */
enum { TDDP_REPORT_OP_NAME_BYTES = 64 };
const char *tddp_status_report_op_name(tddp_op_kind kind, uint64_t sequence, int peer,
                                       char text[TDDP_REPORT_OP_NAME_BYTES]);

/* Appends one line to `line`. `position` is the rank's; the description, `other_groups` and `text`
 * are each cut at `bytes`. */
TDDP_NODISCARD tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind,
                                                    int rank, tddp_status status,
                                                    const tddp_recorder_position *position,
                                                    const char *other_groups, const char *text,
                                                    size_t bytes);

/* Reads a log into `reports[count]`, by rank, which is cleared first. The log is cut into strings
 * and must live as long as the reports; malformed lines are skipped. */
void tddp_status_report_read(char *log, tddp_status_report *reports, int count);

/* Formats the rank's position: "in broadcast 3 (\"weights\") for 5.1 s"; returns `text`. */
enum { TDDP_REPORT_POSITION_BYTES = 512 };
const char *tddp_status_report_position(const tddp_status_report *report,
                                        char text[TDDP_REPORT_POSITION_BYTES]);

#endif
