/*
 * The protocol between nodes and coordinator: nodes send events to the coordinator, the coordinator
 * sends messages to the nodes. Both are short texts, readable by eye.
 *
 * The coordinator (coordinator.h) runs on a thread of one of the torchruns, its host (host.h).
 * Every node, the host's own included, has a member thread (rendezvous.h). Coordinator and members
 * share nothing but these keys, which a backend (backend.h) keeps.
 *
 * c10d and static: keys of the store that the host serves at the endpoint, below torchrun/RUN_ID/.
 *
 *   - open: "TERM JOB": the coordinator listens, for a job of this kind (tddp_launch_job_text() in
 *     host.h). TERM is the time at which it began, so that one that was started again is not taken
 *     for the one before. Deleted when the host leaves the job
 *   - joiners: ADD 1 gives a node its SLOT: 1, 2, ...
 *   - events: a queue (tddp_store_queue_push) that nodes push to and the coordinator pops from
 *   - message/K: the Kth message (K = 1, 2, ...); never changed
 *   - messages: the number of messages so far; set after the message itself
 *   - ended: the message `end` of a job that is over. A node that was in the job takes it for that
 *     message; for a newcomer there is no coordinator yet
 *
 * etcd: keys of etcd, below /torchrun/RUN_ID/. Those below TERM/ are under the coordinator's lease,
 * but for `nodes`, so that nothing is left of a term once it is over.
 *
 *   - coordinator: JOB, under the coordinator's lease. Who creates the key coordinates, and the
 *     revision in which it did is TERM. Every other write of the coordinator is in a transaction
 *     that compares that revision, and so are the nodes' writes
 *   - TERM/slots: its version, once a node has written it, is the node's SLOT
 *   - TERM/nodes/SLOT: under the node's own lease. The coordinator takes its presence for a beat
 *   - TERM/events/ID/N: the Nth event of the node with this id; the coordinator takes them in the
 *     order of their revisions and deletes them
 *   - TERM/messages/K: as message/K. K = 0 is there from the term's beginning; when it goes, the
 *     coordinator leads no more
 *   - ended: as above; written together with the message, under a lease of an hour that nobody
 *     renews. Counts for a node if it is later than the node's last TERM
 *
 * What a node does:
 *
 *   1. Find the coordinator, by `open` or `coordinator`. Compare JOB with its own: all nodes need
 *      the same settings. With etcd, if there is none, try to become it.
 *   2. Take a SLOT, and note how many messages there are: those are in the past. Then push `join`,
 *      and from then on give a sign of life every half second: a `beat`, or a renewal of its lease.
 *   3. With no worker of earlier rounds left, push `ready SLOT ROUND`, where ROUND is one more than
 *      that of the last round this process was in (0 if none).
 *   4. `round N` that lists its slot: the node is in. The node with rank 0 opens the workers' store
 *      and pushes `master`; `master N` comes back to all, and workers start. `round N` without its
 *      slot: wait on; if `spare` came before, the node is one.
 *   5. The workers succeed: `done`. One fails: `failed`. The agent was told to end: `leave`.
 *   6. `over N`: end the workers, then 3. with ROUND = N + 1. Ignore `over` of any other round.
 *   7. `end`: push `bye`, which tells the host that it may end, and finish.
 *      `refuse SLOT` with its slot: the job does not take this node; finish, without `bye`.
 *      `rejoin SLOT`: the coordinator has given this slot up (the node was silent for too long):
 * end the workers, then 2. with a new SLOT.
 *
 * Losses: a node may push an event again when it does not know whether it arrived; the second one
 * has no effect. A message stays until the coordinator is gone. A node whose connection fails
 * connects again and continues with its SLOT, if TERM is the same. When the coordinator is gone (no
 * answer, no `open` or message 0) the node starts at 1.; its `join` there reports round, restart,
 * rank and number of nodes of its last round, from which the new coordinator continues. The workers
 * of that round have to end: `join` may come before that, `ready` after it.
 *
 * An event is a line and, for `join`, lines of key=value; for `failed` and `leave` the rest is a
 * text:
 *
 *   - join SLOT, with id (of this process, random), host, pid, local_size, role, node_rank (as
 *     requested, or -1), last_rank (-1), round (its last, or -1), restart, nodes (of its last
 *     round, or 0), hosting (1: the coordinator is in the same process), addr (at which others
 *     reach this host, numeric)
 *   - ready SLOT ROUND
 *   - beat SLOT
 *   - master SLOT ROUND ADDR PORT
 *   - failed SLOT ROUND
 *   - done SLOT ROUND
 *   - leave SLOT
 *   - bye SLOT
 *
 * A message is a line and a text, or lines of members in the order of their ranks:
 *
 *   - round N restart R: lines of RANK SLOT LOCAL_SIZE ROLE HOST ADDR
 *   - master N ADDR PORT
 *   - over N failed: a worker or node failed, RESTART_COUNT grows
 *   - over N changed: nodes joined or left
 *   - end done|failed|stopped: the last message, except `refuse`
 *   - refuse SLOT
 *   - spare SLOT: there is no place now; the next free one is this node's
 *   - rejoin SLOT
 *   - status: for all nodes, what is waited for
 *
 * Names (role, host, id) have blanks, control characters and % as %XX; an empty one is "%".
 */
