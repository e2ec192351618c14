/*
 * The ranks of a group on one host, by the memory that they share. What the files of this room use
 * of each other, and src/backend/hosts of it.
 *
 * Each rank has a segment, a file without a name (memfd), which all others map:
 *
 *     control    what it says of itself: written by it alone, a cache line for each concern
 *     slots      two calls with their payload, which take turns
 *     staging    two halves for pieces under way, which take turns
 *     mail       messages to each other rank
 *     arena      memory given to callers; costs nothing until it is used
 *
 * Operation n uses slot and half n mod 2. Every rank waits in every operation until all others have
 * entered it (tddp_shm_meet), so who enters n + 1 has done with n, and what was used in n - 1 is
 * free for n + 1: whoever waited for all in n knows it.
 *
 *     arrival    slot.entered: the number of the operation whose call stands there
 *     progress   control.progress: operation and step, growing; what a step means is the
 * algorithm's
 *
 * Resuming: a wait may end with TDDP_CANCELED, and the same operation is given to the same
 * algorithm again. So what is done before a wait is done once: enter() and publish() of something
 * that was published do nothing, and algorithms keep where they are in `course`, which is zero when
 * an operation begins.
 *
 * Threads: one operation at a time, on any thread; p2p on several; memory on any.
 */
#ifndef TDDP_SHM_H
#define TDDP_SHM_H

#include <stdatomic.h>

#include <tddp/backend.h>

#include "base/base.h"

enum {
    TDDP_SHM_PAYLOAD_BYTES = 16 * 1024,   /* that may travel with a call */
    TDDP_SHM_STAGING_BYTES = 1024 * 1024, /* of each half */
    TDDP_SHM_MOST_RANKS = 1024            /* on a host; with more, joining says no */
};

/* The rank has it somewhere where the others cannot see it. */
#define TDDP_SHM_NOWHERE UINT64_MAX

/* Where an algorithm is in the operation that runs. Its own to use. */
typedef struct tddp_shm_course {
    int stage;
    size_t at;
} tddp_shm_course;

typedef struct tddp_shm tddp_shm;

/* --- this rank ------------------------------------------------------------------------------- */

int tddp_shm_rank(const tddp_shm *shm); /* among the ranks of this host, as all ranks here are */
int tddp_shm_size(const tddp_shm *shm);
/* What a rank is called in messages: its number in the group. */
int tddp_shm_name(const tddp_shm *shm, int rank);
tddp_shm_course *tddp_shm_course_of(tddp_shm *shm);
/* Bytes of the last cache that these ranks share, and how many ranks there are for each core they
 * may use, rounded up. */
size_t tddp_shm_cache_bytes(const tddp_shm *shm);
int tddp_shm_ranks_per_core(const tddp_shm *shm);

/* --- joining --------------------------------------------------------------------------------- */

/*
 * Connects this rank with those of its host: `opts` are the whole group's, and all its ranks take
 * part in deciding, also those that are alone on their host, and those that will not: `refusal`
 * is then why, in the words that the others get to read; NULL: this rank will. Ends alike on all
 * ranks: either all get one, or all TDDP_UNAVAILABLE, with the rank that could not or would not and
 * why (a refusal, no memfd, no memory...), in the same text. Other errors: TDDP_TIMEOUT,
 * TDDP_CANCELED, TDDP_PEER_LOST, those of the store.
 */
TDDP_NODISCARD tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal,
                                         const tddp_wait *wait, tddp_shm **out);

/* Tells the others that this rank has left, if farewell() has not told them otherwise. */
void tddp_shm_destroy(tddp_shm *shm);

/* Any thread: waits end soon with TDDP_GROUP_FAILED, now and later. */
void tddp_shm_abort(tddp_shm *shm);

/* Tells the others, once, why this rank takes part in nothing any more: after a failure. */
void tddp_shm_farewell(tddp_shm *shm, tddp_status status, const char *text);

/* "shm": for ranks of one host alone. */
const tddp_backend_v1 *tddp_shm_backend(void);

/* --- an operation ---------------------------------------------------------------------------- */

/*
 * Says which operation begins here, with up to TDDP_SHM_PAYLOAD_BYTES for everybody. The first
 * thing of every operation; does not wait. `op` is kept until the operation is over. The deadline
 * counts from here.
 */
void tddp_shm_enter(tddp_shm *shm, const tddp_op *op, const void *payload, size_t bytes);

/*
 * Waits until all have entered, and compares their calls with this rank's. Errors: TDDP_MISMATCH,
 * with both sides in the text; TDDP_TIMEOUT with who has come; TDDP_PEER_LOST, TDDP_GROUP_FAILED,
 * TDDP_CANCELED.
 */
TDDP_NODISCARD tddp_status tddp_shm_meet(tddp_shm *shm);

/* After meet(): what a rank sent with its call; its factor of PREMUL_SUM. */
const void *tddp_shm_payload(const tddp_shm *shm, int rank);
double tddp_shm_premul(const tddp_shm *shm, int rank);

