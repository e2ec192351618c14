/*
 * A plan given memory. All gradients lie in one zeroed, counted block: bucket after bucket, each
 * gradient on a boundary of 64 bytes so that vector code never straddles a cache line.
 *
 *     | grad 7 |pad| grad 6 | grad 5 |pad||  bucket 1 ...
 *     `---------- bucket 0 --------------'
 *
 * A bucket is reduced in one piece, padding included; padding is zero on every rank and stays so.
 * The block is the group's memory, so that ranks of one host reduce it where it lies. Any thread; a
 * layout does not change after it is made, only the contents do. The block lives as long as anyone
 * holds it, and may outlive the group: the reducer, a tensor on it, a work under way.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "reducer/reducer.h"

struct tddp_reducer_memory {
    atomic_long references;
    tddp_group_memory *block;
};

static size_t padded(size_t bytes)
{
    return (bytes + TDDP_REDUCER_ALIGNMENT - 1) & ~(size_t)(TDDP_REDUCER_ALIGNMENT - 1);
}

static tddp_status memory_make(tddp_group *group, size_t bytes, tddp_reducer_memory **out)
{
    tddp_reducer_memory *memory = tddp_alloc(sizeof *memory);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    /* Sparse gradients alone take none. */
    size_t least = bytes > 0 ? bytes : TDDP_REDUCER_ALIGNMENT;
    tddp_status status = tddp_group_memory_create(group, least, &memory->block);
    if (status != TDDP_OK) {
        free(memory);
        return status;
    }
    atomic_init(&memory->references, 1);
    *out = memory;
    return TDDP_OK;
}

void tddp_reducer_memory_share(tddp_reducer_memory *memory)
{
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
}

void tddp_reducer_memory_release(tddp_reducer_memory *memory)
{
    if (memory && atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) == 1) {
        tddp_group_memory_release(memory->block);
        free(memory);
    }
}

/* Complex numbers are summed and divided part by part, so their buckets go out as real numbers
 * twice as many: any backend knows those. */
static tddp_dtype real_dtype(tddp_dtype dtype)
{
    return dtype == TDDP_COMPLEX64 ? TDDP_FLOAT32 : dtype == TDDP_COMPLEX128 ? TDDP_FLOAT64 : dtype;
}

/* Sets offsets from 0 and returns the bytes of all buckets. Sparse gradients have no place. */
static size_t place(const tddp_reducer_param *params, const int64_t *order, size_t count,
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
    size_t total = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        total += layout->buckets[b].buffer.count;
    }
    return total;
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

static void point(char *start, size_t count, const size_t *offsets, tddp_reducer_layout *layout)
{
    for (size_t b = 0; b < layout->bucket_count; b++) {
        tddp_buffer *buffer = &layout->buckets[b].buffer;
        size_t bytes = buffer->count;
        buffer->data = start;
        buffer->count = bytes / tddp_dtype_size(buffer->dtype);
        start += bytes;
    }
    for (size_t i = 0; i < count; i++) {
        size_t b = layout->bucket_of[i];
        if (b != TDDP_REDUCER_NO_BUCKET) {
            layout->gradients[i] = (char *)layout->buckets[b].buffer.data + offsets[i];
        }
    }
}

static tddp_status fill(tddp_group *group, const tddp_reducer_param *params, const int64_t *order,
                        size_t count, size_t *offsets, tddp_reducer_layout *layout)
{
    if (!offsets || !layout->gradients || !layout->buckets || !layout->gradient_list) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t bytes = place(params, order, count, layout, offsets);
    tddp_status status = memory_make(group, bytes, &layout->memory);
    if (status == TDDP_OK) {
        point(tddp_group_memory_data(layout->memory->block), count, offsets, layout);
        list(params, order, count, layout, offsets);
    }
    return status;
}

tddp_status tddp_reducer_layout_make(tddp_group *group, const tddp_reducer_param *params,
                                     const int64_t *order, size_t count, size_t *bucket_of,
                                     size_t bucket_count, tddp_reducer_layout *out)
{
    tddp_reducer_layout layout = {.bucket_of = bucket_of, .bucket_count = bucket_count};
    size_t *offsets = tddp_alloc_array(count, sizeof *offsets);
    layout.gradients = tddp_alloc_array(count, sizeof *layout.gradients);
    layout.buckets = tddp_alloc_array(bucket_count, sizeof *layout.buckets);
    layout.gradient_list = tddp_alloc_array(count, sizeof *layout.gradient_list);
    tddp_status status = fill(group, params, order, count, offsets, &layout);
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
