/*
 * Gradients sent as bytes: each rank gathers all ranks' bytes and averages what they stand for. One
 * reducer's threads, one at a time.
 *
 *     gathered:   | rank 0's part | rank 1's part | ...
 *     a part:     | scale of each channel | zero point of each channel | elements | pad |
 *
 * A rank quantizes into its own part of the gathered memory at stage 0, and nothing is needed of
 * the others for that: one operation carries everything.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hooks/affine.h"
#include "hooks/hooks.h"

enum { BLOCK = 1024, PART_ALIGNMENT = 64 };

typedef struct quantize {
    size_t channel; /* elements; 0: all of the bucket */
    const char *name;
    tddp_hooks_table table;
} quantize;

/* Of one bucket. */
typedef struct gathered {
    size_t channel;  /* elements; the last one may have fewer */
    size_t channels; /* at least 1 */
    size_t part;     /* bytes */
    tddp_group_memory *memory;
    char *parts; /* in it, one for each rank */
} gathered;

/* --- memory ---------------------------------------------------------------------------------- */

static float *scales_of(const gathered *memory, int rank)
{
    return (float *)(void *)(memory->parts + (size_t)rank * memory->part);
}

static uint8_t *zeros_of(const gathered *memory, int rank)
{
    return (uint8_t *)(scales_of(memory, rank) + memory->channels);
}

static uint8_t *bytes_of(const gathered *memory, int rank)
{
    return zeros_of(memory, rank) + memory->channels;
}

static void free_gathered(void *state)
{
    gathered *memory = state;
    tddp_group_memory_release(memory->memory);
    free(memory);
}

