/*
 * The file store's operations on keys: each is a task that runs while the file is locked. Any
 * thread and any process; file.c has deadlines and locks.
 */

#include "store/file/file.h"

static tddp_status put_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)log;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < task->count && status == TDDP_OK; i++) {
        status = tddp_file_put(access, task->keys[i], task->values[i]);
    }
    return status;
}

static bool have_all(const tddp_file_task *task, const tddp_file_log *log)
{
    for (size_t i = 0; i < task->count; i++) {
        if (!tddp_store_map_find(&log->values, task->keys[i]) &&
            !tddp_file_has_queue(log, task->keys[i])) {
            return false;
        }
    }
    return true;
}

static tddp_status need_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    return have_all(task, log) ? TDDP_OK : TDDP_NOT_FOUND;
}

static tddp_status get_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    tddp_status status = need_all(task, log, access);
    for (size_t i = 0; i < task->count && status == TDDP_OK; i++) {
        const tddp_store_entry *entry = tddp_store_map_find(&log->values, task->keys[i]);
        /* A queue of that name has no value: it reads as empty, as from a server. */
        tddp_slice value = entry ? tddp_store_entry_value(entry) : (tddp_slice){0};
        status = tddp_blob_copy(value, &task->blobs[i]);
    }
    return status;
}

static tddp_status check_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    task->number = have_all(task, log);
    return TDDP_OK;
}

static tddp_status count_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    task->number = 0;
    const tddp_store_entry *entry = tddp_store_map_next(&log->values, NULL);
    while (entry) {
        task->number += !tddp_file_is_extra(tddp_store_entry_key(entry));
        entry = tddp_store_map_next(&log->values, entry);
    }
    return TDDP_OK;
}

static tddp_status add_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    return tddp_file_put_sum(log, access, task->keys[0], task->number, &task->number);
}

static tddp_status compare_set_one(tddp_file_task *task, tddp_file_log *log,
                                   tddp_file_access *access)
{
    bool stored;
    tddp_slice answer = tddp_store_values_compare(&log->values, task->keys[0], task->values[0],
                                                  task->values[1], &stored);
    tddp_status status = tddp_blob_copy(answer, task->blobs);
    if (status == TDDP_OK && stored) {
        status = tddp_file_put(access, task->keys[0], task->values[1]);
    }
    return status;
}

static tddp_status delete_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    task->number = tddp_store_map_find(&log->values, task->keys[0]) != NULL;
    return task->number ? tddp_file_put_deletion(access, task->keys[0]) : TDDP_OK;
}

static tddp_status append_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    const tddp_store_entry *entry = tddp_store_map_find(&log->values, task->keys[0]);
    if (!entry) {
        return put_all(task, log, access);
    }
    tddp_bytes joined = {0};
    tddp_status status = tddp_bytes_append(&joined, entry->value.data, entry->value.size);
    status =
        status ? status : tddp_bytes_append(&joined, task->values[0].data, task->values[0].size);
    if (status == TDDP_OK) {
        status = tddp_file_put(access, task->keys[0], (tddp_slice){joined.data, joined.size});
    }
    tddp_bytes_free(&joined);
    return status;
}

tddp_status tddp_file_multi_set(tddp_store *store, const tddp_slice *keys, const tddp_slice *values,
                                size_t count, const tddp_store_call *call)
{
    tddp_file_task task = {.body = put_all, .write = true, .values = values};
    return tddp_file_run_on_keys(store, &task, keys, count, call);
}

tddp_status tddp_file_set(tddp_store *store, tddp_slice key, tddp_slice value,
                          const tddp_store_call *call)
{
    return tddp_file_multi_set(store, &key, &value, 1, call);
}

tddp_status tddp_file_append(tddp_store *store, tddp_slice key, tddp_slice value,
                             const tddp_store_call *call)
{
    tddp_file_task task = {.body = append_one, .write = true, .values = &value};
    return tddp_file_run_on_keys(store, &task, &key, 1, call);
}

tddp_status tddp_file_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                const tddp_store_call *call, tddp_blob *out)
{
    tddp_file_task task = {.body = get_all, .blobs = out};
    return tddp_file_run_on_keys(store, &task, keys, count, call);
}

tddp_status tddp_file_get(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                          tddp_blob *out)
{
    return tddp_file_multi_get(store, &key, 1, call, out);
}

tddp_status tddp_file_add(tddp_store *store, tddp_slice key, int64_t delta,
                          const tddp_store_call *call, int64_t *out)
{
    tddp_file_task task = {.body = add_one, .write = true, .number = delta};
    tddp_status status = tddp_file_run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}

tddp_status tddp_file_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                  tddp_slice desired, const tddp_store_call *call, tddp_blob *out)
{
    tddp_slice values[] = {expected, desired};
    tddp_blob blob = {0};
    tddp_file_task task = {
        .body = compare_set_one, .write = true, .values = values, .blobs = &blob};
    tddp_status status = tddp_file_run_on_keys(store, &task, &key, 1, call);
    if (status) {
        tddp_blob_free(&blob);
    } else {
        *out = blob;
    }
    return status;
}

tddp_status tddp_file_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                 int *deleted)
{
    tddp_file_task task = {.body = delete_one, .write = true};
    tddp_status status = tddp_file_run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *deleted = (int)task.number;
    }
    return status;
}

tddp_status tddp_file_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    tddp_file_task task = {.body = count_all};
    tddp_status status = tddp_file_run(store, &task, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}

tddp_status tddp_file_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                           const tddp_store_call *call)
{
    tddp_file_task task = {.body = need_all};
    return tddp_file_run_on_keys(store, &task, keys, count, call);
}

tddp_status tddp_file_check(tddp_store *store, const tddp_slice *keys, size_t count,
                            const tddp_store_call *call, int *all_exist)
{
    tddp_file_task task = {.body = check_all};
    tddp_status status = tddp_file_run_on_keys(store, &task, keys, count, call);
    if (status == TDDP_OK) {
        *all_exist = (int)task.number;
    }
    return status;
}
