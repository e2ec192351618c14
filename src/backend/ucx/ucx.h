/*
 * UCX as a transport: one context and one thread for the process, one worker a rank of a group.
 *
 * A worker is not thread-safe, and UCX's own lock for one would be taken twice for each message,
 * once by UCX and once for the states here. So all of a rank's state is behind one mutex, under
 * which UCX is called, and the callbacks run.
 *
 * UCX matches messages by tags of 64 bits: the sender's rank and the transport's tag. Of two ranks
 * the lower one connects, since UCX 1.13 ends the process where two connect to each other at once
 * and one of them ends at that moment (its pull request 8175): the other one connects once a
 * message has arrived, and what it sends before is queued.
 *
 * Locks, in this order: the engine's, a rank's mutex.
 */
#ifndef TDDP_UCX_H
#define TDDP_UCX_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <ucp/api/ucp.h>

#include <tddp/transport.h>

enum { TDDP_UCX_TAG_BITS = 48, TDDP_UCX_REASON_BYTES = 128 };

typedef struct tddp_ucx tddp_ucx;
typedef struct tddp_ucx_transfer tddp_ucx_transfer;

typedef struct tddp_ucx_peer {
    tddp_ucx *self;
    const ucp_address_t *address; /* within tddp_ucx.addresses */
    ucp_ep_h endpoint;            /* NULL: not connected */
    _Atomic bool ended;           /* its connection has, which has this reason: */
    char reason[TDDP_UCX_REASON_BYTES];
    bool said_goodbye; /* this rank has sent it its goodbye, */
    bool acknowledged; /* which it has acknowledged */
    /* What callbacks note for tddp_ucx_settle(), as they must not call most of UCX. */
    bool heard;            /* a message has arrived: this rank connects to it too */
    bool must_acknowledge; /* its goodbye */
    bool must_disconnect;
} tddp_ucx_peer;

typedef enum tddp_ucx_phase { TDDP_UCX_QUEUED, TDDP_UCX_MOVING, TDDP_UCX_DONE } tddp_ucx_phase;

struct tddp_ucx_transfer {
    tddp_ucx *self;
    tddp_ucx_transfer *next; /* QUEUED */
    int peer;                /* may be TDDP_ANY_SOURCE as long as a receive has no message */
    bool sends;
    void *data;
    size_t bytes;
    uint64_t tag;        /* UCX's, with the sender's rank */
    uint64_t mask;       /* of a receive: the bits that count */
    void *request;       /* MOVING: UCX's */
    ucs_status_t status; /* DONE */
    _Atomic tddp_ucx_phase phase;
};

/* A rank of a group. */
struct tddp_ucx {
    int rank;
    int size;
    struct tddp_eventcount *events;
    int peer_timeout; /* seconds; 0: none */
    int64_t began;    /* to connect */
    _Atomic bool closed;
    _Atomic int heard; /* peers */
    _Atomic int ended;

    pthread_mutex_t mutex; /* guards what follows */
    ucp_worker_h worker;   /* NULL: ended */
    int descriptor;        /* the worker's */
    tddp_ucx_peer *peers;
    ucp_address_t *address; /* this rank's */
    char *addresses;        /* of all ranks */
    tddp_ucx_transfer *queue;
    tddp_ucx_transfer control; /* the receive of goodbyes and their acknowledgements */
    bool must_settle;
    bool has_sockets;                /* those are set up: */
    unsigned char old_sockets[8192]; /* a bit for each that was open before the worker was made */

    /* The engine's. */
    int epoll;      /* -1: not registered */
    bool armed;     /* an event at the descriptor will wake the engine's thread */
    bool polled;    /* progress() was called since the engine last looked */
    int recheck_ms; /* when its thread looks again; -1: at an event */
    tddp_ucx *next;
};

/* --- process.c ------------------------------------------------------------------------------- */

/* The process's context, made at the first call. Errors: TDDP_UNAVAILABLE (in a child of a process
 * that has used UCX), TDDP_NETWORK. */
tddp_status tddp_ucx_context(int peer_timeout, ucp_context_h *out);

/* Sets the text, and returns the status for one of UCX's. */
tddp_status tddp_ucx_fail(ucs_status_t status, const char *what);

/* --- engine.c: the thread that moves messages while no caller does --------------------------- */

tddp_status tddp_ucx_engine_add(tddp_ucx *self);
/* Its thread does not use it any more. Does nothing for one that was not added. */
void tddp_ucx_engine_remove(tddp_ucx *self);
/* With the mutex held: its thread does not look at this worker any more. */
void tddp_ucx_engine_forget(tddp_ucx *self);

/* Slots of transport.h: progress() and arm(). */
void tddp_ucx_poll(void *context);
void tddp_ucx_arm(void *context);

/* --- sockets.c ------------------------------------------------------------------------------- */

/* Notes which sockets are open before the worker is made. */
void tddp_ucx_note_sockets(tddp_ucx *self);

/* Makes connections that are new end with this process, and when a machine doesn't answer. */
void tddp_ucx_set_up_sockets(const tddp_ucx *self);

/* --- transfers.c: with the mutex held -------------------------------------------------------- */

extern const tddp_transport_ops tddp_ucx_transport;

void tddp_ucx_post_send(tddp_ucx_transfer *transfer);
void tddp_ucx_post_recv(tddp_ucx_transfer *transfer);
/* A receive that has its message. */
void tddp_ucx_take_control(tddp_ucx *self, ucp_tag_t tag);

/* --- peers.c: with the mutex held, but for open(), connect(), close() and destroy() ---------- */

tddp_status tddp_ucx_open(const tddp_backend_opts *opts, void **context, tddp_slice *address);
tddp_status tddp_ucx_connect(void *context, const tddp_slice *addresses, const tddp_wait *wait,
                             int *peer);
void tddp_ucx_close(void *context, int64_t ms);
void tddp_ucx_destroy(void *context);

/* Makes the endpoint, and sends what is queued. */
void tddp_ucx_connect_to(tddp_ucx_peer *peer);
/* Moves messages, and does what callbacks have left. */
void tddp_ucx_progress(tddp_ucx *self);
/* A message of this peer has arrived. */
void tddp_ucx_hear(tddp_ucx *self, int peer);
/* Ends all connections; later this worker, if UCX does not return the transfer within a second:
 * its memory is not used any more. */
void tddp_ucx_end_transfer(tddp_ucx_transfer *transfer);

#endif
