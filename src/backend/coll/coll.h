/*
 * The operations of one rank over a transport. Private to src/backend/coll.
 *
 * A collective is a program: a list of steps that send, receive, wait and combine. Its kind and the
 * size of its data decide which steps (moves.c, reductions.c, doubling.c); program.c executes them
 * one after the other. A step that waits may be interrupted, and the program is resumed there: no
 * other step is executed twice. So an operation has no state but its program's position.
 */
#ifndef TDDP_COLL_COLL_H
#define TDDP_COLL_COLL_H

#include <pthread.h>

#include <tddp/call.h>
#include <tddp/observation.h>
#include <tddp/transport.h>

#include "base/base.h"

/* Space for a header; keeps the payload behind it aligned. */
#define HEADER_BYTES ((size_t)64)
/* Largest payload that is sent with an operation's header, through memory of this module. */
#define EAGER_BYTES ((size_t)64 * 1024)
/* Small enough to combine one chunk while the next arrives, large enough not to be dominated by
 * per-message cost. Two ranks over loopback, all_reduce of 1 to 8 MiB: chunks of 128 KiB and 256
 * KiB cost a fifth more, 1 MiB and 2 MiB cost the same. */
#define CHUNK_BYTES ((size_t)512 * 1024)

enum { TDDP_COLL_WINDOW = 4 };

/* Tags, of which two bits say what they are for: payloads of collectives (program.c), headers of
 * messages by the user's tag, their payloads by a number (messages.c), and these. */
#define TDDP_COLL_TAG(kind, rest) \
    ((uint64_t)(kind) << (TDDP_TRANSPORT_TAG_BITS - TDDP_TRANSPORT_KIND_BITS) | (uint64_t)(rest))
#define HEADER_TAG TDDP_COLL_TAG(3, 0)
#define NOTICE_TAG TDDP_COLL_TAG(3, 1)
#define HELLO_TAG TDDP_COLL_TAG(3, 2)

/* What a payload is for. Between two ranks payloads of one phase are ordered. */
typedef enum tddp_coll_phase { TO_OWNER = 0, FROM_OWNER = 1, DIRECT = 2 } tddp_coll_phase;

/* An operation, as its waits see it. */
typedef struct tddp_coll_wait {
    const tddp_op *op;
    uint64_t sequence; /* a collective's; 0: a message */
    int64_t deadline;
    int64_t checked_at; /* when the peer was last checked */
    bool matched;       /* point to point: both sides have arrived */
} tddp_coll_wait;

typedef enum tddp_coll_kind {
    STEP_SEND,
    STEP_RECV,
    STEP_WAIT,       /* for the transfer of another step */
    STEP_EXPECT,     /* posts the receive of the peer's next header */
    STEP_ANSWER,     /* sends this rank's, with a payload of at most EAGER_BYTES */
    STEP_HEADER,     /* waits for the peer's, and compares the calls */
    STEP_COPY,       /* to = from */
    STEP_SCALE,      /* to *= factor */
    STEP_SCALE_PEER, /* to *= the factor in the peer's header */
    STEP_COMBINE,    /* to = (to op from) * factor */
} tddp_coll_kind;

typedef struct tddp_coll_step {
    tddp_coll_kind kind;
    int peer;
    char *to;
    const char *from;
    size_t bytes;
    union {
        uint64_t tag;  /* STEP_SEND, STEP_RECV */
        size_t posted; /* STEP_WAIT: the step that has posted the transfer */
        double factor; /* STEP_SCALE, STEP_COMBINE */
    };
    void *transfer; /* posted by this step, and not complete as far as is known */
} tddp_coll_step;

typedef struct tddp_coll_program {
    tddp_coll_step *steps;
    size_t count;
    size_t capacity;
    size_t executed;   /* steps that are */
    size_t drained;    /* steps whose transfers are complete, after all are executed */
    bool incomplete;   /* there was no memory for a step */
    uint64_t sequence; /* of the operation; 0: none is unfinished */
    tddp_coll_wait wait;
} tddp_coll_program;

/* Buffers for headers from a peer and to it, each with a payload. The next header may arrive before
 * the current one is processed: two inboxes are used alternately, and the receive into the next one
 * is posted before this rank's header is sent, so that the peer's finds it. */
