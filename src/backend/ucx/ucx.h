/*
 * UCX as a transport: one context and one thread for the process, one worker a rank of a group.
 *
 * A worker is not thread-safe, and UCX's own lock for one would be taken twice for each message,
 * once by UCX and once for the lists here. So all of a rank's state is behind one mutex, under
 * which UCX is called, and the callbacks run. A rank of a group has its own worker, since the end
 * of a worker is what ends every use of its transfers' memory.
 *
 * Messages are active messages: UCX's tag matching has 64 bits for the tag and the sender, and here
 * the tag alone has them. Receives are matched here (messages.c), so that one without a message is
 * canceled without UCX.
 *
 * Locks, in this order: closing, the engine's, a rank's mutex.
 */
#ifndef TDDP_UCX_H
#define TDDP_UCX_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include <ucp/api/ucp.h>

#include <tddp/meeting.h>
#include <tddp/transport.h>

typedef struct tddp_ucx tddp_ucx;
typedef struct tddp_ucx_transfer tddp_ucx_transfer;
typedef struct tddp_ucx_message tddp_ucx_message;

enum { TDDP_UCX_REASON_BYTES = 512 }; /* why a rank has gone */

/* Active messages by number, and what else than data ranks tell each other, by tag. */
enum { TDDP_UCX_DATA = 1, TDDP_UCX_CONTROL };
enum {
    TDDP_UCX_HELLO,  /* the first, either way: the ranks are connected */
    TDDP_UCX_NOTICE, /* the last: why it takes no further part; with a tddp_ucx_notice */
    TDDP_UCX_NOTED,  /* the acknowledgement of that */
    TDDP_UCX_CONTROLS,
};

/* What precedes each active message. */
typedef struct tddp_ucx_header {
    uint64_t tag;
    uint32_t rank;   /* the sender's */
    uint32_t number; /* TDDP_UCX_DATA: counts its messages to this peer from 1 */
} tddp_ucx_header;

typedef struct tddp_ucx_notice {
    uint64_t sequence; /* of its last collective */
    uint32_t status;   /* TDDP_OK: it left the group; else the failure */
    char reason[TDDP_UCX_REASON_BYTES];
} tddp_ucx_notice;

typedef enum tddp_ucx_state { TDDP_UCX_ACTIVE, TDDP_UCX_LEFT, TDDP_UCX_LOST } tddp_ucx_state;

typedef struct tddp_ucx_peer {
    tddp_ucx *self;
    int rank;
    const ucp_address_t *address; /* within tddp_ucx.addresses */
    ucp_ep_h endpoint;
    uint32_t sent;
    uint32_t received;
    tddp_ucx_transfer *posted; /* receives without a message, the oldest first */
    tddp_ucx_message *unexpected;
    tddp_ucx_state state;
    int64_t since;      /* not active */
    uint64_t sequence;  /* LEFT: its last collective */
    tddp_status status; /* LOST: the failure that it reported; TDDP_OK: none */
    char reason[TDDP_UCX_REASON_BYTES];
    bool notified; /* it was sent this rank's notice, */
    bool noted;    /* which it has acknowledged */
    /* What callbacks note for tddp_ucx_settle(), as they must not call most of UCX. */
    bool heard;           /* it has said hello: this rank connects to it too */
    bool must_note;       /* its notice is to be acknowledged, */
    bool must_disconnect; /* or its endpoint closed */
} tddp_ucx_peer;

typedef enum tddp_ucx_phase { TDDP_UCX_POSTED, TDDP_UCX_MOVING, TDDP_UCX_DONE } tddp_ucx_phase;

struct tddp_ucx_transfer {
    tddp_ucx *self;
    tddp_ucx_transfer *next; /* of the receives posted, or the transfers moving */
    tddp_ucx_transfer **link;
    int peer; /* may be TDDP_ANY_SOURCE as long as a receive has no message */
    bool sends;
    void *data;
    size_t bytes;
    tddp_ucx_header header; /* UCX reads it until a send is complete */
    uint64_t order;         /* in which receives were posted */
    ucs_status_t status;    /* DONE */
    size_t arrived;         /* a receive: the size of its message */
    _Atomic tddp_ucx_phase phase;
};

/* A message that arrived before its receive was posted. */
struct tddp_ucx_message {
    tddp_ucx_message *next;
    uint64_t tag;
    uint64_t order; /* in which messages arrived */
    void *data;     /* UCX's, unless it is `copy` */
    size_t bytes;
    bool rendezvous; /* `data` is only a description */
    char copy[];
};

/* A rank of a group. */
struct tddp_ucx {
    int rank;
    int size;
    int *names;  /* NULL: the ranks' numbers */
    pid_t owner; /* the process that made it; a child must not touch it */
    struct tddp_eventcount *events;
    _Atomic uint64_t sequence; /* of the last collective */
    _Atomic bool aborted;
    _Atomic int inactive; /* peers that are not ACTIVE */

    pthread_mutex_t closing; /* held while the worker is ended */
    pthread_mutex_t mutex;   /* guards what follows */
    ucp_worker_h worker;     /* NULL: ended */
    int descriptor;          /* the worker's */
    tddp_ucx_peer *peers;
    char *addresses; /* of all ranks */
    tddp_ucx_transfer *posted_any;
    tddp_ucx_transfer *moving;
    uint64_t order;
    bool must_settle;
    bool notified; /* the peers have been told why this rank takes no further part */
    tddp_ucx_notice notice;
    tddp_ucx_header controls[TDDP_UCX_CONTROLS];
    char first_failure[TDDP_UCX_REASON_BYTES];
    int peer_timeout; /* seconds; 0: none */

