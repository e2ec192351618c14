/*
 * Gradients on their way to the shards: a reduce_scatter over the shard group, then, if the shards
 * have replicas, an all_reduce over these. Gradients leave in the order in which they came, which
 * is the same on all ranks; so that memory stays bounded, the oldest is waited for when there are
 * too many.
 */
#include <string.h>

#include "sharder/sharder.h"

tddp_status tddp_sharder_gradient(tddp_sharder *sharder, size_t number, void **data, int *fresh)
{
    tddp_unit *unit = &sharder->units[number];
    *fresh = !unit->gradient;
    if (!unit->gradient) {
        const tddp_buffer like = tddp_unit_buffer(unit, unit->ranks, unit->reduce_dtype);
        tddp_status status =
            tddp_block_take(&sharder->blocks, unit->memory_group, &like,
                            like.count * tddp_dtype_size(like.dtype), &unit->gradient);
        if (status != TDDP_OK) {
            return status;
        }
    }
    *data = unit->gradient->data;
    return TDDP_OK;
}

int tddp_sharder_has_gradient(const tddp_sharder *sharder, size_t number)
{
    return sharder->units[number].gradient != NULL;
}

/* --- the operations -------------------------------------------------------------------------- */

static tddp_buffer at_block(tddp_buffer buffer, const tddp_block *block)
{
    buffer.data = block->data;
    return buffer;
}

static tddp_buffer result_of(const tddp_unit *unit, const tddp_reduction *reduction)
{
    return at_block(tddp_unit_buffer(unit, 1, unit->reduce_dtype), reduction->operation.out);
}

static tddp_status scatter(tddp_sharder *sharder, const tddp_unit *unit, tddp_reduction *reduction)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    tddp_operation *operation = &reduction->operation;
    args.kind = TDDP_OP_REDUCE_SCATTER;
    args.reduce = TDDP_REDUCE_AVG;
    args.description = unit->name;
    const tddp_buffer full = tddp_unit_buffer(unit, unit->ranks, unit->reduce_dtype);
    const tddp_buffer part = tddp_unit_buffer(unit, 1, unit->reduce_dtype);
    tddp_status status = tddp_block_take(&sharder->blocks, unit->memory_group, &part,
                                         part.count * tddp_dtype_size(part.dtype), &operation->out);
    if (status == TDDP_OK) {
        args.input = at_block(full, operation->in);
        args.output = at_block(part, operation->out);
        status = tddp_operation_submit(sharder->ops.device, unit->shard_group, &args, operation);
    }
    return status;
}

static tddp_status average_replicas(const tddp_sharder *sharder, const tddp_unit *unit,
                                    tddp_reduction *reduction)
{
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_ALL_REDUCE;
    args.reduce = TDDP_REDUCE_AVG;
    args.description = unit->name;
    args.output = result_of(unit, reduction);
    reduction->over_replicas = true;
    return tddp_operation_submit(sharder->ops.device, unit->replica_group, &args,
                                 &reduction->operation);
}

/* Waits for the operation that runs, and submits the next one. */
static tddp_status advance(tddp_sharder *sharder, tddp_reduction *reduction, const tddp_wait *wait)
{
    tddp_unit *unit = &sharder->units[reduction->unit];
    tddp_operation *operation = &reduction->operation;
    bool done = true;
    tddp_status status =
        tddp_operation_wait(sharder->ops.device, &unit->shard, operation, wait, &done);
    if (status != TDDP_OK || !done) {
        return status;
    }
    if (operation->in != operation->out) {
        tddp_block_give(operation->in);
    }
    operation->in = NULL;
    return unit->replica_group && !reduction->over_replicas
               ? average_replicas(sharder, unit, reduction)
               : TDDP_OK;
}

/* It is over, well or not, or is left. */
static void remove_at(tddp_sharder *sharder, size_t at)
{
    tddp_reduction *reduction = &sharder->reductions[at];
    if (reduction->operation.in == reduction->operation.out) {
        reduction->operation.in = NULL;
    }
    tddp_operation_leave(&sharder->blocks, &reduction->operation);
    sharder->reduction_count--;
    memmove(reduction, reduction + 1, (sharder->reduction_count - at) * sizeof *reduction);
}