/* After meet(): a rank's op->input or op->output where it lies, as this process sees it; NULL if it
 * is not in that rank's segment. Whoever gave it may return only when the others have done. */
const void *tddp_shm_input(const tddp_shm *shm, int rank);
void *tddp_shm_output(const tddp_shm *shm, int rank);
/* Whether all ranks have theirs there: equal on all ranks. */
bool tddp_shm_all_inputs(const tddp_shm *shm);
bool tddp_shm_all_outputs(const tddp_shm *shm);

/* A rank's half of its staging for this operation; the own one may be written before meet(). */
void *tddp_shm_staging(const tddp_shm *shm, int rank);

/* Before enter(): whether the operation was entered already, and goes on; if not, the own half that
 * it will have, for what is to stand there when the others see this rank enter. */
bool tddp_shm_entered(const tddp_shm *shm, const tddp_op *op);
void *tddp_shm_staging_ahead(const tddp_shm *shm);

/* Steps of this operation count from 1 to 2^24 - 1 and grow. */
void tddp_shm_publish(tddp_shm *shm, uint32_t step);
/* Waits until the rank has published this step or a later one. Errors as meet()'s. */
TDDP_NODISCARD tddp_status tddp_shm_await(tddp_shm *shm, int rank, uint32_t step);
TDDP_NODISCARD tddp_status tddp_shm_await_all(tddp_shm *shm, uint32_t step);

/* --- waiting, for mail ----------------------------------------------------------------------- */

/* Sleeps while the word is `seen`, at most so long; may return for no reason. */
void tddp_shm_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t ns);
void tddp_shm_wake(_Atomic uint32_t *word);
/* TDDP_OK while nothing stands against waiting longer for the rank (any, if it is negative): it
 * lives, has not left, this rank was not aborted. */
TDDP_NODISCARD tddp_status tddp_shm_look(tddp_shm *shm, int rank);
/* How often a wait looks. */
#define TDDP_SHM_LOOK_NS (20 * TDDP_NS_PER_MS)

/* What `from` has for all others: mail_bytes(size), zero at first; mail.c's to lay out. */
void *tddp_shm_mail(const tddp_shm *shm, int from);
size_t tddp_shm_mail_bytes(int size);

/* --- memory ---------------------------------------------------------------------------------- */

/* Memory in this rank's arena: zero, at a multiple of 4096 bytes. It may outlive the context.
 * Errors: TDDP_OUT_OF_MEMORY, TDDP_UNAVAILABLE (the arena is full, or there is none). */
TDDP_NODISCARD tddp_status tddp_shm_allocate(tddp_shm *shm, size_t bytes, void **handle,
                                             void **data);
void tddp_shm_deallocate(void *handle);
/* Where in this rank's segment the memory lies; TDDP_SHM_NOWHERE if it does not. */
uint64_t tddp_shm_locate(const tddp_shm *shm, const void *data, size_t bytes);
/* The same place as this process sees it in a rank's segment. */
void *tddp_shm_at(const tddp_shm *shm, int rank, uint64_t where);

/* --- algorithms ------------------------------------------------------------------------------ */

/*
 * Each carries out one operation, from enter() on; the table's slots. Parts may lie anywhere and
 * differ in size, also those of reduce_scatter; input and output of a rank may be the same memory
 * where its own part is: input_parts[own] and output of reduce_scatter, input and output_parts[own]
 * of all_gather. src/backend/hosts makes use of that.
 */
tddp_status tddp_shm_all_reduce(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_reduce(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_reduce_scatter(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_broadcast(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_barrier(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_all_gather(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_gather(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_scatter(tddp_shm *shm, const tddp_op *op);
tddp_status tddp_shm_all_to_all(tddp_shm *shm, const tddp_op *op);

/* Point to point, as in the table; p2p.c. */
typedef struct tddp_shm_post tddp_shm_post;
tddp_status tddp_shm_post_create(tddp_shm *shm, const tddp_op *op, void **request);
tddp_status tddp_shm_post_finish(tddp_shm *shm, void *request, int *source);
/* What p2p.c keeps of a context, made at the join, freed with it. */
struct tddp_shm_posts;
TDDP_NODISCARD tddp_status tddp_shm_posts_create(tddp_shm *shm, struct tddp_shm_posts **out);
void tddp_shm_posts_destroy(struct tddp_shm_posts *posts);
struct tddp_shm_posts *tddp_shm_posts_of(const tddp_shm *shm);

/*
 * choose.c: which algorithm serves an operation of so many bytes: its name, for TDDP_LOG=debug, and
 * to be overridden by TDDP_SHM_ALGORITHM ("all_reduce=staged,broadcast=..."). Equal on all ranks by
 * what tddp_shm_join() agreed on.
 */
const char *tddp_shm_override(const tddp_shm *shm, tddp_op_kind kind);

#endif
