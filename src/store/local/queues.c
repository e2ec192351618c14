/*
 * Queues of a store in memory. Any thread; local.c has the deadlines.
 */
#include "store/local/local.h"
#include "store/queue.h"

static tddp_status push_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    return tddp_store_queues_push(&log->queues, task->keys[0], task->values[0]);
}

static tddp_status pop_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    tddp_slice oldest;
    if (!tddp_store_queues_first(&log->queues, task->keys[0], &oldest)) {
        return TDDP_NOT_FOUND;
    }
    tddp_status status = tddp_blob_copy(oldest, task->blobs);
    if (status == TDDP_OK) {
        tddp_store_queues_drop(&log->queues, task->keys[0]);
    }
    return status;
}

static tddp_status count_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    task->number = (int64_t)tddp_store_queues_length(&log->queues, task->keys[0]);
    return TDDP_OK;
}

tddp_status tddp_local_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                  const tddp_store_call *call)
{
    tddp_local_task task = {.body = push_one, .write = true, .values = &value};
    return tddp_local_run_on_keys(store, &task, &key, 1, call);
}

tddp_status tddp_local_queue_pop(tddp_store *store, tddp_slice key, bool block,
                                 const tddp_store_call *call, tddp_blob *out)
{
    tddp_local_task task = {.body = pop_one, .keys = &key, .count = 1, .blobs = out};
    return block ? tddp_local_run_on_keys(store, &task, &key, 1, call)
                 : tddp_local_run(store, &task, &(tddp_store_call){.deadline_ns = 0});
}

tddp_status tddp_local_queue_len(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                 int64_t *out)
{
    tddp_local_task task = {.body = count_one};
    tddp_status status = tddp_local_run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}
