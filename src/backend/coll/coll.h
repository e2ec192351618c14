/*
 * The operations of one rank over a transport. Private to src/backend/coll.
 *
 * A collective is a program: a list of steps that send, receive, wait and combine. Its kind and the
 * size of its data decide which steps (moves.c, reductions.c, all_reduce.c); program.c executes
 * them one after the other. A step that waits may be interrupted, and the program is resumed there:
 * no other step is executed twice. So an operation has no state but its program's position.
 */
#ifndef TDDP_COLL_COLL_H
#define TDDP_COLL_COLL_H

#include <pthread.h>

#include <tddp/call.h>
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
/* Chunks of one peer that may be in transit to the rank that combines them. */
#define WINDOW ((size_t)4)

/* What a payload is for. Between two ranks payloads of one phase are ordered. */
typedef enum tddp_coll_phase { TO_OWNER = 0, FROM_OWNER = 1, DIRECT = 2 } tddp_coll_phase;

/* --- waiting (wait.c) ------------------------------------------------------------------------ */

/* An operation, as its waits see it. */
typedef struct tddp_coll_wait {
    const tddp_op *op;
    int64_t deadline;
    int64_t checked_at; /* when the peer was last checked */
    bool matched;       /* point to point: both sides have arrived */
} tddp_coll_wait;

void tddp_coll_wait_init(tddp_coll_wait *wait, const tddp_op *op);

/* Waits until a transfer with this peer is complete. Returns what it has ended with; TDDP_CANCELED
 * without a text, once the operation's token is triggered; TDDP_TIMEOUT; or why the peer has gone.
 */
TDDP_NODISCARD tddp_status tddp_coll_await(const tddp_coll *coll, tddp_coll_wait *wait,
                                           void *transfer, int peer, int *source);

/* Whether a transfer has succeeded by now. */
bool tddp_coll_is_complete(const tddp_coll *coll, void *transfer);

/* Releases a transfer and forgets it; NULL is fine. */
void tddp_coll_release(const tddp_coll *coll, void **transfer);

/* Whether the group is out of step after this: an interruption leaves an operation as it is, and a
 * refused one has sent nothing. */
bool tddp_coll_is_fatal(tddp_status status);

/* Tells the transport of a fatal status. Returns it. */
tddp_status tddp_coll_report(const tddp_coll *coll, tddp_status status);

/* Before the caller sleeps, or returns with something unfinished. */
void tddp_coll_arm(const tddp_coll *coll);

int tddp_coll_rank_name(const tddp_coll *coll, int rank);

/* --- programs (program.c) -------------------------------------------------------------------- */

