/*
 * What the files of this room share: the group, its queue of works, and who may touch what.
 *
 *   group.c        making and ending a group
 *   attributes.c   what a group is: its rank, names, peers, timeout
 *   join.c         how the ranks find each other through the store
 *   progress.c     the queue and the progress thread
 *   turn.c         which thread carries out what is queued
 *   reaper.c       groups that end where nobody may wait for that
 *   failure.c      operations that fail, and the group after the first of them
 *   calls.c        the calls by which operations begin
 *   collectives.c  the operations on one piece of memory: argument checks, then the queue
 *   lists.c        those with a buffer for each rank
 *   coalesce.c     several buffers in one operation
 *   staging.c      operations on memory that the backend does not take; with copies.c,
 *                  places.c and blocks.c
 *   p2p.c          sends and receives, beside the queue, and the threads that finish them
 *   device.c       operations that a device carries out, and the thread that awaits them
 *   checks.c       what is wrong with arguments
 *   describe.c     what callers say of an operation
 *   parts.c        the pieces of an operation, one for each rank
 *   span.c         operations on the trace's lane "communication"
 *   work.c         handles on operations; they know nothing of the group and outlive it
 *   peers.c        who the ranks are: host, pid
 *   memory.c       memory for buffers
 *   monitored_barrier.c
 *                  a barrier through the store that names who is missing
 *   recorder/      the flight recorder: the last operations, as JSON, in files
 *   watch/         how failures become known between the ranks: the thread, its words in the store,
 *                  what a rank says of itself then, who is to blame
 */
#ifndef TDDP_GROUP_PRIVATE_H
#define TDDP_GROUP_PRIVATE_H

#include <stdatomic.h>
#include <sys/types.h>

#include <tddp/backend.h>
#include <tddp/group.h>

#include "base/base.h"
#include "group/peers.h"

struct tddp_work {
    atomic_int references;
    pid_t pid;              /* who made it */
    atomic_bool done;       /* set last, with the lock held */
    atomic_int waiters;     /* threads that wait for it */
    tddp_group *group;      /* whose queue waiters may help with, while it is not done; or NULL */
    _Atomic int64_t expiry; /* when the running operation's time is over; 0 before it runs */
    tddp_op op;
    tddp_buffer *parts;                 /* what the operation's parts point to; NULL: it has none */
    struct tddp_group_bundle *bundle;   /* coalesced: how far it is; NULL: it is not */
    struct tddp_group_staged *staged;   /* on copies: how far it is; NULL: it is not, or not yet */
    uint64_t steps;                     /* sequence numbers it takes: 1, if not coalesced */
    void *request;                      /* the backend's, once posted; NULL: not, or not any more */
    const struct tddp_group *on_device; /* whose device carries it out; NULL: the CPU does */
    int64_t device_ns;                  /* how long that took; 0: nobody measured */
    char *description;                  /* what the caller said of it; NULL: nothing */
    int source;                         /* of a recv that went well */
    void *_Atomic user;                 /* the caller's */
    pthread_mutex_t mutex;              /* guards what follows */
    pthread_cond_t cond;
    bool launched;     /* it is on the device's queue */
    int event_fd;      /* readable once done; -1 while nobody needs it */
    int event_waiters; /* waiters with a cancel token, who do */
    bool event_kept;   /* so does the caller, who polls it */
    tddp_status status;
    char *text; /* what went wrong; NULL: nothing, or no memory to say it */
    bool has_callback;
    void (*callback)(void *data);
    void *callback_data;
    struct tddp_work *next;     /* in the group's queue; guarded by the group's lock */
    struct tddp_record *record; /* recorder.c's, as the next; its entry, NULL: none */
    uint64_t record_id;
    bool started;               /* the backend was asked for it */
    tddp_status pending_status; /* it has, and is to be concluded by a thread of the group's */
    char *pending_text;
    int64_t queued_ns; /* for traces; 0: nobody traced then */
    int64_t started_ns;
};

struct tddp_group_finisher;

/* p2p.c: the works that are posted, and the threads that finish them. */
typedef struct tddp_group_p2p {
    pthread_mutex_t order; /* held to number and post */
    uint64_t sequence;     /* of this rank's sends and receives */
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t wake;   /* something is posted, or `ending` is set */
    tddp_work *head;       /* posted, not yet taken by a thread */
    tddp_work *tail;
    size_t idle_threads; /* threads that wait for what is not promised to anyone */
    struct tddp_group_finisher *finishers;
    bool ending;
} tddp_group_p2p;

