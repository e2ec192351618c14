/*
 * Finds the root cause of a group's failure: from what this rank observed and what the others
 * reported, which rank failed first, and the text that all ranks raise. A pure function of the
 * evidence: it neither waits nor locks, and does not use the store.
 */
#ifndef TDDP_GROUP_ROOT_CAUSE_H
#define TDDP_GROUP_ROOT_CAUSE_H

#include "group/failure_detector/observed.h"
#include "group/failure_detector/status_report.h"
#include "group/peers.h"

/* An operation that failed on this rank. */
typedef struct tddp_failure {
    tddp_op op;
    const char *described; /* by its caller; NULL: not at all */
    tddp_status status;
    const char *text; /* the backend's */
} tddp_failure;

typedef struct tddp_failure_evidence {
    const tddp_peers *peers;
    int rank;                    /* this one */
    const tddp_failure *failure; /* NULL: another rank's operation failed */
    tddp_observed *observed;     /* what it has seen of other ranks */
    bool store_lost;             /* no reports can be read: a missing one means nothing */
    bool deadline_over;          /* no more reports are waited for */
} tddp_failure_evidence;

/*
 * True: the root cause is known, or as much of it as ever will be. `*status` is then what the
 * failed operation, or pending ones where none failed here, end with, and this thread's error text
 * says why, without naming that operation. False: more reports may still come. `log`: the group's,
 * which is cut into strings; NULL: it can't be read.
 */
bool tddp_root_cause_find(const tddp_failure_evidence *evidence, char *log, tddp_status *status);

#endif
