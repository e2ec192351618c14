/*
 * Compares the calls of all ranks before NCCL runs them: with calls that differ NCCL would hang or
 * corrupt memory. Goes through the store, so it is for debugging, with
 * TORCH_DISTRIBUTED_DEBUG=DETAIL. Without it only a few operations are compared, and they run
 * unchecked once the store has ended.
 */
#ifndef TDDP_NCCL_CALL_CHECK_H
#define TDDP_NCCL_CALL_CHECK_H

#include <stdbool.h>

#include <tddp/call.h>

#include "backend/nccl/communicator.h"

enum { TDDP_NCCL_CALL_NAME_BYTES = 32 };

typedef struct tddp_nccl_call_checker {
    int rank;
    int size;
    tddp_store *store; /* owned by the context */
    tddp_store *own;   /* a connection to wait on; NULL: not needed so far */
    tddp_calls *calls; /* with each rank, of the last operation compared */
    char name[TDDP_NCCL_CALL_NAME_BYTES];
    struct tddp_meeting *meeting; /* of that name; NULL: no comparison was interrupted */
    uint64_t last;                /* the number of the last operation compared; 0: none */
    const atomic_bool *aborted;   /* the context's */
    bool store_ended;             /* nothing is compared any more */
} tddp_nccl_call_checker;

/* Whether this operation is compared: equal on all ranks. */
bool tddp_nccl_checks_calls(const tddp_op *op);

/* Called by all ranks, in the order of operations; after TDDP_CANCELED, again. Errors:
 * TDDP_MISMATCH with both sides, TDDP_TIMEOUT, those of the store. */
TDDP_NODISCARD tddp_status tddp_nccl_check_calls(tddp_nccl_call_checker *self, const tddp_op *op,
                                                 tddp_nccl_limits limits);

#endif
