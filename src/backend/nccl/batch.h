/*
 * Messages that are launched as one: whichever thread comes first launches all, and the others find
 * that done. Any thread.
 */
#ifndef TDDP_NCCL_BATCH_H
#define TDDP_NCCL_BATCH_H

#include "backend/nccl/context.h"
#include "backend/nccl/operations.h"

typedef struct tddp_nccl_batch tddp_nccl_batch;

/* Adds a message to the batch that is being posted; the first one begins it. The caller gives the
 * batch back once for each of its messages. */
TDDP_NODISCARD tddp_status tddp_nccl_batch_add(tddp_nccl_context *context,
                                               tddp_nccl_request *request, tddp_nccl_batch **out);

/* Launches all messages of the batch, unless that was done; all threads get the same outcome. */
TDDP_NODISCARD tddp_status tddp_nccl_batch_launch(tddp_nccl_batch *self,
                                                  tddp_nccl_context *context);

/* Whether that would wait for nothing. */
bool tddp_nccl_batch_launches_at_once(tddp_nccl_batch *self, tddp_nccl_context *context);

/* Before the message's request is freed: a batch that lacks one is not launched any more. */
void tddp_nccl_batch_leave(tddp_nccl_batch *self, tddp_nccl_context *context);

#endif
