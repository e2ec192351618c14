/*
 * Collectives and point-to-point messages among the ranks of one host, through shared memory.
 * Declares what the files of this folder, and src/backend/hosts, use.
 *
 * Each rank has a segment, an unnamed file (memfd) that all other ranks map. The segments belong to
 * a rank's first group; each further group of the same ranks has a view of its own in the arena:
 *
 *     control    the rank's progress and state: only the rank writes them, one cache line a concern
 *     slots      two call slots with inline payload, used alternately
 *     staging    two staging buffers for data in transit, used alternately
 *     p2p        rings, eager buffers and rendezvous state for messages to each other rank
 *     arena      memory allocated by callers, and views of further groups (control to p2p); takes
 *                no memory until it is used
 *
 * The control at the start of the segment also counts the rank's events, those of all its views.
 *
 * Operation n uses the slot and the staging half n mod 2. In every operation each rank waits until
 * all others have entered it (tddp_shm_sync()). Therefore a rank that enters n + 1 has finished n,
 * and after the wait in n what was used in n - 1 is free for n + 1.
 *
 *     entry      slot.entered: the number of the operation whose call is in the slot
 *     progress   control.progress: operation and step, monotonic; the algorithm defines the steps
 *
 * Resumption: a wait may end with TDDP_CANCELED, and the same operation is then passed to the same
 * algorithm again. Whatever precedes a wait must therefore be idempotent: tddp_shm_enter() and
 * tddp_shm_publish_step() do nothing the second time, and an algorithm keeps its position in the
 * cursor, which is zero when an operation begins. Once the awaited rank gets on, it counts an event
 * here (tddp_shm_events()), so that one thread can try the operations of many groups.
 *
 * Threads: one operation at a time, on any thread; p2p on several; memory on any.
 */
#ifndef TDDP_SHM_H
#define TDDP_SHM_H

#include <stdatomic.h>

#include <tddp/backend.h>

#include "base/base.h"

enum {
    TDDP_SHM_PAYLOAD_BYTES = 16 * 1024,   /* inline payload of a call, at most */
    TDDP_SHM_STAGING_BYTES = 1024 * 1024, /* of each half */
    TDDP_SHM_MAX_RANKS = 1024             /* on a host; joining fails with more */
};

/* The memory is not in the rank's segment, so other ranks can't access it. */
#define TDDP_SHM_NOT_SHARED UINT64_MAX

/* An algorithm's position in the current operation, for the algorithm to use. */
typedef struct tddp_shm_cursor {
    int stage;
    size_t index;
} tddp_shm_cursor;

typedef struct tddp_shm tddp_shm;
typedef struct tddp_shm_fabric tddp_shm_fabric;

/* --- this rank ------------------------------------------------------------------------------- */

/* Among the ranks of this host, like all ranks in this folder. */
int tddp_shm_rank(const tddp_shm *shm);
int tddp_shm_size(const tddp_shm *shm);
/* The rank's number for messages: its number in the group. */
int tddp_shm_rank_name(const tddp_shm *shm, int rank);
tddp_shm_cursor *tddp_shm_cursor_of(tddp_shm *shm);
/* Bytes of the last-level cache that these ranks share; ranks for each core they may use,
 * rounded up. */
size_t tddp_shm_cache_bytes(const tddp_shm *shm);
int tddp_shm_ranks_per_core(const tddp_shm *shm);

/* --- joining --------------------------------------------------------------------------------- */

/* The segments of the ranks of a host, which all groups of a rank have in common (fabric.c): the
 * first group that shares memory leaves them here, and later ones of ranks among those
 * (tddp_backend_opts.fabric) use parts of them. Any thread. */
TDDP_NODISCARD tddp_status tddp_shm_fabric_create(tddp_shm_fabric **out);
tddp_shm_fabric *tddp_shm_fabric_retain(tddp_shm_fabric *fabric);
void tddp_shm_fabric_release(tddp_shm_fabric *fabric);

/* This rank's events in all groups that share these segments; valid as long as the fabric. NULL:
 * no group has left any here. */
tddp_eventcount *tddp_shm_fabric_events(tddp_shm_fabric *fabric);

