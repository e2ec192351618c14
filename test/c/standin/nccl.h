/* What the files of NCCL's stand-in share: the file in which ranks meet, and calls on their way. */
#ifndef TDDP_TEST_STANDIN_NCCL_H
#define TDDP_TEST_STANDIN_NCCL_H

#include <stdatomic.h>
#include <stdbool.h>

#include <tddp/backend.h>

#include "standin/standin.h"

enum { RANKS = 8, PIECE = 64 * 1024, MOST_IN_GROUP = 64, FACTORS = 16, FIRST_FACTOR = 64 };

typedef struct box {
    _Atomic size_t bytes; /* 0: empty */
    char data[PIECE];
} box;

/* What all ranks have to say alike of a collective. */
typedef struct title {
    int kind;
    int dtype;
    int op;
    int root;
    size_t count;
} title;

/* The file. */
typedef struct meeting {
    _Atomic int joined;
    _Atomic int aborted;
    _Atomic int pids[RANKS];
    _Atomic int arrived;
    _Atomic int generation;
    _Atomic int split_by[RANKS];    /* how many times */
    _Atomic int colors[2][RANKS];   /* of a split, by turns */
    _Atomic int begun[5];           /* by kind of collective: ranks that have called a first one */
    _Atomic int sent[RANKS][RANKS]; /* from, to: a first message was */
    _Atomic int received[RANKS][RANKS];
    box boxes[RANKS][RANKS]; /* from, to */
    title titles[2][RANKS];  /* of collectives, by turns */
    char pieces[RANKS][PIECE];
} meeting;

struct ncclComm {
    meeting *shared;
    char path[128];
    int rank;
    int size;
    int device;
    bool seen; /* all have come */
    _Atomic bool aborted;
    _Atomic int under_way; /* on streams */
    _Atomic int inside;    /* threads in calls that block */
    unsigned collectives;  /* so far */
    double factors[FACTORS];
    bool taken[FACTORS];
    int splitting; /* looks at its state until the split is done */
    bool blocking;
    bool begun[5];            /* by kind of collective */
    struct batch *connecting; /* waits for the other ranks' calls */
    struct ncclComm *split;
    struct ncclComm **split_out;
};

typedef enum call_kind {
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    SEND,
    RECV
} call_kind;

typedef struct call {
    call_kind kind;
    const char *input;
    char *output;
    size_t count;
    int dtype;
    int op;
    int peer; /* or root */
    struct ncclComm *comm;
    tddp_cuda_stream stream;
    double factor; /* kept by the call, as the operation may be given back before it runs */
} call;

typedef struct batch {
    int count;
    int device;
    unsigned ticket; /* of the device */
    call calls[MOST_IN_GROUP];
} batch;

/* Declared for themselves: real ones come with NCCL's header. */
#define DECLARE(result, name, arguments) STANDIN_API result name arguments;
TDDP_NCCL_CALLS(DECLARE)
#undef DECLARE

#define FAIL_IF_NCCL_IS_TOLD()                    \
    do {                                          \
        int error = standin_failure_of(__func__); \
        if (error) {                              \
            return error;                         \
        }                                         \
    } while (0)

/* NCCL's type as ours. */
tddp_dtype standin_nccl_dtype(int type);

/* Puts a call on its way whose ranks have all come; false: one has not. */
bool standin_nccl_connect(struct ncclComm *comm);

/* Looks again a little later. */
void standin_nccl_nap(void);

/* Kernels on the device begin and end. A serial one carries them out one at a time, in the order in
 * which they were given their tickets. */
void standin_nccl_begin_kernel(const batch *all);
void standin_nccl_end_kernel(const batch *all);

/* Carries out a batch, which is freed; on a stream's thread. */
void standin_nccl_carry_out(void *all);

#endif
