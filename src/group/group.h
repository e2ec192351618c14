/*
 * What the files of this room share: the group, its queue of works, and which thread may use what.
 *
 *   group.c         creates and shuts down a group
 *   attributes.c    a group's rank, names, peers and timeout
 *   join.c          the ranks find each other through the store
 *   peers.c         the ranks' hosts and processes
 *   entry_points.c  the public functions that start operations: tddp_submit(), tddp_all_reduce()...
 *   arguments.c     what the arguments of each kind are, and an operation made of them
 *   coalesce.c      one all_reduce of several buffers
 *   p2p.c           sends and receives, beside the queue, and batches of them
 *   checks.c        argument checks
 *   prepare.c       makes a work, with its operation's parts: one buffer for each rank
 *   describe.c      the caller's description of an operation
 *   submit.c        executes operations within their calls, or queues them
 *   progress.c      what is unfinished: who tries it, and completes it
 *   backends.c      the group's backends, by kind of memory
 *   hold.c          calls and operations that use them, for which the group's end waits
 *   engine.c        the threads that poll many groups: what their callers leave unfinished, and
 *                   what they have launched on devices
 *   device.c        operations that a device executes: launched by their callers
 *   failure.c       failed operations, and the group after its first failure
 *   reaper.c        shuts down groups whose last reference is dropped where waiting is forbidden
 *   span.c          operations as spans of a trace
 *   work.c          handles on operations; they outlive the group
 *   memory.c        memory for buffers
 *   monitored_barrier.c
 *                   a barrier through the store that names the missing ranks
 *   recorder/       the flight recorder: the last operations, as JSON, in files
 *   failure_detector/
 *                   makes a failure known to all ranks, with its root cause
 */
#ifndef TDDP_GROUP_PRIVATE_H
#define TDDP_GROUP_PRIVATE_H

#include <stdatomic.h>
#include <sys/types.h>

#include <tddp/backend.h>
#include <tddp/group.h>

#include "backend/blocking.h"
#include "base/base.h"
#include "group/backends.h"
#include "group/failure_detector/observed.h"
#include "group/peers.h"

/* Which thread tries to get a work on. */
typedef enum tddp_trier {
    TDDP_TRIER_NONE,
    TDDP_TRIER_ENGINE, /* without waiting */
    TDDP_TRIER_CALLER,
} tddp_trier;

struct tddp_work {
    atomic_int references;
    pid_t pid;              /* of the process that made it */
    atomic_bool done;       /* set last, with the lock held */
    tddp_group *group;      /* whose queue a waiter may execute, while it is not done; or NULL */
    _Atomic int64_t expiry; /* the operation's deadline; 0 before it is started */
    tddp_op op;
    tddp_buffer *parts;                 /* the operation's parts point here; NULL: it has none */
    struct tddp_group_bundle *bundle;   /* the progress of a coalesced operation, or NULL */
    uint64_t steps;                     /* sequence numbers it uses: 1 unless coalesced */
    void *request;                      /* the backend's, from posting to finishing; else NULL */
    const struct tddp_group *on_device; /* whose device executes it; NULL: the CPU does */
    atomic_bool launched;               /* it is on the device's queue */
    int64_t device_ns;                  /* how long that took; 0: not measured */
    char *description;                  /* the caller's; NULL: none */
    int source;                         /* of a recv that succeeded */
    void *_Atomic user;                 /* the caller's */
    tddp_eventcount waiters;            /* counts its end */
    pthread_mutex_t mutex;              /* guards what follows */
    int event_fd; /* readable once done; -1: the caller has not asked for it */
    tddp_status status;
    char *text; /* the error text; NULL: none, or no memory for it */
    bool has_callback;
    void (*callback)(void *data);
    void *callback_data;
    struct tddp_work *next;     /* in a list of the group's */
    bool listed;                /* progress.c: it is a message, and in the group's list */
    tddp_trier trier;           /* progress.c */
    struct tddp_record *record; /* recorder.c: its entry, or NULL */
    uint64_t record_id;         /* recorder.c: the entry's id */
    bool started;               /* the backend was called for it */
    tddp_status pending_status; /* a failure that a thread of the group's has to complete it with */
    char *pending_text;
    int64_t queued_ns; /* for traces; 0: tracing was off */
    int64_t started_ns;
};

/* Works in their order. */
typedef struct tddp_work_list {
    tddp_work *head;
    tddp_work *tail;
} tddp_work_list;

struct tddp_engine;

