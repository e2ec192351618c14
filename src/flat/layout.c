/*
 * Places the buffers of a plan in memory. All buffers of a device are in one zeroed allocation
 * (memory.c), one after the other, with each slice aligned to 64 bytes, so that vector loads don't
 * straddle cache lines.
 *
 *     | param 7 |pad| param 6 | param 5 |pad||  buffer 1 ...
 *     `------------ buffer 0 ---------------'
 *
 * An operation on a buffer includes the padding, which is zero on every rank and stays zero. Any
 * thread; a layout is immutable, except for the contents of its memory.
 */
#include <stdlib.h>

#include "flat/flat.h"

static size_t padded(size_t bytes)
{
    return (bytes + TDDP_FLAT_ALIGNMENT - 1) & ~(size_t)(TDDP_FLAT_ALIGNMENT - 1);
}

/* A buffer of complex numbers is one of real numbers, two for each: sums and divisions are
 * elementwise, and every backend supports real dtypes. */
static tddp_dtype real_dtype(tddp_dtype dtype)
{
    return dtype == TDDP_COMPLEX64 ? TDDP_FLOAT32 : dtype == TDDP_COMPLEX128 ? TDDP_FLOAT64 : dtype;
}

/* Sets the offsets, in bytes, and each buffer's bytes. Sparse parameters have no slice. */
static void assign_offsets(const tddp_param *params, const int64_t *order, size_t count,
                           tddp_flat_layout *layout, size_t *offsets)
{
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            continue;
        }
        tddp_flat_buffer *into = &layout->buffers[layout->buffer_of[i]];
        offsets[i] = into->buffer.count; /* the buffer's bytes until tddp_flat_memory_make() */
        into->buffer.count += padded(tddp_param_bytes(&params[i]));
        into->buffer.dtype = real_dtype(params[i].dtype);
        into->buffer.device_type = params[i].device_type;
        into->buffer.device_index = params[i].device_index;
        into->bytes += tddp_param_bytes(&params[i]);
        into->slice_count++;
    }
}

/* Makes each buffer's slices, by increasing offset. */
static void make_slices(const tddp_param *params, const int64_t *order, size_t count,
                        tddp_flat_layout *layout, const size_t *offsets)
{
    tddp_flat_slice *next = layout->slices;
    for (size_t b = 0; b < layout->buffer_count; b++) {
        layout->buffers[b].slices = next;
        next += layout->buffers[b].slice_count;
        layout->buffers[b].slice_count = 0;
    }
    for (size_t k = 0; k < count; k++) {
        size_t i = order ? (size_t)order[k] : k;
        if (params[i].sparse) {
            continue;
        }
        tddp_flat_buffer *into = &layout->buffers[layout->buffer_of[i]];
        size_t element = tddp_dtype_size(into->buffer.dtype);
        into->slices[into->slice_count++] =
            (tddp_flat_slice){i, offsets[i] / element, tddp_param_bytes(&params[i]) / element,
                              params[i].dims, params[i].ndim};
    }
}

static void set_addresses(size_t count, const size_t *offsets, tddp_flat_layout *layout)
{
    for (size_t i = 0; i < count; i++) {
        size_t b = layout->buffer_of[i];
        if (b != TDDP_FLAT_NO_BUFFER) {
            layout->addresses[i] = (char *)layout->buffers[b].buffer.data + offsets[i];
        }
    }
}

static tddp_status fill(tddp_group *group, const tddp_device_memory_ops *device,
                        const tddp_param *params, const int64_t *order, size_t count,
                        size_t *offsets, tddp_flat_layout *layout)
{
    if (!offsets || !layout->addresses || !layout->buffers || !layout->slices) {
        return TDDP_OUT_OF_MEMORY;
    }
    assign_offsets(params, order, count, layout, offsets);
    tddp_status status = tddp_flat_memory_make(group, device, layout->buffers, layout->buffer_count,
                                               &layout->memory);
    if (status == TDDP_OK) {
        set_addresses(count, offsets, layout);
        make_slices(params, order, count, layout, offsets);
    }
    return status;
}

tddp_status tddp_flat_layout_make(tddp_group *group, const tddp_device_memory_ops *device,
                                  const tddp_param *params, const int64_t *order, size_t count,
                                  size_t *buffer_of, size_t buffer_count, tddp_flat_layout *out)
{
    tddp_flat_layout layout = {.buffer_of = buffer_of, .buffer_count = buffer_count};
    size_t *offsets = tddp_alloc_array(count, sizeof *offsets);
    layout.addresses = tddp_alloc_array(count, sizeof *layout.addresses);
    layout.buffers = tddp_alloc_array(buffer_count, sizeof *layout.buffers);
    layout.slices = tddp_alloc_array(count, sizeof *layout.slices);
    tddp_status status = fill(group, device, params, order, count, offsets, &layout);
    free(offsets);
    if (status != TDDP_OK) {
        tddp_flat_layout_free(&layout);
        return status;
    }
    *out = layout;
    return TDDP_OK;
}

void tddp_flat_layout_free(tddp_flat_layout *layout)
{
    free(layout->buffer_of);
    free(layout->addresses);
    free(layout->buffers);
    free(layout->slices);
    tddp_flat_memory_release(layout->memory);
    *layout = (tddp_flat_layout){0};
}
