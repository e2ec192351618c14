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

/* What is known of one rank. Texts point into the log that was read, or are "". */
typedef struct tddp_status_report {
    tddp_status_report_kind kind; /* a failure stays one; else the latest */
    int order;                    /* of its failure among all failures of the log, from 1 */
    tddp_status status;           /* of its failure */
    /* The operation that it is in or that failed, and the last collective; number 0: none. */
    int current_kind;
    uint64_t current;
    int last_kind;
    uint64_t last;
    const char *where;     /* "all_reduce 7", which failed; else its operations in all groups */
    const char *described; /* how the caller described its current operation */
    const char *text;      /* of its failure, without the operation; why it has left */
} tddp_status_report;

/* "all_reduce 2", "recv 3 from rank 1", "recv 3 from any rank"; returns `text`. */
enum { TDDP_REPORT_OP_NAME_BYTES = 64 };
const char *tddp_status_report_op_name(tddp_op_kind kind, uint64_t sequence, int peer,
                                       char text[TDDP_REPORT_OP_NAME_BYTES]);

/* Appends one line to `line`. `position` is the rank's; the description, the operations with those
 * in `other_groups`, and `text` are each cut at `bytes`. */
TDDP_NODISCARD tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind,
                                                    int rank, tddp_status status,
                                                    const tddp_recorder_position *position,
                                                    const char *other_groups, const char *text,
                                                    size_t bytes);

/* Reads a log into `reports[count]`, by rank, which is cleared first. The log is cut into strings
 * and must live as long as the reports; malformed lines are skipped. */
void tddp_status_report_read(char *log, tddp_status_report *reports, int count);

#endif
