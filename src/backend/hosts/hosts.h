/*
 * Hierarchical collectives on several hosts with more ranks than hosts: shared memory within each
 * host, the requested backend between hosts. Declares what the files of this folder, and
 * src/backend/open.c, use.
 *
 *     context.c     life cycle, ranks and hosts, scratch memory
 *     connect.c     the communicators
 *     stage.c       the stages that an operation consists of
 *     reductions.c  all_reduce, reduce, reduce_scatter
 *     moves.c       all other collectives
 *     messages.c    sends and receives
 *     table.c       the backend table; failures
 *
 * The ranks of a host are numbered in the order of the group: local ranks. The first of them are
 * leaders, on every host as many as the host with the fewest ranks has. The leaders with the same
 * local rank on all hosts form a communicator of the requested backend, in which a leader's rank is
 * the number of its host. One more communicator, the global one, has all ranks of the group: it is
 * made when an operation first needs it, since it costs each rank a connection to every other.
 *
 * An operation consists of stages. Each stage is an operation of its own in shared memory or in a
 * communicator, with its own sequence number there. The first stage is always local and includes
 * all ranks of the host. In each operation the first leaders of all hosts synchronise, and no
 * rank's last stage can succeed before they have. Therefore ranks whose calls differ are told so on
 * any host; `part_of` has the call that they compare.
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

/* The backend "hosts", which nothing requests by name: it has no create(). */
const tddp_backend_v1 *tddp_hosts_backend(void);

/* Whether a backend has everything needed between hosts. */
bool tddp_hosts_can_use(const tddp_backend_v1 *between);

/* Connects the hosts of the group by `between`; `opts` are the group's, and all ranks connect to
 * each other by opts->on_demand, or at once without it. Takes ownership of `shm`, which connects
 * this rank to those of its host, in any case. Errors: those of the backend's create(). */
TDDP_NODISCARD tddp_status tddp_hosts_create(const tddp_backend_v1 *between, tddp_shm *shm,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             tddp_hosts **out);

/* --- a context ------------------------------------------------------------------------------- */

/* A communicator of the backend between hosts. All zero: none. */
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
    uint64_t local_sequence;
    /* The running operation, or the interrupted one: */
    uint64_t running; /* its number; 0: there is none */
    int64_t deadline;
    size_t stages_done;
    bool stage_begun;            /* the next one was interrupted */
    tddp_hosts_comm leader_comm; /* only on leaders */
    tddp_on_demand *on_demand;   /* the group's, which makes the global one; NULL: it is there */
    tddp_store *store;           /* the group's; like the next four for the global one */
    char *group;
    char *address;        /* NULL: unknown */
    int *names;           /* by rank; NULL: their numbers */
    pthread_mutex_t lock; /* guards the following until on_demand has connected */
    tddp_hosts_comm global_comm;
    tddp_hosts_message *queued; /* messages that wait for it, in their order */
    bool aborted;
    tddp_hosts_tag *tags;         /* with which this rank has received from any source */
    tddp_hosts_arrival *arrivals; /* not yet received */
    void *scratch;                /* shared or plain memory; NULL: nothing allocated */
    void *scratch_data;
    size_t scratch_bytes;
    bool scratch_is_shared;
    atomic_bool failure_reported; /* other ranks know that this one takes no further part */
};

void tddp_hosts_destroy(tddp_hosts *self);
void tddp_hosts_abort(tddp_hosts *self);

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

/* Calls `look` at each event, until it returns something else than TDDP_CANCELED, or the
 * operation's token is triggered. */
TDDP_NODISCARD tddp_status tddp_hosts_try(tddp_hosts *self, const tddp_op *op,
                                          tddp_status (*look)(tddp_hosts *self, void *data),
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

/* Returns memory that stays valid until the next call, aligned to 64 bytes; its contents are
 * lost. */
TDDP_NODISCARD tddp_status tddp_hosts_scratch(tddp_hosts *self, size_t bytes, void **out);

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

/* --- a running operation --------------------------------------------------------------------- */

typedef struct tddp_hosts_run {
    tddp_hosts *self;
    const tddp_op *op;
    size_t stage;    /* the next one's number */
    uint32_t layout; /* hash of the sizes of all ranks' parts, if each rank knows them; or 0 */
    /* Two lists of world_size buffers, for stages. */
    tddp_buffer *send_parts;
    tddp_buffer *recv_parts;
} tddp_hosts_run;

/* Stages of an operation that was interrupted are not repeated: whether the next one is to be done,
 * or was done before; ends it, with its outcome. */
bool tddp_hosts_begin_stage(tddp_hosts_run *run);
tddp_status tddp_hosts_end_stage(tddp_hosts_run *run, tddp_status status);

/* Each runs one stage: among the ranks of this host, among the leaders with this local rank, or
 * among all ranks. Fills in what all stages have in common. */
TDDP_NODISCARD tddp_status tddp_hosts_run_local(tddp_hosts_run *run, tddp_op *stage);
TDDP_NODISCARD tddp_status tddp_hosts_run_leaders(tddp_hosts_run *run, tddp_op *stage);
TDDP_NODISCARD tddp_status tddp_hosts_run_global(tddp_hosts_run *run, tddp_op *stage);
/* A barrier among the ranks of this host; one among the first leaders, which does nothing on
 * other ranks. */
TDDP_NODISCARD tddp_status tddp_hosts_local_barrier(tddp_hosts_run *run);
TDDP_NODISCARD tddp_status tddp_hosts_leader_barrier(tddp_hosts_run *run);

/* Elements of a buffer from `at` on; fewer at its end. */
tddp_buffer tddp_hosts_subrange(const tddp_buffer *buffer, size_t at, size_t count);

/* Cuts a buffer into parts[local_size]: a slice for each leader, the others empty. */
void tddp_hosts_slice(const tddp_hosts *self, const tddp_buffer *buffer, tddp_buffer *parts);

/* --- algorithms ------------------------------------------------------------------------------ */

tddp_status tddp_hosts_all_reduce(tddp_hosts_run *run);
tddp_status tddp_hosts_reduce(tddp_hosts_run *run);
tddp_status tddp_hosts_reduce_scatter(tddp_hosts_run *run);
tddp_status tddp_hosts_broadcast(tddp_hosts_run *run);
tddp_status tddp_hosts_all_gather(tddp_hosts_run *run);
tddp_status tddp_hosts_gather(tddp_hosts_run *run);
tddp_status tddp_hosts_scatter(tddp_hosts_run *run);
tddp_status tddp_hosts_all_to_all(tddp_hosts_run *run);
tddp_status tddp_hosts_barrier(tddp_hosts_run *run);

#endif
