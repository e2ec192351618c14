/*
 * Waits for an operation, or leaves it: the memory of one that still runs lives until it is done.
 */
#include <stdlib.h>

#include "sharder/sharder.h"

tddp_status tddp_operation_submit(const tddp_device_memory_ops *device, tddp_group *group,
                                  tddp_op_args *args, tddp_operation *operation)
{
    if (args->output.device_type != TDDP_CPU) {
        void *stream = args->input.stream;
        stream = stream ? stream : device->stream(device->user, args->output.device_index);
        args->input.stream = stream;
        args->output.stream = stream;
    }
    return tddp_submit(group, args, &operation->work);
}

static tddp_status wait_for(const tddp_device_memory_ops *device, const tddp_buffer *like,
                            tddp_work *work, const tddp_wait *wait, bool *done)
{
    tddp_status status;
    if (like->device_type != TDDP_CPU) {
        status = tddp_work_order(work, device->stream(device->user, like->device_index), wait);
    } else {
        status = tddp_work_wait(work, wait);
    }
    /* It may have completed after the wait failed: then its own status counts. */
    const bool completed = tddp_work_completed(work);
    *done = status == TDDP_OK || completed;
    return completed ? tddp_work_status(work) : status;
}

tddp_status tddp_operation_wait(const tddp_device_memory_ops *device, const tddp_buffer *like,
                                tddp_operation *operation, const tddp_wait *wait, bool *done)
{
    *done = true;
    if (!operation->work) {
        return TDDP_OK;
    }
    tddp_status status = wait_for(device, like, operation->work, wait, done);
    if (*done) {
        tddp_work_release(operation->work);
        operation->work = NULL;
    }
    return status;
}

/* What an operation that was left still uses. */
typedef struct kept_memory {
    tddp_flat_memory *memories[3];
} kept_memory;

static void release_memory(void *data)
{
    kept_memory *kept = data;
    for (size_t i = 0; i < sizeof kept->memories / sizeof *kept->memories; i++) {
        tddp_flat_memory_release(kept->memories[i]);
    }
    free(kept);
}

static tddp_flat_memory *take_memory(tddp_blocks *blocks, tddp_block *block)
{
    tddp_flat_memory *memory = block ? tddp_flat_memory_retain(block->memory) : NULL;
    tddp_block_drop(blocks, block);
    return memory;
}

static void keep_until_done(tddp_blocks *blocks, const tddp_operation *operation)
{
    tddp_flat_memory *read = operation->reads ? tddp_flat_memory_retain(operation->reads) : NULL;
    kept_memory *kept = tddp_alloc(sizeof *kept);
    tddp_flat_memory *in = take_memory(blocks, operation->in);
    tddp_flat_memory *out = take_memory(blocks, operation->out);
    if (kept) {
        *kept = (kept_memory){{read, in, out}};
    }
    if (!kept || tddp_work_on_done(operation->work, release_memory, kept) != TDDP_OK) {
        /* A leak is better than a write to freed memory. */
        tddp_log(TDDP_LOG_WARN, "sharder", "the memory of a pending operation is leaked");
    }
}

void tddp_operation_leave(tddp_blocks *blocks, tddp_operation *operation)
{
    if (operation->work && !tddp_work_completed(operation->work)) {
        keep_until_done(blocks, operation);
    } else {
        tddp_block_give(operation->in);
        tddp_block_give(operation->out);
    }
    tddp_work_release(operation->work);
    *operation = (tddp_operation){0};
}
