/*
 * The life of a tddp_coll, and running collectives. tddp_coll_run() is called on any thread, one at
 * a time; messages.c has its own rules.
 *
 * Invariant: an operation that is interrupted stays the program's until it is resumed to its end or
 * fails; after a failure none of its transfers uses the caller's memory.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"

static tddp_status copy_names(tddp_coll *coll, const int *names)
{
    const size_t count = (size_t)coll->size;
    coll->names = names ? tddp_alloc_array(count, sizeof *names) : NULL;
    if (coll->names) {
        memcpy(coll->names, names, count * sizeof *names);
    }
    return names && !coll->names ? TDDP_OUT_OF_MEMORY : TDDP_OK;
}

tddp_status tddp_coll_create(const tddp_coll_opts *opts, tddp_coll **out)
{
    tddp_coll *coll = tddp_alloc(sizeof *coll);
    if (!coll) {
        return TDDP_OUT_OF_MEMORY;
    }
    coll->transport = opts->transport;
    coll->context = opts->context;
    coll->events = opts->events;
    coll->rank = opts->rank;
    coll->size = opts->world_size;
    coll->observer = opts->observer;
    pthread_mutex_init(&coll->mutex, NULL);
    tddp_status status = tddp_coll_make_peers(coll);
    status = status ? status : copy_names(coll, opts->names);
    status = status ? status : tddp_coll_make_program(coll);
    status = status ? status : tddp_coll_make_links(coll);
    if (status) {
        tddp_coll_destroy(coll);
        return status;
    }
    *out = coll;
    return TDDP_OK;
}

tddp_status tddp_coll_begin(tddp_coll *coll)
{
    const tddp_status status = tddp_coll_expect_notices(coll);
    return status ? status : tddp_coll_expect_headers(coll);
}

void tddp_coll_destroy(tddp_coll *coll)
{
    if (!coll) {
        return;
    }
    tddp_coll_end_program(coll);
    tddp_coll_end_messages(coll);
    tddp_coll_free_links(coll);
    tddp_coll_free_peers(coll);
    pthread_mutex_destroy(&coll->mutex);
    free(coll->program.steps);
    free(coll->scratch);
    free(coll->names);
    free(coll);
}

/* --- collectives ----------------------------------------------------------------------------- */

typedef tddp_status algorithm(tddp_coll *coll, const tddp_op *op);

static algorithm *const ALGORITHMS[TDDP_OP_COUNT] = {
    [TDDP_OP_ALL_REDUCE] = tddp_coll_all_reduce,
    [TDDP_OP_REDUCE] = tddp_coll_reduce,
    [TDDP_OP_REDUCE_SCATTER] = tddp_coll_reduce_scatter,
    [TDDP_OP_BROADCAST] = tddp_coll_broadcast,
    [TDDP_OP_BARRIER] = tddp_coll_barrier,
    [TDDP_OP_ALL_GATHER] = tddp_coll_move,
    [TDDP_OP_GATHER] = tddp_coll_move,
    [TDDP_OP_SCATTER] = tddp_coll_move,
    [TDDP_OP_ALL_TO_ALL] = tddp_coll_move,
};

static tddp_status begin(tddp_coll *coll, const tddp_op *op)
{
    algorithm *append_steps = (unsigned)op->kind < TDDP_OP_COUNT ? ALGORITHMS[op->kind] : NULL;
    if (!append_steps || op->bundled > 0) {
        return tddp_fail(TDDP_UNSUPPORTED, "%s%s over a transport", tddp_op_name(op->kind),
                         op->bundled > 0 ? " of several buffers" : "");
    }
    if (coll->out_of_step || coll->program.sequence != 0) {
        return tddp_fail(TDDP_GROUP_FAILED, "an earlier operation of this group %s",
                         coll->out_of_step ? "has failed" : "is unfinished");
    }
    tddp_coll_end_program(coll);
    tddp_coll_wait_init(&coll->program.wait, op);
    tddp_status status = append_steps(coll, op);
    if (status == TDDP_OK && coll->program.incomplete) {
        status = TDDP_OUT_OF_MEMORY;
    }
    coll->program.sequence = status ? 0 : op->sequence;
    return status;
}

tddp_status tddp_coll_run(tddp_coll *coll, const tddp_op *op)
{
    tddp_status status = TDDP_OK;
    atomic_store(&coll->sequence, op->sequence);
    if (coll->program.sequence != op->sequence) {
        status = begin(coll, op);
    }
    if (status == TDDP_OK) {
        status = tddp_coll_execute(coll, op);
        if (status == TDDP_CANCELED) {
            return status;
        }
        status = status ? tddp_coll_describe(coll, op, status) : status;
    }
    coll->out_of_step = coll->out_of_step || tddp_coll_is_fatal(status);
    status = tddp_coll_report(coll, status);
    tddp_coll_end_program(coll);
    return status;
}
