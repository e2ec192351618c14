/*
 * Why a group has failed: from what this rank met and what the others said, who was first and what
 * all ranks are told. Plain thought on given evidence: nothing here waits, locks or asks a store.
 */
#ifndef TDDP_GROUP_ROOT_CAUSE_H
#define TDDP_GROUP_ROOT_CAUSE_H

#include "group/failure_detector/status_report.h"

typedef struct tddp_failure_evidence {
    const tddp_peers *peers;
    int rank;          /* this one */
    const tddp_op *op; /* that failed here; NULL: none did, another rank has told of a failure */
    const char *described;              /* the operation, by its caller; NULL: not at all */
    tddp_status status;                 /* of the operation; TDDP_OK without one */
    const char *text;                   /* the backend's words on it; "" without one */
    const tddp_status_report *accounts; /* by rank */
    bool deaf;                          /* the store is gone: silence says nothing */
    bool last;                          /* no more will be known */
} tddp_failure_evidence;

/*
 * True: the case is clear, or as clear as it will get. `*status` is what the operation ends with
 * then, or pending ones where none failed here, and this thread's error text says why, without
 * naming that operation. False: others may still tell.
 */
bool tddp_root_cause_find(const tddp_failure_evidence *evidence, tddp_status *status);

#endif
