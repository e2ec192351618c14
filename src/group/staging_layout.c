/*
 * The layout of an operation's copies in their one block: the offset of each buffer. It computes
 * addresses only and copies nothing. On the thread that executes the operation.
 *
 * Invariant: buffers that overlap or are contiguous in memory are so in the block. All others
 * follow one another in the operation's order, so that most lists are contiguous there.
 */
#include <stdint.h>
#include <stdlib.h>

#include "group/staging.h"

enum { CACHE_LINE = 64 };

tddp_status tddp_group_layout_init(tddp_group_layout *self, size_t most)
{
    *self = (tddp_group_layout){.pieces = tddp_alloc_array(most, sizeof *self->pieces)};
    return self->pieces ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

void tddp_group_layout_add(tddp_group_layout *self, const tddp_buffer *buffer, bool in, bool out)
{
    char *data = buffer->data;
    size_t bytes = buffer->count * tddp_dtype_size(buffer->dtype);
    if (bytes == 0) {
        return;
    }
    tddp_group_piece *last = self->count > 0 ? &self->pieces[self->count - 1] : NULL;
    if (last && last->in == in && last->out == out && last->stream == buffer->stream &&
        last->data + last->bytes == data) {
        last->bytes += bytes;
        return;
    }
    self->pieces[self->count++] = (tddp_group_piece){
        .data = data, .bytes = bytes, .stream = buffer->stream, .in = in, .out = out};
}

static int by_address(const void *a, const void *b)
{
    uintptr_t one = (uintptr_t)(*(tddp_group_piece *const *)a)->data;
    uintptr_t other = (uintptr_t)(*(tddp_group_piece *const *)b)->data;
    return (one > other) - (one < other);
}

/* Merges pieces that overlap or are contiguous into extents. */
static void merge(tddp_group_layout *self, tddp_group_piece **order)
{
    tddp_group_extent *last = NULL;
    for (size_t i = 0; i < self->count; i++) {
        char *end = order[i]->data + order[i]->bytes;
        if (!last || (uintptr_t)order[i]->data > (uintptr_t)last->end) {
            last = &self->extents[self->extent_count++];
            *last = (tddp_group_extent){.start = order[i]->data, .end = end};
        } else if ((uintptr_t)end > (uintptr_t)last->end) {
            last->end = end;
        }
        order[i]->extent = (size_t)(last - self->extents);
    }
}

static size_t rounded_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Assigns the extents' offsets. Inputs and outputs each start at a cache line. */
static void assign_offsets(tddp_group_layout *self, size_t each)
{
    for (size_t i = 0; i < self->count; i++) {
        tddp_group_piece *piece = &self->pieces[i];
        tddp_group_extent *extent = &self->extents[piece->extent];
        if (!extent->assigned) {
            bool changes = i > 0 && piece->in != self->pieces[i - 1].in;
            extent->at = rounded_up(self->bytes, changes ? CACHE_LINE : each);
            extent->assigned = true;
            self->bytes = extent->at + (size_t)(extent->end - extent->start);
        }
        piece->at = extent->at + (size_t)(piece->data - extent->start);
    }
}

tddp_status tddp_group_layout_assign(tddp_group_layout *self, size_t each)
{
    if (self->count == 0) {
        return TDDP_OK;
    }
    tddp_group_piece **order = tddp_alloc_array(self->count, sizeof *order);
    self->extents = order ? tddp_alloc_array(self->count, sizeof *self->extents) : NULL;
    if (!self->extents) {
        free(order);
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < self->count; i++) {
        order[i] = &self->pieces[i];
    }
    qsort(order, self->count, sizeof *order, by_address);
    merge(self, order);
    assign_offsets(self, each);
    free(order);
    return TDDP_OK;
}

size_t tddp_group_layout_offset(const tddp_group_layout *self, const void *data)
{
    size_t low = 0;
    size_t high = self->extent_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)self->extents[middle].start <= (uintptr_t)data) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const tddp_group_extent *extent = &self->extents[low];
    return extent->at + (size_t)((const char *)data - extent->start);
}

void tddp_group_layout_free(tddp_group_layout *self)
{
    free(self->pieces);
    free(self->extents);
    *self = (tddp_group_layout){0};
}