/* device.c: the works that are on a device's queue, and the thread that awaits them in order. */
typedef struct tddp_group_device {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t wake;   /* something was launched, or `ending` is set */
    tddp_work *head;
    tddp_work *tail;
    bool ending;
    bool started;
} tddp_group_device;

/* A work with two references: its caller's and the queue's. */
TDDP_NODISCARD tddp_status tddp_group_work_create(const tddp_op *op, tddp_work **out);

/* One on its maker's stack, which nobody else gets to see; and frees what it has. */
void tddp_group_work_init(tddp_work *work, const tddp_op *op);
void tddp_group_work_clear(tddp_work *work);

/* Tells the outcome, wakes the waiters, calls the callback. Once a work. */
void tddp_group_work_finish(tddp_work *work, tddp_status status, const char *text);

/* Between lines that say who is missing when ranks join; a constant but for tests. */
extern int64_t tddp_group_missing_log_interval_ms;

typedef enum tddp_group_state {
    TDDP_GROUP_OPEN,
    TDDP_GROUP_DRAINING, /* takes no more operations, carries out those it has */
    TDDP_GROUP_ENDING,   /* refuses what is queued, then the thread ends */
    TDDP_GROUP_ENDED,
} tddp_group_state;

struct tddp_group {
    atomic_int references;
    pid_t pid; /* who made it: a forked child only forgets */
    int rank;
    int world_size;
    bool is_root;  /* it was made from no other group */
    int root_rank; /* this process's rank in the group that others were made from */
    char *name;
    const tddp_backend_v1 *requested; /* the backend by name; for messages */
    const tddp_backend_v1 *backend;   /* what serves in its place; maybe itself */
    void *context;                    /* the serving backend's; used by one thread at a time */
    atomic_bool aborted;              /* the backend was */
    atomic_int staging_device;        /* copies of host memory go there; -1: not settled yet */
    tddp_store *membership;           /* prefix NAME: who has joined and left */
    tddp_store *store;                /* prefix NAME/INCARNATION: this group's own keys */
    bool joined;                      /* all ranks have joined this incarnation */
    tddp_peers *peers;                /* who they are, once they have met */
    struct tddp_recorder *recorder;   /* NULL before it is there */
    struct tddp_detector *watch;      /* NULL with one rank */
    int64_t incarnation; /* how many groups of this name this rank has made on this store */
    _Atomic int64_t timeout_ms;
    _Atomic uint64_t monitored_barriers; /* how many this rank has come to */

    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows; never held while a backend or a callback runs */
    pthread_cond_t wake;   /* for the progress thread: something is queued, or the state changed */
    pthread_cond_t idle;   /* for those shutting down: nothing is queued, or the state changed */
    tddp_group_state state;
    tddp_work *head;
    tddp_work *tail;
    bool running;                       /* a thread has the turn */
    atomic_bool completing;             /* and its operation an outcome, which is being told */
    size_t in_flight;                   /* sends and receives under way */
    atomic_size_t in_flight_completing; /* of these have an outcome, which is being told */
    uint64_t sequence;
    tddp_status failure; /* of the first operation that failed; TDDP_OK: none */
    char *failure_text;
    bool failure_pending; /* its cause is being looked for, or written; `idle` tells the end */
    bool dumped; /* the flight recorder's file is, or will be before an error is returned */
    bool failed_elsewhere;                    /* the operation was another rank's */
    bool failure_returned;                    /* and an operation of this rank has ended with it */
    struct tddp_group_block_pool *block_pool; /* memory for copies; NULL: none was needed */

    tddp_group_p2p p2p;
    tddp_group_device device;
    struct tddp_group *next_reaped; /* reaper.c's */
};

/* group.c: shuts down and frees a group without references. */
void tddp_group_end(tddp_group *group);

/* reaper.c: has a thread do so; false if there is none to be had. */
bool tddp_group_reap(tddp_group *group);

/* join.c: takes this rank's place, waits for the others, says what the backend wants to know. On
 * success `*address` is to be freed; may be NULL. tddp_group_leave() gives the place up. */
TDDP_NODISCARD tddp_status tddp_group_join(tddp_group *group, tddp_store *store,
                                           const tddp_wait *wait, int64_t deadline, int *same_host,
                                           char **address);

/* Once all have met, the name may be used again after all have left; before, it is as if this rank
 * had never joined. */
