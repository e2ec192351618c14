/*
 * Random programs of collectives, and what each must leave behind.
 *
 * A seed decides a program: how many ranks, their groups, and each operation with its dtype, sizes,
 * layouts and the way it is waited for. Every rank draws the same program. What it says of one rank
 * alone (where its memory lies, when it waits) is drawn from the rank as well. Operation n depends
 * on the seed and n only, so a program stays the same when others are left out: that is how a
 * failing one is made small.
 *
 *     draw.c        numbers from a seed, programs
 *     memory.c      where operands lie: rooms with guards, parts end to end or apart
 *     reference.c   what is given, and what must come of it, in plain C
 *     operations.c  an operation on one rank
 *     rank.c        a rank's process: its groups, its operations, a fault at the end
 *     cases.c       processes for each program, failures, and how these are made small
 */
#ifndef TDDP_TEST_SEQUENCE_H
#define TDDP_TEST_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tddp.h>
#include <tddp/backend.h>

#include "check.h"

enum {
    SEQ_RANKS = 4,
    SEQ_GROUPS = 3,
    SEQ_OPS = 600,
    SEQ_PARTS = 6,
    SEQ_ROOMS = 2 * SEQ_PARTS + 1,
    SEQ_PENDING = 6,
    SEQ_TEXT = 512
};

/* --- draw.c ---------------------------------------------------------------------------------- */

typedef struct seq_random {
    uint64_t state;
} seq_random;

/* A stream of numbers for something that three numbers name. */
seq_random seq_random_of(uint64_t seed, uint64_t what, uint64_t which);
uint64_t seq_next(seq_random *random);
/* 0 ... limit - 1 */
uint32_t seq_below(seq_random *random, uint32_t limit);
/* Once in `times`. */
bool seq_once_in(seq_random *random, uint32_t times);

typedef enum seq_kind {
    SEQ_ALL_REDUCE,
    SEQ_COALESCED,
    SEQ_REDUCE,
    SEQ_BROADCAST,
    SEQ_BARRIER,
    SEQ_ALL_GATHER,
    SEQ_ALL_GATHER_LIST,
    SEQ_GATHER,
    SEQ_SCATTER,
    SEQ_REDUCE_SCATTER,
    SEQ_REDUCE_SCATTER_LIST,
    SEQ_ALL_TO_ALL,
    SEQ_MESSAGES,
    SEQ_KINDS
} seq_kind;

/* What carries a program, and what it does not have. */
typedef struct seq_carrier {
    const char *backend; /* as tddp_group_opts has it */
    size_t most;         /* elements of the largest operand */
    int operations;      /* in a program */
    bool cpu;
    bool cuda;
    bool any_source; /* messages may come from anybody, and have tags */
    bool hosts;      /* made-up ones: LAYOUT */
    bool algorithms; /* TDDP_SHM_ALGORITHM */
    bool faults;
    bool threads; /* ranks are threads of one process */
    bool sweep;   /* each kind with each dtype and reduction, instead of what is drawn */
    bool stores;  /* each group needs a connection of its own: its operations wait in the store */
    bool nccl;    /* memory of devices is reduced by NCCL */
} seq_carrier;

typedef struct seq_message {
    int from; /* ranks of the group */
    int to;
    size_t count;
    uint32_t tag;
    bool from_any;
} seq_message;

typedef struct seq_op {
    int number;
    seq_kind kind;
    int group;
    tddp_dtype dtype;
    tddp_reduce_op reduce;
    tddp_device_type device;
    bool unsupported; /* TDDP_UNSUPPORTED, and the group goes on */
    bool described;
    int root;
    int parts;                           /* of SEQ_COALESCED */
    size_t counts[SEQ_RANKS][SEQ_PARTS]; /* [from][to] of SEQ_ALL_TO_ALL, else [0][part] */
    int messages;
    seq_message message[SEQ_PARTS];
} seq_op;

/* How a program ends. */
typedef enum seq_fault { SEQ_NO_FAULT, SEQ_DEATH, SEQ_MISMATCH } seq_fault;

