/*
 * The memory of full units and of their gradients. Few units are unsharded at a time, so units
 * share blocks: one that is given back is taken again by the next that fits. If none fits, the
 * largest free one makes room for a new one. There are so never more blocks than were used at once.
 */
#include <stdlib.h>

#include "sharder/sharder.h"

static bool serves(const tddp_block *block, const tddp_group *group, const tddp_buffer *like)
{
    return !block->used && block->group == group && block->device_type == like->device_type &&
           block->device_index == like->device_index;
}

/* The smallest free one of at least this size; else NULL, and `*largest` is the largest free one.
 */
static tddp_block *find(const tddp_blocks *blocks, const tddp_group *group, const tddp_buffer *like,
                        size_t bytes, tddp_block **largest)
{
    tddp_block *best = NULL;
    *largest = NULL;
    for (tddp_block *block = blocks->first; block; block = block->next) {
        if (!serves(block, group, like)) {
            continue;
        }
        if (block->bytes >= bytes && (!best || block->bytes < best->bytes)) {
            best = block;
        }
        if (!*largest || block->bytes > (*largest)->bytes) {
            *largest = block;
        }
    }
    return best;
}

static tddp_status allocate(tddp_blocks *blocks, tddp_group *group, const tddp_buffer *like,
                            size_t bytes, tddp_block **out)
{
    tddp_block *block = tddp_alloc(sizeof *block);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_flat_buffer flat = {.buffer = *like};
    flat.buffer.dtype = TDDP_UINT8;
    flat.buffer.count = bytes;
    tddp_status status = tddp_flat_memory_make(group, &blocks->device, &flat, 1, &block->memory);
    if (status != TDDP_OK) {
        free(block);
        return status;
    }
    block->group = group;
    block->device_type = like->device_type;
    block->device_index = like->device_index;
    block->bytes = bytes;
    block->data = flat.buffer.data;
    block->next = blocks->first;
    blocks->first = block;
    blocks->bytes += bytes;
    if (blocks->bytes > blocks->peak_bytes) {
        blocks->peak_bytes = blocks->bytes;
    }
    *out = block;
    return TDDP_OK;
}

tddp_status tddp_block_take(tddp_blocks *blocks, tddp_group *group, const tddp_buffer *like,
                            size_t bytes, tddp_block **out)
{
    tddp_block *largest;
    tddp_block *block = find(blocks, group, like, bytes, &largest);
    if (!block) {
        tddp_block_drop(blocks, largest);
        tddp_status status = allocate(blocks, group, like, bytes, &block);
        if (status != TDDP_OK) {
            return status;
        }
    }
    block->used = true;
    *out = block;
    return TDDP_OK;
}

void tddp_block_give(tddp_block *block)
{
    if (block) {
        block->used = false;
    }
}

void tddp_block_drop(tddp_blocks *blocks, tddp_block *block)
{
    if (!block) {
        return;
    }
    tddp_block **at = &blocks->first;
    while (*at != block) {
        at = &(*at)->next;
    }
    *at = block->next;
    blocks->bytes -= block->bytes;
    tddp_flat_memory_release(block->memory);
    free(block);
}

void tddp_blocks_free(tddp_blocks *blocks)
{
    while (blocks->first) {
        tddp_block_drop(blocks, blocks->first);
    }
}
