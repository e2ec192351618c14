/*
 * Operations on their way: put on a channel's stream behind what the caller's stream has written,
 * and waited for later. Any thread; those of one channel are put on it one at a time, in the order
 * in which they are to match the other ranks'.
 */
#ifndef TDDP_NCCL_OPERATIONS_H
#define TDDP_NCCL_OPERATIONS_H

#include "backend/nccl/channel.h"

typedef struct tddp_nccl_request {
    const tddp_nccl_libraries *libraries;
    tddp_nccl_channel *channel; /* NULL: not launched */
    const tddp_op *op;
    int device;
    tddp_cuda_event ready; /* what the caller's stream had to do before */
    tddp_cuda_event begun; /* NULL: nobody asks for times */
    tddp_cuda_event done;
    int64_t deadline_ns;
} tddp_nccl_request;

/* The caller's stream is noted at once: what it does later is not waited for. To be freed. Errors:
 * TDDP_UNSUPPORTED while that stream is being captured in a graph. */
TDDP_NODISCARD tddp_status tddp_nccl_request_create(const tddp_nccl_libraries *libraries,
                                                    const tddp_op *op, int device,
                                                    tddp_nccl_request **out);

/* Puts a collective on the channel of all ranks. */
TDDP_NODISCARD tddp_status tddp_nccl_launch(tddp_nccl_request *self, tddp_nccl_channel *channel);

/* Puts a message on the channel from its sender, rank 0 there, to its receiver, rank 1. */
TDDP_NODISCARD tddp_status tddp_nccl_launch_message(tddp_nccl_request *self,
                                                    tddp_nccl_channel *channel);

/* Waits until it is done; it was launched. */
TDDP_NODISCARD tddp_status tddp_nccl_request_await(tddp_nccl_request *self);

/* Has a stream of its device wait for it; it was launched. */
TDDP_NODISCARD tddp_status tddp_nccl_request_order(tddp_nccl_request *self,
                                                   tddp_cuda_stream stream);

/* How long the device took, once it is done; 0: nobody asked. */
int64_t tddp_nccl_request_ns(const tddp_nccl_request *self);

/* NULL is fine. */
void tddp_nccl_request_free(tddp_nccl_request *self);

#endif
