/*
 * Which parameter goes into which bucket: arithmetic alone, no group and no memory kept, so any
 * thread. The result depends on nothing but the arguments, which is what keeps the ranks in step
 * without a word between them. The rule is PyTorch's: a bucket is closed by the parameter that
 * brings it to its limit, so it may exceed the limit by less than that parameter.
 * What the buckets look like in memory is layout.c's part.
 */
#include <stdlib.h>

#include "reducer/reducer.h"

/* One kind of memory: gradients of one dtype on one device share buckets. */
typedef struct lane {
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index;
    size_t open; /* the bucket being filled, or NONE */
    size_t bytes;
    size_t limit; /* which of the limits holds for it */
} lane;

static const size_t NONE = TDDP_REDUCER_NO_BUCKET;

size_t tddp_reducer_param_bytes(const tddp_reducer_param *param)
{
    return param->count * tddp_dtype_size(param->dtype);
}

static lane *find_lane(lane *lanes, size_t *lane_count, const tddp_reducer_param *param)
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

static tddp_status check(const tddp_reducer_param *params, size_t count, const size_t *limits,
                         size_t limit_count)
{
    if (count == 0 || !params) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no parameters to put into buckets");
    }
    if (limit_count == 0 || !limits) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no bucket limits: expected at least one");
    }
    for (size_t i = 0; i < count; i++) {
        if (tddp_dtype_size(params[i].dtype) == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter %zu: %d is no dtype", i,
                             (int)params[i].dtype);
        }
    }
    return TDDP_OK;
}

/* Buckets in the order in which they are opened, which is that of their first parameter. */
static tddp_status assign(const tddp_reducer_param *params, const int64_t *order, size_t count,
                          const size_t *limits, size_t limit_count, size_t *bucket_of,
                          size_t *bucket_count)
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
    size_t buckets = 0;
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            bucket_of[i] = NONE;
            continue;
        }
        lane *into = find_lane(lanes, &lane_count, &params[i]);
        if (into->open == NONE) {
            into->open = buckets++;
            into->bytes = 0;
        }
        bucket_of[i] = into->open;
        into->bytes += tddp_reducer_param_bytes(&params[i]);
        if (into->bytes >= limits[into->limit]) {
            into->open = NONE;
            into->limit += into->limit + 1 < limit_count;
        }
    }
    free(lanes);
    *bucket_count = buckets;
    return TDDP_OK;
}

tddp_status tddp_reducer_plan(const tddp_reducer_param *params, size_t count, const size_t *limits,
                              size_t limit_count, size_t *bucket_of, size_t *bucket_count)
{
    return assign(params, NULL, count, limits, limit_count, bucket_of, bucket_count);
}

tddp_status tddp_reducer_plan_in_order(const tddp_reducer_param *params, const int64_t *order,
                                       size_t count, const size_t *limits, size_t limit_count,
                                       size_t *bucket_of, size_t *bucket_count)
{
    size_t *number = tddp_alloc_array(count, sizeof *number);
    if (!number) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t buckets = 0;
    tddp_status status = assign(params, order, count, limits, limit_count, bucket_of, &buckets);
    if (status == TDDP_OK) {
        for (size_t b = 0; b < buckets; b++) {
            number[b] = NONE;
        }
        /* Seen from the end, a bucket is met first at its last parameter. */
        size_t next = buckets;
        for (size_t k = count; k-- > 0;) {
            size_t b = bucket_of[order[k]];
            if (b != NONE && number[b] == NONE) {
                number[b] = --next;
            }
        }
        for (size_t i = 0; i < count; i++) {
            bucket_of[i] = bucket_of[i] == NONE ? NONE : number[bucket_of[i]];
        }
        *bucket_count = buckets;
    }
    free(number);
    return status;
}