typedef struct tddp_coll_link {
    char *memory;
    char *inbox[2];
    char *outbox;
    void *arrivals[2];               /* the receives into the inboxes; NULL: none is posted */
    void *departure;                 /* the send from the outbox; NULL: it is complete */
    unsigned next;                   /* the inbox of the next header */
    tddp_calls before;               /* the calls of the last operation that agreed */
    uint64_t agreed;                 /* that operation's number */
    size_t posted[TDDP_COLL_WINDOW]; /* the steps that receive this peer's chunks */
    uint32_t messages;               /* large messages sent so far; see messages.c */
} tddp_coll_link;

/* A rank's last message: why it takes no further part. */
typedef struct tddp_coll_notice {
    uint64_t sequence; /* of its last collective */
    uint32_t status;   /* TDDP_OK: the group was destroyed; else the failure */
    char text[500];
} tddp_coll_notice;

/* A peer, as far as this rank can see. */
typedef struct tddp_coll_peer {
    enum { PEER_ACTIVE, PEER_LEFT, PEER_LOST } state;
    int64_t since;           /* not active */
    tddp_coll_notice notice; /* LOST without a status: the text says how its connection ended */
    void *receive;           /* of the notice: the transport writes there until this has ended */
    void *send;              /* of this rank's */
    void *hellos[2];         /* while ranks connect: the receive, the send; NULL: complete */
} tddp_coll_peer;

typedef struct tddp_coll {
    const tddp_transport_ops *transport;
    void *context;           /* the transport's; NULL: it is not open */
    tddp_eventcount *events; /* counts what the transport and aborts tell */
    bool owns_events;
    int rank;
    int size;
    int *names; /* NULL: the ranks' own numbers */
    tddp_observer observer;
    tddp_coll_link *links;
    char *scratch; /* for received data, reused */
    size_t scratch_bytes;
    tddp_coll_program program;
    bool out_of_step; /* a collective has failed */

    pthread_mutex_t mutex; /* guards what messages.c shares between threads: */
    struct tddp_coll_request *requests;
    union tddp_coll_eager *idle; /* eager buffers, for reuse */
    size_t idle_count;

    _Atomic uint64_t sequence; /* of the last collective */
    _Atomic bool aborted;
    pthread_mutex_t peers_mutex; /* guards the following */
    tddp_coll_peer *peers;
    _Atomic bool has_noticed; /* this rank has sent its notice */
    tddp_coll_notice notice;
} tddp_coll;

/* What tddp_coll_create() gets. */
typedef struct tddp_coll_opts {
    const tddp_transport_ops *transport; /* borrowed, like its context and the events */
    void *context;
    tddp_eventcount *events;
    int rank;
    int world_size;
    const int *names; /* the ranks' names in messages, copied; NULL: their numbers */
    tddp_observer observer;
} tddp_coll_opts;

/* --- backend.c ------------------------------------------------------------------------------- */

/* Tells the other ranks why this one will not connect by any transport. */
void tddp_transport_refuse(const tddp_backend_opts *opts, const char *reason);

/* --- coll.c ---------------------------------------------------------------------------------- */

/* Makes what operations need of memory. */
TDDP_NODISCARD tddp_status tddp_coll_create(const tddp_coll_opts *opts, tddp_coll **out);

/* Posts a receive of each peer's first header and of its notice. The peers are connected. */
TDDP_NODISCARD tddp_status tddp_coll_begin(tddp_coll *coll);

/* Cancels the transfers that are left and frees them, before their transport ends. No operation is
 * running. NULL is fine. */
void tddp_coll_destroy(tddp_coll *coll);

/*
 * Runs a collective, as tddp_backend_run describes, on any thread, one at a time. Once the
 * operation's token is triggered it returns TDDP_CANCELED, at whatever point it waits, and is then
 * called again with the same operation, on any thread; an event tells when that may get on. After
 * another error the group is out of step, except for TDDP_INVALID_ARGUMENT and TDDP_UNSUPPORTED.
 */
TDDP_NODISCARD tddp_status tddp_coll_run(tddp_coll *coll, const tddp_op *op);

/* --- wait.c ---------------------------------------------------------------------------------- */

void tddp_coll_wait_init(tddp_coll_wait *wait, const tddp_op *op);

