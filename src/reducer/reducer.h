/*
 * What the reducer's files share. Public part of this room: <tddp/reducer.h>. A bucket is a buffer
 * of src/flat and what a round knows of it.
 *
 *     device.c       streams of devices: what waits for what, where the host does not wait
 *     options.c      what was asked for
 *     verify.c       are the parameters and options the same on every rank?
 *     reducer.c      making and freeing
 *     answers.c      the questions one may ask
 *     round.c        prepare, mark_ready, finish: one backward's life
 *     stages.c       buckets go to the group or the hook, and through its stages
 *     usage.c        parameters that a round leaves out, and who uses what
 *     static_graph.c how often each parameter is reported, learnt in the first round
 *     shadow.c       the round of a rank without data
 *     complaints.c   what is said of rounds that went wrong
 *     rebuild.c      the second layout, in the order of rank 0
 *     await.c        waiting for works, and what becomes of memory when nobody waits
 *     describe.c     what ranks compare of a bucket beside its size
 *     comm_hook.c    hooks as counted objects; src/hooks has the built-in ones
 */
#ifndef TDDP_REDUCER_REDUCER_H
#define TDDP_REDUCER_REDUCER_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include <tddp/reducer.h>

#include "base/base.h"
#include "flat/flat.h"

/* --- options.c ------------------------------------------------------------------------------- */

enum { TDDP_REDUCER_LIMITS_TOLD = 4 };

/* The options as ranks compare them. */
typedef struct tddp_reducer_asked {
    int64_t limit_count;
    int64_t limits[TDDP_REDUCER_LIMITS_TOLD]; /* the first ones, for the text */
    int64_t limits_hash;
    int64_t find_unused;
    int64_t static_graph;
    int64_t skip_unused;
} tddp_reducer_asked;

/* Checks them (NULL: the defaults) and puts in the limits that were left out. */
TDDP_NODISCARD tddp_status tddp_reducer_settle_options(const tddp_reducer_opts *opts,
                                                       tddp_reducer_opts *out);
tddp_reducer_asked tddp_reducer_asked_of(const tddp_reducer_opts *opts);
TDDP_NODISCARD tddp_status tddp_reducer_compare_asked(const tddp_reducer_asked *mine, int rank,
                                                      const tddp_reducer_asked *theirs);

/* --- verify.c -------------------------------------------------------------------------------- */

/* Compares parameters and options over the ranks; TDDP_MISMATCH with one text on all. */
TDDP_NODISCARD tddp_status tddp_reducer_verify(tddp_group *group, const tddp_param *params,
                                               size_t count, const tddp_reducer_opts *opts,
                                               const tddp_wait *wait);

/* --- await.c --------------------------------------------------------------------------------- */

/* The waits of one call: each may use what is left of its time. */
typedef struct tddp_reducer_patience {
    bool bounded;
    int64_t deadline_ns;
    tddp_cancel *cancel;
} tddp_reducer_patience;

tddp_reducer_patience tddp_reducer_patience_of(const tddp_wait *wait);
/* What is left of it, for one wait. */
tddp_wait tddp_reducer_rest_of(const tddp_reducer_patience *patience);

/* Has an operation executed by the thread that submits it, as long as the patience lasts; NULL: by
 * the group's. */
void tddp_reducer_inline(const tddp_reducer_patience *patience, tddp_op_args *args);

/* Waits for `work`. `*done` says whether it is over: if not, the status speaks of the wait alone,
 * and the work and its buffers are still in use. */
TDDP_NODISCARD tddp_status tddp_reducer_await(tddp_work *work,
                                              const tddp_reducer_patience *patience, bool *done);

/* Lets go of a work: `release(data)` runs once it is over, which may be now. */
void tddp_reducer_abandon(tddp_work *work, void (*release)(void *data), void *data);

/* all_gather that waits. `memory` holds both buffers and is freed: by the caller if `*kept` is
 * set to true, else later by the operation that still uses it. */
TDDP_NODISCARD tddp_status tddp_reducer_gather(tddp_group *group, tddp_buffer input,
                                               tddp_buffer output,
                                               const tddp_reducer_patience *patience, void *memory,
                                               bool *kept);

