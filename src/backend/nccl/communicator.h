/*
 * An NCCL communicator with its own stream on one device: of all ranks of a group, or of two for
 * the messages between them. It is made when it is first asked for, and connects later.
 *
 * NCCL's calls may block: in blocking mode (NCCL's own default) until other ranks come, and an
 * abort until the device has carried out what hangs there. So those that connect, close and abort
 * run on lent threads, which hold a reference, and a thread that waits for them may stop waiting; a
 * launch runs on its caller's thread, and is ended by an abort. No lock is held during
 * any of them.
 */
#ifndef TDDP_NCCL_COMMUNICATOR_H
#define TDDP_NCCL_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tddp/backend.h>

#include "backend/nccl/libraries.h"
#include "base/base.h"

enum { TDDP_NCCL_TEXT_BYTES = 2048, TDDP_NCCL_KEY_BYTES = 64 };

/* How far it has come. */
typedef enum tddp_nccl_state {
    TDDP_NCCL_UNCONNECTED,
    TDDP_NCCL_CONNECTING,
    TDDP_NCCL_CONNECTED,
    TDDP_NCCL_FAILED /* to connect */
} tddp_nccl_state;

/* Describes a communicator; all its ranks use the same key. */
typedef struct tddp_nccl_communicator_opts {
    int device;
    int rank;
    int size;
    tddp_store *store;
    char key[TDDP_NCCL_KEY_BYTES];
    bool has_id; /* `id` is known on all ranks; else rank 0 creates it, and publishes it */
    tddp_nccl_id id;
    /* Split from it, by all its ranks at once; NULL: created from the id. */
    struct tddp_nccl_communicator *parent;
    bool declines; /* this rank takes part in the split alone */
} tddp_nccl_communicator_opts;

typedef struct tddp_nccl_communicator {
    struct tddp_nccl_communicator *next; /* in its context's list */
    atomic_int references;
    const tddp_nccl_libraries *libraries;
    tddp_nccl_communicator_opts opts;
    bool blocking;
    tddp_cancel *stop;       /* ends waits for the store */
    atomic_bool aborted;     /* set first of all, without a lock */
    tddp_cuda_stream stream; /* since it is connected, as the next two */
    void *scratch;           /* a few bytes on the device, never read */
    tddp_nccl_comm none;     /* where a split without this rank writes NULL, perhaps late */
    pthread_mutex_t mutex;   /* guards what follows; never held during a call of NCCL's */
    pthread_cond_t changed;  /* any of it */
    tddp_nccl_state state;
    tddp_nccl_comm comm; /* NULL: none, or a thread is about to abort it */
    bool in_use;         /* by the one thread that makes calls of it */
    int threads;         /* that connect, close or abort it */
    bool ending;         /* one of them is to abort it */
    bool aborting;       /* and does so now */
    bool ended;          /* and has done so, or found nothing to abort */
    tddp_status status;  /* why it could not connect, */
    char text[TDDP_NCCL_TEXT_BYTES];
} tddp_nccl_communicator;

/* What ends a wait early. */
typedef struct tddp_nccl_limits {
    int64_t deadline_ns; /* CLOCK_MONOTONIC */
    tddp_cancel *cancel; /* NULL: none */
} tddp_nccl_limits;

/* Does nothing that waits. The caller releases it. Errors: TDDP_OUT_OF_MEMORY, TDDP_SYSTEM. */
TDDP_NODISCARD tddp_status tddp_nccl_communicator_create(const tddp_nccl_libraries *libraries,
                                                         const tddp_nccl_communicator_opts *opts,
                                                         tddp_nccl_communicator **out);

/* Blocks until all ranks have arrived, unless that is so already; any number of threads. After an
 * error it is good for nothing. Errors: TDDP_INVALID_ARGUMENT (no such device), TDDP_TIMEOUT,
 * TDDP_CANCELED, TDDP_PEER_LOST, TDDP_GROUP_FAILED, TDDP_NETWORK with NCCL's text. */
TDDP_NODISCARD tddp_status tddp_nccl_connect(tddp_nccl_communicator *communicator,
                                             tddp_nccl_limits limits);

/* Sets how far it has come, and why no further, with the thread's error text. */
void tddp_nccl_set_state(tddp_nccl_communicator *communicator, tddp_nccl_state state,
                         tddp_status status);

/* Between these a thread, and no other one, uses the communicator, as `*comm`. Waits for another
 * thread until the deadline. Errors: TDDP_TIMEOUT, TDDP_GROUP_FAILED. */
TDDP_NODISCARD tddp_status tddp_nccl_begin_calls(tddp_nccl_communicator *communicator,
                                                 int64_t deadline_ns, tddp_nccl_comm *comm);
void tddp_nccl_end_calls(tddp_nccl_communicator *communicator);

/* Between these: after an NCCL call on `comm` returned `result`, waits until the call is complete.
 * `what` names it. */
TDDP_NODISCARD tddp_status tddp_nccl_wait_call(tddp_nccl_communicator *communicator,
                                               tddp_nccl_comm comm, tddp_nccl_result result,
                                               const char *what, int64_t deadline_ns);

/* Whether it has failed, which NCCL's own threads may find. While another thread makes calls of it,
 * that one finds it. */
TDDP_NODISCARD tddp_status tddp_nccl_check(tddp_nccl_communicator *communicator);

/* connecting.c: only the step that needs the store: rank 0 creates the unique id, and all ranks get
 * it. Errors: those of the store, TDDP_PEER_LOST. */
TDDP_NODISCARD tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries,
                                              tddp_store *store, const char *key, int rank,
                                              int size, tddp_nccl_limits limits, tddp_nccl_id *id);

/* On a lent thread: connects, and sets the state. */
void tddp_nccl_connecting(tddp_nccl_communicator *communicator);

/* --- the end: closing.c ---------------------------------------------------------------------- */

/* All of a list, marked before the first is aborted, then side by side. Returns when they are, or
 * after a moment: the threads that abort them go on. Any thread. */
void tddp_nccl_abort(tddp_nccl_communicator *list);

/* On a lent thread: aborts one, once its calls have ended, or after a moment. */
void tddp_nccl_end_comm(tddp_nccl_communicator *communicator);

/* Closes all of a list and releases them; no thread uses them any more. */
void tddp_nccl_close(tddp_nccl_communicator *list);

/* Another reference; gives one back, the last one with all that there is on the device. */
tddp_nccl_communicator *tddp_nccl_retain(tddp_nccl_communicator *communicator);
void tddp_nccl_release(tddp_nccl_communicator *communicator);

/* Runs `body` with the communicator on a lent thread, its device current. */
TDDP_NODISCARD tddp_status tddp_nccl_start(tddp_nccl_communicator *communicator,
                                           void (*body)(tddp_nccl_communicator *communicator));

/* Waits for a change, with the mutex held, until then at the latest; false: it is over. */
bool tddp_nccl_await_change(tddp_nccl_communicator *communicator, int64_t deadline_ns);

/* The time left, for the store. */
tddp_wait tddp_nccl_time_left(tddp_nccl_limits limits);

#endif
