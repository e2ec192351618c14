/*
 * An NCCL communicator with its own stream on one device, and waiting for it.
 *
 * It has all ranks of a group, or two ranks for the messages from one to the other. Each direction
 * has its own communicator, so that no message waits behind another one that depends on it.
 */
#ifndef TDDP_NCCL_COMMUNICATOR_H
#define TDDP_NCCL_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tddp/backend.h>

#include "backend/nccl/libraries.h"

typedef struct tddp_nccl_communicator {
    const tddp_nccl_libraries *libraries;
    int device;
    int rank;
    int size;
    tddp_cuda_stream stream;
    void *scratch; /* a few bytes on the device, never read */
    _Atomic bool aborted;
    pthread_mutex_t mutex; /* guards the following, and every call with the communicator */
    tddp_nccl_comm comm;   /* NULL after an abort */
    tddp_nccl_comm none;   /* where a split without this rank writes NULL, perhaps late */
} tddp_nccl_communicator;

/* What ends a wait early. */
typedef struct tddp_nccl_limits {
    int64_t deadline_ns;              /* CLOCK_MONOTONIC */
    tddp_cancel *cancel;              /* NULL: none */
    const _Atomic bool *aborted_flag; /* ends the wait when set */
} tddp_nccl_limits;

/* Describes a communicator; all its ranks use the same key. */
typedef struct tddp_nccl_communicator_opts {
    int device;
    int rank;
    int size;
    tddp_store *store;
    const char *key;
    tddp_nccl_limits limits;
    /* Known on all ranks; NULL: rank 0 creates it and publishes it under the key. */
    const tddp_nccl_id *id;
    /* Split from it, by all its ranks at once; NULL: created from the id. */
    tddp_nccl_communicator *parent;
} tddp_nccl_communicator_opts;

/* Blocks until all ranks have arrived. The caller destroys it. Errors: TDDP_INVALID_ARGUMENT (no
 * such device), TDDP_TIMEOUT, TDDP_CANCELED, TDDP_PEER_LOST, TDDP_GROUP_FAILED, TDDP_NETWORK
 * with NCCL's text. */
TDDP_NODISCARD tddp_status tddp_nccl_communicator_create(const tddp_nccl_libraries *libraries,
                                                         const tddp_nccl_communicator_opts *opts,
                                                         tddp_nccl_communicator **out);

/* Only the step that needs the store: rank 0 creates the unique id, and all ranks get it.
 * Errors: the same. */
TDDP_NODISCARD tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries,
                                              const tddp_nccl_communicator_opts *opts,
                                              tddp_nccl_id *id);

/* This rank is not a member of the communicator that others split from this one. */
TDDP_NODISCARD tddp_status tddp_nccl_communicator_decline(tddp_nccl_communicator *communicator,
                                                          const tddp_nccl_communicator_opts *opts);

/* Ends everything on its stream soon. Any thread. */
void tddp_nccl_communicator_abort(tddp_nccl_communicator *communicator);

/* No thread may wait for it any more. NULL is fine. */
void tddp_nccl_communicator_destroy(tddp_nccl_communicator *communicator);

/* With the mutex held, after an NCCL call on the communicator returned `result`: waits until the
 * call is complete. `what` names it. */
TDDP_NODISCARD tddp_status tddp_nccl_wait_call(tddp_nccl_communicator *communicator,
                                               tddp_nccl_result result, const char *what,
                                               int64_t deadline_ns);

/* Waits until the event is complete, by polling, since a dead peer wakes nobody. */
TDDP_NODISCARD tddp_status tddp_nccl_wait_event(tddp_nccl_communicator *communicator,
                                                tddp_cuda_event event, int64_t deadline_ns);

/* Waits until the store has the key, by polling. `timeout_text` explains a timeout. */
TDDP_NODISCARD tddp_status tddp_nccl_wait_key(tddp_store *store, tddp_slice key,
                                              tddp_nccl_limits limits, const char *timeout_text);

/* Nanoseconds of CLOCK_MONOTONIC; that time `timeout_ms` from now; the time left. */
int64_t tddp_nccl_now(void);
int64_t tddp_nccl_deadline(int64_t timeout_ms);
tddp_wait tddp_nccl_time_left(tddp_nccl_limits limits);

#endif
