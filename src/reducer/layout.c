/*
 * A plan given memory. All gradients of a device lie in one zeroed piece (memory.c): bucket after
 * bucket, each gradient on a boundary of 64 bytes so that vector code never straddles a cache line.
 *
 *     | grad 7 |pad| grad 6 | grad 5 |pad||  bucket 1 ...
 *     `---------- bucket 0 --------------'
 *
 * A bucket is reduced in one piece, padding included; padding is zero on every rank and stays so.
 * Any thread; a layout does not change after it is made, only the contents do.
 */
#include <stdlib.h>

#include "reducer/reducer.h"

static size_t padded(size_t bytes)
{
    return (bytes + TDDP_REDUCER_ALIGNMENT - 1) & ~(size_t)(TDDP_REDUCER_ALIGNMENT - 1);
}

/* Complex numbers are summed and divided part by part, so their buckets go out as real numbers
 * twice as many: any backend knows those. */
static tddp_dtype real_dtype(tddp_dtype dtype)
{
    return dtype == TDDP_COMPLEX64 ? TDDP_FLOAT32 : dtype == TDDP_COMPLEX128 ? TDDP_FLOAT64 : dtype;
}

/* Sets offsets from 0 and each bucket's bytes. Sparse gradients have no place. */
static void place(const tddp_reducer_param *params, const int64_t *order, size_t count,
                  tddp_reducer_layout *layout, size_t *offsets)
{
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            continue;
        }
        tddp_reducer_bucket *bucket = &layout->buckets[layout->bucket_of[i]];
        offsets[i] = bucket->buffer.count; /* bytes within the bucket, for now */
        bucket->buffer.count += padded(tddp_reducer_param_bytes(&params[i]));
        bucket->buffer.dtype = real_dtype(params[i].dtype);
        bucket->buffer.device_type = params[i].device_type;
        bucket->buffer.device_index = params[i].device_index;
        bucket->bytes += tddp_reducer_param_bytes(&params[i]);
        bucket->params++;
    }
}

/* Lists each bucket's gradients in the order in which they lie. */
static void list(const tddp_reducer_param *params, const int64_t *order, size_t count,
                 tddp_reducer_layout *layout, const size_t *offsets)
{
    tddp_bucket_gradient *next = layout->gradient_list;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].gradients = next;
        next += layout->buckets[b].params;
        layout->buckets[b].params = 0;
    }
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            continue;
        }
        tddp_reducer_bucket *bucket = &layout->buckets[layout->bucket_of[i]];
        size_t element = tddp_dtype_size(bucket->buffer.dtype);
        bucket->gradients[bucket->params++] = (tddp_bucket_gradient){
            i, offsets[i] / element, tddp_reducer_param_bytes(&params[i]) / element, params[i].dims,
            params[i].ndim};
    }
}

static void point(size_t count, const size_t *offsets, tddp_reducer_layout *layout)
{
    for (size_t i = 0; i < count; i++) {
        size_t b = layout->bucket_of[i];
        if (b != TDDP_REDUCER_NO_BUCKET) {
            layout->gradients[i] = (char *)layout->buckets[b].buffer.data + offsets[i];
        }
    }
}

static tddp_status fill(tddp_group *group, const tddp_reducer_memory_ops *device,
                        const tddp_reducer_param *params, const int64_t *order, size_t count,
                        size_t *offsets, tddp_reducer_layout *layout)
{
    if (!offsets || !layout->gradients || !layout->buckets || !layout->gradient_list) {
        return TDDP_OUT_OF_MEMORY;
    }
    place(params, order, count, layout, offsets);
    tddp_status status = tddp_reducer_memory_make(group, device, layout->buckets,
                                                  layout->bucket_count, &layout->memory);
    if (status == TDDP_OK) {
        point(count, offsets, layout);
        list(params, order, count, layout, offsets);
    }
    return status;
}

tddp_status tddp_reducer_layout_make(tddp_group *group, const tddp_reducer_memory_ops *device,
                                     const tddp_reducer_param *params, const int64_t *order,
                                     size_t count, size_t *bucket_of, size_t bucket_count,
                                     tddp_reducer_layout *out)
{
    tddp_reducer_layout layout = {.bucket_of = bucket_of, .bucket_count = bucket_count};
    size_t *offsets = tddp_alloc_array(count, sizeof *offsets);
    layout.gradients = tddp_alloc_array(count, sizeof *layout.gradients);
    layout.buckets = tddp_alloc_array(bucket_count, sizeof *layout.buckets);
    layout.gradient_list = tddp_alloc_array(count, sizeof *layout.gradient_list);
    tddp_status status = fill(group, device, params, order, count, offsets, &layout);
    free(offsets);
    if (status != TDDP_OK) {
        tddp_reducer_layout_free(&layout);
        return status;
    }
    *out = layout;
    return TDDP_OK;
}

void tddp_reducer_layout_free(tddp_reducer_layout *layout)
{
    free(layout->bucket_of);
    free(layout->gradients);
    free(layout->buckets);
    free(layout->gradient_list);
    tddp_reducer_memory_release(layout->memory);
    *layout = (tddp_reducer_layout){0};
}
