/* Ranks over a mailbox: their threads, and operations that are interrupted again and again. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "mailbox.h"

unsigned coll_random(unsigned *seed, unsigned limit)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % limit;
}

/* --- ranks ----------------------------------------------------------------------------------- */

typedef struct rank_thread {
    coll_rank it;
    void (*body)(coll_rank *it);
    pthread_barrier_t *all;
    pthread_t thread;
} rank_thread;

void coll_leave(coll_rank *it)
{
    mailbox_leave(it->end);
}

static void observe(void *data, const tddp_observation *seen)
{
    ((coll_rank *)data)->seen[seen->rank] = *seen;
}

static void *rank_body(void *data)
{
    rank_thread *self = data;
    coll_rank *it = &self->it;
    int names[MOST_RANKS];
    for (int rank = 0; rank < it->size; rank++) {
        names[rank] = rank;
    }
    const tddp_coll_opts opts = {.transport = &mailbox_ops,
                                 .context = it->end,
                                 .events = it->end->events,
                                 .rank = it->rank,
                                 .world_size = it->size,
                                 .names = it->seed % 2 ? names : NULL,
                                 .observer = {observe, it}};
    CHECK_OK(tddp_coll_create(&opts, &it->coll));
    CHECK_OK(tddp_coll_begin(it->coll));
    self->body(it);
    pthread_barrier_wait(self->all);
    CHECK(it->end->unfinished == 0 || !mailbox_is_whole(it->end->box));
    pthread_barrier_wait(self->all);
    tddp_coll_destroy(it->coll);
    return NULL;
}

void run_ranks(int size, unsigned seed, void (*body)(coll_rank *it), void *data)
{
    rank_thread threads[MOST_RANKS];
    pthread_barrier_t all;
    mailbox *box = mailbox_create(size, seed);
    pthread_barrier_init(&all, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++) {
        threads[rank] = (rank_thread){.body = body, .all = &all};
        threads[rank].it = (coll_rank){.rank = rank,
                                       .size = size,
                                       .mode = (coll_mode)((seed + (unsigned)rank) % COLL_MODES),
                                       .seed = seed * 31 + (unsigned)rank,
                                       .end = mailbox_end_of(box, rank),
                                       .data = data};
        CHECK_INT(pthread_create(&threads[rank].thread, NULL, rank_body, &threads[rank]), 0);
    }
    for (int rank = 0; rank < size; rank++) {
        CHECK_INT(pthread_join(threads[rank].thread, NULL), 0);
    }
    pthread_barrier_destroy(&all);
    mailbox_destroy(box);
}

/* --- operations ------------------------------------------------------------------------------ */

tddp_buffer coll_buffer(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){count > 0 ? data : NULL, count, dtype, TDDP_CPU, 0, NULL};
}

tddp_op coll_op(coll_rank *it, tddp_op_kind kind)
{
    const tddp_buffer none = coll_buffer(NULL, 0, TDDP_FLOAT32);
    return (tddp_op){.kind = kind,
                     .sequence = ++it->sequence,
                     .input = none,
                     .output = none,
                     .premul = 1,
                     .peer = TDDP_ANY_SOURCE,
                     .timeout_ms = COLL_TIMEOUT_MS};
}

tddp_op coll_message(tddp_op_kind kind, int peer, uint32_t tag, tddp_buffer buffer)
{
    return (tddp_op){.kind = kind,
                     .input = buffer,
                     .output = buffer,
                     .peer = peer,
                     .tag = tag,
                     .timeout_ms = COLL_TIMEOUT_MS};
}

/* An event must come; once a rank has gone, waits for others are to notice that themselves. */
void coll_await_event(const coll_rank *it, uint32_t seen)
{
    const bool whole = mailbox_is_whole(it->end->box);
    tddp_eventcount_wait(it->end->events, seen, 0, whole ? 1000 * TDDP_NS_PER_S : TDDP_NS_PER_MS);
}

/* A token for the next call; a blocking rank has none. */
static tddp_cancel *next_token(coll_rank *it, tddp_cancel *token)
{
    const tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
    *token = at_once;
    if (it->mode == COLL_INTERRUPTED) {
        token->deadline = tddp_now_ns() + coll_random(&it->seed, 50000);
    }
    return it->mode == COLL_BLOCKING ? NULL : token;
}

/* Runs a copy of the operation that is gone afterwards, its lists included. */
static tddp_status run_copy(coll_rank *it, const tddp_op *op, tddp_cancel *token, int awaited)
{
    const size_t size = (size_t)it->size;
    tddp_op *copy = malloc(sizeof *copy);
    tddp_buffer *parts = calloc(2 * size, sizeof *parts);
    CHECK(copy && parts);
    *copy = *op;
    copy->cancel = token;
    copy->awaited = awaited;
    if (op->input_parts) {
        memcpy(parts, op->input_parts, size * sizeof *parts);
        copy->input_parts = parts;
    }
    if (op->output_parts) {
        memcpy(parts + size, op->output_parts, size * sizeof *parts);
        copy->output_parts = parts + size;
    }
    tddp_status status = tddp_coll_run(it->coll, copy);
    memset(copy, 0xa5, sizeof *copy);
    memset(parts, 0xa5, 2 * size * sizeof *parts);
    free(copy);
    free(parts);
    return status;
}

tddp_status coll_try(coll_rank *it, const tddp_op *op)
{
    for (;;) {
        tddp_cancel token;
        tddp_cancel *cancel = next_token(it, &token);
        const int awaited = it->mode != COLL_POLLED && coll_random(&it->seed, 2);
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        const tddp_status status = run_copy(it, op, cancel, awaited);
        if (status != TDDP_CANCELED) {
            return status;
        }
        CHECK(cancel);
        coll_await_event(it, seen);
    }
}

tddp_status coll_try_times(coll_rank *it, const tddp_op *op, int calls)
{
    tddp_status status = TDDP_CANCELED;
    for (int i = 0; i < calls && status == TDDP_CANCELED; i++) {
        tddp_cancel token = TDDP_CANCEL_AT_ONCE;
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        status = run_copy(it, op, &token, 0);
        if (status == TDDP_CANCELED && i + 1 < calls) {
            coll_await_event(it, seen);
        }
    }
    return status;
}

tddp_status coll_finish(coll_rank *it, tddp_op *op, void *request, int *source)
{
    for (;;) {
        tddp_cancel token;
        op->cancel = next_token(it, &token);
        op->awaited = it->mode != COLL_POLLED && coll_random(&it->seed, 2);
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        const tddp_status status = tddp_coll_finish(it->coll, request, source);
        if (status != TDDP_CANCELED) {
            return status;
        }
        CHECK(op->cancel);
        coll_await_event(it, seen);
    }
}