/* p2p.c: sends and receives. */
typedef struct tddp_group_p2p {
    pthread_mutex_t order; /* held to number and post a message */
    uint64_t sequence;     /* of this rank's sends and receives */
} tddp_group_p2p;

/* device.c: works that are being launched, or are on a device's queue. */
typedef struct tddp_group_device {
    pthread_mutex_t mutex; /* guards the list, in the order of their numbers */
    tddp_work *head;
    tddp_work *tail;
    bool launching;           /* a thread posts and launches a collective; the group's lock */
    size_t continued;         /* launches that lent threads continue; the group's lock */
    atomic_bool overdue;      /* a launch is, and the backend was aborted for that */
    tddp_blocking_call abort; /* of the thread that does so */
    bool watched;             /* by the watchdog, whose lock guards these */
    struct tddp_group *next_watched;
} tddp_group_device;

/* Initializes a work on the caller's stack, which no other thread sees; frees what it owns. */
void tddp_group_work_init(tddp_work *work, const tddp_op *op);
void tddp_group_work_clear(tddp_work *work);

/* Makes a work for other threads of it, with two references: the caller's and the queue's. What the
 * one on the stack owned is the new one's. */
TDDP_NODISCARD tddp_status tddp_group_work_move(tddp_work *here, tddp_work **out);

/* Stores the outcome, wakes the waiters, calls the callback. Once a work. */
void tddp_group_work_finish(tddp_work *work, tddp_status status, const char *text);

/* Between log lines that name the missing ranks while a group is created; only tests change it. */
extern int64_t tddp_group_missing_log_interval_ms;

typedef enum tddp_group_state {
    TDDP_GROUP_OPEN,
    TDDP_GROUP_DRAINING, /* accepts no more operations, executes the queued ones */
    TDDP_GROUP_ENDING,   /* refuses queued operations */
    TDDP_GROUP_ENDED,
} tddp_group_state;

struct tddp_group {
    atomic_int references;
    pid_t pid; /* of the process that made it: a forked child only frees memory */
    int rank;
    int world_size;
    bool is_root;  /* it has no parent */
    int root_rank; /* this process's rank in the group that others were made from */
    char *name;
    char *backend_name; /* as the caller gave it; for error texts, like the next */
    char *carrier;      /* of what executes operations; may be the same */
    const tddp_backend_v1 *requested[TDDP_DEVICE_TYPES];
    tddp_device_backend backends[TDDP_DEVICE_TYPES]; /* backends.c */
    bool launches;                                   /* a backend launches operations on a device */
    struct tddp_shm_fabric *fabric;   /* the parent's; NULL once this group has been shut down */
    struct tddp_on_demand *on_demand; /* connections that its backend makes later */
    struct tddp_engine *engine;       /* the parent's, or its own */
    bool polled;                      /* by the engine; constant once the group is made */
    struct tddp_group *next_polled;   /* the engine's */
    tddp_store *membership;           /* prefix NAME: which ranks have joined and left */
    tddp_store *store;                /* prefix NAME/INCARNATION: this group's keys */
    bool arrived;                     /* this rank is counted among those of this incarnation */
    bool joined;                      /* all ranks have joined it */
    tddp_peers *peers;                /* the ranks, once all have joined */
    struct tddp_recorder *recorder;   /* NULL before it is created */
    struct tddp_detector *detector;   /* NULL with one rank */
    tddp_observed observed;           /* what its backend has seen of other ranks */
    int64_t incarnation;   /* counts the groups of this name that this rank has made on the store */
    atomic_size_t holders; /* hold.c: calls that use the backend */
    _Atomic int64_t timeout_ms;
    _Atomic uint64_t monitored_barriers; /* how many this rank has entered */

    pthread_mutex_t mutex; /* guards what follows; never held while anything may take a while */
    pthread_cond_t idle;   /* nothing is queued, the queue is free, or the state changed */
    _Atomic tddp_group_state state; /* hold.c reads it without the lock */
    tddp_work_list queue;           /* collectives, without the one that its caller executes */
    tddp_work_list messages;
    tddp_work_list failed;   /* works of both, and on a device, to be completed */
    bool failing;            /* a lent thread completes them */
    tddp_blocking_call fail; /* of that thread */
    bool running;            /* a collective is being tried, or completed */
    size_t poll_waiters;     /* threads that wait until the engine has tried a work */
    size_t in_flight;        /* operations under way, and calls that may wait for other ranks */
    atomic_size_t in_flight_completing; /* those of them with an outcome, being delivered */
    uint64_t sequence;
    tddp_status failure; /* of the first operation that failed; TDDP_OK: none */
    char *failure_text;
    bool failure_pending;  /* its root cause or its dump is not complete; `idle` signals the end */
    bool dumped;           /* the flight recorder's file is written before any error is returned */
    bool failed_elsewhere; /* the operation was another rank's */
    bool failure_returned; /* and an operation of this rank has returned the failure */
    char *leave_reason;    /* why this rank is about to leave; NULL: as the program has it */

