/*
 * Ranks that compare what they call before NCCL gets it, which itself would wait for ever or mix up
 * memory: through the store, so for debugging, with TORCH_DISTRIBUTED_DEBUG=DETAIL. Few operations
 * are compared without it, and those run unchecked once the store has ended.
 */
#ifndef TDDP_NCCL_COMPARE_H
#define TDDP_NCCL_COMPARE_H

#include <stdbool.h>

#include <tddp/call.h>

#include "backend/nccl/channel.h"

typedef struct tddp_nccl_comparer {
    int rank;
    int size;
    tddp_store *store; /* its owner's */
    tddp_calls *calls; /* with each rank, of the last two operations */
    uint64_t last;     /* the operation whose words are still in the store; 0: none */
    bool gone;         /* the store has ended: there is nothing to compare by */
} tddp_nccl_comparer;

/* Whether this operation is compared, which its callers decide alike on all ranks. */
bool tddp_nccl_compares(const tddp_op *op);

/* All ranks, in the order of the operations. Errors: TDDP_MISMATCH with both sides, TDDP_TIMEOUT,
 * those of the store. */
TDDP_NODISCARD tddp_status tddp_nccl_compare(tddp_nccl_comparer *self, const tddp_op *op,
                                             tddp_nccl_until until);

#endif
