/*
 * A unit: the layout of its flat buffer, and the shard that this rank holds of it.
 *
 *     | parameter 0 |pad| parameter 1        |pad| parameter 2 |   padding    |
 *     |    shard of rank 0    |    shard of rank 1    |    shard of rank 2    |
 *
 * Slices begin at multiples of 16 elements, and so do shards: vector loads don't straddle cache
 * lines, whatever the dtype.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sharder/sharder.h"

enum { ALIGNMENT = 16 }; /* elements */

static size_t padded(size_t count)
{
    return (count + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
}

tddp_buffer tddp_unit_buffer(const tddp_unit *unit, size_t shards, tddp_dtype dtype)
{
    tddp_buffer buffer = unit->shard;
    buffer.data = NULL;
    buffer.count = shards * unit->shard.count;
    buffer.dtype = dtype;
    return buffer;
}

static tddp_status check_params(const tddp_unit_opts *opts, const tddp_device_memory_ops *device)
{
    const tddp_param *first = opts->params;
    if (opts->param_count == 0 || (!opts->shard_group && !opts->replica_group)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "unit \"%s\" has no %s: expected one", opts->name,
                         opts->param_count ? "group" : "parameter");
    }
    for (size_t i = 0; i < opts->param_count; i++) {
        const tddp_param *param = &opts->params[i];
        if (param->sparse) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "parameter \"%s\" of unit \"%s\" is sparse: expected a dense one",
                             param->name, opts->name);
        }
        if (param->dtype != first->dtype || param->device_type != first->device_type ||
            param->device_index != first->device_index) {
            return tddp_fail(
                TDDP_INVALID_ARGUMENT,
                "parameter \"%s\" of unit \"%s\" is %s on %s %d, \"%s\" is %s on %s %d: expected "
                "one dtype and one device in a unit",
                param->name, opts->name, tddp_dtype_name(param->dtype),
                tddp_device_type_name(param->device_type), (int)param->device_index, first->name,
                tddp_dtype_name(first->dtype), tddp_device_type_name(first->device_type),
                (int)first->device_index);
        }
    }
    if (first->device_type == TDDP_CPU && opts->offload) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "parameter \"%s\" of unit \"%s\" is on the CPU: expected one on a device "
                         "in a unit that is to be offloaded",
                         first->name, opts->name);
    }
    if (first->device_type != TDDP_CPU && !device->allocate) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "parameter \"%s\" of unit \"%s\" is on %s: units there need ops.device",
                         first->name, opts->name, tddp_device_type_name(first->device_type));
    }
    return TDDP_OK;
}

/* The shapes of `params` are not kept. */
static size_t lay_out(const tddp_unit_opts *opts, tddp_unit *unit)
{
    size_t offset = 0;
    for (size_t i = 0; i < opts->param_count; i++) {
        unit->slices[i] =
            (tddp_flat_slice){.param = i, .offset = offset, .count = opts->params[i].count};
        offset += padded(opts->params[i].count);
    }
    return offset;
}

/* A unit that is offloaded has its shard elsewhere. */
static tddp_status make_shard(const tddp_unit_opts *opts, const tddp_device_memory_ops *device,
                              tddp_unit *unit)
{
    const size_t count = lay_out(opts, unit);
    const size_t shard = padded((count + unit->ranks - 1) / unit->ranks);
    const size_t each = unit->offloaded ? 1 : tddp_dtype_size(opts->params->dtype);
    tddp_flat_buffer flat = {.buffer = {.count = shard * each,
                                        .dtype = opts->params->dtype,
                                        .device_type = opts->params->device_type,
                                        .device_index = opts->params->device_index}};
    tddp_status status = TDDP_OK;
    if (!unit->offloaded) {
        status = tddp_flat_memory_make(unit->memory_group, device, &flat, 1, &unit->memory);
    }
    unit->shard = flat.buffer;
    return status;
}

/* Ranks that differ would read each other's parameters at other places. */
static tddp_status verify(const tddp_unit *unit, const tddp_unit_opts *opts, const tddp_wait *wait)
{
    char text[512];
    tddp_group *const groups[] = {unit->shard_group, unit->replica_group};
    tddp_status status = TDDP_OK;
    (void)snprintf(text, sizeof text,
                   "unit \"%.200s\", gathered as %s, reduced as %s, %sresharded after forward%s",
                   unit->name, tddp_dtype_name(unit->gather_dtype),
                   tddp_dtype_name(unit->reduce_dtype), unit->reshard_after_forward ? "" : "not ",
                   unit->offloaded ? ", offloaded" : "");
    for (size_t i = 0; i < 2 && status == TDDP_OK; i++) {
        if (groups[i]) {
            status = tddp_flat_verify(groups[i], unit->name, opts->params, opts->param_count, text,
                                      wait);
        }
    }
    return status;
}

/* --- opening and closing --------------------------------------------------------------------- */

static tddp_status open_unit(const tddp_unit_opts *opts, const tddp_device_memory_ops *device,
                             const tddp_wait *wait, tddp_unit *unit)
{
    unit->name = strdup(opts->name ? opts->name : "");
    unit->slices = tddp_alloc_array(opts->param_count, sizeof *unit->slices);
    if (!unit->name || !unit->slices) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory for unit \"%s\"", opts->name);
    }
    tddp_status status = verify(unit, opts, wait);
    return status ? status : make_shard(opts, device, unit);
}

tddp_status tddp_unit_open(const tddp_unit_opts *opts, const tddp_device_memory_ops *device,
                           const tddp_wait *wait, tddp_unit *out)
{
    tddp_status status = check_params(opts, device);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_group *shards = opts->shard_group ? tddp_group_retain(opts->shard_group) : NULL;
    tddp_group *replicas = opts->replica_group ? tddp_group_retain(opts->replica_group) : NULL;
    tddp_unit unit = {.shard_group = shards,
                      .replica_group = replicas,
                      .memory_group = shards ? shards : replicas,
                      .ranks = shards ? (size_t)tddp_group_world_size(shards) : 1,
                      .rank = shards ? (size_t)tddp_group_rank(shards) : 0,
                      .reshard_after_forward = opts->reshard_after_forward != 0,
                      .offloaded = opts->offload != 0,
                      .slice_count = opts->param_count,
                      .gather_dtype = opts->gather_dtype,
                      .reduce_dtype = opts->reduce_dtype};
    status = open_unit(opts, device, wait, &unit);
    if (status != TDDP_OK) {
        tddp_unit_close(&unit);
        return status;
    }
    *out = unit;
    return TDDP_OK;
}

void tddp_unit_close(tddp_unit *unit)
{
    tddp_flat_memory_release(unit->memory);
    free(unit->slices);
    free(unit->name);
    if (unit->replica_group) {
        tddp_group_release_async(unit->replica_group);
    }
    if (unit->shard_group) {
        tddp_group_release_async(unit->shard_group);
    }
}
