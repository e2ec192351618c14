/*
 * A communicator with a stream of its own on one device, and waiting for what was put on it.
 *
 * Of a group with all its ranks, or of two ranks for the messages from one to the other: each
 * direction has its own, so that no message waits behind another one that waits for it.
 */
#ifndef TDDP_NCCL_CHANNEL_H
#define TDDP_NCCL_CHANNEL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tddp/backend.h>

#include "backend/nccl/libraries.h"

typedef struct tddp_nccl_channel {
    const tddp_nccl_libraries *libraries;
    int device;
    int rank;
    int size;
    tddp_cuda_stream stream;
    void *scratch; /* a few bytes on the device, whose contents nobody reads */
    _Atomic bool aborted;
    pthread_mutex_t mutex; /* guards what follows, and every call with the communicator */
    tddp_nccl_comm comm;   /* NULL once aborted */
} tddp_nccl_channel;

/* What ends a wait. */
typedef struct tddp_nccl_until {
    int64_t deadline_ns;      /* CLOCK_MONOTONIC */
    tddp_cancel *cancel;      /* NULL: none */
    const _Atomic bool *ends; /* gives up when it is set */
} tddp_nccl_until;

/* What it takes to make one; all ranks name the same key. */
typedef struct tddp_nccl_plan {
    int device;
    int rank;
    int size;
    tddp_store *store;
    const char *key;
    tddp_nccl_until until;
    const tddp_nccl_id
        *id; /* that all ranks have; NULL: rank 0 makes one, and says it by the key */
    tddp_nccl_channel *from; /* split off from it, by all its ranks at once; NULL: anew */
} tddp_nccl_plan;

/*
 * Blocks until all ranks of the plan have come. To be closed.
 * Errors: TDDP_INVALID_ARGUMENT (no such device), TDDP_TIMEOUT, TDDP_CANCELED, TDDP_PEER_LOST,
 * TDDP_GROUP_FAILED, TDDP_NETWORK with NCCL's words.
 */
TDDP_NODISCARD tddp_status tddp_nccl_channel_open(const tddp_nccl_libraries *libraries,
                                                  const tddp_nccl_plan *plan,
                                                  tddp_nccl_channel **out);

/* Only the first step of it, which needs the store: rank 0 makes the id, and all get it. Errors:
 * the same. */
TDDP_NODISCARD tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries,
                                              const tddp_nccl_plan *plan, tddp_nccl_id *id);

/* This rank is not in what the others split off from the channel. */
TDDP_NODISCARD tddp_status tddp_nccl_channel_decline(tddp_nccl_channel *channel,
                                                     const tddp_nccl_plan *plan);

/* All that is on its stream ends soon. Any thread. */
void tddp_nccl_channel_abort(tddp_nccl_channel *channel);

/* Nothing of it is waited for any more. NULL is fine. */
void tddp_nccl_channel_close(tddp_nccl_channel *channel);

/* With the mutex held, after a call with the communicator that gave `result`: waits until NCCL is
 * through with the call. `what` names it. */
TDDP_NODISCARD tddp_status tddp_nccl_settle(tddp_nccl_channel *channel, tddp_nccl_result result,
                                            const char *what, int64_t deadline_ns);

/* Waits until the event's work is done: by looking, as nothing can be told of a dead peer. */
TDDP_NODISCARD tddp_status tddp_nccl_await(tddp_nccl_channel *channel, tddp_cuda_event event,
                                           int64_t deadline_ns);

/* Waits until there is such a key: by looking, now and then. `lack` says what it means that there
 * is none when the time is over. */
TDDP_NODISCARD tddp_status tddp_nccl_await_key(tddp_store *store, tddp_slice key,
                                               tddp_nccl_until until, const char *lack);

/* Nanoseconds of CLOCK_MONOTONIC; such a moment `timeout_ms` from now; what is left until one. */
int64_t tddp_nccl_now(void);
int64_t tddp_nccl_deadline(int64_t timeout_ms);
tddp_wait tddp_nccl_left(tddp_nccl_until until);

#endif
