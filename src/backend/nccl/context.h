/*
 * A group's context: its communicators, made for the device or the peer of the operation that first
 * needs one, in the order in which operations are called, which is the same on all ranks.
 */
#ifndef TDDP_NCCL_CONTEXT_H
#define TDDP_NCCL_CONTEXT_H

#include "backend/nccl/call_check.h"
#include "backend/nccl/communicator.h"

enum { TDDP_NCCL_MAX_DEVICES = 64 };

typedef struct tddp_nccl_context {
    const tddp_nccl_libraries *libraries;
    int rank;
    int size;
    int device; /* -1: the buffers' device */
    bool bound; /* only this device */
    tddp_store *store;
    int64_t timeout_ms;
    atomic_bool aborted;
    tddp_nccl_call_checker call_checker;
    pthread_mutex_t mutex; /* guards what follows; never held during a wait */
    int created; /* communicators of all ranks so far: equal on all ranks, like the order of
                    operations */
    tddp_nccl_id first_id;        /* of the first communicator, unless the group is bound */
    tddp_nccl_communicator *list; /* all of them; none leaves it before the end */
    tddp_nccl_communicator *of_all[TDDP_NCCL_MAX_DEVICES]; /* by device */
    tddp_nccl_communicator **of_two;                       /* by the other rank */
} tddp_nccl_context;

/* The device of an operation: its memory's, or the group's. */
TDDP_NODISCARD tddp_status tddp_nccl_device_of(const tddp_nccl_context *self, const tddp_op *op,
                                               int *device);

/* The communicator for an operation on this device: of all ranks for collectives and batches, else
 * of this rank and the message's peer. It need not be connected. Any thread. */
TDDP_NODISCARD tddp_status tddp_nccl_communicator_for(tddp_nccl_context *self, const tddp_op *op,
                                                      int device, tddp_nccl_communicator **out);

/* All communicators there are. Any thread. */
tddp_nccl_communicator *tddp_nccl_communicators(tddp_nccl_context *self);

#endif