#ifndef TDDP_LAUNCH_TEXT_H
#define TDDP_LAUNCH_TEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/base.h"

enum {
    TDDP_LAUNCH_TEXT_BYTES = 8192, /* of a text, with its NUL; longer ones are cut */
    TDDP_LAUNCH_ROLE_BYTES = 128,
    TDDP_LAUNCH_NAME_BYTES = 256, /* a host's name */
    TDDP_LAUNCH_ADDR_BYTES = 96,  /* a numeric address */
    TDDP_LAUNCH_ID_BYTES = 40,
    TDDP_LAUNCH_MOST_MEMBERS = 65536,
    TDDP_LAUNCH_HIGHEST_ROUND = 1000000000
};

typedef enum tddp_launch_event_kind {
    TDDP_LAUNCH_EVENT_JOIN,
    TDDP_LAUNCH_EVENT_READY,
    TDDP_LAUNCH_EVENT_BEAT,
    TDDP_LAUNCH_EVENT_MASTER,
    TDDP_LAUNCH_EVENT_FAILED,
    TDDP_LAUNCH_EVENT_DONE,
    TDDP_LAUNCH_EVENT_LEAVE,
    TDDP_LAUNCH_EVENT_BYE,
} tddp_launch_event_kind;

/* What a `join` tells. */
typedef struct tddp_launch_joiner {
    char id[TDDP_LAUNCH_ID_BYTES];
    char host[TDDP_LAUNCH_NAME_BYTES];
    char role[TDDP_LAUNCH_ROLE_BYTES];
    char addr[TDDP_LAUNCH_ADDR_BYTES];
    int64_t pid;
    int local_size;
    int node_rank; /* asked for, or -1 */
    int last_rank; /* in its last round, or -1 */
    int round;     /* its last one, or -1 */
    int restart;
    int nodes; /* in its last round, or 0 */
    bool hosting;
} tddp_launch_joiner;

typedef struct tddp_launch_event {
    tddp_launch_event_kind kind;
    int slot;
    int round;                         /* READY, MASTER, FAILED, DONE */
    int port;                          /* MASTER */
    tddp_launch_joiner joiner;         /* JOIN */
    char addr[TDDP_LAUNCH_ADDR_BYTES]; /* MASTER */
    char text[TDDP_LAUNCH_TEXT_BYTES]; /* FAILED, LEAVE */
} tddp_launch_event;

typedef enum tddp_launch_message_kind {
    TDDP_LAUNCH_MESSAGE_ROUND,
    TDDP_LAUNCH_MESSAGE_MASTER,
    TDDP_LAUNCH_MESSAGE_OVER,
    TDDP_LAUNCH_MESSAGE_END,
    TDDP_LAUNCH_MESSAGE_REFUSE,
    TDDP_LAUNCH_MESSAGE_SPARE,
    TDDP_LAUNCH_MESSAGE_REJOIN,
    TDDP_LAUNCH_MESSAGE_STATUS,
} tddp_launch_message_kind;

