/*
 * A model's units. One thread at a time.
 */
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "sharder/sharder.h"

static tddp_status read_ops(const tddp_sharder_ops *ops, tddp_sharder_ops *out)
{
    tddp_status status =
        tddp_opts_read("sizeof(tddp_sharder_ops)", ops, TDDP_OPTS_UNTIL(tddp_sharder_ops, device),
                       out, sizeof *out);
    if (status == TDDP_OK && (!out->place || !out->cast_shard || !out->reduced ||
                              !out->load_shard != !out->follow_copies)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "ops lacks a callback: expected all of them");
    }
    return status;
}

tddp_status tddp_sharder_create(const tddp_sharder_ops *ops, tddp_sharder **out)
{
    tddp_sharder_ops all = {0};
    tddp_status status = read_ops(ops, &all);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_sharder *sharder = tddp_alloc(sizeof *sharder);
    if (!sharder) {
        return TDDP_OUT_OF_MEMORY;
    }
    *sharder = (tddp_sharder){.ops = all};
    if (all.device) {
        sharder->blocks.device = *all.device;
    }
    sharder->ops.device = &sharder->blocks.device;
    *out = sharder;
    return TDDP_OK;
}

void tddp_sharder_free(tddp_sharder *sharder)
{
    if (!sharder) {
        return;
    }
    tddp_reductions_leave(sharder);
    for (size_t u = 0; u < sharder->count; u++) {
        tddp_operation_leave(&sharder->blocks, &sharder->units[u].gather);
    }
    tddp_blocks_free(&sharder->blocks);
    for (size_t u = 0; u < sharder->count; u++) {
        tddp_unit_close(&sharder->units[u]);
    }
    free(sharder->units);
    free(sharder->order.units);
    free(sharder->before.units);
    free(sharder);
}

static tddp_status make_room(tddp_sharder *sharder, size_t more)
{
    if (sharder->count + more <= sharder->capacity) {
        return TDDP_OK;
    }
    const size_t capacity = 2 * sharder->capacity + more;
    tddp_unit *units = realloc(sharder->units, capacity * sizeof *units);
    if (!units) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory for %zu units", capacity);
    }
    sharder->units = units;
    sharder->capacity = capacity;
    return TDDP_OK;
}

tddp_status tddp_sharder_add(tddp_sharder *sharder, const tddp_unit_opts *opts,
                             const tddp_wait *wait)
{
    tddp_unit_opts all = TDDP_UNIT_OPTS_INIT;
    tddp_status status =
        tddp_opts_read("TDDP_UNIT_OPTS_INIT", opts,
                       TDDP_OPTS_UNTIL(tddp_unit_opts, reshard_after_forward), &all, sizeof all);
    if (status != TDDP_OK) {
        return status;
    }
    if (all.offload && !sharder->ops.load_shard) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unit \"%s\" is to be offloaded: that needs ops.load_shard", all.name);
    }
    status = make_room(sharder, 1);
    if (status != TDDP_OK) {
        return status;
    }
    status = tddp_unit_open(&all, &sharder->blocks.device, wait, &sharder->units[sharder->count]);
    if (status == TDDP_OK) {
        sharder->count++;
    }
    return status;
}

static bool at_rest(const tddp_sharder *sharder)
{
    bool rests = sharder->reduction_count == 0 && !sharder->in_backward;
    for (size_t u = 0; u < sharder->count && rests; u++) {
        const tddp_unit *unit = &sharder->units[u];
        rests = unit->state == TDDP_SHARDED && unit->forwards == 0 && !unit->gradient;
    }
    return rests;
}

tddp_status tddp_sharder_merge(tddp_sharder *into, tddp_sharder *from)
{
    if (into == from) {
        return TDDP_OK;
    }
    if (!at_rest(into) || !at_rest(from)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "units of a model are added while it runs: expected before its forward");
    }
    tddp_status status = make_room(into, from->count);
    if (status != TDDP_OK) {
        return status;
    }
    memcpy(into->units + into->count, from->units, from->count * sizeof *from->units);
    into->count += from->count;
    into->order.count = into->before.count = 0;
    from->count = from->order.count = from->before.count = 0;
    return TDDP_OK;
}

void tddp_sharder_set_reshard(tddp_sharder *sharder, size_t unit, int after_forward)
{
    sharder->units[unit].reshard_after_forward = after_forward != 0;
}

void tddp_sharder_abandon(tddp_sharder *sharder)
{
    tddp_reductions_leave(sharder);
    for (size_t u = 0; u < sharder->count; u++) {
        tddp_unit *unit = &sharder->units[u];
        tddp_block_give(unit->gradient);
        unit->gradient = NULL;
        unit->forwards = 0;
        unit->in_backward = false;
        tddp_unit_reshard(sharder, u);
    }
    tddp_end_of_backward(sharder);
}

/* --- queries --------------------------------------------------------------------------------- */

const tddp_flat_slice *tddp_sharder_slices(const tddp_sharder *sharder, size_t unit, size_t *count)
{
    *count = sharder->units[unit].slice_count;
    return sharder->units[unit].slices;
}

tddp_buffer tddp_sharder_shard(const tddp_sharder *sharder, size_t unit, size_t *offset,
                               tddp_flat_memory **memory)
{
    const tddp_unit *of = &sharder->units[unit];
    *offset = of->rank * of->shard.count;
    if (memory) {
        *memory = of->memory ? tddp_flat_memory_retain(of->memory) : NULL;
    }
    return of->shard;
}

tddp_sharder_bytes tddp_sharder_memory(const tddp_sharder *sharder)
{
    tddp_sharder_bytes bytes = {.unsharded = sharder->blocks.bytes,
                                .peak_unsharded = sharder->blocks.peak_bytes};
    for (size_t u = 0; u < sharder->count; u++) {
        const tddp_buffer *shard = &sharder->units[u].shard;
        bytes.shards += shard->count * tddp_dtype_size(shard->dtype);
    }
    return bytes;
}