/* Start transfers, and say why a peer has gone to which that is not possible any more. */
TDDP_NODISCARD tddp_status tddp_coll_start_send(tddp_coll *coll, int peer, uint64_t tag,
                                                const void *data, size_t bytes, void **transfer);
TDDP_NODISCARD tddp_status tddp_coll_start_recv(tddp_coll *coll, int peer, uint64_t tag, void *data,
                                                size_t bytes, void **transfer);

/* Waits until a transfer with this peer is complete. Returns what it has ended with; TDDP_CANCELED
 * without a text, once the operation's token is triggered; TDDP_TIMEOUT; or why the peer has gone.
 */
TDDP_NODISCARD tddp_status tddp_coll_await(tddp_coll *coll, tddp_coll_wait *wait, void *transfer,
                                           int peer, int *source);

/* Whether a transfer has succeeded by now; NULL: no. */
bool tddp_coll_is_complete(const tddp_coll *coll, void *transfer);

/* Releases a transfer and forgets it; NULL is fine. */
void tddp_coll_release(const tddp_coll *coll, void **transfer);

/* Before the caller sleeps, or returns with something unfinished. */
void tddp_coll_arm(const tddp_coll *coll);

/* Whether the group is out of step after this: an interruption leaves an operation as it is, and a
 * refused one has sent nothing. */
bool tddp_coll_is_fatal(tddp_status status);

/* Tells the transport of a fatal status. Returns it. */
tddp_status tddp_coll_report(tddp_coll *coll, tddp_status status);

int tddp_coll_rank_name(const tddp_coll *coll, int rank);

/* --- peers.c --------------------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_coll_make_peers(tddp_coll *coll);
TDDP_NODISCARD tddp_status tddp_coll_expect_notices(tddp_coll *coll);
void tddp_coll_free_peers(tddp_coll *coll);

/* Tells the peers, once, why this rank takes no further part: what it waits for fails from now on.
 */
void tddp_coll_send_notice(tddp_coll *coll, tddp_status status, const char *text);

/* TDDP_OK while it may succeed to wait for this peer, or for any with TDDP_ANY_SOURCE. `sequence`
 * is the number of the collective that waits, which fails also if another rank has left the group
 * before it; 0: a message. Errors, with a text that names the ranks and the cause: TDDP_PEER_LOST,
 * TDDP_MISMATCH (on that rank), TDDP_GROUP_FAILED (aborted). What the peer sent before has arrived,
 * if it ever will: the caller tests its transfer once more. */
TDDP_NODISCARD tddp_status tddp_coll_check(tddp_coll *coll, int peer, uint64_t sequence);

/* --- program.c ------------------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_coll_make_program(tddp_coll *coll);

/* Each of these appends steps. send() and recv() return the index of theirs, for await_step(). */
void tddp_coll_add(tddp_coll *coll, tddp_coll_step step);
#define ADD_STEP(coll, ...) tddp_coll_add((coll), (tddp_coll_step){__VA_ARGS__})
size_t tddp_coll_send(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      const char *data, size_t bytes);
size_t tddp_coll_recv(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      char *data, size_t bytes);
void tddp_coll_await_step(tddp_coll *coll, int peer, size_t posted);
void tddp_coll_copy(tddp_coll *coll, void *to, const void *from, size_t bytes);
void tddp_coll_scale(tddp_coll *coll, void *data, size_t bytes, double factor);
void tddp_coll_combine(tddp_coll *coll, void *into, const void *from, size_t bytes, double factor);
/* Expects the peer's header, and sends this rank's. */
void tddp_coll_send_header(tddp_coll *coll, int peer, const void *data, size_t bytes);
/* Waits for those of all peers. */
void tddp_coll_recv_headers(tddp_coll *coll);

/* Where the payload of a peer's header will be, until the next operation. While steps are appended.
 */
char *tddp_coll_payload(const tddp_coll *coll, int peer);

/* Reused memory for received data, at least so much: what it has is lost with the next program.
 * NULL: there is no memory, or none is asked for. */
char *tddp_coll_scratch(tddp_coll *coll, size_t bytes);

/* Executes the operation's program from its position on, until all of its transfers are complete.
 * Errors: those of tddp_coll_await(); TDDP_MISMATCH. */
TDDP_NODISCARD tddp_status tddp_coll_execute(tddp_coll *coll, const tddp_op *op);

