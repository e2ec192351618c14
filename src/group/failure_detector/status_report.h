/*
 * What a rank says of itself when its group is in trouble: that it failed and how, where it is in
 * its operations, that it has left. Each is a line in the group's log in the store; appending keeps
 * the order in which the ranks spoke. Plain functions on text; any thread.
 */
#ifndef TDDP_GROUP_STATUS_REPORT_H
#define TDDP_GROUP_STATUS_REPORT_H

#include "group/recorder/recorder.h"

typedef enum tddp_status_report_kind {
    TDDP_REPORT_NONE,
    TDDP_REPORT_POSITION, /* it lives, and is there */
    TDDP_REPORT_FAILURE,  /* its own operation failed */
    TDDP_REPORT_LEFT,     /* it has destroyed the group */
} tddp_status_report_kind;

/* An operation as another rank tells of it. */
typedef struct tddp_status_report_op {
    bool any;
    tddp_op_kind kind;
    uint64_t sequence;
    int peer;
    int64_t age_ms; /* since it began or ended, when the line was written */
} tddp_status_report_op;

/* What is known of one rank. Texts lie in the log that was read, or are "". */
typedef struct tddp_status_report {
    tddp_status_report_kind kind; /* a failure stays one; else the latest */
    int order;                    /* of its failure among all failures of the log, from 1 */
    tddp_status status;           /* of its failure */
    tddp_status_report_op current;
    tddp_status_report_op last;
    tddp_status_report_op message;
    const char *described; /* what its current operation was said to be */
    const char *elsewhere; /* what it does in other groups */
    const char *text;      /* what its failure is, without its place */
} tddp_status_report;

/* "all_reduce 2", "recv 3 from rank 1", "recv 3 from any rank"; returns `text`. */
enum { TDDP_REPORT_OP_NAME_BYTES = 64 };
const char *tddp_status_report_op_name(tddp_op_kind kind, uint64_t sequence, int peer,
                                       char text[TDDP_REPORT_OP_NAME_BYTES]);

/* Adds one line to `line`. `position` is where the rank is; `text` and `elsewhere` are cut to fit
 * into about `bytes`. */
TDDP_NODISCARD tddp_status tddp_status_report_write(tddp_bytes *line, tddp_status_report_kind kind,
                                                    int rank, tddp_status status,
                                                    const tddp_recorder_position *position,
                                                    const char *elsewhere, const char *text,
                                                    size_t bytes);

/* Reads a whole log into `accounts[count]`, which is cleared first. The log is cut into strings and
 * must live as long as the accounts; lines that make no sense are passed over. */
void tddp_status_report_read(char *log, tddp_status_report *accounts, int count);

/* Where the rank is, for people: "in broadcast 3 (\"weights\") for 5.1 s"; returns `text`. */
enum { TDDP_REPORT_POSITION_BYTES = 512 };
const char *tddp_status_report_position(const tddp_status_report *account,
                                        char text[TDDP_REPORT_POSITION_BYTES]);

#endif
