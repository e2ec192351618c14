/*
 * Whole units: gathered before forward and backward, and sharded again after them. While a unit is
 * used, one that comes next is gathered ahead: in forward the one that followed it in the last
 * iteration, in backward the one before it. Ranks decide alike, whenever their gradients come: it
 * follows from the calls alone, which are the same on all of them.
 *
 * Where the shard group has one rank and no dtype changes, the shard is the full unit. The shard of
 * a unit that is offloaded is copied to the device first, which its owner does on another stream:
 * the gather follows that one.
 */
#include <stdlib.h>
#include <string.h>

#include "sharder/sharder.h"

/* --- one unit -------------------------------------------------------------------------------- */

/* The shard is where it is used, and as it is used. */
static bool shard_is_input(const tddp_unit *unit)
{
    return !unit->offloaded && unit->gather_dtype == unit->shard.dtype;
}

static bool shard_is_full(const tddp_unit *unit)
{
    return unit->ranks == 1 && shard_is_input(unit);
}

/* Writes the shard in the gather dtype to `into`, and sets the stream on which that happens. */
static tddp_status write_shard(tddp_sharder *sharder, size_t number, tddp_buffer *into)
{
    const tddp_sharder_ops *ops = &sharder->ops;
    if (!sharder->units[number].offloaded) {
        return ops->cast_shard(ops->user, number, into->data, into->count);
    }
    into->stream = ops->device->stream(ops->device->user, into->device_index);
    return ops->load_shard(ops->user, number, into->data, into->count, &into->stream);
}

/* The shard in the gather dtype. */
static tddp_status gather_input(tddp_sharder *sharder, size_t number, tddp_buffer *input)
{
    tddp_unit *unit = &sharder->units[number];
    if (shard_is_input(unit)) {
        *input = unit->shard;
        return TDDP_OK;
    }
    *input = tddp_unit_buffer(unit, 1, unit->gather_dtype);
    const size_t bytes = input->count * tddp_dtype_size(input->dtype);
    tddp_status status =
        tddp_block_take(&sharder->blocks, unit->memory_group, input, bytes, &unit->gather.in);
    if (status == TDDP_OK) {
        input->data = unit->gather.in->data;
        status = write_shard(sharder, number, input);
    }
    return status;
}

static tddp_status submit_gather(tddp_sharder *sharder, size_t number)
{
    tddp_unit *unit = &sharder->units[number];
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = TDDP_OP_ALL_GATHER;
    args.output = tddp_unit_buffer(unit, unit->ranks, unit->gather_dtype);
    args.description = unit->name;
    const size_t bytes = args.output.count * tddp_dtype_size(args.output.dtype);
    tddp_status status = tddp_block_take(&sharder->blocks, unit->memory_group, &args.output, bytes,
                                         &unit->gather.out);
    if (status != TDDP_OK) {
        return status;
    }
    args.output.data = unit->gather.out->data;
    if (unit->ranks == 1) {
        return write_shard(sharder, number, &args.output);
    }
    status = gather_input(sharder, number, &args.input);
    if (status == TDDP_OK) {
        unit->gather.reads = unit->memory;
        status =
            tddp_operation_submit(sharder->ops.device, unit->shard_group, &args, &unit->gather);
    }
    return status;
}

static tddp_status follow_copies(const tddp_sharder *sharder, const tddp_unit *unit)
{
    return sharder->ops.follow_copies(sharder->ops.user, unit->shard.device_index);
}

/* Nobody waits for it any more: a copy that no operation follows may still write to its memory. */
static void leave_gather(tddp_sharder *sharder, tddp_unit *unit)
{
    if (unit->offloaded && unit->gather.out && !unit->gather.work) {
        (void)!follow_copies(sharder, unit);
    }
    tddp_operation_leave(&sharder->blocks, &unit->gather);
}

static tddp_status start_gather(tddp_sharder *sharder, size_t number)
{
    tddp_unit *unit = &sharder->units[number];
    if (unit->state != TDDP_SHARDED) {
        return TDDP_OK;
    }
    if (!shard_is_full(unit)) {
        tddp_status status = submit_gather(sharder, number);
        if (status != TDDP_OK) {
            leave_gather(sharder, unit);
            return status;
        }
    }
    unit->state = TDDP_GATHERING;
    return TDDP_OK;
}

static tddp_status await_gather(tddp_sharder *sharder, size_t number, const tddp_wait *wait)
{
    tddp_unit *unit = &sharder->units[number];
    if (unit->state == TDDP_UNSHARDED) {
        return TDDP_OK;
    }
    bool done = true;
    tddp_status status =
        tddp_operation_wait(sharder->ops.device, &unit->shard, &unit->gather, wait, &done);
    if (!done) {
        return status;
    }
    if (status == TDDP_OK && unit->offloaded && unit->ranks == 1) {
        status = follow_copies(sharder, unit);
    }
    if (status != TDDP_OK) {
        tddp_unit_reshard(sharder, number);
        return status;
    }
    tddp_block_give(unit->gather.in);
    unit->gather.in = NULL;
    unit->state = TDDP_UNSHARDED;
    sharder->ops.place(sharder->ops.user, number,
                       unit->gather.out ? unit->gather.out->data : unit->shard.data);
    return TDDP_OK;
}

static tddp_status unshard(tddp_sharder *sharder, size_t number, const tddp_wait *wait)
{
    tddp_status status = start_gather(sharder, number);
    return status ? status : await_gather(sharder, number, wait);
}

