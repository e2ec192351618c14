/*
 * The operations of local stores: each is a task that runs with the mutex, and the lock of the
 * file. Any thread and any process; local.c has deadlines and locks. PyTorch's has no barrier of
 * this kind: `barrier/k`, which it ignores, counts how often one of the key k was complete, while
 * the key itself counts who has arrived.
 */
#include <string.h>

#include "store/local/local.h"

static tddp_status put_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)log;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < task->count && status == TDDP_OK; i++) {
        status = tddp_local_put(access, task->keys[i], task->values[i]);
    }
    return status;
}

static bool have_all(const tddp_local_task *task, const tddp_local_log *log)
{
    for (size_t i = 0; i < task->count; i++) {
        if (!tddp_store_map_find(&log->values, task->keys[i]) &&
            !tddp_store_map_find(&log->queues, task->keys[i])) {
            return false;
        }
    }
    return true;
}

static tddp_status need_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    return have_all(task, log) ? TDDP_OK : TDDP_NOT_FOUND;
}

static tddp_status get_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
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

static tddp_status check_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    task->number = have_all(task, log);
    return TDDP_OK;
}

/* PyTorch does not know of it, so it does not count. */
static bool is_completion(tddp_slice key)
{
    return key.size >= 8 && memcmp(key.data, "barrier/", 8) == 0;
}

static tddp_status count_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    task->number = 0;
    const tddp_store_entry *entry = tddp_store_map_next(&log->values, NULL);
    while (entry) {
        task->number += !is_completion(tddp_store_entry_key(entry));
        entry = tddp_store_map_next(&log->values, entry);
    }
    return TDDP_OK;
}

static tddp_status add_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    return tddp_local_put_sum(log, access, task->keys[0], task->number, &task->number);
}

static tddp_status compare_set_one(tddp_local_task *task, tddp_local_log *log,
                                   tddp_local_access *access)
{
    bool stored;
    tddp_slice answer = tddp_store_values_compare(&log->values, task->keys[0], task->values[0],
                                                  task->values[1], &stored);
    tddp_status status = tddp_blob_copy(answer, task->blobs);
    if (status == TDDP_OK && stored) {
        status = tddp_local_put(access, task->keys[0], task->values[1]);
    }
    return status;
}

static tddp_status delete_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    task->number = tddp_store_map_find(&log->values, task->keys[0]) != NULL;
    return task->number ? tddp_local_put_deletion(access, task->keys[0]) : TDDP_OK;
}

static tddp_status append_one(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
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
        status = tddp_local_put(access, task->keys[0], (tddp_slice){joined.data, joined.size});
    }
    tddp_bytes_free(&joined);
    return status;
}

static tddp_status completion_key(tddp_bytes *to, tddp_slice key)
{
    tddp_status status = tddp_bytes_append(to, "barrier", strlen("barrier"));
    return status ? status : tddp_bytes_append(to, key.data, key.size);
}

/* Arrives at a barrier of `other` callers. `number` becomes how many have arrived, `other` how
 * often it was complete before. */
static tddp_status arrive(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    tddp_bytes name = {0};
    int64_t before = 0;
    int64_t after;
    tddp_slice key = task->keys[0];
    tddp_status status = tddp_local_put_sum(log, access, key, 1, &task->number);
    status = status ? status : completion_key(&name, key);
    status = status ? status
                    : tddp_store_values_sum(&log->values, (tddp_slice){name.data, name.size}, 0,
                                            &before);
    if (status == TDDP_OK && task->number >= task->other) {
        status = tddp_local_put_sum(log, access, (tddp_slice){name.data, name.size}, 1, &after);
    }
    task->other = before;
    tddp_bytes_free(&name);
    return status;
}

/* Until it was complete more often than `other` times. */
static tddp_status need_complete(tddp_local_task *task, tddp_local_log *log,
                                 tddp_local_access *access)
{
    (void)access;
    tddp_bytes name = {0};
    int64_t now = 0;
    tddp_status status = completion_key(&name, task->keys[0]);
    status = status
                 ? status
                 : tddp_store_values_sum(&log->values, (tddp_slice){name.data, name.size}, 0, &now);
    tddp_bytes_free(&name);
    if (tddp_store_values_sum(&log->values, task->keys[0], 0, &task->number)) {
        task->number = -1; /* a caller has overwritten it: the count is unknown */
    }
    return status || now > task->other ? status : TDDP_NOT_FOUND;
}

static tddp_status list_all(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    (void)access;
    tddp_status status = TDDP_OK;
    const tddp_store_entry *entry = tddp_store_map_next(&log->values, NULL);
    while (entry && status == TDDP_OK) {
        status = tddp_blob_list_add(task->list, tddp_store_entry_key(entry));
        entry = tddp_store_map_next(&log->values, entry);
    }
    return status;
}

