/*
 * Quantization to eight bits: the ranks gather all ranks' bytes, dequantize and average them.
 * Called by one thread of a reducer at a time.
 *
 *     gathered:   | rank 0's part | rank 1's part | ...
 *     a part:     | scale of each channel | zero point of each channel | elements | pad |
 *
 * Stage 0 quantizes into this rank's part of the gathered memory. Scales and zero points travel
 * with the elements, so a single operation is enough.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hooks/affine.h"
#include "hooks/hooks.h"

enum { BLOCK = 1024, PART_ALIGNMENT = 64 };

typedef struct quantize {
    size_t channel; /* elements of a channel; 0: the bucket is one channel */
    const char *name;
    tddp_hooks_states states;
} quantize;

/* The gathered memory of a bucket. */
typedef struct gathered {
    size_t channel;  /* elements of a channel; the last one may have fewer */
    size_t channels; /* at least 1 */
    size_t part;     /* bytes of a part */
    tddp_group_memory *memory;
    char *parts; /* in `memory`, one for each rank */
} gathered;

/* --- memory ---------------------------------------------------------------------------------- */

static float *scales_of(const gathered *memory, int rank)
{
    return (float *)(void *)(memory->parts + (size_t)rank * memory->part);
}

static uint8_t *zero_points_of(const gathered *memory, int rank)
{
    return (uint8_t *)(scales_of(memory, rank) + memory->channels);
}

static uint8_t *elements_of(const gathered *memory, int rank)
{
    return zero_points_of(memory, rank) + memory->channels;
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
        group, tddp_hooks_byte_count((size_t)tddp_group_world_size(group), memory->part),
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

static tddp_hooks_affine observe(const tddp_buffer *buffer, size_t start, size_t end)
{
    tddp_hooks_range range = {0};
    float scratch[BLOCK];
    for (size_t at = start; at < end; at += BLOCK) {
        size_t count = tddp_hooks_min(BLOCK, end - at);
        tddp_hooks_extend_range(tddp_hooks_floats(buffer, at, count, scratch), count, &range);
    }
    return tddp_hooks_affine_of(&range);
}

static void pack(const tddp_buffer *buffer, const gathered *memory, int rank)
{
    float scratch[BLOCK];
    uint8_t *bytes = elements_of(memory, rank);
    for (size_t c = 0; c < memory->channels; c++) {
        size_t start = c * memory->channel;
        size_t end = tddp_hooks_min(start + memory->channel, buffer->count);
        tddp_hooks_affine affine = observe(buffer, start, end);
        scales_of(memory, rank)[c] = affine.scale;
        zero_points_of(memory, rank)[c] = affine.zero;
        if (affine.scale != affine.scale) {
            memset(bytes + start, 0, end - start);
            continue;
        }
        for (size_t at = start; at < end; at += BLOCK) {
            size_t count = tddp_hooks_min(BLOCK, end - at);
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
                                    zero_points_of(memory, rank)[channel]};
        tddp_hooks_dequantize_add(elements_of(memory, rank) + start, count, affine, sum);
    }
    tddp_hooks_divide(sum, count, (float)ranks);
    tddp_hooks_store_floats(sum, buffer, start, count);
}

static void average(const tddp_buffer *buffer, const gathered *memory, int ranks)
{
    for (size_t c = 0; c < memory->channels; c++) {
        size_t start = c * memory->channel;
        size_t end = tddp_hooks_min(start + memory->channel, buffer->count);
        for (size_t at = start; at < end; at += BLOCK) {
            average_block(buffer, memory, ranks, c, at, tddp_hooks_min(BLOCK, end - at));
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

/* Zeroes the padding between the gradients, which must stay zero. */
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
    void *found = NULL;
    int ranks = tddp_group_world_size(group);
    if (stage > 0) {
        tddp_status status = tddp_hooks_find_state(&self->states, bucket, &found);
        if (status == TDDP_OK) {
            average(&bucket->buffer, found, ranks);
            if (any_nan(found, ranks)) {
                clear_padding(bucket);
            }
        }
        return status;
    }
    tddp_status status = tddp_hooks_check_host(self->name, bucket);
    if (status == TDDP_OK) {
        status = tddp_hooks_require_state(&self->states, group, bucket, make_gathered,
                                          free_gathered, self, &found);
    }
    if (status != TDDP_OK) {
        return status;
    }
    gathered *memory = found;
    int rank = tddp_group_rank(group);
    pack(&bucket->buffer, memory, rank);
    tddp_buffer output = {memory->parts, (size_t)ranks * memory->part, TDDP_UINT8, TDDP_CPU, 0,
                          NULL};
    tddp_buffer input = output;
    input.data = scales_of(memory, rank);
    input.count = memory->part;
    const tddp_op_args args = {.size = sizeof args,
                               .kind = TDDP_OP_ALL_GATHER,
                               .input = input,
                               .output = output,
                               .description = bucket->description};
    *again = 1;
    return tddp_submit(group, &args, work);
}

static void free_quantize(void *state)
{
    quantize *self = state;
    tddp_hooks_free_states(&self->states, free_gathered);
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