    /* The engine's. */
    int epoll;      /* -1: not registered */
    bool armed;     /* an event at the descriptor will wake the engine's thread */
    bool polled;    /* progress() was called since the engine last looked */
    int recheck_ms; /* when its thread looks again; -1: at an event */
    tddp_ucx *next;
};

/* --- process.c ------------------------------------------------------------------------------- */

/* The process's context, made at the first call. Errors: TDDP_UNAVAILABLE (in a child of a process
 * that has used UCX), TDDP_INVALID_ARGUMENT (TDDP_PEER_TIMEOUT), TDDP_NETWORK. */
tddp_status tddp_ucx_context(ucp_context_h *out);

/* Seconds without an answer after which a machine counts as dead; 0: never. */
tddp_status tddp_ucx_peer_timeout(int *seconds);

/* Sets the text, and returns the status for one of UCX's. */
tddp_status tddp_ucx_fail(ucs_status_t status, const char *what);

/* --- engine.c: the thread that moves messages while no caller does --------------------------- */

tddp_status tddp_ucx_engine_add(tddp_ucx *self);
/* Its thread does not use it any more. Does nothing for one that was not added. */
void tddp_ucx_engine_remove(tddp_ucx *self);

/* Slots of transport.h: progress() and arm(). */
void tddp_ucx_poll(void *context);
void tddp_ucx_arm(void *context);

/* --- sockets.c ------------------------------------------------------------------------------- */

/* The descriptors of this process at a moment. */
typedef struct tddp_ucx_descriptors {
    char *is_open; /* by number; free() it */
    int room;      /* numbers below that */
    int count;
} tddp_ucx_descriptors;

tddp_status tddp_ucx_list_descriptors(tddp_ucx_descriptors *out);

/* Whether this process may open as many files as connections to all ranks need: else UCX ends it.
 */
tddp_status tddp_ucx_check_descriptors(const tddp_ucx_descriptors *open, int size);

/* Makes connections that are new end with this process, and when a machine doesn't answer. */
void tddp_ucx_set_up_sockets(const tddp_ucx_descriptors *before, int seconds);

/* --- connect.c ------------------------------------------------------------------------------- */

/* Exchanges addresses with all ranks. Errors: those of meetings, and of UCX. */
tddp_status tddp_ucx_open(const tddp_backend_opts *opts, const tddp_wait *wait, tddp_ucx **out);
/* Leaves the group, if it has not failed, and frees everything. */
void tddp_ucx_free(tddp_ucx *self);

/* With the mutex held: makes the endpoint, and says hello. */
void tddp_ucx_connect(tddp_ucx_peer *peer);
/* Its transfers fail, which UCX tells later. */
void tddp_ucx_disconnect(tddp_ucx_peer *peer);

/* --- close.c --------------------------------------------------------------------------------- */

/* Ends the worker, and with it all transfers; their memory is not used any more. Waits for a moment
 * until the peers know what they were told. `text` says why, for later calls. */
void tddp_ucx_close(tddp_ucx *self, const char *text);
/* The same without a word to the peers. */
void tddp_ucx_abort(tddp_ucx *self);

/* --- messages.c ------------------------------------------------------------------------------ */

extern const tddp_transport_ops tddp_ucx_transport;

/* With the mutex held: moves messages, and does what callbacks have left. */
void tddp_ucx_progress(tddp_ucx *self);
ucs_status_t tddp_ucx_on_data(void *self, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param);
void tddp_ucx_complete(tddp_ucx_transfer *transfer, ucs_status_t status);
/* Frees what arrived and was not received. */
void tddp_ucx_drop_messages(tddp_ucx *self);

/* --- peers.c: all with the mutex held, unless said ------------------------------------------- */

void tddp_ucx_settle(tddp_ucx *self);
void tddp_ucx_lose(tddp_ucx_peer *peer, const char *reason);
void tddp_ucx_on_error(void *peer, ucp_ep_h endpoint, ucs_status_t status);
ucs_status_t tddp_ucx_on_control(void *self, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param);
/* Who sent an active message, whose header is copied; NULL: it is none of ours. */
tddp_ucx_peer *tddp_ucx_sender(tddp_ucx *self, const void *header, size_t header_bytes,
                               tddp_ucx_header *out);
/* Adds to a text in so many bytes; what has no room is cut. */
void tddp_ucx_add(char *text, size_t bytes, const char *format, ...) TDDP_PRINTF(3, 4);
/* Sends what is no data; it is complete when UCX says so, which nobody waits for. */
void tddp_ucx_tell(tddp_ucx_peer *peer, unsigned control, const void *data, size_t bytes);
/* Tells all connected peers, once, why this rank takes no further part. */
void tddp_ucx_notify(tddp_ucx *self, tddp_status status, const char *text);
/* Fails with what is known of a peer, or of any, that has gone. */
tddp_status tddp_ucx_check(tddp_ucx *self, int peer, uint64_t sequence);
/* Without the mutex: the slots of transport.h. */
tddp_status tddp_ucx_check_peer(void *context, int peer, uint64_t sequence);
void tddp_ucx_report_failure(void *context, tddp_status status, const char *text);

#endif
