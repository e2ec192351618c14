/*
 * The reducer's internal interface. Its public part is <tddp/reducer.h>. A bucket is a buffer of
 * src/flat with its state in the current iteration.
 *
 *     reducer.c       creation and destruction
 *     options.c       options: defaults, checks, and the text that ranks compare
 *     iteration.c     prepare, mark_ready, finish
 *     launch.c        submits ready buckets to the group or to the hook, and runs the hook's stages
 *     unused.c        parameters that an iteration doesn't use, and the map of used parameters
 *     static_graph.c  how often each parameter is marked ready, recorded in the first iteration
 *     join.c          the iteration of a rank that has run out of data
 *     rebuild.c       the second layout, in the order in which rank 0's gradients became ready
 *     queries.c       getters
 *     errors.c        error messages
 *     description.c   the text that ranks compare with a bucket's first operation
 *     device.c        the streams of buckets on devices
 *     work_wait.c     waits for works, and frees what a work uses that isn't waited for
 *     comm_hook.c     reference-counted hooks; src/hooks has the built-in ones
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

enum { TDDP_REDUCER_OPTS_TEXT = 256 };

/* Checks the options (NULL: the defaults) and fills in the default limits. */
TDDP_NODISCARD tddp_status tddp_reducer_read_options(const tddp_reducer_opts *opts,
                                                     tddp_reducer_opts *out);
/* The options as ranks compare them: "buckets of [1048576, 26214400] bytes, find_unused on, ..." */
void tddp_reducer_opts_text(const tddp_reducer_opts *opts, char text[TDDP_REDUCER_OPTS_TEXT]);

/* --- work_wait.c ----------------------------------------------------------------------------- */

/* The deadline of a call that waits several times. */
typedef struct tddp_reducer_deadline {
    bool bounded;
    int64_t deadline_ns;
    tddp_cancel *cancel;
} tddp_reducer_deadline;

tddp_reducer_deadline tddp_reducer_deadline_of(const tddp_wait *wait);
/* The time that remains, for one wait. */
tddp_wait tddp_reducer_remaining(const tddp_reducer_deadline *deadline);

/* Lets the submitting thread execute the operation until the deadline. NULL: the group's progress
 * thread executes it. */
void tddp_reducer_set_inline(const tddp_reducer_deadline *deadline, tddp_op_args *args);

/* Waits for `work`. Sets `*done` to whether the work is completed. If it isn't, the status is the
 * wait's, and the work still uses its buffers. */
TDDP_NODISCARD tddp_status tddp_reducer_wait_work(tddp_work *work,
                                                  const tddp_reducer_deadline *deadline,
                                                  bool *done);

/* Releases a work that may be pending. `release(data)` runs when it completes, possibly at once. */
void tddp_reducer_detach_work(tddp_work *work, void (*release)(void *data), void *data);

/* --- unused.c -------------------------------------------------------------------------------- */

/* Which parameters are used: with find_unused per iteration, with static_graph determined once. */
typedef struct tddp_reducer_unused {
    size_t *indices; /* this rank's unused parameters; with static_graph, of every iteration */
    size_t count;
    bool marked_ready;  /* they were marked ready in this iteration */
    bool *used_outside; /* by parameter: got a gradient outside an iteration (no_sync) */
    tddp_flat_numbers *map;
    int32_t *used_map;  /* its numbers, by parameter: how many ranks use it; valid if
                           used_map_ready() */
    bool map_submitted; /* in this iteration; with static_graph, in the first one */
    tddp_work *map_work;
} tddp_reducer_unused;

/* --- static_graph.c -------------------------------------------------------------------------- */

typedef struct tddp_reducer_calls {
    bool recorded;       /* the first iteration is finished, and `expected` is valid */
    uint32_t *expected;  /* by parameter: mark_ready calls in an iteration */
    uint32_t *counts;    /* by parameter: mark_ready calls in this iteration */
    uint64_t *last_call; /* by parameter: number of its last call in the first iteration; 0: none */
    uint64_t total;      /* calls in the first iteration */
} tddp_reducer_calls;

