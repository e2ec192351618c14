/*
 * What the files of this room share: the group, its queue of works, and who may touch what.
 *
 *   group.c        making and ending a group, what it is
 *   join.c         how the ranks find each other through the store
 *   progress.c     the queue and the progress thread; the first failure
 *   collectives.c  argument checks, then the queue
 *   parts.c        the pieces of an operation, one for each rank
 *   work.c         handles on operations; they know nothing of the group and outlive it
 */
#ifndef TDDP_GROUP_PRIVATE_H
#define TDDP_GROUP_PRIVATE_H

#include <stdatomic.h>
#include <sys/types.h>

#include <tddp/group.h>

#include "base/base.h"

struct tddp_work {
    atomic_int references;
    pid_t pid;              /* who made it */
    atomic_bool done;       /* set last, with the lock held */
    _Atomic int64_t expiry; /* when the running operation's time is over; 0 before it runs */
    tddp_op op;
    tddp_buffer *parts;    /* what the operation's parts point to; NULL: it has none */
    int source;            /* of a recv that went well */
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t cond;
    int event_fd; /* readable once done; -1 until a waiter with a cancel token needs it */
    tddp_status status;
    char *text; /* what went wrong; NULL: nothing, or no memory to say it */
    bool has_callback;
    void (*callback)(void *data);
    void *callback_data;
    struct tddp_work *next; /* in the group's queue; guarded by the group's lock */
};

/* A work with two references: its caller's and the queue's. */
TDDP_NODISCARD tddp_status tddp_group_work_create(const tddp_op *op, tddp_work **out);

/* Tells the outcome, wakes the waiters, calls the callback. Once a work. */
void tddp_group_work_finish(tddp_work *work, tddp_status status, const char *text);

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
    char *name;
    const tddp_backend_v1 *backend;
    void *context;       /* the backend's; used by the progress thread */
    tddp_store *names;   /* prefix NAME: who has joined and left */
    tddp_store *store;   /* prefix NAME/INCARNATION: this group's own keys */
    bool met;            /* all ranks have joined this incarnation */
    int64_t incarnation; /* how many groups of this name this rank has made on this store */
    _Atomic int64_t timeout_ms;

    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows; never held while a backend or a callback runs */
    pthread_cond_t wake;   /* for the progress thread: something is queued, or the state changed */
    pthread_cond_t idle;   /* for those shutting down: nothing is queued, or the state changed */
    tddp_group_state state;
    tddp_work *head;
    tddp_work *tail;
    bool running;
    uint64_t sequence;
    tddp_status failure; /* of the first operation that failed; TDDP_OK: none */
    char *failure_text;
};

/* join.c: takes this rank's place, waits for the others, says what the backend wants to know. On
 * success `*address` is to be freed; may be NULL. tddp_group_leave() gives the place up. */
TDDP_NODISCARD tddp_status tddp_group_join(tddp_group *group, tddp_store *store,
                                           const tddp_wait *wait, int64_t deadline, int *same_host,
                                           char **address);

/* Once all have met, the name may be used again after all have left; before, it is as if this rank
 * had never joined. */
void tddp_group_leave(tddp_group *group);

/* parts.c: gives a fresh work parts of its own where its operation has some. */
TDDP_NODISCARD tddp_status tddp_group_work_parts(const tddp_group *group, tddp_work *work);

/* progress.c */
TDDP_NODISCARD tddp_status tddp_group_progress_start(tddp_group *group);

/* Queues an operation: numbers it, and waits for it if `work` is NULL. */
TDDP_NODISCARD tddp_status tddp_group_submit(tddp_group *group, tddp_op *op, tddp_work **work);

/* Tells a work what came of its operation: says which it was, and if the ranks may be out of step
 * after it, keeps it as the group's first failure and lets the peers know. Without the lock. */
void tddp_group_conclude(tddp_group *group, tddp_work *work, tddp_status status);

/* Whether the caller is this group's progress thread: a callback of one of its works. */
bool tddp_group_on_progress_thread(const tddp_group *group);

/* Takes no more operations, lets those there are finish until the deadline, aborts the rest, ends
 * the thread. */
void tddp_group_progress_stop(tddp_group *group, int64_t deadline);

/* Sets the text for a group that failed. With the lock held. */
tddp_status tddp_group_failed(const tddp_group *group);

#endif