void tddp_group_leave(tddp_group *group);

/* Where this process hosts the store of `names`: waits until all ranks have left the group that was
 * the given incarnation of the name. Errors: those of tddp_store_await_clients(). */
TDDP_NODISCARD tddp_status tddp_group_wait_for_leave(tddp_store *names, int world_size,
                                                     int64_t incarnation, const tddp_wait *wait);

/* Checks the arguments of an operation and begins it; called by calls.c. In collectives.c, lists.c,
 * coalesce.c and p2p.c. */
typedef tddp_status tddp_group_operation(tddp_group *group, const tddp_op_args *args,
                                         tddp_work **work);
TDDP_NODISCARD tddp_group_operation tddp_group_all_reduce, tddp_group_reduce, tddp_group_broadcast,
    tddp_group_barrier, tddp_group_all_gather, tddp_group_reduce_scatter,
    tddp_group_all_gather_list, tddp_group_gather, tddp_group_scatter,
    tddp_group_reduce_scatter_list, tddp_group_all_to_all, tddp_group_all_reduce_list,
    tddp_group_send_or_recv;

/* parts.c: makes a work with the caller's timeout and description, and parts of its own where its
 * operation has some. */
TDDP_NODISCARD tddp_status tddp_group_prepare(const tddp_group *group, const tddp_op *op,
                                              const tddp_op_args *args, tddp_work **out);

/* The same on the stack: tddp_group_work_clear(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_group_prepare_here(const tddp_group *group, const tddp_op *op,
                                                   const tddp_op_args *args, tddp_work *work);

/* What buffers are together: one piece of memory, or, with its data NULL, a number of elements. */
void tddp_group_merge_buffers(const tddp_buffer *parts, size_t count, tddp_buffer *whole);

/* describe.c: gives a work its description, which may be NULL. The fingerprint of a text is never
 * 0. */
TDDP_NODISCARD tddp_status tddp_group_describe_work(tddp_work *work, const char *text);
uint32_t tddp_group_fingerprint(const char *text);

/* coalesce.c: carries out an operation, or goes on with it after TDDP_CANCELED. By whose turn it
 * is. */
TDDP_NODISCARD tddp_status tddp_group_run(tddp_group *group, tddp_work *work);
void tddp_group_bundle_free(struct tddp_group_bundle *bundle);

/* How many buffers it has; NULL has none. Has it work on copies of them, which live as long. */
size_t tddp_group_bundle_count(const struct tddp_group_bundle *bundle);
void tddp_group_bundle_use(struct tddp_group_bundle *bundle, const tddp_buffer *buffers);

/* span.c: a work's way as a trace has it: queued, begun, ended before anybody learns of it. Without
 * a trace each costs a load. */
void tddp_group_span_queued(tddp_work *work);
void tddp_group_span_started(tddp_work *work);
void tddp_group_span_ended(const tddp_group *group, const tddp_work *work, tddp_status status);

/* p2p.c. The threads end with stop(), after everything under way is over: the backend must have
 * been aborted, if it is to be soon. */
TDDP_NODISCARD tddp_status tddp_group_p2p_init(tddp_group_p2p *p2p);
void tddp_group_p2p_stop(tddp_group *group);
void tddp_group_p2p_destroy(tddp_group_p2p *p2p);

/* device.c. Whether the backend's device carries it out, by its queue. */
bool tddp_group_queues(const tddp_group *group, const tddp_op *op);

/* Before it is queued, on its caller's thread. */
TDDP_NODISCARD tddp_status tddp_group_device_post(tddp_group *group, tddp_work *work);

/* It was posted, but is not to be launched. */
void tddp_group_device_drop(tddp_group *group, tddp_work *work);

/* Puts a posted work on the device's queue, and lets those know who wait for that. */
TDDP_NODISCARD tddp_status tddp_group_device_launch(tddp_group *group, tddp_work *work);

/* The rest of a work that was launched, on this thread: waits for the device. */
TDDP_NODISCARD tddp_status tddp_group_device_finish(tddp_group *group, tddp_work *work,
                                                    int *source);

/* Launches the work whose turn it is and leaves the rest to the group's thread, which ends it and
 * releases it. On the progress thread. */
void tddp_group_device_carry_out(tddp_group *group, tddp_work *work);

/* The thread ends after everything under way is over. */
TDDP_NODISCARD tddp_status tddp_group_device_start(tddp_group *group);
void tddp_group_device_stop(tddp_group *group);