/* --- reducer.c ------------------------------------------------------------------------------- */

enum { TDDP_REDUCER_STREAMS = 4 };

/* A bucket and its state in the current iteration. */
typedef struct tddp_reducer_bucket {
    tddp_buffer buffer; /* the layout's; on a device, with the stream on which it is launched */
    size_t pending;     /* gradients that are not ready yet */
    tddp_work *work;    /* pending, or NULL */
    int stage;          /* the hook's next stage */
    bool more_stages;   /* the hook asked to run that stage */
    bool interrupted;   /* the hook was interrupted in that stage */
    bool skipped;       /* no rank uses any of its parameters: not reduced in this iteration */
    /* On a device: the streams on which its gradients were written in this iteration. After the
     * launch, the one stream that waited for all of them. */
    void *streams[TDDP_REDUCER_STREAMS];
    size_t stream_count;
    tddp_work *stream_work; /* on a device: only streams waited for it, not the host; or NULL */
} tddp_reducer_bucket;

/* Makes the buckets of a layout. Caller: free(). */
TDDP_NODISCARD tddp_status tddp_reducer_make_buckets(const tddp_flat_layout *layout,
                                                     tddp_reducer_bucket **out);

typedef enum tddp_reducer_phase {
    TDDP_REDUCER_IDLE,     /* not prepared, or finished */
    TDDP_REDUCER_PREPARED, /* gradients become ready */
    TDDP_REDUCER_LAUNCHED, /* every bucket is launched, finish() is due */
} tddp_reducer_phase;

/* State of a parameter in an iteration. */
enum { TDDP_REDUCER_UNREADY, TDDP_REDUCER_READY, TDDP_REDUCER_UNUSED };

/*
 * `lock` guards what an iteration changes: phase, ready, order, launched, the buckets' state,
 * unused, calls, current_times, and the failure. A thread holds it while it submits a bucket to the
 * group, so buckets are queued in their order, whichever thread marks the last gradient ready. The
 * group's lock is taken inside it, never the other way round. It is released, with `launching` set,
 * only while a hook runs that must run on the caller's thread, and while finish() executes an
 * operation itself. finish(), prepare(), set_unused(), shadow(), rebuild() and free() are called by
 * one thread at a time, and only they read and clear works.
 */
struct tddp_reducer {
    pthread_mutex_t lock;
    pid_t owner; /* the process that created it: a forked child must not touch the works */
    tddp_group *group;
    int rank;
    int world_size;
    size_t *limits; /* bytes of the first, second ... bucket */
    size_t limit_count;
    bool find_unused; /* false with static_graph, which finds them by itself */
    bool static_graph;
    bool skip_unused;
    bool describe;                 /* ranks compare a description of each bucket */
    bool launch_in_finish;         /* finish() submits all averages and executes them */
    tddp_device_memory_ops device; /* all zero: none given */
    bool on_devices;               /* some parameter is on a device */
    tddp_comm_hook *hook;
    int divisor; /* of the sums, in this iteration */
    int next_divisor;

    size_t count;
    tddp_param *params; /* names and dims are copies */
    tddp_flat_layout layout;
    tddp_reducer_bucket *buckets; /* one for each buffer of the layout */
    uint64_t layout_number;       /* from 0 */

    tddp_reducer_phase phase;
    unsigned char *ready; /* by parameter */
    int64_t *order;       /* parameters in the order in which they became ready */
    size_t ready_count;
    size_t launched;     /* the first `launched` buckets are launched in this iteration */
    bool launching;      /* a thread launches a bucket without the lock: no other may launch */
    size_t next_to_wait; /* the bucket that finish() waits for next */
    bool joined;         /* this rank has no data in this iteration */
    tddp_reducer_unused unused;
    tddp_reducer_calls calls;
    tddp_reducer_times current_times;

    uint64_t finished;             /* iterations */
    tddp_reducer_times last_times; /* of the last finished iteration */
    int64_t *last_order;           /* of the last finished iteration with data */
    bool last_order_valid;