    tddp_group_p2p p2p;
    tddp_group_device device;
    struct tddp_group *next_reaped; /* reaper.c's */
};

/* group.c: shuts down and frees a group without references. */
void tddp_group_end(tddp_group *group);

/* reaper.c: does so on another thread; false if there can be none. */
bool tddp_group_reap(tddp_group *group);

/* join.c: claims this rank, waits for the others, and finds the backend's options. On success
 * `*address` is to be freed; may be NULL. tddp_group_leave() gives the rank up. */
TDDP_NODISCARD tddp_status tddp_group_join(tddp_group *group, tddp_store *store,
                                           const tddp_wait *wait, int64_t deadline, int *same_host,
                                           char **address);

/* If all ranks have joined, the name may be used again after all have left; otherwise it is as if
 * this rank had never joined. */
void tddp_group_leave(tddp_group *group);

/* Where this process hosts the store: waits until all ranks have left the given incarnation of the
 * group. Errors: those of tddp_store_await_clients(). */
TDDP_NODISCARD tddp_status tddp_group_wait_for_leave(tddp_store *membership, int world_size,
                                                     int64_t incarnation, const tddp_wait *wait);

/* arguments.c: checks the arguments that the kind has, and makes an operation of them. `listed`:
 * they have buffers in a list, where the kind may have one instead; what a kind doesn't have is not
 * read. */
TDDP_NODISCARD tddp_status tddp_group_read_args(const tddp_group *group, const tddp_op_args *args,
                                                bool listed, tddp_op *out);

/* Start an operation of which the arguments were read. In coalesce.c and p2p.c; of all others
 * tddp_group_submit(). */
TDDP_NODISCARD tddp_status tddp_group_all_reduce_list(tddp_group *group, const tddp_op *op,
                                                      const tddp_op_args *args, tddp_work **work);
TDDP_NODISCARD tddp_status tddp_group_send_or_recv(tddp_group *group, tddp_op *op,
                                                   const tddp_op_args *args, tddp_work **work);

/* p2p.c: several messages; `works` has room for as many. */
TDDP_NODISCARD tddp_status tddp_group_batch(tddp_group *group, const tddp_op_args *messages,
                                            size_t count, tddp_work **works);

/* prepare.c: initializes a work on the caller's stack, with the caller's timeout and description,
 * and a copy of its operation's parts. tddp_group_work_clear(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_group_prepare(const tddp_group *group, const tddp_op *op,
                                              const tddp_op_args *args, tddp_work *work);

/* describe.c: sets a work's description, which may be NULL, and its fingerprint, which is never 0
 * for a text. */
TDDP_NODISCARD tddp_status tddp_group_describe_work(tddp_work *work, const char *text);
uint32_t tddp_group_fingerprint(const char *text);

/* coalesce.c: executes an operation, or resumes it after TDDP_CANCELED. By the thread that has
 * acquired the queue. */
TDDP_NODISCARD tddp_status tddp_group_run(tddp_group *group, tddp_work *work);
void tddp_group_bundle_free(struct tddp_group_bundle *bundle);

/* span.c: records when a work was queued, started and ended, before its outcome is delivered.
 * Without a trace each costs a load. */
void tddp_group_span_queued(tddp_work *work);
void tddp_group_span_started(tddp_work *work);
void tddp_group_span_ended(const tddp_group *group, const tddp_work *work, tddp_status status);

/* Between looks at a cancel token, which signals no condition. */
enum { TDDP_GROUP_TOKEN_CHECK_MS = 20 };

/* What the engine found to do, in bits. */
enum {
    TDDP_GROUP_WAITING = 1,   /* something goes on with an event */
    TDDP_GROUP_PROGRESSED = 2 /* something has ended, and more may follow */
};

/* The backend for one kind of memory; for one that no backend knows, any: it takes none. */
static inline const tddp_inner *tddp_group_backend_on(const tddp_group *group,
                                                      tddp_device_type type)
{
    const bool cpu = type == TDDP_CPU;
    const tddp_inner *own = &group->backends[cpu ? TDDP_CPU : TDDP_CUDA].inner;
    return own->backend ? own : &group->backends[cpu ? TDDP_CUDA : TDDP_CPU].inner;
}