void tddp_unit_reshard(tddp_sharder *sharder, size_t number)
{
    tddp_unit *unit = &sharder->units[number];
    if (unit->state == TDDP_UNSHARDED) {
        sharder->ops.place(sharder->ops.user, number, NULL);
        tddp_operation_leave(&sharder->blocks, &unit->gather);
    } else {
        leave_gather(sharder, unit);
    }
    unit->state = TDDP_SHARDED;
    unit->kept = false;
}

int tddp_sharder_unsharded(const tddp_sharder *sharder, size_t unit)
{
    return sharder->units[unit].state == TDDP_UNSHARDED;
}

tddp_status tddp_sharder_unshard(tddp_sharder *sharder, size_t unit, const tddp_wait *wait)
{
    return unshard(sharder, unit, wait);
}

void tddp_sharder_reshard(tddp_sharder *sharder, size_t unit)
{
    tddp_unit_reshard(sharder, unit);
}

/* --- the order of units ---------------------------------------------------------------------- */

static tddp_status record(tddp_unit_order *order, size_t number)
{
    if (order->count == order->capacity) {
        const size_t capacity = order->capacity ? 2 * order->capacity : 16;
        size_t *units = realloc(order->units, capacity * sizeof *units);
        if (!units) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory for the order of %zu units",
                             capacity);
        }
        order->units = units;
        order->capacity = capacity;
    }
    order->units[order->count++] = number;
    return TDDP_OK;
}

/* A new iteration's forward. */
static void next_order(tddp_sharder *sharder)
{
    tddp_unit_order last = sharder->before;
    sharder->before = sharder->order;
    sharder->order = last;
    sharder->order.count = 0;
}

/* One at a time: units that enclose the current one are unsharded beside it, and one more is. */
static bool may_gather_ahead(const tddp_sharder *sharder, const tddp_unit *next)
{
    for (size_t u = 0; u < sharder->count; u++) {
        if (sharder->units[u].state == TDDP_GATHERING) {
            return false;
        }
    }
    return next->state == TDDP_SHARDED;
}

/* The place of the unit in the last iteration's forward is that in this one's, if the units before
 * it were the same: this is so in all but the rarest models. */
static tddp_status gather_following(tddp_sharder *sharder)
{
    const size_t at = sharder->order.count;
    const tddp_unit_order *before = &sharder->before;
    if (at == 0 || at >= before->count || before->units[at - 1] != sharder->order.units[at - 1]) {
        return TDDP_OK;
    }
    const size_t next = before->units[at];
    return may_gather_ahead(sharder, &sharder->units[next]) ? start_gather(sharder, next) : TDDP_OK;
}

/* Backward comes to the units in the reverse order of forward, but for the model itself, which it
 * comes to first. */
static tddp_status gather_preceding(tddp_sharder *sharder)
{
    const tddp_unit_order *order = &sharder->order;
    size_t at = order->count;
    while (at > 0 && sharder->units[order->units[at - 1]].passed) {
        at--;
    }
    if (at == 0) {
        return TDDP_OK;
    }
    const size_t next = order->units[at - 1];
    return may_gather_ahead(sharder, &sharder->units[next]) ? start_gather(sharder, next) : TDDP_OK;
}

/* --- forward and backward -------------------------------------------------------------------- */

/* What backward computes again is no iteration of its own. */
void tddp_sharder_begin_forward(tddp_sharder *sharder)
{
    if (!sharder->in_backward) {
        sharder->iteration++;
        next_order(sharder);
    }
}

/* What was gathered ahead, but not used, may be outdated when it is. */
void tddp_sharder_end_forward(tddp_sharder *sharder)
{
    for (size_t u = 0; u < sharder->count && !sharder->in_backward; u++) {
        if (sharder->units[u].state == TDDP_GATHERING) {
            tddp_unit_reshard(sharder, u);
        }
    }
}

tddp_status tddp_sharder_before_forward(tddp_sharder *sharder, size_t number, const tddp_wait *wait)
{
    tddp_unit *unit = &sharder->units[number];
    if (unit->kept && unit->iteration != sharder->iteration) {
        tddp_unit_reshard(sharder, number);
    }
    tddp_status status = unshard(sharder, number, wait);
    if (status != TDDP_OK) {
        return status;
    }
    unit->kept = false;
    unit->iteration = sharder->iteration;
    if (!sharder->in_backward) {
        status = record(&sharder->order, number);
        status = status ? status : gather_following(sharder);
    }
    if (status == TDDP_OK) {
        unit->forwards++;
    }
    return status;
}

void tddp_sharder_after_forward(tddp_sharder *sharder, size_t number, int backward)
{
    tddp_unit *unit = &sharder->units[number];
    if (unit->forwards > 0) {
        unit->forwards--;
    }
    if (unit->forwards > 0 || unit->in_backward) {
        return;
    }
    if (backward && (sharder->in_backward || !unit->reshard_after_forward)) {
        unit->kept = true;
    } else {
        tddp_unit_reshard(sharder, number);
    }
}

void tddp_sharder_begin_backward(tddp_sharder *sharder)
{
    sharder->in_backward = true;
}

tddp_status tddp_sharder_before_backward(tddp_sharder *sharder, size_t number,
                                         const tddp_wait *wait)
{
    tddp_unit *unit = &sharder->units[number];
    tddp_status status = unshard(sharder, number, wait);
    if (status != TDDP_OK || unit->in_backward) {
        return status;
    }
    unit->in_backward = true;
    unit->passed = true;
    unit->kept = false;
    return gather_preceding(sharder);
}

void tddp_sharder_after_backward(tddp_sharder *sharder, size_t number)
{
    tddp_unit *unit = &sharder->units[number];
    unit->in_backward = false;
    if (unit->forwards == 0) {
        tddp_unit_reshard(sharder, number);
    }
}
