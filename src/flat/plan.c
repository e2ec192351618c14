/*
 * Assigns parameters to buffers. Pure functions, any thread: the result depends on the arguments
 * alone, so all ranks get the same one without communication. The rule is PyTorch's: the parameter
 * with which a buffer reaches its limit closes it, so a buffer may exceed its limit by less than
 * that parameter. layout.c places the buffers in memory.
 */
#include <stdlib.h>

#include "flat/flat.h"

/* The open buffer of a dtype and device. */
typedef struct accumulator {
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index;
    size_t open; /* the buffer's number, or NONE */
    size_t bytes;
    size_t limit; /* index of its limit */
} accumulator;

static const size_t NONE = TDDP_FLAT_NO_BUFFER;

size_t tddp_param_bytes(const tddp_param *param)
{
    return param->count * tddp_dtype_size(param->dtype);
}

static accumulator *find_accumulator(accumulator *accumulators, size_t *accumulator_count,
                                     const tddp_param *param)
{
    for (size_t i = 0; i < *accumulator_count; i++) {
        if (accumulators[i].dtype == param->dtype &&
            accumulators[i].device_type == param->device_type &&
            accumulators[i].device_index == param->device_index) {
            return &accumulators[i];
        }
    }
    accumulator *added = &accumulators[(*accumulator_count)++];
    *added = (accumulator){param->dtype, param->device_type, param->device_index, NONE, 0, 0};
    return added;
}

static tddp_status check(const tddp_param *params, size_t count, const size_t *limits,
                         size_t limit_count)
{
    if (count == 0 || !params) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no parameters: expected at least one");
    }
    if (limit_count == 0 || !limits) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no buffer limits: expected at least one");
    }
    for (size_t i = 0; i < count; i++) {
        if (tddp_dtype_size(params[i].dtype) == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter %zu: invalid dtype %d", i,
                             (int)params[i].dtype);
        }
    }
    return TDDP_OK;
}

/* Numbers buffers in the order in which they are opened: by their first parameter. */
static tddp_status assign(const tddp_param *params, const int64_t *order, size_t count,
                          const size_t *limits, size_t limit_count, size_t *buffer_of,
                          size_t *buffer_count)
{
    tddp_status status = check(params, count, limits, limit_count);
    if (status != TDDP_OK) {
        return status;
    }
    accumulator *accumulators = tddp_alloc_array(count, sizeof *accumulators);
    if (!accumulators) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t accumulator_count = 0;
    size_t buffers = 0;
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            buffer_of[i] = NONE;
            continue;
        }
        accumulator *into = find_accumulator(accumulators, &accumulator_count, &params[i]);
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
    free(accumulators);
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
        /* From the end, the first parameter of a buffer that the loop sees is its last one. */
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