    tddp_status failure; /* permanent: the ranks are out of step; TDDP_OK if there is none */
    char failure_text[1024];

    bool rebuilt;
    tddp_flat_numbers
        *rebuild_order; /* rank 0's order, from the broadcast until the rebuild is done */
    tddp_work *rebuild_work;
};

/* Releases a bucket's work that may be pending. It keeps the memory and the hook until it
 * completes. */
void tddp_reducer_detach_bucket_work(const tddp_reducer *reducer, tddp_flat_memory *memory,
                                     tddp_work *work);

/* --- device.c -------------------------------------------------------------------------------- */

/* Reads the caller's device memory table (NULL: none) into `out`, which is all zero before. Checks
 * that there is one if a parameter is on a device. */
TDDP_NODISCARD tddp_status tddp_reducer_read_device(const tddp_device_memory_ops *ops,
                                                    const tddp_param *params, size_t count,
                                                    tddp_device_memory_ops *out);

/* Checks that the hook supports the devices of all parameters. */
TDDP_NODISCARD tddp_status tddp_reducer_check_hook(const tddp_reducer *reducer,
                                                   const tddp_comm_hook *hook);

/* The next three: under the lock; they do nothing for buckets on the CPU. */

/* An iteration begins: the bucket's memory is in order on the calling thread's current stream. */
void tddp_reducer_reset_streams(const tddp_reducer *reducer, tddp_reducer_bucket *bucket);
/* The parameter's gradient was written on the calling thread's current stream. A failure is stored
 * in the reducer. */
void tddp_reducer_record_stream(tddp_reducer *reducer, size_t index);
/* Before the launch: the calling thread's current stream waits for all others and becomes the
 * buffer's stream. */
TDDP_NODISCARD tddp_status tddp_reducer_join_streams(tddp_reducer *reducer,
                                                     tddp_reducer_bucket *bucket);

/* For a bucket on a device, in place of a wait of the host: the calling thread's current stream
 * waits for the bucket's work. `*done` is false if `deadline` passed before that was queued. */
TDDP_NODISCARD tddp_status tddp_reducer_order_bucket(tddp_reducer *reducer,
                                                     tddp_reducer_bucket *bucket,
                                                     const tddp_reducer_deadline *deadline,
                                                     bool *done);

/* Under the lock: checks the works for which only streams waited, and releases the completed ones.
 * A failure is stored in the reducer. */
void tddp_reducer_poll_stream_works(tddp_reducer *reducer);

/* --- description.c --------------------------------------------------------------------------- */

typedef struct tddp_reducer_description {
    char text[TDDP_DESCRIPTION_BYTES];
    size_t length;
} tddp_reducer_description;

/* The text that ranks compare with the first operation of bucket number `bucket`: the parameters'
 * names and shapes; without opts.describe only the hook and its settings, with the first bucket of
 * all. Stored in `to`. NULL: nothing to compare. */
const char *tddp_reducer_describe(const tddp_reducer *reducer, size_t bucket,
                                  tddp_reducer_description *to);

/* --- iteration.c ----------------------------------------------------------------------------- */

/* Stores the status and the calling thread's error text as the reducer's permanent failure, unless
 * it has one. Returns the status. Under the lock. */
tddp_status tddp_reducer_set_failure(tddp_reducer *reducer, tddp_status status);

/* Sets a parameter's state, appends it to the order and decrements its bucket's `pending`. Under
 * the lock. */
void tddp_reducer_count_ready(tddp_reducer *reducer, size_t index, unsigned char state);

/* Waits for the work in `slot`, then clears the slot. A failure is stored in the reducer. `*done`
 * is false if the wait ended before the work did. */
TDDP_NODISCARD tddp_status tddp_reducer_wait_and_clear(tddp_reducer *reducer, tddp_work **slot,
                                                       const tddp_reducer_deadline *deadline,
                                                       bool *done);

/* tddp_reducer_finish() with a deadline. */
TDDP_NODISCARD tddp_status tddp_reducer_finish_by(tddp_reducer *reducer,
                                                  const tddp_reducer_deadline *deadline);

