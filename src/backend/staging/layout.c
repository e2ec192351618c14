/*
 * Where the memory of an operation lies in the block that holds its copies. This file computes
 * addresses and copies nothing. Runs on the operation's thread.
 *
 * Invariant: pieces that overlap or adjoin do so in the block. All others follow one another in the
 * order in which the operation names them, so that most lists are contiguous there. Pieces that are
 * known not to overlap are always contiguous.
 */
#include <stdint.h>
#include <stdlib.h>

#include "backend/staging/staging.h"

enum { LINE = 64 };

tddp_status tddp_staging_layout_init(tddp_staging_layout *self, size_t max_count, bool separate)
{
    *self = (tddp_staging_layout){.pieces = tddp_alloc_array(max_count, sizeof *self->pieces),
                                  .separate = separate};
    return self->pieces ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

void tddp_staging_layout_add(tddp_staging_layout *self, const tddp_buffer *buffer, bool in,
                             bool out)
{
    char *data = buffer->data;
    size_t bytes = buffer->count * tddp_dtype_size(buffer->dtype);
    if (bytes == 0) {
        return;
    }
    tddp_staging_piece *last = self->count > 0 ? &self->pieces[self->count - 1] : NULL;
    if (last && last->in == in && last->out == out && last->stream == buffer->stream &&
        last->data + last->bytes == data) {
        last->bytes += bytes;
        return;
    }
    self->pieces[self->count++] = (tddp_staging_piece){
        .data = data, .bytes = bytes, .stream = buffer->stream, .in = in, .out = out};
}

static int by_address(const void *a, const void *b)
{
    uintptr_t one = (uintptr_t)(*(tddp_staging_piece *const *)a)->data;
    uintptr_t other = (uintptr_t)(*(tddp_staging_piece *const *)b)->data;
    return (one > other) - (one < other);
}

/* Joins pieces that overlap or adjoin, unless each has an extent of its own. */
static void join(tddp_staging_layout *self, tddp_staging_piece **order)
{
    tddp_staging_extent *last = NULL;
    for (size_t i = 0; i < self->count; i++) {
        char *end = order[i]->data + order[i]->bytes;
        if (!last || self->separate || (uintptr_t)order[i]->data > (uintptr_t)last->end) {
            last = &self->extents[self->extent_count++];
            *last = (tddp_staging_extent){.start = order[i]->data, .end = end};
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

/* What is copied in, and what is only copied out, begin at a cache line each. */
static void place(tddp_staging_layout *self, size_t element)
{
    for (size_t i = 0; i < self->count; i++) {
        tddp_staging_piece *piece = &self->pieces[i];
        tddp_staging_extent *extent = &self->extents[piece->extent];
        if (!extent->placed) {
            bool changes = i > 0 && piece->in != self->pieces[i - 1].in;
            extent->at = rounded_up(self->bytes, changes ? LINE : element);
            extent->placed = true;
            self->bytes = extent->at + (size_t)(extent->end - extent->start);
        }
        piece->at = extent->at + (size_t)(piece->data - extent->start);
    }
}

tddp_status tddp_staging_layout_compute(tddp_staging_layout *self, size_t element)
{
    if (self->count == 0) {
        return TDDP_OK;
    }
    tddp_staging_piece **order = tddp_alloc_array(self->count, sizeof *order);
    self->extents = order ? tddp_alloc_array(self->count, sizeof *self->extents) : NULL;
    if (!self->extents) {
        free(order);
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < self->count; i++) {
        order[i] = &self->pieces[i];
    }
    qsort(order, self->count, sizeof *order, by_address);
    join(self, order);
    place(self, element);
    free(order);
    return TDDP_OK;
}

size_t tddp_staging_layout_find(const tddp_staging_layout *self, const void *data)
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
    const tddp_staging_extent *extent = &self->extents[low];
    return extent->at + (size_t)((const char *)data - extent->start);
}

void tddp_staging_layout_free(tddp_staging_layout *self)
{
    free(self->pieces);
    free(self->extents);
    *self = (tddp_staging_layout){0};
}