/* How a round is over (FAILED, CHANGED) or the job (DONE, FAILED, STOPPED). */
typedef enum tddp_launch_how {
    TDDP_LAUNCH_HOW_DONE,
    TDDP_LAUNCH_HOW_FAILED,
    TDDP_LAUNCH_HOW_STOPPED,
    TDDP_LAUNCH_HOW_CHANGED,
} tddp_launch_how;

/* A node in a round; its rank is its index. */
typedef struct tddp_launch_member {
    int slot;
    int local_size;
    char role[TDDP_LAUNCH_ROLE_BYTES];
    char host[TDDP_LAUNCH_NAME_BYTES];
    char addr[TDDP_LAUNCH_ADDR_BYTES];
} tddp_launch_member;

typedef struct tddp_launch_message {
    tddp_launch_message_kind kind;
    tddp_launch_how how;               /* OVER, END */
    int round;                         /* ROUND, MASTER, OVER */
    int restart;                       /* ROUND */
    int slot;                          /* REFUSE, SPARE, ANEW */
    int port;                          /* MASTER */
    int count;                         /* ROUND: how many members */
    tddp_launch_member *members;       /* ROUND: owned */
    char addr[TDDP_LAUNCH_ADDR_BYTES]; /* MASTER */
    char text[TDDP_LAUNCH_TEXT_BYTES]; /* all others */
} tddp_launch_message;

/* Append the text of an event or a message to `out`. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_event_encode(const tddp_launch_event *event,
                                                    tddp_bytes *out);
TDDP_NODISCARD tddp_status tddp_launch_message_encode(const tddp_launch_message *message,
                                                      tddp_bytes *out);

/* Read `size` bytes at `data`, which need no NUL, checking everything. Errors: TDDP_PROTOCOL with a
 * text that shows the line, TDDP_OUT_OF_MEMORY. A message is the caller's:
 * tddp_launch_message_free(). */
TDDP_NODISCARD tddp_status tddp_launch_event_decode(const char *data, size_t size,
                                                    tddp_launch_event *out);
TDDP_NODISCARD tddp_status tddp_launch_message_decode(const char *data, size_t size,
                                                      tddp_launch_message *out);

/* Frees a message's members and clears it. */
void tddp_launch_message_free(tddp_launch_message *message);

/* --- between text.c and text_message.c ----------------------------------------------------------
 */

/* A text being read: from `at` to `end`. */
typedef struct tddp_launch_reader {
    const char *at;
    const char *end;
    const char *start;
} tddp_launch_reader;

/* Each takes one item and returns false if it is not there. Fields end at a blank or the line's
 * end. */
bool tddp_launch_read_literal(tddp_launch_reader *reader, const char *literal);
bool tddp_launch_read_number(tddp_launch_reader *reader, int64_t min, int64_t max, int64_t *out);
bool tddp_launch_read_int(tddp_launch_reader *reader, int min, int max, int *out);
bool tddp_launch_read_name(tddp_launch_reader *reader, char *out, size_t size);
bool tddp_launch_read_blank(tddp_launch_reader *reader);
/* The end of a line, or of the whole. */
bool tddp_launch_read_line_end(tddp_launch_reader *reader);
/* All that is left; false if it has a NUL. What is too long is cut. */
bool tddp_launch_read_rest(tddp_launch_reader *reader, char *out, size_t size);
/* Sets a text that shows the line where reading stopped. */
tddp_status tddp_launch_read_failed(const tddp_launch_reader *reader, const char *what);

TDDP_NODISCARD tddp_status tddp_launch_write(tddp_bytes *out, const char *format, ...)
    TDDP_PRINTF(2, 3);
/* Writes a name as %XX has it. */
TDDP_NODISCARD tddp_status tddp_launch_write_name(tddp_bytes *out, const char *name);

#endif