/* Releases the transfers, and clears the steps. */
void tddp_coll_end_program(tddp_coll *coll);

/* --- headers.c ------------------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_coll_make_links(tddp_coll *coll);
TDDP_NODISCARD tddp_status tddp_coll_expect_headers(tddp_coll *coll);
void tddp_coll_free_links(tddp_coll *coll);

/* What STEP_EXPECT, STEP_ANSWER and STEP_HEADER do. */
TDDP_NODISCARD tddp_status tddp_coll_post_inbox(tddp_coll *coll, int peer);
TDDP_NODISCARD tddp_status tddp_coll_post_header(tddp_coll *coll, const tddp_op *op,
                                                 const tddp_coll_step *step);
TDDP_NODISCARD tddp_status tddp_coll_await_header(tddp_coll *coll, const tddp_op *op, int peer);

/* Describes a collective that has failed: a header that has arrived may show the cause, calls that
 * differ; after a timeout, which ranks have entered. Returns the status. */
tddp_status tddp_coll_describe(tddp_coll *coll, const tddp_op *op, tddp_status status);

/* --- messages.c ------------------------------------------------------------------------------ */

/* Starts a send or a receive, as tddp_backend_v1.post, for all of which there are events. */
TDDP_NODISCARD tddp_status tddp_coll_post(tddp_coll *coll, const tddp_op *op, void **request);

/* Ends one, as tddp_backend_v1.finish. Once the operation's token is triggered it returns
 * TDDP_CANCELED, and is then called again. */
TDDP_NODISCARD tddp_status tddp_coll_finish(tddp_coll *coll, void *request, int *source);

/* Waits for a receive's message, as tddp_backend_v1.probe; interrupted like finish(). */
TDDP_NODISCARD tddp_status tddp_coll_probe(tddp_coll *coll, void *request, int *source);

/* Frees a request that is not finished, as tddp_backend_v1.drop, also after tddp_coll_destroy(). */
void tddp_coll_drop(void *request);

/* Cancels the transfers of requests that are left, which may only be dropped then, and frees what
 * messages need of memory. */
void tddp_coll_end_messages(tddp_coll *coll);

/* --- algorithms: each appends the steps of an operation -------------------------------------- */

/* moves.c. Errors: TDDP_MISMATCH, where this rank's part for itself isn't what it expects. */
TDDP_NODISCARD tddp_status tddp_coll_move(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_broadcast(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_barrier(tddp_coll *coll, const tddp_op *op);

/* reductions.c. Errors: TDDP_OUT_OF_MEMORY, TDDP_MISMATCH. */
TDDP_NODISCARD tddp_status tddp_coll_all_reduce(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_reduce(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_reduce_scatter(tddp_coll *coll, const tddp_op *op);

/* doubling.c: combines all ranks' output there, without factors; without data a barrier. */
void tddp_coll_double(tddp_coll *coll, const tddp_op *op);

/* Whether that is the better way for so many bytes: with few ranks one step is. */
static inline bool tddp_coll_doubles(const tddp_coll *coll, size_t bytes)
{
    return coll->size > 8 && bytes <= EAGER_BYTES;
}

/* --- parts and chunks ------------------------------------------------------------------------ */

typedef struct tddp_coll_span {
    char *data;
    size_t bytes;
} tddp_coll_span;

static inline size_t tddp_coll_min(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* Part `index` of so many equal ones, which all start on a cache line if the buffer does. */
static inline tddp_coll_span tddp_coll_part(const tddp_buffer *buffer, int parts, int index)
{
    const size_t element = tddp_dtype_size(buffer->dtype);
    const size_t even = (buffer->count + (size_t)parts - 1) / (size_t)parts;
    const size_t line = 64 / element;
    const size_t each = (even + line - 1) / line * line;
    const size_t start = tddp_coll_min(each * (size_t)index, buffer->count);
    return (tddp_coll_span){(char *)buffer->data + start * element,
                            tddp_coll_min(each, buffer->count - start) * element};
}

/* for (each peer), for (each chunk of so many bytes: where it starts) */
#define EACH_PEER(coll, peer)                       \
    for (int peer = 0; peer < (coll)->size; peer++) \
        if (peer != (coll)->rank)
#define EACH_CHUNK(bytes, at) for (size_t at = 0; at < (bytes); at += CHUNK_BYTES)

#endif