static tddp_status make_gathered(void *state, tddp_group *group, const tddp_bucket *bucket,
                                 void **out)
{
    const quantize *self = state;
    size_t count = bucket->buffer.count;
    gathered *memory = tddp_alloc(sizeof *memory);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    memory->channel = self->channel > 0 && self->channel < count ? self->channel : count;
    memory->channels = count > 0 ? (count - 1) / memory->channel + 1 : 1;
    size_t bytes = memory->channels * (sizeof(float) + 1) + count;
    memory->part = (bytes + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
    tddp_status status = tddp_group_memory_create(
        group, tddp_hooks_room((size_t)tddp_group_world_size(group), memory->part),
        &memory->memory);
    if (status != TDDP_OK) {
        free_gathered(memory);
        return status;
    }
    memory->parts = tddp_group_memory_data(memory->memory);
    *out = memory;
    return TDDP_OK;
}

/* --- numbers --------------------------------------------------------------------------------- */

static size_t shorter(size_t a, size_t b)
{
    return a < b ? a : b;
}

static tddp_hooks_affine observe(const tddp_buffer *buffer, size_t start, size_t end)
{
    tddp_hooks_range range = {0};
    float scratch[BLOCK];
    for (size_t at = start; at < end; at += BLOCK) {
        size_t count = shorter(BLOCK, end - at);
        tddp_hooks_range_of(tddp_hooks_floats(buffer, at, count, scratch), count, &range);
    }
    return tddp_hooks_affine_of(&range);
}

static void pack(const tddp_buffer *buffer, const gathered *memory, int rank)
{
    float scratch[BLOCK];
    uint8_t *bytes = bytes_of(memory, rank);
    for (size_t c = 0; c < memory->channels; c++) {
        size_t start = c * memory->channel;
        size_t end = shorter(start + memory->channel, buffer->count);
        tddp_hooks_affine affine = observe(buffer, start, end);
        scales_of(memory, rank)[c] = affine.scale;
        zeros_of(memory, rank)[c] = affine.zero;
        if (affine.scale != affine.scale) {
            memset(bytes + start, 0, end - start);
            continue;
        }
        for (size_t at = start; at < end; at += BLOCK) {
            size_t count = shorter(BLOCK, end - at);
            tddp_hooks_quantize(tddp_hooks_floats(buffer, at, count, scratch), count, affine,
                                bytes + at);
        }
    }
}

static void average_block(const tddp_buffer *buffer, const gathered *memory, int ranks,
                          size_t channel, size_t start, size_t count)
{
    float sum[BLOCK] = {0};
    for (int rank = 0; rank < ranks; rank++) {
        tddp_hooks_affine affine = {scales_of(memory, rank)[channel],
                                    zeros_of(memory, rank)[channel]};
        tddp_hooks_dequantize_add(bytes_of(memory, rank) + start, count, affine, sum);
    }
    tddp_hooks_divide(sum, count, (float)ranks);
    tddp_hooks_store_floats(sum, buffer, start, count);
}

static void average(const tddp_buffer *buffer, const gathered *memory, int ranks)
{
    for (size_t c = 0; c < memory->channels; c++) {
        size_t start = c * memory->channel;
        size_t end = shorter(start + memory->channel, buffer->count);
        for (size_t at = start; at < end; at += BLOCK) {
            average_block(buffer, memory, ranks, c, at, shorter(BLOCK, end - at));
        }
    }
}

static bool any_nan(const gathered *memory, int ranks)
{
    bool found = false;
    for (int rank = 0; rank < ranks; rank++) {
        const float *scales = scales_of(memory, rank);
        for (size_t c = 0; c < memory->channels; c++) {
            found = found || scales[c] != scales[c];
        }
    }
    return found;
}

/* What lies between the gradients stays zero: nobody else would ever make it so again. */
static void clear_padding(const tddp_bucket *bucket)
{
    size_t size = tddp_dtype_size(bucket->buffer.dtype);
    size_t end = 0;
    for (size_t i = 0; i <= bucket->gradient_count; i++) {
        bool last = i == bucket->gradient_count;
        size_t next = last ? bucket->buffer.count : bucket->gradients[i].offset;
        if (next > end) {
            memset(tddp_hooks_at(&bucket->buffer, end), 0, (next - end) * size);
        }
        end = last ? next : next + bucket->gradients[i].count;
    }
}

/* --- the hook -------------------------------------------------------------------------------- */

static tddp_status run(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again)
{
    quantize *self = state;
    void *entered = NULL;
    int ranks = tddp_group_world_size(group);
    if (stage > 0) {
        tddp_status status = tddp_hooks_entered(&self->table, bucket, &entered);
        if (status == TDDP_OK) {
            average(&bucket->buffer, entered, ranks);
            if (any_nan(entered, ranks)) {
                clear_padding(bucket);
            }
        }
        return status;
    }
    tddp_status status = tddp_hooks_check_host(self->name, bucket);
    if (status == TDDP_OK) {
        status = tddp_hooks_enter(&self->table, group, bucket, make_gathered, free_gathered, self,
                                  &entered);
    }
    if (status != TDDP_OK) {
        return status;
    }
    gathered *memory = entered;
    int rank = tddp_group_rank(group);
    pack(&bucket->buffer, memory, rank);
    tddp_buffer all = {memory->parts, (size_t)ranks * memory->part, TDDP_UINT8, TDDP_CPU, 0, NULL};
    tddp_buffer own = all;
    own.data = scales_of(memory, rank);
    own.count = memory->part;
    const tddp_op_args args = {.size = sizeof args,
                               .kind = TDDP_OP_ALL_GATHER,
                               .input = own,
                               .output = all,
                               .description = bucket->description};
    *again = 1;
    return tddp_submit(group, &args, work);
}

static void free_quantize(void *state)
{
    quantize *self = state;
    tddp_hooks_clear(&self->table, free_gathered);
    free(self);
}

tddp_status tddp_hook_quantize(int per_channel, size_t bucket_size, tddp_comm_hook **out)
{
    if (per_channel && bucket_size == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "quantize in channels of 0 elements: expected 1 or "
                                                "more, PyTorch's are of 512");
    }
    quantize *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->channel = per_channel ? bucket_size : 0;
    self->name = per_channel ? "quantize_per_channel" : "quantize_per_tensor";
    char settings[64];
    (void)snprintf(settings, sizeof settings, "channels of %zu elements", bucket_size);
    tddp_comm_hook_ops ops = {
        sizeof ops, self->name, 0, run, free_quantize, per_channel ? settings : NULL, 0};
    return tddp_hooks_make(&ops, self, out);
}