/* The backend for an operation; for a barrier, which has no memory, not one that copies. */
static inline const tddp_inner *tddp_group_backend_for(const tddp_group *group, const tddp_op *op)
{
    const tddp_device_type type = op->kind != TDDP_OP_BARRIER        ? op->input.device_type
                                  : group->backends[TDDP_CPU].copies ? TDDP_CUDA
                                                                     : TDDP_CPU;
    return tddp_group_backend_on(group, type);
}

/* device.c: whether the backend reduces memory of this kind on a device, perhaps a copy of it. */
bool tddp_group_reduces_on_device(const tddp_group *group, tddp_device_type type);

/* Whether the operation is launched on a device's queue. */
bool tddp_group_is_launched(const tddp_group *group, const tddp_op *op);

/* Posts, numbers and launches such works as one, on the calling thread, which may block while ranks
 * connect; once the token (may be NULL) is triggered, a lent thread goes on. On an error none of
 * them was begun, and all are released; a failure from then on is the works'. */
TDDP_NODISCARD tddp_status tddp_group_launch(tddp_group *group, tddp_work *const *works,
                                             size_t count, tddp_cancel *cancel);

/* The same for one work; returns it in `*out`, or waits for it if `out` is NULL. */
TDDP_NODISCARD tddp_status tddp_group_launch_one(tddp_group *group, tddp_work *work,
                                                 const tddp_op_args *args, tddp_work **out);

/* Tests the group's launched works once, and completes those that have ended; aborts a launch that
 * is overdue. On the watchdog's thread, or, once that has left the group, the one that shuts it
 * down. */
unsigned tddp_group_device_test(tddp_group *group);

/* --- progress.c. With the group's lock held, which is released meanwhile, unless said otherwise.
 */

void tddp_work_list_append(tddp_work_list *list, tddp_work *work);
void tddp_work_list_prepend(tddp_work_list *list, tddp_work *work);
void tddp_work_list_remove(tddp_work_list *list, const tddp_work *work);

/* Stores a failure, for the thread that completes the work. Without the lock. */
void tddp_group_keep_failure(tddp_work *work, tddp_status status);
TDDP_NODISCARD tddp_status tddp_group_kept_failure(const tddp_work *work);

/* Executes an operation until the token (may be NULL) is triggered: then false. A failure is
 * stored. Without the lock, by the only thread that may. */
bool tddp_group_execute(tddp_group *group, tddp_work *work, tddp_cancel *cancel, int awaited);

/* Completes a work in flight that is in no list; one that has failed on a lent thread, if there can
 * be one. complete_polled() takes the lock. */
void tddp_group_complete_ended(tddp_group *group, tddp_work *work);
void tddp_group_complete_polled(tddp_group *group, tddp_work *work);

/* Completes the first work that has failed; false if there is none. */
bool tddp_group_complete_failed(tddp_group *group);

/* One operation in flight less; `queued`: it is no message, and not on a device. */
void tddp_group_ended(tddp_group *group, bool queued);

/* Has the engine try what is in the lists. */
void tddp_group_wake_engine(tddp_group *group);

/* Adds a message that was posted, and `tries` it until the token is triggered. Without the lock. */
void tddp_group_add_message(tddp_group *group, tddp_work *work, tddp_cancel *cancel, bool tries,
                            int awaited);

/* For a thread that waits for the work: tries it, and what is ahead of it, until the token (may be
 * NULL) is triggered, unless another thread does. Without the lock. */
void tddp_group_make_progress(tddp_work *work, tddp_cancel *cancel);

/* Tries all works of the lists without waiting. Without the lock, on the engine's thread, or in a
 * shutdown. */
unsigned tddp_group_poll(tddp_group *group);

/* engine.c */
typedef struct tddp_engine tddp_engine;

/* While something is under way: between looks at deadlines and for lost ranks. Only tests change
 * it. */
extern int64_t tddp_engine_look_ns;
TDDP_NODISCARD tddp_status tddp_engine_create(tddp_engine **out);
tddp_engine *tddp_engine_retain(tddp_engine *engine);
void tddp_engine_release(tddp_engine *engine);

/* What a backend without shared memory counts its events on: valid as long as the engine. */
tddp_eventcount *tddp_engine_events(tddp_engine *engine);

/* Adds a group whose backend has events and is connected; it may get another engine. Nothing is
 * polled after remove(). */
TDDP_NODISCARD tddp_status tddp_engine_add(tddp_group *group);
void tddp_engine_remove(tddp_group *group);

