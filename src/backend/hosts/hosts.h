/*
 * Hierarchical collectives on several hosts with more ranks than hosts: shared memory within each
 * host, the requested backend between hosts. Declares what the files of this folder, and
 * src/backend/open.c, use.
 *
 *     context.c     life cycle, ranks and hosts, scratch memory, the backend table, failures
 *     connect.c     the communicators
 *     operations.c  the stages of each collective
 *     program.c     runs them; waits
 *     messages.c    sends and receives
 *
 * The ranks of a host are numbered in the order of the group: local ranks. The first of them are
 * leaders, on every host as many as the host with the fewest ranks has. The leaders with the same
 * local rank on all hosts form a communicator of the requested backend, in which a leader's rank is
 * the number of its host. One more communicator, the global one, has all ranks of the group: it is
 * made when an operation first needs it, since it costs each rank a connection to every other.
 *
 * A collective is a list of stages, which is made once and has a position. Each stage is an
 * operation of its own in shared memory or in a communicator, with its own sequence number there.
 * The first stage is always local and includes all ranks of the host. In each operation the first
 * leaders of all hosts synchronise, and no rank's last stage can succeed before they have.
 * Therefore ranks whose calls differ are told so on any host; `part_of` has the call that they
 * compare.
 */
#ifndef TDDP_HOSTS_H
#define TDDP_HOSTS_H

#include <stdatomic.h>

#include <tddp/backend.h>

#include "backend/on_demand.h"
#include "backend/shm/shm.h"
#include "backend/wrapper.h"
#include "base/base.h"

typedef struct tddp_hosts tddp_hosts;
typedef struct tddp_hosts_message tddp_hosts_message;
typedef struct tddp_hosts_tag tddp_hosts_tag;
typedef struct tddp_hosts_arrival tddp_hosts_arrival;

/* Whether a backend has everything needed between hosts. */
bool tddp_hosts_can_use(const tddp_backend_v1 *between);

/* Connects the hosts of the group by `between`; `opts` are the group's, and all ranks connect to
 * each other by opts->on_demand, or at once without it. Takes ownership of `shm`, which connects
 * this rank to those of its host, in any case. Errors: those of the backend's create(). */
TDDP_NODISCARD tddp_status tddp_hosts_create(const tddp_backend_v1 *between, tddp_shm *shm,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             tddp_hosts **out);

/* The backend "hosts" of such a context, which nothing requests by name: it has no create(). */
const tddp_backend_v1 *tddp_hosts_backend(void);

/* --- collectives ----------------------------------------------------------------------------- */

/* Where a stage runs. The first three have a communicator each. */
typedef enum tddp_hosts_where {
    TDDP_HOSTS_LOCAL,   /* among the ranks of this host, in shared memory */
    TDDP_HOSTS_LEADERS, /* among the leaders with this local rank; only on leaders */
    TDDP_HOSTS_GLOBAL,  /* among all ranks */
    TDDP_HOSTS_COMMS,
    TDDP_HOSTS_DIVIDE = TDDP_HOSTS_COMMS, /* here: divides the output by the number of ranks */
} tddp_hosts_where;

typedef struct tddp_hosts_stage tddp_hosts_stage;

/* Sets a stage's kind, memory and reduction, in which it may use the context's lists. */
typedef void tddp_hosts_fill(tddp_hosts *self, const tddp_hosts_stage *at, tddp_op *out);

struct tddp_hosts_stage {
    tddp_hosts_where where;
    tddp_hosts_fill *fill;
    size_t
        start; /* the chunk of each buffer or part that it is for: so many elements from here on */
    size_t count;
    int first; /* the local rank whose part the first leader has */
    int host;  /* whose ranks' parts it is for */
};

typedef struct tddp_hosts_program {
    tddp_hosts_stage *stages;
    size_t count;
    size_t capacity;
    size_t position;   /* stages that are done */
    bool begun;        /* the next one was interrupted */
    bool incomplete;   /* there was no memory for a stage */
    uint64_t sequence; /* of the operation; 0: none is unfinished */
    int64_t deadline;
    uint32_t layout; /* hash of the sizes of all ranks' parts, if each rank knows them; or 0 */
} tddp_hosts_program;