/* --- usage.c --------------------------------------------------------------------------------- */

/* Who uses which parameters: with find_unused in each round, with static_graph once. */
typedef struct tddp_reducer_usage {
    size_t *unused; /* those that the round does not reach; with static_graph no round does */
    size_t unused_count;
    bool taken;   /* they count as ready in this round */
    bool *noted;  /* by parameter: got a gradient outside of rounds */
    int32_t *map; /* by parameter: how many ranks use it, once `sent` and no longer under way */
    bool sent;    /* this round's map; with static_graph the only one */
    tddp_work *work;
} tddp_reducer_usage;

/* --- static_graph.c -------------------------------------------------------------------------- */

typedef struct tddp_reducer_calls {
    bool known;         /* the first round is over, `expected` holds */
    uint32_t *expected; /* by parameter: calls of mark_ready in a round */
    uint32_t *made;     /* in this round */
    uint64_t *turn;     /* the first round's: when it was called last, from 1; 0: never */
    uint64_t turns;
} tddp_reducer_calls;

/* --- reducer.c ------------------------------------------------------------------------------- */

enum { TDDP_REDUCER_STREAMS = 4 };

/* What a round knows of a bucket. */
typedef struct tddp_reducer_bucket {
    tddp_buffer buffer; /* the layout's, on a device with the stream on which it is handed over */
    size_t pending;     /* how many gradients are not ready in this round */
    tddp_work *work;    /* under way, or NULL */
    int stage;          /* of the hook, that comes next */
    bool again;         /* the hook wants that stage */
    bool interrupted;   /* the hook was, in that stage */
    bool skipped;       /* no rank uses any of it: not reduced in this round */
    /* On a device: the streams on which its gradients were written in this round; once it is handed
     * over the one that waited for all of them. */
    void *streams[TDDP_REDUCER_STREAMS];
    size_t stream_count;
    tddp_work *ordered; /* on a device: streams wait for it, the host has not; or NULL */
} tddp_reducer_bucket;

/* Those of a layout, before its first round. Caller: free(). */
TDDP_NODISCARD tddp_status tddp_reducer_buckets_make(const tddp_flat_layout *layout,
                                                     tddp_reducer_bucket **out);

typedef enum tddp_reducer_phase {
    TDDP_REDUCER_IDLE,     /* not prepared, or finished */
    TDDP_REDUCER_OPEN,     /* prepared: gradients become ready */
    TDDP_REDUCER_LAUNCHED, /* every bucket handed over, finish() is due */
} tddp_reducer_phase;

/* Of a parameter in a round. */
enum { TDDP_REDUCER_UNREADY, TDDP_REDUCER_READY, TDDP_REDUCER_UNUSED };

/*
 * `lock` guards what a round changes: phase, ready, order, launched, what buckets are at, usage,
 * calls, now, and the failure. It is held while a bucket is handed to the group, so that buckets
 * queue in their order whatever thread completes them; the group's own lock is taken inside it,
 * never the other way round. Without it only a hook runs that must be on the caller's thread, and
 * what finish() executes itself; `launching` is set then. finish(), prepare(), set_unused(),
 * shadow(), rebuild() and free() come from one thread at a time, and only they read and clear
 * works.
 */
struct tddp_reducer {
    pthread_mutex_t lock;
    pid_t owner; /* who made it: a forked child must not touch the works */
    tddp_group *group;
    int rank;
    int world_size;
    size_t *limits; /* bytes of the first, second ... bucket */
    size_t limit_count;
    bool find_unused; /* and no static graph, which finds out by itself */
    bool static_graph;
    bool skip_unused;
    bool describe;                 /* buckets are described as they are handed over */
    bool waits_till_end;           /* finish() hands over all averages and executes them */
    tddp_device_memory_ops device; /* all zero: none was given */
    bool on_devices;               /* some parameter is */
    tddp_comm_hook *hook;
    int divisor; /* of the sums, in this round */
    int next_divisor;