typedef struct seq_program {
    uint64_t seed;
    const seq_carrier *carrier;
    int ranks;
    int groups;
    unsigned members[SEQ_GROUPS]; /* a bit for each rank; the first has all */
    bool split[SEQ_GROUPS];
    bool child[SEQ_GROUPS];
    int count;
    seq_fault fault;
    int fault_group;
    int culprit; /* a rank of that group */
    const char *layout;
    char algorithms[SEQ_TEXT];
} seq_program;

void seq_draw_program(seq_program *program, const seq_carrier *carrier, uint64_t seed);
void seq_draw_op(const seq_program *program, int number, seq_op *op);
/* "3: all_reduce of int8, max, group 1, 17 elements" */
void seq_describe_op(const seq_program *program, const seq_op *op, char *text, size_t bytes);
const char *seq_kind_name(seq_kind kind);
int seq_group_size(const seq_program *program, int group);
/* A rank's number in a group; negative: it is not in it. */
int seq_rank_in(const seq_program *program, int group, int rank);
bool seq_kind_reduces(seq_kind kind);
/* How many operations have each kind with each dtype and reduction that there is. */
int seq_sweep_size(void);

/* --- an operation on one rank ---------------------------------------------------------------- */

/* Memory for operands, and what must stand there when the operation is over. */
typedef struct seq_room {
    unsigned char *data;
    unsigned char *expected;
    size_t bytes;
    tddp_group_memory *memory; /* NULL: of malloc */
} seq_room;

typedef struct seq_call {
    const seq_program *program;
    const seq_op *op;
    tddp_group *group;
    int rank; /* in the group */
    int size;
    seq_random own; /* this rank's choices */
    void *stream;
    seq_room rooms[SEQ_ROOMS];
    int room_count;
    tddp_buffer in[SEQ_PARTS];
    tddp_buffer out[SEQ_PARTS];
    int ins;
    int outs;
    tddp_work *works[2 * SEQ_PARTS];
    int sources[2 * SEQ_PARTS]; /* whom a receive's message is from; negative: no receive */
    int work_count;
} seq_call;

/* --- memory.c -------------------------------------------------------------------------------- */

/* Gives `count` buffers of so many elements memory: `whole`: end to end. */
void seq_lay(seq_call *call, tddp_buffer *buffers, const size_t *counts, int count, bool whole);
/* The same place in what is expected. */
void *seq_expected(const seq_call *call, const void *place);
/* Has the memory hold what is expected now; that of a device when its stream comes to it. */
void seq_set_rooms(seq_call *call);
/* Waits until the stream has come to it, where no operation has waited for that. */
void seq_settle(const seq_call *call);
void seq_check_rooms(const seq_call *call);
void seq_free_rooms(seq_call *call);

/* --- reference.c ----------------------------------------------------------------------------- */

/* Writes what a rank gives as part `part` into what is expected at the buffer's place. */
void seq_give(seq_call *call, tddp_buffer buffer, int rank, int part);
/* What must stand there when all is over: a copy of a rank's part, or the reduction of all ranks'.
 */
void seq_expect_copy(seq_call *call, tddp_buffer buffer, int rank, int part);
void seq_expect_reduced(seq_call *call, tddp_buffer buffer, int part);
/* The factor that a rank has for PREMUL_SUM. */
double seq_factor(const seq_program *program, const seq_op *op, int rank);

/* --- operations.c ---------------------------------------------------------------------------- */

/* Begins, and ends unless `later` says that the caller will; false: it has ended. */
bool seq_begin(seq_call *call, bool may_last);
void seq_end(seq_call *call);

/* --- rank.c, cases.c ------------------------------------------------------------------------- */

/* What the processes of a program share with the one that started them. */
typedef struct seq_shared {
    _Atomic int at[SEQ_RANKS];      /* the operation that a rank is at */
    _Atomic int drained;            /* ranks that wait for nothing any more */
    unsigned char skipped[SEQ_OPS]; /* operations that are left out */
} seq_shared;

void seq_run_rank(const seq_program *program, seq_shared *shared, int rank, int port,
                  const char *name);
/* Programs of `count` seeds from `first` on. */
void seq_run(const seq_carrier *carrier, uint64_t first, int count);

#endif