typedef enum tddp_coll_kind {
    STEP_SEND,
    STEP_RECV,
    STEP_WAIT,       /* for the transfer of another step */
    STEP_EXPECT,     /* posts the receive of the peer's next header */
    STEP_ANSWER,     /* sends this rank's header */
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

/* A buffer for headers from a peer, or to it, each with a payload. The next header may arrive
 * before the current one is processed: two inboxes are used alternately, and the receive into the
 * next one is posted before this rank's header is sent, so that the peer's finds it. */
typedef struct tddp_coll_link {
    char *memory;
    char *inbox[2];
    char *outbox;
    void *departure;       /* the send from the outbox; NULL: it is complete */
    void *arrivals[2];     /* the receives into the inboxes; NULL: none is posted */
    unsigned next;         /* the inbox of the next header */
    tddp_calls before;     /* the calls of the last operation that agreed */
    uint64_t agreed;       /* that operation's number */
    size_t posted[WINDOW]; /* the steps that receive this peer's chunks; see combine.c */
    uint32_t messages;     /* large messages sent so far; see messages.c */
} tddp_coll_link;

struct tddp_coll_request;
union tddp_coll_eager;

struct tddp_coll {
    const tddp_transport_ops *transport;
    void *context;
    int rank;
    int size;
    int *names; /* NULL: the ranks' own numbers */
    tddp_coll_link *links;
    char *scratch; /* for received data, reused */
    size_t scratch_bytes;
    tddp_coll_program program;
    bool out_of_step; /* a collective has failed */

    pthread_mutex_t mutex; /* guards what messages.c shares between threads: */
    struct tddp_coll_request *requests;
    union tddp_coll_eager *idle; /* eager buffers, for reuse */
    size_t idle_count;
};

TDDP_NODISCARD tddp_status tddp_coll_make_program(tddp_coll *coll);

/* Each of these appends a step. send() and recv() return its index, for await(). */
size_t tddp_coll_send(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      const char *data, size_t bytes);
size_t tddp_coll_recv(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      char *data, size_t bytes);
void tddp_coll_await_step(tddp_coll *coll, int peer, size_t posted);
/* Only where something is to be done. */
void tddp_coll_copy(tddp_coll *coll, void *to, const void *from, size_t bytes);
void tddp_coll_scale(tddp_coll *coll, void *data, size_t bytes, double factor);
void tddp_coll_scale_peer(tddp_coll *coll, int peer, void *data, size_t bytes);
void tddp_coll_combine(tddp_coll *coll, void *into, const void *from, size_t bytes, double factor);

/* Executes the operation's program from its position on, until all of its transfers are complete.
 * Errors: those of tddp_coll_await(); TDDP_MISMATCH. */
TDDP_NODISCARD tddp_status tddp_coll_execute(tddp_coll *coll, const tddp_op *op);

/* Releases the transfers, and clears the steps. */
void tddp_coll_end_program(tddp_coll *coll);

/* Reused memory for received data: what it has is lost with the next program. NULL: no memory. */
char *tddp_coll_scratch(tddp_coll *coll, size_t bytes);

/* --- headers (headers.c) --------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_coll_make_links(tddp_coll *coll);
void tddp_coll_free_links(tddp_coll *coll);

/* Appends the steps to send a header with up to EAGER_BYTES of payload: expect() posts the receive
 * of the peer's next header, answer() sends this rank's; send_header() does both. */
void tddp_coll_expect_header(tddp_coll *coll, int peer);
void tddp_coll_answer_header(tddp_coll *coll, int peer, const void *data, size_t bytes);
void tddp_coll_send_header(tddp_coll *coll, int peer, const void *data, size_t bytes);
/* Append the steps that wait for a peer's header, or for all of them. */
void tddp_coll_recv_header(tddp_coll *coll, int peer);
void tddp_coll_recv_headers(tddp_coll *coll);
/* Where the payload of that header is then, until the next operation. While steps are appended. */
char *tddp_coll_payload(const tddp_coll *coll, int peer);

/* What the steps do. */
TDDP_NODISCARD tddp_status tddp_coll_post_inbox(tddp_coll *coll, int peer);
TDDP_NODISCARD tddp_status tddp_coll_post_header(tddp_coll *coll, const tddp_op *op,
                                                 const tddp_coll_step *step);
TDDP_NODISCARD tddp_status tddp_coll_await_header(tddp_coll *coll, const tddp_op *op, int peer);

/* Describes a collective that has failed: a header that has arrived may show the cause, calls that
 * differ; after a timeout, which ranks have entered. Returns the status. */
tddp_status tddp_coll_describe(tddp_coll *coll, const tddp_op *op, tddp_status status);

/* --- algorithms: each appends the steps of an operation -------------------------------------- */

/* moves.c. Errors: TDDP_MISMATCH, where this rank's part for itself isn't what it expects. */
TDDP_NODISCARD tddp_status tddp_coll_move(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_broadcast(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_barrier(tddp_coll *coll, const tddp_op *op);

/* all_reduce.c. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_coll_all_reduce(tddp_coll *coll, const tddp_op *op);
/* Combines all ranks' output there, without factors; without data a barrier. */
void tddp_coll_all_reduce_doubling(tddp_coll *coll, const tddp_op *op);

/* reductions.c. Errors: TDDP_OUT_OF_MEMORY, TDDP_MISMATCH. */
TDDP_NODISCARD tddp_status tddp_coll_reduce(tddp_coll *coll, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_coll_reduce_scatter(tddp_coll *coll, const tddp_op *op);

/* --- combining (combine.c) ------------------------------------------------------------------- */

/* The factor on this rank's data. For AVG of float16 it divides, since the sum could overflow. */
double tddp_coll_factor_before(const tddp_coll *coll, const tddp_op *op);
/* The factor on the result. */
double tddp_coll_factor_after(const tddp_coll *coll, const tddp_op *op);

/* Where a rank combines all ranks' data. */
typedef struct tddp_coll_part {
    const char *local; /* this rank's data; may be the same as `into` */
    char *into;
    size_t bytes;
    bool scaled;    /* each rank has applied its factor to what it sends */
    char *incoming; /* memory for received data */
} tddp_coll_part;

/* Appends the steps to combine the data in all ranks' headers, which have arrived, in the order of
 * ranks, so that the bits don't depend on the rank. Needs `bytes` of memory. */
void tddp_coll_combine_headers(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part);

/* Appends the steps to receive all peers' headers and, in phase TO_OWNER, their data of this part,
 * to combine them, and to send each chunk of the result in phase FROM_OWNER to `to`: a rank, TO_ALL
 * or TO_NONE. Needs tddp_coll_window_bytes() of memory. */
enum { TO_ALL = -1, TO_NONE = -2 };
void tddp_coll_combine_part(tddp_coll *coll, const tddp_op *op, const tddp_coll_part *part, int to);
size_t tddp_coll_window_bytes(const tddp_coll *coll, size_t bytes);

/* --- parts and chunks ------------------------------------------------------------------------ */

/* Whether recursive doubling is the better way for so many bytes: with few ranks one step is. */
static inline bool tddp_coll_doubles(const tddp_coll *coll, size_t bytes)
{
    return coll->size > 8 && bytes <= EAGER_BYTES;
}

/* Equal parts of `count` elements; all start on a cache line if the buffer does. */
typedef struct tddp_coll_partition {
    size_t count;
    size_t element;
    size_t each;
} tddp_coll_partition;

static inline tddp_coll_partition tddp_coll_partition_of(const tddp_buffer *buffer, int owners)
{
    const size_t element = tddp_dtype_size(buffer->dtype);
    const size_t even = (buffer->count + (size_t)owners - 1) / (size_t)owners;
    const size_t line = 64 / element;
    return (tddp_coll_partition){buffer->count, element, (even + line - 1) / line * line};
}

static inline size_t tddp_coll_part_start(const tddp_coll_partition *self, int owner)
{
    const size_t start = self->each * (size_t)owner;
    return (start < self->count ? start : self->count) * self->element;
}

static inline size_t tddp_coll_part_bytes(const tddp_coll_partition *self, int owner)
{
    return tddp_coll_part_start(self, owner + 1) - tddp_coll_part_start(self, owner);
}

/* The smaller one; what is left of the last chunk, for example. */
static inline size_t tddp_coll_min(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* for (each peer of coll), for (each chunk of so many bytes: where it starts) */
#define EACH_PEER(coll, peer)                       \
    for (int peer = 0; peer < (coll)->size; peer++) \
        if (peer != (coll)->rank)
#define EACH_CHUNK(bytes, at) for (size_t at = 0; at < (bytes); at += CHUNK_BYTES)

#endif
