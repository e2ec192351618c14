/*
 * Several hosts with more ranks than hosts: shared memory within each, the backend asked for
 * between them. What the files of this room use of each other, and src/backend/open.c of it.
 *
 *     context.c     making and ending a context, its ranks and channels, scratch memory
 *     stage.c       the operations of which one of the group's is made
 *     reductions.c  all_reduce, reduce, reduce_scatter
 *     moves.c       all others
 *     table.c       the backend table; what becomes of failures; sends and receives
 *
 * The ranks of a host are numbered as they come in the group ("local"). The first of them are
 * carriers: as many on every host as the host with the fewest ranks has. The carriers of one number
 * on all hosts make up a channel of the backend asked for, in which a rank's number is its host's
 * ("across"); one more channel has all ranks of the group ("wide").
 *
 * An operation is made of stages, each an operation of its own in shared memory or in a channel,
 * with a number of its own there. The first stage is always a local one in which all ranks of the
 * host take part, the first carriers of all hosts meet in each operation, and nobody's last stage
 * can end well before they have: so ranks that do not call the same are told so, wherever they are.
 * `part_of` says what they have called.
 */
#ifndef TDDP_HOSTS_H
#define TDDP_HOSTS_H

#include <stdatomic.h>

#include <tddp/backend.h>

#include "backend/shm/shm.h"
#include "base/base.h"

typedef struct tddp_hosts tddp_hosts;

/* "hosts"; its create() is never asked. */
const tddp_backend_v1 *tddp_hosts_backend(void);

/* Whether a backend can do what is needed between hosts. */
bool tddp_hosts_can_use(const tddp_backend_v1 *between);

/* Connects all ranks of the group by `between`; `opts` are the group's. `shm` is this rank's with
 * those of its host, and taken over in any case. Errors: those of the backend's create(). */
TDDP_NODISCARD tddp_status tddp_hosts_create(const tddp_backend_v1 *between, tddp_shm *shm,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             tddp_hosts **out);

/* --- a context ------------------------------------------------------------------------------- */

/* Ranks connected by the backend between hosts. All zero: none. */
typedef struct tddp_hosts_channel {
    tddp_store *store;
    void *context;
    uint64_t sequence; /* of the last stage there */
} tddp_hosts_channel;

struct tddp_hosts {
    const tddp_backend_v1 *between;
    int rank;
    int world_size;
    int host;
    int host_count;
    int local_rank;
    int local_size;
    int carriers;
    int most;     /* ranks on any host */
    int *host_of; /* by rank, as the next */
    int *local_of;
    int *members; /* ranks, host by host */
    int *starts;  /* of each host in `members`, and their end */
    tddp_shm *shm;
    uint64_t local_sequence;
    tddp_hosts_channel wide;
    tddp_hosts_channel across; /* of a carrier */
    void *scratch;             /* what was allocated, shared memory or plain; NULL: nothing */
    void *scratch_data;
    size_t scratch_bytes;
    bool scratch_is_shared;
    atomic_bool ended; /* others were told that this rank takes part in nothing any more */
};

void tddp_hosts_destroy(tddp_hosts *self);
void tddp_hosts_abort(tddp_hosts *self);

/* Memory of this rank until the next call, at a multiple of 64 bytes; contents are lost. */
TDDP_NODISCARD tddp_status tddp_hosts_scratch(tddp_hosts *self, size_t bytes, void **out);

static inline int tddp_hosts_size_of(const tddp_hosts *self, int host)
{
    return self->starts[host + 1] - self->starts[host];
}

/* The group's number of a host's rank. */
static inline int tddp_hosts_member(const tddp_hosts *self, int host, int local)
{
    return self->members[self->starts[host] + local];
}

static inline bool tddp_hosts_carries(const tddp_hosts *self)
{
    return self->local_rank < self->carriers;
}

/* --- an operation under way ------------------------------------------------------------------ */

typedef struct tddp_hosts_run {
    tddp_hosts *self;
    const tddp_op *op;
    int64_t deadline;
    uint32_t layout; /* of all ranks' parts, where each rank knows them; or 0 */
    /* Two lists of buffers for stages, as long as there are ranks. */
    tddp_buffer *given;
    tddp_buffer *wanted;
} tddp_hosts_run;

/* One stage, among the ranks of this host, in this carrier's channel, or in that of all ranks. What
 * all stages have in common is filled in here. */
TDDP_NODISCARD tddp_status tddp_hosts_local(tddp_hosts_run *run, tddp_op *stage);
TDDP_NODISCARD tddp_status tddp_hosts_across(tddp_hosts_run *run, tddp_op *stage);
TDDP_NODISCARD tddp_status tddp_hosts_wide(tddp_hosts_run *run, tddp_op *stage);
/* A local barrier; one of the first carriers, nothing for others. */
TDDP_NODISCARD tddp_status tddp_hosts_meet(tddp_hosts_run *run);
TDDP_NODISCARD tddp_status tddp_hosts_meet_across(tddp_hosts_run *run);

/* A piece of a buffer, which is empty beyond its end. */
tddp_buffer tddp_hosts_piece(const tddp_buffer *whole, size_t at, size_t count);
/* So many parts as one: in one place if they lie end to end, else nowhere. */
tddp_buffer tddp_hosts_joined(const tddp_buffer *parts, int count);

/* Into parts[local_size]: a message cut into slices, one for each carrier, the others empty. */
void tddp_hosts_slice(const tddp_hosts *self, const tddp_buffer *whole, tddp_buffer *parts);

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