/* progress.c */
TDDP_NODISCARD tddp_status tddp_group_progress_start(tddp_group *group);

/* What a queued operation is told instead of being run; TDDP_OK: run it. With the lock held. */
TDDP_NODISCARD tddp_status tddp_group_check_runnable(tddp_group *group, const tddp_op *op);

/* turn.c: whether threads that wait carry out operations. */
bool tddp_group_resumes(const tddp_group *group);

/* Carries out the first operation of the queue, which is not empty, on the progress thread. With
 * the lock held, which is let go meanwhile. */
void tddp_group_execute_next(tddp_group *group);

/* Wakes the progress thread if it has something to do now. With the lock held. */
void tddp_group_wake_progress(tddp_group *group);

/* Executes a work that was just queued on the calling thread, if it is the first, as long as
 * tddp_op_args allows. With the lock held, which is released meanwhile. */
void tddp_group_run_inline(tddp_group *group, const tddp_work *work, int64_t inline_us,
                           tddp_cancel *cancel);

/* Carries out what is in the queue up to this work on the calling thread, which waits for it, as
 * far as nobody else does so and the token (may be NULL) is not triggered. */
void tddp_group_make_progress(tddp_work *work, tddp_cancel *cancel);

/* Numbers and carries out an operation that nobody else knows of; false if it is not its turn. */
bool tddp_group_run_unqueued(tddp_group *group, tddp_work *work, tddp_status *status);

/* Queues an operation: numbers it, and waits for it if `work` is NULL. Of the arguments it reads
 * the options only. */
TDDP_NODISCARD tddp_status tddp_group_submit(tddp_group *group, const tddp_op *op,
                                             const tddp_op_args *args, tddp_work **work);

/* The same with a work that is prepared; consumed, also on failure. */
TDDP_NODISCARD tddp_status tddp_group_queue(tddp_group *group, tddp_work *work,
                                            const tddp_op_args *args, tddp_work **out);

/* Gives the caller's reference to the caller, or waits and releases it. */
TDDP_NODISCARD tddp_status tddp_group_return_or_wait(tddp_work *work, tddp_work **out);

/* Counts one more send or receive under way, or says why there may be none. */
TDDP_NODISCARD tddp_status tddp_group_begin_in_flight(tddp_group *group, const tddp_op *op);

/* One less under way; `decided`: tddp_group_complete_in_flight() has told of it. The group may be
 * gone afterwards, if its end was waiting for this. */
void tddp_group_end_in_flight(tddp_group *group, bool decided);

/* The calling thread is one of the group's, on which callbacks of its works run. */
void tddp_group_enter_thread(const tddp_group *group);

/* Says what came of an operation: which it was, and if the ranks may be out of step after it, keeps
 * it as the group's first failure and lets the peers know. Without the lock. */
tddp_status tddp_group_record_outcome(tddp_group *group, tddp_work *work, tddp_status status);

/* Tells a work what came of its operation: as above. Of the one that has the turn, or of one that
 * is counted as under way. */
void tddp_group_complete(tddp_group *group, tddp_work *work, tddp_status status);
void tddp_group_complete_in_flight(tddp_group *group, tddp_work *work, tddp_status status);

/* Whether the caller is one of this group's threads, or acts as one: a callback of its works. */
bool tddp_group_on_progress_thread(const tddp_group *group);

/* Waits until nothing is queued or under way, and tells whether that is so, or else the deadline
 * over or the token (may be NULL) triggered. With the lock held. */
bool tddp_group_await_idle(tddp_group *group, int64_t deadline, const tddp_cancel *cancel);

/* The same for what is queued alone: what a device or another thread has may be under way. */
bool tddp_group_await_queue(tddp_group *group, int64_t deadline, const tddp_cancel *cancel);

/* Takes no more operations, lets those there are finish until the deadline, aborts the rest, ends
 * the thread. */
void tddp_group_progress_stop(tddp_group *group, int64_t deadline);

/* Sets the text of an operation that is not begun for a group that failed, once the cause is known.
 * With the lock held, which is let go meanwhile. */
tddp_status tddp_group_fail_unstarted(tddp_group *group, const char *operation);

/* Has what the backend does, or is waited for before and after it, end soon. Not with the lock. */
void tddp_group_abort(tddp_group *group);

/* The group has failed on another rank. Not with the lock. */
void tddp_group_fail(tddp_group *group, tddp_status status, const char *text);

#endif