/* Runs a task whose result is a number. */
static tddp_status ask(tddp_store *store, tddp_local_task *task, const tddp_slice *keys,
                       size_t count, const tddp_store_call *call, int64_t *out)
{
    tddp_status status = tddp_local_run_on_keys(store, task, keys, count, call);
    if (status == TDDP_OK) {
        *out = task->number;
    }
    return status;
}

static tddp_status local_set(tddp_store *store, const tddp_slice *keys, const tddp_slice *values,
                             size_t count, const tddp_store_call *call)
{
    tddp_local_task task = {.body = put_all, .write = true, .values = values};
    return tddp_local_run_on_keys(store, &task, keys, count, call);
}

static tddp_status local_append(tddp_store *store, tddp_slice key, tddp_slice value,
                                const tddp_store_call *call)
{
    tddp_local_task task = {.body = append_one, .write = true, .values = &value};
    return tddp_local_run_on_keys(store, &task, &key, 1, call);
}

static tddp_status local_get(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_store_call *call, tddp_blob *out)
{
    tddp_local_task task = {.body = get_all, .blobs = out};
    return tddp_local_run_on_keys(store, &task, keys, count, call);
}

static tddp_status local_add(tddp_store *store, tddp_slice key, int64_t delta,
                             const tddp_store_call *call, int64_t *out)
{
    tddp_local_task task = {.body = add_one, .write = true, .number = delta};
    return ask(store, &task, &key, 1, call, out);
}

static tddp_status local_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                     tddp_slice desired, const tddp_store_call *call,
                                     tddp_blob *out)
{
    tddp_slice values[] = {expected, desired};
    tddp_blob blob = {0};
    tddp_local_task task = {
        .body = compare_set_one, .write = true, .values = values, .blobs = &blob};
    tddp_status status = tddp_local_run_on_keys(store, &task, &key, 1, call);
    if (status) {
        tddp_blob_free(&blob);
    } else {
        *out = blob;
    }
    return status;
}

static tddp_status local_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                    int *deleted)
{
    tddp_local_task task = {.body = delete_one, .write = true};
    tddp_status status = tddp_local_run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *deleted = (int)task.number;
    }
    return status;
}

static tddp_status local_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    tddp_local_task task = {.body = count_all};
    return ask(store, &task, NULL, 0, call, out);
}

static tddp_status local_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                              const tddp_store_call *call)
{
    tddp_local_task task = {.body = need_all};
    return tddp_local_run_on_keys(store, &task, keys, count, call);
}

static tddp_status local_check(tddp_store *store, const tddp_slice *keys, size_t count,
                               const tddp_store_call *call, int *all_exist)
{
    tddp_local_task task = {.body = check_all};
    tddp_status status = tddp_local_run_on_keys(store, &task, keys, count, call);
    if (status == TDDP_OK) {
        *all_exist = (int)task.number;
    }
    return status;
}

static tddp_status local_barrier(tddp_store *store, tddp_slice key, int world_size,
                                 const tddp_store_call *call)
{
    tddp_local_task arrival = {.body = arrive, .write = true, .other = world_size};
    tddp_status status = tddp_local_run_on_keys(store, &arrival, &key, 1, call);
    if (status || arrival.number >= world_size) {
        return status;
    }
    tddp_local_task wait = {
        .body = need_complete, .keys = &key, .count = 1, .other = arrival.other};
    status = tddp_local_run(store, &wait, call);
    if (status == TDDP_NOT_FOUND || status == TDDP_CANCELED) {
        status = status == TDDP_NOT_FOUND ? TDDP_TIMEOUT : status;
        return tddp_store_fail_barrier(status, key, wait.number, world_size, call,
                                       tddp_local_name(store));
    }
    return status;
}

static tddp_status local_list_keys(tddp_store *store, const tddp_store_call *call,
                                   tddp_blob_list *out)
{
    tddp_local_task task = {.body = list_all, .list = out};
    return tddp_local_run(store, &task, call);
}

#define OF_BOTH_KINDS                                                                       \
    .set = local_set, .get = local_get, .add = local_add, .compare_set = local_compare_set, \
    .delete_key = local_delete_key, .num_keys = local_num_keys, .wait = local_wait,         \
    .check = local_check, .append = local_append, .list_keys = local_list_keys,             \
    .barrier = local_barrier, .destroy = tddp_local_destroy

const tddp_store_ops tddp_file_ops = {OF_BOTH_KINDS};

const tddp_store_ops tddp_hash_ops = {
    OF_BOTH_KINDS,
    .queue_push = tddp_local_queue_push,
    .queue_pop = tddp_local_queue_pop,
    .queue_len = tddp_local_queue_len,
};
