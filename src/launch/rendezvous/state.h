/*
 * What the nodes of a job and their coordinator write for each other, as JSON, each under a key
 * that its owner alone writes:
 *
 *     leader      ID of the node that coordinates; ephemeral
 *     state       the document: what the coordinator has decided
 *     node/ID     what that node is, and what it wants; ephemeral
 *
 * Whoever reads only the latest version of each misses nothing that matters: a node compares the
 * document with the round it is in, and the coordinator compares each node's entry with what it
 * knows of that node.
 */
#ifndef TDDP_LAUNCH_STATE_H
#define TDDP_LAUNCH_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/base.h"

enum {
    TDDP_LAUNCH_TEXT_BYTES = 8192, /* of a text, with its NUL; longer ones are cut */
    TDDP_LAUNCH_ROLE_BYTES = 128,
    TDDP_LAUNCH_NAME_BYTES = 256, /* a host's name */
    TDDP_LAUNCH_ADDR_BYTES = 96,  /* a numeric address */
    TDDP_LAUNCH_ID_BYTES = 40,
    TDDP_LAUNCH_JOB_BYTES = 128,
    TDDP_LAUNCH_NODE_NOTE_BYTES = 640,
    TDDP_LAUNCH_STATUS_BYTES = 2048,
    TDDP_LAUNCH_MOST_MEMBERS = 65536,
    TDDP_LAUNCH_HIGHEST_ROUND = 1000000000
};

/* Who a node is. In a document's list its rank is its index. */
typedef struct tddp_launch_member {
    char id[TDDP_LAUNCH_ID_BYTES]; /* of the process, random */
    char host[TDDP_LAUNCH_NAME_BYTES];
    char role[TDDP_LAUNCH_ROLE_BYTES];
    char addr[TDDP_LAUNCH_ADDR_BYTES]; /* at which others reach this host */
    int64_t pid;
    int local_size;
    int node_rank; /* asked for, or -1 */
    bool hosting;  /* the store is in the same process */
} tddp_launch_member;

/* A node's entry. Rounds are -1 where there is none. */
typedef struct tddp_launch_entry {
    tddp_launch_member self;
    char job[TDDP_LAUNCH_JOB_BYTES]; /* the settings that all nodes must share */
    int round;                       /* the last one it was in, and its rank there */
    int rank;
    int ready;        /* the round that it can start: its workers of the ones before have ended */
    int done;         /* the last one in which its workers have succeeded */
    int failed;       /* the last one in which one has failed */
    int64_t probe;    /* the document's, as read last: a sign of life */
    bool leaves;      /* it takes no part any more */
    bool ended;       /* it has read the job's end */
    int master_round; /* of rank 0: where the workers' store of that round is */
    int master_port;
    char master_addr[TDDP_LAUNCH_ADDR_BYTES];
    char text[TDDP_LAUNCH_TEXT_BYTES]; /* of `failed` */
    char leave_text[TDDP_LAUNCH_NAME_BYTES];
} tddp_launch_entry;

/* An entry of which nothing is known but who it is of. */
#define TDDP_LAUNCH_ENTRY_INIT                                                            \
    {                                                                                     \
        .self = {.local_size = 1, .node_rank = -1}, .round = -1, .rank = -1, .ready = -1, \
        .done = -1, .failed = -1, .master_round = -1                                      \
    }

/* What one node is told. */
typedef struct tddp_launch_note {
    char id[TDDP_LAUNCH_ID_BYTES];
    bool refused; /* else: it is a spare, which waits for a place */
    char text[TDDP_LAUNCH_NODE_NOTE_BYTES];
} tddp_launch_note;

typedef enum tddp_launch_stage {
    TDDP_LAUNCH_STAGE_GATHERING,
    TDDP_LAUNCH_STAGE_RUNNING,
    TDDP_LAUNCH_STAGE_ENDED,
} tddp_launch_stage;

/* How a round is over (FAILED, CHANGED) or the job (DONE, FAILED, STOPPED). */
typedef enum tddp_launch_how {
    TDDP_LAUNCH_HOW_DONE,
    TDDP_LAUNCH_HOW_FAILED,  /* a worker or a node failed, which costs a restart if one is left */
    TDDP_LAUNCH_HOW_STOPPED, /* a node was told to end */
    TDDP_LAUNCH_HOW_CHANGED, /* nodes came or left, which costs none */
} tddp_launch_how;

/* The document. */
typedef struct tddp_launch_state {
    int64_t started;                 /* when the job was: no other has the same */
    char job[TDDP_LAUNCH_JOB_BYTES]; /* its settings */
    tddp_launch_stage stage;
    int round;          /* the last one started, or -1 */
    int restart;        /* failures so far */
    int64_t generation; /* of the round: larger than any before, also of other coordinators */
    int64_t probe;      /* nodes write it into their entries */
    int master_port;    /* of the round's workers' store; 0: not known yet */
    char master_addr[TDDP_LAUNCH_ADDR_BYTES];
    int over;            /* the last round that is over, or -1 */
    tddp_launch_how how; /* that is, or once the job has ENDED, that has; and why */
    char text[TDDP_LAUNCH_TEXT_BYTES];
    int64_t report; /* grows with each new `status`, which is for all to see */
    char status[TDDP_LAUNCH_STATUS_BYTES];
    tddp_launch_member *members; /* of `round`; owned */
    int count;
    tddp_launch_note *notes; /* owned */
    int note_count;
} tddp_launch_state;

/* Append the JSON to `out`. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_entry_write(const tddp_launch_entry *entry, tddp_bytes *out);
TDDP_NODISCARD tddp_status tddp_launch_state_write(const tddp_launch_state *state, tddp_bytes *out);

/* Read `size` bytes at `data`, which may be anything; keys that are not known are passed over, and
 * texts that are too long cut. Errors: TDDP_PROTOCOL (a text that shows the start),
 * TDDP_OUT_OF_MEMORY. Caller: the functions below. */
TDDP_NODISCARD tddp_status tddp_launch_entry_read(const char *data, size_t size,
                                                  tddp_launch_entry *out);
TDDP_NODISCARD tddp_status tddp_launch_state_read(const char *data, size_t size,
                                                  tddp_launch_state *out);

/* Frees what is owned, and clears. */
void tddp_launch_state_free(tddp_launch_state *state);

/* The member with this id; -1: none. */
int tddp_launch_state_rank(const tddp_launch_state *state, const char *id);

#endif