/* program.c: run[] of the table. */
tddp_status tddp_hosts_run(void *context, const tddp_op *op);
/* Appends a stage. */
void tddp_hosts_add(tddp_hosts *self, const tddp_hosts_stage *stage);
/* operations.c: appends all stages. Errors: TDDP_OUT_OF_MEMORY, TDDP_MISMATCH. */
TDDP_NODISCARD tddp_status tddp_hosts_build(tddp_hosts *self);

/* --- a context ------------------------------------------------------------------------------- */

/* All zero: none. */
typedef struct tddp_hosts_comm {
    tddp_inner inner;
    uint64_t sequence; /* of its last stage */
} tddp_hosts_comm;

struct tddp_hosts {
    const tddp_backend_v1 *between;
    int rank;
    int world_size;
    int host;
    int host_count;
    int local_rank;
    int local_size;
    int leaders;
    int max_local_size; /* most ranks on any host */
    int *host_of;       /* by rank, like the next */
    int *local_of;
    int *members; /* all ranks, sorted by host */
    int *starts;  /* offset of each host in `members`, and the end */
    tddp_shm *shm;
    tddp_hosts_comm comms[TDDP_HOSTS_COMMS]; /* the global one guarded by the lock */
    tddp_hosts_program program;
    const tddp_op *op;       /* while it runs; it may be at another address when it is resumed */
    tddp_buffer *send_parts; /* lists of world_size, for the running stage */
    tddp_buffer *recv_parts;
    void *scratch; /* shared or plain memory; NULL: nothing allocated */
    void *scratch_data;
    size_t scratch_bytes;
    bool scratch_is_shared;
    tddp_on_demand *on_demand;  /* the group's, which makes the global one; NULL: it is there */
    tddp_backend_opts opts;     /* of the global one; owns what they point to */
    pthread_mutex_t lock;       /* guards the following, and the global one until it is connected */
    tddp_hosts_message *queued; /* messages that wait for it, in their order */
    bool aborted;
    tddp_hosts_tag *tags;         /* with which this rank has received from any source */
    tddp_hosts_arrival *arrivals; /* not yet received */
    atomic_bool failure_reported; /* other ranks know that this one takes no further part */
};

/* Makes the communicators, or prepares for them; closes them. */
TDDP_NODISCARD tddp_status tddp_hosts_connect(tddp_hosts *self, const tddp_backend_opts *opts,
                                              const tddp_wait *wait);
void tddp_hosts_disconnect(tddp_hosts *self);

/* Whether the global communicator is there, which the first call requests; does not wait.
 * TDDP_CANCELED: not yet. */
TDDP_NODISCARD tddp_status tddp_hosts_check_global(tddp_hosts *self, int64_t deadline);
/* Waits for it, or until the operation's token is triggered: TDDP_CANCELED. */
TDDP_NODISCARD tddp_status tddp_hosts_await_global(tddp_hosts *self, const tddp_op *op,
                                                   int64_t deadline);

/* Calls `poll` at each event, until it returns something else than TDDP_CANCELED, or the
 * operation's token is triggered. */
TDDP_NODISCARD tddp_status tddp_hosts_try(tddp_hosts *self, const tddp_op *op,
                                          tddp_status (*poll)(tddp_hosts *self, void *data),
                                          void *data);

/* messages.c: post() and finish() of the table. */
tddp_status tddp_hosts_post(void *context, const tddp_op *op, void **request);
tddp_status tddp_hosts_finish(void *context, void *request, int *source);
/* Posts what waits for the communicator, with the lock held. */
void tddp_hosts_post_queued(tddp_hosts *self);
/* Frees what has not been received, after the communicator has ended. */
void tddp_hosts_free_arrivals(tddp_hosts *self);

/* Reports a failure to the other ranks of this host and of its communicators, once, if it leaves
 * this rank out of step. Returns its status. */
tddp_status tddp_hosts_report_if_fatal(tddp_hosts *self, tddp_status status);

/* On leaders: scratch_data has so much memory from now on, aligned to 64 bytes. */
TDDP_NODISCARD tddp_status tddp_hosts_scratch(tddp_hosts *self, size_t bytes);

static inline int tddp_hosts_size_of(const tddp_hosts *self, int host)
{
    return self->starts[host + 1] - self->starts[host];
}

/* The group's number of a local rank of a host. */
static inline int tddp_hosts_member(const tddp_hosts *self, int host, int local)
{
    return self->members[self->starts[host] + local];
}

static inline bool tddp_hosts_is_leader(const tddp_hosts *self)
{
    return self->local_rank < self->leaders;
}

#endif