    size_t count;
    tddp_param *params; /* names and dims are copies */
    tddp_flat_layout layout;
    tddp_reducer_bucket *buckets; /* one for each buffer of the layout */
    uint64_t layouts;             /* before this one */

    tddp_reducer_phase phase;
    unsigned char *ready; /* by parameter */
    int64_t *order;       /* parameters in the order in which they became ready */
    size_t ready_count;
    size_t launched; /* buckets handed over in this round: always the first so many */
    bool launching;  /* a thread hands one over without the lock: nobody else does so */
    size_t settling; /* the bucket that finish() waits for next */
    bool shadowing;  /* this rank has no data in this round */
    tddp_reducer_usage usage;
    tddp_reducer_calls calls;
    tddp_reducer_times now;

    uint64_t finished;        /* rounds */
    tddp_reducer_times times; /* the last finished one's */
    int64_t *last_order;      /* the last one's with data */
    bool order_seen;

    tddp_status failure; /* what put the ranks out of step, for good; TDDP_OK if nothing did */
    char failure_text[1024];

    bool rebuilt;
    int64_t *rebuild_order; /* rank 0's order while its broadcast is under way, else NULL */
    tddp_work *rebuild_work;
};

/* Leaves a work that may be under way to itself, with what it may still use. */
void tddp_reducer_leave_work(const tddp_reducer *reducer, tddp_flat_memory *memory,
                             tddp_work *work);

/* --- device.c -------------------------------------------------------------------------------- */

/* Checks the table and which parameters need it. */
TDDP_NODISCARD tddp_status tddp_reducer_check_device(const tddp_device_memory_ops *ops,
                                                     const tddp_param *params, size_t count);

/* Whether the hook takes the memory of all parameters. */
TDDP_NODISCARD tddp_status tddp_reducer_check_hook(const tddp_reducer *reducer,
                                                   const tddp_comm_hook *hook);

/* Under the lock, these three; of buckets on the CPU nothing is to be done. A round begins: what
 * lies in the bucket is in order on the calling thread's stream. */
void tddp_reducer_open_streams(const tddp_reducer *reducer, tddp_reducer_bucket *bucket);
/* The parameter's gradient was written on the calling thread's stream. A failure breaks the
 * reducer. */
void tddp_reducer_wrote(tddp_reducer *reducer, size_t index);
/* Before the bucket is handed over: the calling thread's stream, which becomes the buffer's, waits
 * for all the others. */
TDDP_NODISCARD tddp_status tddp_reducer_gather_streams(tddp_reducer *reducer,
                                                       tddp_reducer_bucket *bucket);

/* Of a bucket on a device, in place of waiting for its work: the calling thread's stream does.
 * `*done` is false if the wait ended before that was arranged. */
TDDP_NODISCARD tddp_status tddp_reducer_order_bucket(tddp_reducer *reducer,
                                                     tddp_reducer_bucket *bucket,
                                                     const tddp_reducer_patience *patience,
                                                     bool *done);

/* Under the lock: what became of works that only streams waited for, as far as it is known. A
 * failure breaks the reducer. */
void tddp_reducer_look_back(tddp_reducer *reducer);

/* --- describe.c ------------------------------------------------------------------------------ */

typedef struct tddp_reducer_description {
    char text[TDDP_DESCRIPTION_BYTES];
    size_t length;
} tddp_reducer_description;

/* What the ranks compare with the first operation of bucket number `bucket`: the names and shapes
 * in it, or in the first round whether there is a hook, which, and its settings. Lives in `to`;
 * NULL: nothing. */
const char *tddp_reducer_describe(const tddp_reducer *reducer, size_t bucket,
                                  tddp_reducer_description *to);

/* --- round.c --------------------------------------------------------------------------------- */

/* Keeps the calling thread's text as the reason why this reducer is of no further use. Under the
 * lock. */
tddp_status tddp_reducer_break(tddp_reducer *reducer, tddp_status status);

/* Counts a parameter as ready, in its bucket and in the order. Under the lock. */
void tddp_reducer_count_ready(tddp_reducer *reducer, size_t index, unsigned char how);

