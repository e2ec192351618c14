/* The faults that TDDP_FAKE requests; fake.h describes them. */
#ifndef TDDP_BACKEND_FAKE_FAULTS_H
#define TDDP_BACKEND_FAKE_FAULTS_H

#include "backend/fake/fake.h"
#include "base/base.h"

typedef struct tddp_fake_faults {
    char over[TDDP_FAKE_NAME_BYTES]; /* the backend beneath, on all ranks */
    int any;                         /* there are some on this rank */
    int64_t delay_ms;
    int64_t fail_at;
    int64_t drop_at;
    int64_t lose_at;
    int64_t p2p_fail_at;
    int64_t p2p_drop_at;
    int64_t p2p_lose_at;
    int64_t post_fail_at;
    int64_t create_fail;
} tddp_fake_faults;

/* What becomes of an operation, which is decided once. All zero at first. */
typedef struct tddp_fake_fate {
    int fault;
    int64_t timeout_ms; /* the operation's, at first */
    int64_t until;      /* when its delay is over; 0: nothing is decided */
} tddp_fake_fate;

/* Parses TDDP_FAKE; `over` is set also if that fails. */
TDDP_NODISCARD tddp_status tddp_fake_read_faults(int rank, tddp_fake_faults *out);

/* Whether the backend beneath must not get the operation at all. */
bool tddp_fake_ends(const tddp_fake_faults *faults, const tddp_op *op);

/* Delays an operation, then drops or fails it. TDDP_CANCELED, once the operation's token is
 * triggered, leaves the rest of its delay. TDDP_GROUP_FAILED: `aborted` was triggered. */
TDDP_NODISCARD tddp_status tddp_fake_before(const tddp_fake_faults *faults, const tddp_op *op,
                                            const tddp_cancel *aborted, tddp_fake_fate *fate);

#endif