/*
 * Connects this rank to the ranks of its host. `opts` are the whole group's. All ranks of the
 * group take part in the decision, also a rank that is alone on its host, and a rank that must
 * not share memory: it passes its reason as `refusal` (NULL: it may share). The outcome is the
 * same on all ranks: all succeed, or all fail with TDDP_UNAVAILABLE and the same text, which
 * names the rank and its reason (a refusal, no memfd, no memory...). Other errors: TDDP_TIMEOUT,
 * TDDP_CANCELED, TDDP_PEER_LOST, those of the store.
 */
TDDP_NODISCARD tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal,
                                         const tddp_wait *wait, tddp_shm **out);

/* Tells the other ranks that this one has left, unless tddp_shm_report_failure() told them why
 * before. */
void tddp_shm_destroy(tddp_shm *shm);

/* Any thread. Current and later waits end soon with TDDP_GROUP_FAILED. */
void tddp_shm_abort(tddp_shm *shm);

/* After a failure: tells the other ranks, once, why this rank takes no further part. */
void tddp_shm_report_failure(tddp_shm *shm, tddp_status status, const char *text);

/* Whether ranks may be out of step after an operation with this status. */
static inline bool tddp_shm_is_fatal(tddp_status status)
{
    return status != TDDP_OK && status != TDDP_INVALID_ARGUMENT && status != TDDP_UNSUPPORTED &&
           status != TDDP_CANCELED;
}

/* The backend "shm", for groups on one host. */
const tddp_backend_v1 *tddp_shm_backend(void);

/* --- an operation ---------------------------------------------------------------------------- */

/* Publishes this rank's call, with up to TDDP_SHM_PAYLOAD_BYTES for all ranks. Every operation
 * starts with it. It does not wait. `op` must stay valid until the operation ends. The timeout
 * counts from the first wait. */
void tddp_shm_enter(tddp_shm *shm, const tddp_op *op, const void *payload, size_t bytes);

/* Waits until all ranks have entered the operation, and compares their calls with this rank's.
 * Errors: TDDP_MISMATCH, with both calls in the text; TDDP_TIMEOUT, with the ranks that have
 * entered; TDDP_PEER_LOST, TDDP_GROUP_FAILED, TDDP_CANCELED. */
TDDP_NODISCARD tddp_status tddp_shm_sync(tddp_shm *shm);

/* After tddp_shm_sync(): the payload that a rank sent with its call; its factor of PREMUL_SUM. */
const void *tddp_shm_payload(const tddp_shm *shm, int rank);
double tddp_shm_premul(const tddp_shm *shm, int rank);

/* After tddp_shm_sync(): a rank's op->input or op->output as mapped here; NULL if it is not in
 * that rank's segment. The owner may return only when the others have finished with it. */
const void *tddp_shm_input(const tddp_shm *shm, int rank);
void *tddp_shm_output(const tddp_shm *shm, int rank);
/* Whether the buffers of all ranks are in their segments: equal on all ranks. */
bool tddp_shm_all_inputs(const tddp_shm *shm);
bool tddp_shm_all_outputs(const tddp_shm *shm);

/* A rank's staging half for this operation. A rank may write its own half before
 * tddp_shm_sync(). */
void *tddp_shm_staging(const tddp_shm *shm, int rank);

/* Before tddp_shm_enter(): whether the operation was entered already and resumes; and this
 * rank's staging half for the operation if it was not, to be filled before the others see this
 * rank enter. */
bool tddp_shm_entered(const tddp_shm *shm, const tddp_op *op);
void *tddp_shm_next_staging(const tddp_shm *shm);

/* Steps of an operation are increasing numbers from 1 to 2^24 - 1. */
void tddp_shm_publish_step(tddp_shm *shm, uint32_t step);
/* Waits until the rank has published this step or a later one. Errors: those of tddp_shm_sync(). */
TDDP_NODISCARD tddp_status tddp_shm_wait_step(tddp_shm *shm, int rank, uint32_t step);
TDDP_NODISCARD tddp_status tddp_shm_wait_step_all(tddp_shm *shm, uint32_t step);

/* --- waiting, for p2p ------------------------------------------------------------------------ */