/* Waits for the work in `slot`, then clears it; a failure breaks the reducer. `*done` is false if
 * the wait ended before the work did. */
TDDP_NODISCARD tddp_status tddp_reducer_await_slot(tddp_reducer *reducer, tddp_work **slot,
                                                   const tddp_reducer_patience *patience,
                                                   bool *done);

/* finish() with a patience that has begun. */
TDDP_NODISCARD tddp_status tddp_reducer_finish_within(tddp_reducer *reducer,
                                                      const tddp_reducer_patience *patience);

/* --- stages.c -------------------------------------------------------------------------------- */

/* Whether the ranks share memory alone and have less than two cores each. */
bool tddp_reducer_no_core_is_free(const tddp_group *group);

/* Whether buckets are handed over by tddp_reducer_hand_over() alone. */
bool tddp_reducer_on_caller(const tddp_reducer *reducer);

/* Hands over the buckets that are complete and were not; all of them: the round is LAUNCHED, and
 * the usage map follows. `finishing` is finish()'s time, which executes what it hands over on its
 * thread; NULL leaves to it what it can execute so. Under the lock, which is given up while a hook
 * on the caller's thread runs and while finish() executes. A failure breaks the reducer. */
TDDP_NODISCARD tddp_status tddp_reducer_launch_complete(tddp_reducer *reducer,
                                                        const tddp_reducer_patience *finishing);

/* Waits for the first `launched` buckets, stage by stage if `all` were handed over, and for the
 * usage map; also after a failure, which is kept, for their memory must be quiet after it. `*done`
 * is false if the wait ended before. */
TDDP_NODISCARD tddp_status tddp_reducer_settle(tddp_reducer *reducer, size_t launched, bool all,
                                               const tddp_reducer_patience *patience, bool *done);

/* --- usage.c, continued ---------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_reducer_usage_make(tddp_reducer *reducer);
/* Under the lock: a new round. */
void tddp_reducer_usage_open(tddp_reducer *reducer);
/* Under the lock: the parameters left out count as ready. */
void tddp_reducer_take_unused(tddp_reducer *reducer);
/* Whether buckets must wait for a map that is not there yet. */
bool tddp_reducer_usage_lacking(const tddp_reducer *reducer);
/* Under the lock, with all buckets handed over: the map, if it is due now. */
TDDP_NODISCARD tddp_status tddp_reducer_usage_follow(tddp_reducer *reducer,
                                                     const tddp_reducer_patience *finishing);
/* skip_unused: has all ranks' maps added up before the round's buckets. */
TDDP_NODISCARD tddp_status tddp_reducer_usage_exchange(tddp_reducer *reducer,
                                                       const tddp_reducer_patience *patience);

/* --- static_graph.c, continued --------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_reducer_calls_make(tddp_reducer *reducer);
/* Under the lock, all of these: a new round; one more call, `*ready` if it is the last expected
 * one; the end of the first round, all are ready; whether that is still to come. */
void tddp_reducer_calls_open(tddp_reducer *reducer);
TDDP_NODISCARD tddp_status tddp_reducer_count_call(tddp_reducer *reducer, size_t index,
                                                   bool *ready);
void tddp_reducer_close_counting(tddp_reducer *reducer);
bool tddp_reducer_counting(const tddp_reducer *reducer);

/* --- complaints.c ---------------------------------------------------------------------------- */

/* The failure with its text, for every call after it. */
tddp_status tddp_reducer_broken(const tddp_reducer *reducer);
/* A round that was left with some parameters ready and others not. */
tddp_status tddp_reducer_fail_unready(const tddp_reducer *reducer);
/* A parameter that was ready already. */
tddp_status tddp_reducer_fail_twice(const tddp_reducer *reducer, size_t index);
/* More calls with static_graph than in the first round. */
tddp_status tddp_reducer_fail_calls(const tddp_reducer *reducer, size_t index);
/* A number that is no parameter's. */
tddp_status tddp_reducer_fail_index(const tddp_reducer *reducer, size_t index);

#endif
