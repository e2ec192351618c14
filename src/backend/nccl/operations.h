/*
 * Requests: operations put on a communicator's stream, after the caller's stream, and tested
 * later. Any thread. Operations of a communicator are put on it one at a time, in the order in
 * which they match those of other ranks.
 */
#ifndef TDDP_NCCL_OPERATIONS_H
#define TDDP_NCCL_OPERATIONS_H

#include "backend/nccl/communicator.h"

typedef struct tddp_nccl_request {
    const tddp_nccl_libraries *libraries;
    tddp_nccl_communicator *communicator;
    const tddp_op *op;
    bool launched;
    tddp_cuda_event ready;   /* recorded on the caller's stream */
    tddp_cuda_event started; /* NULL: not timed */
    tddp_cuda_event done;
    int64_t deadline_ns; /* of its launch */
    unsigned tests;
} tddp_nccl_request;

/* Records the position of the caller's stream: later work on it is not waited for. The caller
 * frees the request. Errors: TDDP_UNSUPPORTED while a graph captures that stream. */
TDDP_NODISCARD tddp_status tddp_nccl_request_create(tddp_nccl_communicator *communicator,
                                                    const tddp_op *op, tddp_nccl_request **out);

/* Puts an operation on its communicator's stream: a collective of all ranks, a message on that of
 * the two ranks, or several messages of a batch, in one group, on that of all ranks. All have the
 * same communicator, which is connected. */
TDDP_NODISCARD tddp_status tddp_nccl_launch(tddp_nccl_request *const *requests, size_t count);

/* The slots test() and order(). Whether a launched request is complete, at once. Errors: of the
 * device, of NCCL's own threads; TDDP_GROUP_FAILED after an abort. */
TDDP_NODISCARD tddp_status tddp_nccl_request_test(void *context, void *request, int *complete);

/* Makes a stream of the device wait for a launched request. */
TDDP_NODISCARD tddp_status tddp_nccl_request_order(void *context, void *request, void *stream);

/* The device time of a completed request; 0: not timed. */
int64_t tddp_nccl_request_ns(const tddp_nccl_request *self);

/* NULL is fine. */
void tddp_nccl_request_free(tddp_nccl_request *self);

#endif