/* --- launch.c -------------------------------------------------------------------------------- */

/* Whether the ranks communicate through shared memory alone and have less than two cores each. */
bool tddp_reducer_oversubscribed(const tddp_group *group);

/* Whether the hook must run on the caller's thread: then only tddp_reducer_hand_over() and
 * finish() launch buckets. */
bool tddp_reducer_hook_on_caller(const tddp_reducer *reducer);

/* Launches the next buckets as long as all their gradients are ready. After the last bucket the
 * phase is LAUNCHED, and the map of used parameters is submitted. finish() passes its `deadline`
 * and executes the operations on its thread; NULL leaves to finish() what it executes itself. Under
 * the lock, which is released while a hook runs on the caller's thread and while finish() executes.
 * A failure is stored in the reducer. */
TDDP_NODISCARD tddp_status tddp_reducer_launch_ready(tddp_reducer *reducer,
                                                     const tddp_reducer_deadline *deadline);

/* Waits for the first `launched` buckets (if `all` are launched, through all stages of the hook)
 * and for the map of used parameters. Also after a failure: nothing uses their memory afterwards.
 * `*done` is false if the wait ended before. */
TDDP_NODISCARD tddp_status tddp_reducer_wait_buckets(tddp_reducer *reducer, size_t launched,
                                                     bool all,
                                                     const tddp_reducer_deadline *deadline,
                                                     bool *done);

/* --- unused.c, continued --------------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_reducer_unused_init(tddp_reducer *reducer);
/* Under the lock: an iteration begins. */
void tddp_reducer_unused_prepare(tddp_reducer *reducer);
/* Under the lock: marks the unused parameters ready, once in an iteration. */
void tddp_reducer_mark_unused_ready(tddp_reducer *reducer);
/* Whether buckets may not be launched yet because the map of used parameters is missing. */
bool tddp_reducer_used_map_missing(const tddp_reducer *reducer);
/* Under the lock, after the last bucket: submits the map, unless that was done. */
TDDP_NODISCARD tddp_status tddp_reducer_submit_used_map(tddp_reducer *reducer,
                                                        const tddp_reducer_deadline *deadline);
/* skip_unused: reduces the map before the iteration's buckets, waits for it, and finds the buckets
 * to skip. */
TDDP_NODISCARD tddp_status tddp_reducer_exchange_used_map(tddp_reducer *reducer,
                                                          const tddp_reducer_deadline *deadline);

/* --- static_graph.c, continued --------------------------------------------------------------- */

TDDP_NODISCARD tddp_status tddp_reducer_calls_init(tddp_reducer *reducer);

/* The next four: under the lock. */

/* An iteration begins. */
void tddp_reducer_calls_prepare(tddp_reducer *reducer);
/* Counts a mark_ready call. Sets `*ready` to whether it is the parameter's last expected one. */
TDDP_NODISCARD tddp_status tddp_reducer_count_call(tddp_reducer *reducer, size_t index,
                                                   bool *ready);
/* The first iteration's backward is over: stores the counts and marks all parameters ready. */
void tddp_reducer_end_recording(tddp_reducer *reducer);
/* Whether this is the first iteration with static_graph. */
bool tddp_reducer_recording(const tddp_reducer *reducer);

/* --- errors.c -------------------------------------------------------------------------------- */

/* The stored failure, for every call after it. */
tddp_status tddp_reducer_fail_again(const tddp_reducer *reducer);
/* The previous iteration was left with some parameters ready and others not. */
tddp_status tddp_reducer_fail_unfinished(const tddp_reducer *reducer);
/* A parameter was marked ready twice. */
tddp_status tddp_reducer_fail_marked_twice(const tddp_reducer *reducer, size_t index);
/* static_graph: a parameter was marked ready more often than in the first iteration. */
tddp_status tddp_reducer_fail_extra_call(const tddp_reducer *reducer, size_t index);
/* A parameter's number is out of range. */
tddp_status tddp_reducer_fail_index(const tddp_reducer *reducer, size_t index);

#endif