/* Makes sure that there is a thread, and that it looks again. Also with a group's lock held. */
TDDP_NODISCARD tddp_status tddp_engine_start(tddp_engine *engine);
bool tddp_engine_on_thread(const tddp_engine *engine);

/* The watchdog, for groups whose backend launches: nothing is tested on its thread after remove().
 */
TDDP_NODISCARD tddp_status tddp_watchdog_add(tddp_group *group);
void tddp_watchdog_remove(tddp_group *group);
TDDP_NODISCARD tddp_status tddp_watchdog_start(void);
void tddp_watchdog_wake(void);
bool tddp_watchdog_on_thread(void);

/* submit.c: whether the caller of an operation tries it within the call, and until which token,
 * maybe `until`; NULL: to the end. */
bool tddp_group_limit_of(const tddp_op *op, const tddp_op_args *args, tddp_cancel *until,
                         tddp_cancel **cancel);

/* Executes an operation here, launches it on its device, or numbers and queues it; and waits for it
 * if `out` is NULL. Reads only the options of the arguments. `*out` is NULL if it is done. */
TDDP_NODISCARD tddp_status tddp_group_submit(tddp_group *group, const tddp_op *op,
                                             const tddp_op_args *args, tddp_work **out);

/* The same for an operation that was prepared, which it clears. */
TDDP_NODISCARD tddp_status tddp_group_start(tddp_group *group, tddp_work *here,
                                            const tddp_op_args *args, tddp_work **out);

/* Returns the caller's reference in `*out`, or, if `out` is NULL, waits and releases it. */
TDDP_NODISCARD tddp_status tddp_group_return_or_wait(tddp_work *work, tddp_work **out);

/* hold.c: TDDP_OK, or why the group accepts no calls. With the lock held, which may be released
 * meanwhile. */
TDDP_NODISCARD tddp_status tddp_group_check_open(tddp_group *group, const char *call);
TDDP_NODISCARD tddp_status tddp_group_fail_destroyed(const tddp_group *group);

/* For the length of a call, in which the backend's context stays: first of all, and without the
 * lock. Whoever calls has a reference to the group. */
TDDP_NODISCARD tddp_status tddp_group_hold(tddp_group *group, const char *call);
void tddp_group_let_go(tddp_group *group);

/* Counts one more operation in flight, or returns why the group accepts none. */
TDDP_NODISCARD tddp_status tddp_group_begin_in_flight(tddp_group *group, const char *call);

/* One operation in flight less; `completed`: by tddp_group_complete_in_flight(). The group may be
 * gone afterwards, if its shutdown was waiting for this. */
void tddp_group_end_in_flight(tddp_group *group, bool completed);

/* Marks the calling thread as one of the group's, on which callbacks of its works run. */
void tddp_group_enter_thread(const tddp_group *group);
/* The same for a moment on a caller's thread; returns what is to be set afterwards. */
const tddp_group *tddp_group_set_current(const tddp_group *group);

/* Whether the other ranks may be out of step after this outcome of an operation. */
bool tddp_group_breaks(tddp_status status);

/* Determines and records an operation's outcome: names the operation in the error text; a failure
 * after which the ranks may be out of step becomes the group's first failure, and is reported to
 * the other ranks. Without the lock. */
tddp_status tddp_group_record_outcome(tddp_group *group, tddp_work *work, tddp_status status);

/* Records the outcome as above and completes a work that is counted as in flight. */
void tddp_group_complete_in_flight(tddp_group *group, tddp_work *work, tddp_status status);

/* Whether the caller is one of this group's threads, or runs a callback of its works. */
bool tddp_group_on_progress_thread(const tddp_group *group);

/* Waits until nothing is queued or in flight; false if the deadline was over or the token (may be
 * NULL) triggered first. With the lock held. */
bool tddp_group_await_idle(tddp_group *group, int64_t deadline, const tddp_cancel *cancel);

/* The same for queued operations alone: others may be in flight. */
bool tddp_group_await_queue(tddp_group *group, int64_t deadline, const tddp_cancel *cancel);

/* Waits for operations until the deadline, aborts the rest, and ends the threads. */
void tddp_group_progress_stop(tddp_group *group, int64_t deadline);

/* Fails an operation that is not started since the group has failed, once the root cause is known.
 * With the lock held, which is released meanwhile. */
tddp_status tddp_group_fail_unstarted(tddp_group *group, const char *operation);

/* Fails the group because it has failed on another rank. Not with the lock. */
void tddp_group_fail(tddp_group *group, tddp_status status, const char *text);

#endif
