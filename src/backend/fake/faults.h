/* The faults that TDDP_FAKE requests; fake.h describes them. */
#ifndef TDDP_BACKEND_FAKE_FAULTS_H
#define TDDP_BACKEND_FAKE_FAULTS_H

#include "backend/fake/fake.h"

typedef struct tddp_fake_faults {
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

/* Parses TDDP_FAKE; all zero if it is unset or for another rank. */
TDDP_NODISCARD tddp_status tddp_fake_read_faults(int rank, tddp_fake_faults *out);

/* Delays, drops or fails an operation that is about to run. */
TDDP_NODISCARD tddp_status tddp_fake_before(const tddp_fake_faults *faults, const tddp_op *op,
                                            tddp_cancel *cancel);

#endif