/* A rank's events: whatever its threads may wait for, in all groups that share its segment. */
tddp_eventcount *tddp_shm_events(const tddp_shm *shm, int rank);
/* TDDP_OK as long as waiting for the rank may succeed (a negative rank: for any): it is alive,
 * it has not left, and this rank was not aborted. */
TDDP_NODISCARD tddp_status tddp_shm_check_peer(tddp_shm *shm, int rank);
/* The interval of these checks within a wait. */
#define TDDP_SHM_CHECK_INTERVAL_NS (20 * TDDP_NS_PER_MS)

/* The point-to-point region of `from`: tddp_shm_p2p_region_bytes(size) bytes, zero at first,
 * laid out by p2p_region.c. */
void *tddp_shm_p2p_region(const tddp_shm *shm, int from);
size_t tddp_shm_p2p_region_bytes(int size);

/* --- memory ---------------------------------------------------------------------------------- */

/* Allocates from this rank's arena: zero-filled, aligned to 4096 bytes. The memory may outlive
 * the context. Errors: TDDP_OUT_OF_MEMORY, TDDP_UNAVAILABLE (the arena is full, or there is
 * none). */
TDDP_NODISCARD tddp_status tddp_shm_allocate(tddp_shm *shm, size_t bytes, void **handle,
                                             void **data);
void tddp_shm_deallocate(void *handle);
/* The offset of the memory in this rank's segment; TDDP_SHM_NOT_SHARED if it is outside. */
uint64_t tddp_shm_offset_of(const tddp_shm *shm, const void *data, size_t bytes);
/* The address of that offset in a rank's segment as mapped here. */
void *tddp_shm_address(const tddp_shm *shm, int rank, uint64_t offset);

/* --- algorithms ------------------------------------------------------------------------------ */

/*
 * Each function runs one operation, starting with tddp_shm_enter(), and is a slot of the backend
 * table. Parts may be anywhere and differ in size, also those of reduce_scatter. A rank's input
 * and output may be the same memory where its own part is: input_parts[rank] and output of
 * reduce_scatter, input and output_parts[rank] of all_gather. src/backend/hosts relies on this.
 */
tddp_status tddp_shm_all_reduce(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_reduce(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_reduce_scatter(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_barrier(tddp_shm *shm, const tddp_op *op);
/* broadcast, all_gather, gather, scatter, all_to_all */
tddp_status tddp_shm_move(tddp_shm *shm, const tddp_op *op);

/* Point to point, as in the backend table; p2p.c. */
typedef struct tddp_shm_request tddp_shm_request;
tddp_status tddp_shm_p2p_post(tddp_shm *shm, const tddp_op *op, void **request);
tddp_status tddp_shm_p2p_finish(tddp_shm *shm, void *request, int *source);
/* Before the first message: some come from elsewhere, and a receive from any source goes on
 * waiting when all ranks of this host have left. */
void tddp_shm_p2p_add_foreign(tddp_shm *shm);
/* A message from elsewhere, for receives posted here: as if it had just arrived from rank `from`,
 * which is tddp_shm_size() or more. Any thread. */
TDDP_NODISCARD tddp_status tddp_shm_p2p_deliver(tddp_shm *shm, int from, uint32_t tag,
                                                void *message);
/* Waits until a posted receive has its message. From elsewhere: sets *message and *from, and frees
 * the request. Else *message is NULL, and tddp_shm_p2p_finish() comes next. Errors as there. */
TDDP_NODISCARD tddp_status tddp_shm_p2p_await_message(tddp_shm *shm, void *request, void **message,
                                                      int *from);
/* Frees a request that is not finished, instead. */
void tddp_shm_p2p_drop(tddp_shm *shm, void *request);
/* The message matching state of a context (matching.c), created by the join and freed with the
 * context. */
struct tddp_shm_matching;
TDDP_NODISCARD tddp_status tddp_shm_matching_create(tddp_shm *shm, struct tddp_shm_matching **out);
void tddp_shm_matching_destroy(struct tddp_shm_matching *matching);
struct tddp_shm_matching *tddp_shm_matching_of(const tddp_shm *shm);

#endif