tddp_status tddp_copied_give(tddp_sharder *sharder)
{
    tddp_block *block = sharder->copied;
    if (!block) {
        return TDDP_OK;
    }
    tddp_status status = sharder->ops.follow_copies(sharder->ops.user, block->device_index);
    sharder->copied = NULL;
    tddp_block_give(block);
    return status;
}

/* The result is copied on another stream: its memory waits until the next one is, or the end. */
static void keep_copied(tddp_sharder *sharder, const tddp_unit *unit, tddp_operation *operation)
{
    if (unit->offloaded) {
        sharder->copied = operation->out;
        operation->in = operation->in == operation->out ? NULL : operation->in;
        operation->out = NULL;
    }
}

static tddp_status complete_first(tddp_sharder *sharder, const tddp_wait *wait)
{
    tddp_reduction *reduction = &sharder->reductions[0];
    tddp_unit *unit = &sharder->units[reduction->unit];
    tddp_status status;
    do {
        status = advance(sharder, reduction, wait);
    } while (status == TDDP_OK && reduction->operation.work);
    if (status != TDDP_OK && reduction->operation.work) { /* `wait` ended first */
        return status;
    }
    if (status == TDDP_OK && unit->offloaded) {
        status = tddp_copied_give(sharder);
    }
    if (status == TDDP_OK) {
        const tddp_buffer result = result_of(unit, reduction);
        status =
            sharder->ops.reduced(sharder->ops.user, reduction->unit, result.data, result.count);
        keep_copied(sharder, unit, &reduction->operation);
    }
    remove_at(sharder, 0);
    return status;
}

static tddp_status start(tddp_sharder *sharder, tddp_unit *unit, tddp_reduction *reduction)
{
    if (unit->ranks > 1) {
        return scatter(sharder, unit, reduction);
    }
    reduction->operation.out = reduction->operation.in;
    return unit->replica_group ? average_replicas(sharder, unit, reduction) : TDDP_OK;
}

tddp_status tddp_sharder_reduce(tddp_sharder *sharder, size_t number, const tddp_wait *wait)
{
    tddp_unit *unit = &sharder->units[number];
    if (!unit->gradient) {
        return TDDP_OK;
    }
    while (sharder->reduction_count >= TDDP_REDUCTIONS) {
        tddp_status status = complete_first(sharder, wait);
        if (status != TDDP_OK) {
            return status;
        }
    }
    tddp_reduction *reduction = &sharder->reductions[sharder->reduction_count++];
    *reduction = (tddp_reduction){.unit = number, .operation.in = unit->gradient};
    unit->gradient = NULL;
    tddp_status status = start(sharder, unit, reduction);
    if (status != TDDP_OK) {
        remove_at(sharder, sharder->reduction_count - 1);
    }
    return status;
}

void tddp_end_of_backward(tddp_sharder *sharder)
{
    sharder->in_backward = false;
    for (size_t u = 0; u < sharder->count; u++) {
        sharder->units[u].passed = false;
    }
}

/* The host reads gradients that are offloaded as soon as backward has ended: so a failure is one of
 * this backward. */
static tddp_status await_first(const tddp_sharder *sharder, const tddp_wait *wait)
{
    const tddp_reduction *first = &sharder->reductions[0];
    tddp_work *work = first->operation.work;
    if (!work || !sharder->units[first->unit].offloaded) {
        return TDDP_OK;
    }
    tddp_status status = tddp_work_wait(work, wait);
    return tddp_work_completed(work) ? TDDP_OK : status; /* complete_first() has its outcome */
}

tddp_status tddp_sharder_finish(tddp_sharder *sharder, const tddp_wait *wait)
{
    while (sharder->reduction_count > 0) {
        tddp_status status = await_first(sharder, wait);
        status = status ? status : complete_first(sharder, wait);
        if (status != TDDP_OK) {
            return status;
        }
    }
    tddp_end_of_backward(sharder);
    return tddp_copied_give(sharder);
}

void tddp_reductions_leave(tddp_sharder *sharder)
{
    (void)!tddp_copied_give(sharder);
    while (sharder->reduction_count > 0) {
        remove_at(sharder, 0);
    }
}
