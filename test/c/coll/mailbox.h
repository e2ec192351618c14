/*
 * A transport in memory, for tests of src/backend/coll: ranks are threads of one process. A thread
 * delivers what was sent, one message at a time, in an order that the seed chooses: messages
 * between two ranks with one tag match in order, and complete in any. Some messages are buffered,
 * so that their sends complete before they are received, and others are read from the sender's
 * memory late.
 *
 *     static void body(coll_rank *it) { coll_run(it, coll_op(it, TDDP_OP_BARRIER)); }
 *
 *     run_ranks(3, seed, body, NULL);
 *
 * coll_run() interrupts an operation again and again, at moments that the seed chooses too, and
 * waits for an event before each resumption: one that is missing ends the test by its time limit.
 */
#ifndef TDDP_TEST_COLL_MAILBOX_H
#define TDDP_TEST_COLL_MAILBOX_H

#include "backend/coll/coll.h"
#include "check.h"

enum { MOST_RANKS = 20, COLL_TIMEOUT_MS = 300000 };

typedef struct mailbox mailbox;

/* The mailbox as one rank sees it: the context of its transport. */
typedef struct mailbox_end {
    mailbox *box;
    int rank;
    tddp_eventcount *events;
    bool gone;
    bool noticed;   /* the rank has said why it takes no further part */
    int unfinished; /* transfers that were released before they were complete */
} mailbox_end;

extern const tddp_transport_ops mailbox_ops;

mailbox *mailbox_create(int size, unsigned seed);
void mailbox_destroy(mailbox *box);
mailbox_end *mailbox_end_of(mailbox *box, int rank);
/* The rank does nothing more: what it has sent still arrives. */
void mailbox_leave(mailbox_end *end);
/* Whether no rank has gone, or said that it takes no further part. */
bool mailbox_is_whole(mailbox *box);

/* How coll_run() and coll_finish() call. */
typedef enum coll_mode {
    COLL_BLOCKING,    /* once */
    COLL_POLLED,      /* never waiting, with each operation at an address of its own */
    COLL_INTERRUPTED, /* with a token that triggers after some microseconds */
    COLL_MODES,
} coll_mode;

typedef struct coll_rank {
    int rank;
    int size;
    coll_mode mode;
    unsigned seed; /* this rank's */
    uint64_t sequence;
    mailbox_end *end;
    tddp_coll *coll;
    void *data;
    tddp_observation seen[MOST_RANKS]; /* of each rank the last; texts are not kept */
} coll_rank;

/* Runs the body as each rank, with different modes and all destroyed at the end, together. No rank
 * may have released an unfinished transfer by then, unless it or another one has gone. */
void run_ranks(int size, unsigned seed, void (*body)(coll_rank *it), void *data);

void coll_leave(coll_rank *it);

/* The next collective, without buffers; sum, root 0. */
tddp_op coll_op(coll_rank *it, tddp_op_kind kind);

/* A message. */
tddp_op coll_message(tddp_op_kind kind, int peer, uint32_t tag, tddp_buffer buffer);

tddp_buffer coll_buffer(void *data, size_t count, tddp_dtype dtype);

/* Runs it to its end in the rank's mode. */
tddp_status coll_try(coll_rank *it, const tddp_op *op);
#define coll_run(it, op) CHECK_OK(coll_try((it), (op)))

/* Calls at most `calls` times without waiting; TDDP_CANCELED: it is not finished. */
tddp_status coll_try_times(coll_rank *it, const tddp_op *op, int calls);

/* Waits until something may have changed since the count was read. */
void coll_await_event(const coll_rank *it, uint32_t seen);

/* Finishes a message in the rank's mode. The operation's token is used. */
tddp_status coll_finish(coll_rank *it, tddp_op *op, void *request, int *source);

/* A number below `limit`. */
unsigned coll_random(unsigned *seed, unsigned limit);

#endif
