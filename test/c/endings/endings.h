/*
 * Groups that end at any moment, while threads call.
 *
 *     calls.c          a thread's calls, of everything there is, and what each may return
 *     endings_test.c   the threads of each rank, and what carries the groups
 */
#ifndef TDDP_TEST_ENDINGS_H
#define TDDP_TEST_ENDINGS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tddp.h>

#include "check.h"

enum {
    ENDINGS_RANKS = 3,
    ENDINGS_CALLERS = 4, /* collectives, messages, and whatever touches the backend beside them */
    ENDINGS_TIMEOUT_MS = 20000,
};

typedef struct medium {
    const char *backend;
    bool host;   /* takes the CPU's memory */
    bool device; /* and a stand-in's */
    bool bound;  /* groups are bound to a device, and split */
    bool any_source;
} medium;

typedef struct plan {
    const medium *carrier;
    uint64_t seed;
    int ranks;
    bool disagree; /* the ranks' collectives differ */
    bool from_any; /* messages are received from whoever sends */
} plan;

typedef struct member {
    const plan *program;
    tddp_store *store;
    int rank;
    tddp_group *group;
    atomic_bool over; /* a shutdown has returned */
} member;

typedef struct piece {
    struct piece *next;
    float data[];
} piece;

typedef struct caller {
    member *member;
    int number;
    uint64_t state;
    tddp_cancel *cancel;
    piece *pieces; /* operands, which works may use until the group has ended */
    int messages;  /* so far */
    tddp_status last;
} caller;

/* Numbers from a seed; 0 ... limit - 1; a stream of them for each of a rank's threads. */
uint64_t endings_next(uint64_t *state);
uint32_t endings_below(uint64_t *state, uint32_t limit);
uint64_t endings_stream_of(uint64_t seed, int rank, int number);

/* One call, whose outcome is `last`. The ranks draw their collectives from `agreed`. */
tddp_status endings_call(caller *self, uint64_t *agreed);

#endif
