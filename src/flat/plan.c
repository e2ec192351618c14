/*
 * Which parameter goes into which buffer: arithmetic alone, no group and no memory kept, so any
 * thread. The result depends on nothing but the arguments, so all ranks get the same without a
 * message. The rule is PyTorch's: a buffer is closed by the parameter that brings it to its limit,
 * so it may exceed the limit by less than that parameter. How buffers look in memory is layout.c's.
 */
#include <stdlib.h>

#include "flat/flat.h"

/* One kind of memory: parameters of one dtype on one device share buffers. */
typedef struct lane {
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index;
    size_t open; /* the buffer being filled, or NONE */
    size_t bytes;
    size_t limit; /* which of the limits holds for it */
} lane;

static const size_t NONE = TDDP_FLAT_NO_BUFFER;

size_t tddp_param_bytes(const tddp_param *param)
{
    return param->count * tddp_dtype_size(param->dtype);
}

static lane *find_lane(lane *lanes, size_t *lane_count, const tddp_param *param)
{
    for (size_t i = 0; i < *lane_count; i++) {
        if (lanes[i].dtype == param->dtype && lanes[i].device_type == param->device_type &&
            lanes[i].device_index == param->device_index) {
            return &lanes[i];
        }
    }
    lane *fresh = &lanes[(*lane_count)++];
    *fresh = (lane){param->dtype, param->device_type, param->device_index, NONE, 0, 0};
    return fresh;
}

static tddp_status check(const tddp_param *params, size_t count, const size_t *limits,
                         size_t limit_count)
{
    if (count == 0 || !params) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no parameters to put into buffers");
    }
    if (limit_count == 0 || !limits) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no limits of buffers: expected at least one");
    }
    for (size_t i = 0; i < count; i++) {
        if (tddp_dtype_size(params[i].dtype) == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter %zu: %d is no dtype", i,
                             (int)params[i].dtype);
        }
    }
    return TDDP_OK;
}

/* Buffers in the order in which they are opened, which is that of their first parameter. */
static tddp_status assign(const tddp_param *params, const int64_t *order, size_t count,
                          const size_t *limits, size_t limit_count, size_t *buffer_of,
                          size_t *buffer_count)
{
    tddp_status status = check(params, count, limits, limit_count);
    if (status != TDDP_OK) {
        return status;
    }
    lane *lanes = tddp_alloc_array(count, sizeof *lanes);
    if (!lanes) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t lane_count = 0;
    size_t buffers = 0;
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            buffer_of[i] = NONE;
            continue;
        }
        lane *into = find_lane(lanes, &lane_count, &params[i]);
        if (into->open == NONE) {
            into->open = buffers++;
            into->bytes = 0;
        }
        buffer_of[i] = into->open;
        into->bytes += tddp_param_bytes(&params[i]);
        if (into->bytes >= limits[into->limit]) {
            into->open = NONE;
            into->limit += into->limit + 1 < limit_count;
        }
    }
    free(lanes);
    *buffer_count = buffers;
    return TDDP_OK;
}

tddp_status tddp_flat_plan(const tddp_param *params, size_t count, const size_t *limits,
                           size_t limit_count, size_t *buffer_of, size_t *buffer_count)
{
    return assign(params, NULL, count, limits, limit_count, buffer_of, buffer_count);
}

tddp_status tddp_flat_plan_in_order(const tddp_param *params, const int64_t *order, size_t count,
                                    const size_t *limits, size_t limit_count, size_t *buffer_of,
                                    size_t *buffer_count)
{
    size_t *number = tddp_alloc_array(count, sizeof *number);
    if (!number) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t buffers = 0;
    tddp_status status = assign(params, order, count, limits, limit_count, buffer_of, &buffers);
    if (status == TDDP_OK) {
        for (size_t b = 0; b < buffers; b++) {
            number[b] = NONE;
        }
        /* Seen from the end, a buffer is met first at its last parameter. */
        size_t next = buffers;
        for (size_t k = count; k-- > 0;) {
            size_t b = buffer_of[order[k]];
            if (b != NONE && number[b] == NONE) {
                number[b] = --next;
            }
        }
        for (size_t i = 0; i < count; i++) {
            buffer_of[i] = buffer_of[i] == NONE ? NONE : number[buffer_of[i]];
        }
        *buffer_count = buffers;
    }
    free(number);
    return status;
}
