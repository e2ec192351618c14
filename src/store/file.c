/*
 * A store kept in a file, as PyTorch's FileStore keeps it. Any thread and any process: one mutex,
 * held for one access at a time, guards what is known of the file, and the file's own lock guards
 * the file. Waiting is looking again every ten milliseconds, without mutex or lock. Keys of users
 * carry a slash in the file; `refcount/` and `cleanup/` count its users.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net/net.h"
#include "store/file.h"

enum { LOOK_AGAIN_MS = 10, LOCK_AGAIN_MS = 1, LEAVE_MS = 5000 };

typedef struct file_store {
    tddp_store base;
    pthread_mutex_t mutex;
    pid_t pid; /* that counted in; a forked child must not count out */
    int world_size;
    char *path;
    tddp_file_log log;
} file_store;

static const tddp_slice users_key = {"refcount/", 9};
static const tddp_slice finished_key = {"cleanup/", 8};

/* What one access is to do; the values are up to date. */
typedef struct file_task {
    tddp_status (*body)(struct file_task *task, tddp_file_log *log, tddp_file_access *access);
    bool write;
    const tddp_slice *keys; /* with their slashes */
    const tddp_slice *values;
    size_t count;
    int64_t number; /* delta in, sum out; or a result */
    tddp_blob *blobs;
} file_task;

/* One access, tried again until the deadline while another process has the lock, or while the body
 * says TDDP_NOT_FOUND. */
static tddp_status run(tddp_store *store, file_task *task, const tddp_store_call *call)
{
    file_store *file = (file_store *)store;
    for (;;) {
        tddp_file_access access;
        (void)pthread_mutex_lock(&file->mutex);
        tddp_status status = tddp_file_begin(&file->log, task->write, &access);
        if (status == TDDP_OK) {
            status = tddp_file_end(&file->log, &access, task->body(task, &file->log, &access));
        }
        (void)pthread_mutex_unlock(&file->mutex);
        if (status != TDDP_TIMEOUT && status != TDDP_NOT_FOUND) {
            return status;
        }
        int64_t now = tddp_now_ns();
        if (now >= call->deadline_ns) {
            return status;
        }
        int64_t pause_ms = status == TDDP_NOT_FOUND ? LOOK_AGAIN_MS : LOCK_AGAIN_MS;
        int64_t again = now + pause_ms * TDDP_NS_PER_MS;
        again = again < call->deadline_ns ? again : call->deadline_ns;
        status = tddp_net_sleep(again, tddp_store_call_cancel_fd(call));
        if (status) {
            return status;
        }
    }
}

/* Gives user keys their slash: slices and bytes in one block. */
static tddp_status with_slashes(const tddp_slice *keys, size_t count, tddp_slice **out)
{
    size_t bytes = count * (sizeof(tddp_slice) + 1);
    for (size_t i = 0; i < count; i++) {
        bytes += keys[i].size;
    }
    tddp_slice *block = tddp_alloc(bytes);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    char *at = (char *)(block + count);
    for (size_t i = 0; i < count; i++) {
        block[i] = (tddp_slice){at, keys[i].size + 1};
        *at = '/';
        memcpy(at + 1, keys[i].data, keys[i].size);
        at += block[i].size;
    }
    *out = block;
    return TDDP_OK;
}

/* Runs a task on user keys; names them if time runs out. */
static tddp_status run_on_keys(tddp_store *store, file_task *task, const tddp_slice *keys,
                               size_t count, const tddp_store_call *call)
{
    tddp_slice *full;
    tddp_status status = with_slashes(keys, count, &full);
    if (status) {
        return status;
    }
    task->keys = full;
    task->count = count;
    status = run(store, task, call);
    free(full);
    if (status == TDDP_NOT_FOUND || status == TDDP_CANCELED) {
        const char *name = ((file_store *)store)->path;
        return tddp_store_fail_wait(status == TDDP_NOT_FOUND ? TDDP_TIMEOUT : status, keys, count,
                                    call, name);
    }
    return status;
}

static tddp_status put_all(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)log;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < task->count && status == TDDP_OK; i++) {
        status = tddp_file_put(access, task->keys[i], task->values[i]);
    }
    return status;
}

static tddp_status need_all(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    return tddp_store_values_have(&log->values, task->keys, task->count) ? TDDP_OK : TDDP_NOT_FOUND;
}

static tddp_status get_all(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    tddp_status status = need_all(task, log, access);
    for (size_t i = 0; i < task->count && status == TDDP_OK; i++) {
        const tddp_store_entry *entry = tddp_store_map_find(&log->values, task->keys[i]);
        status = tddp_blob_copy(tddp_store_entry_value(entry), &task->blobs[i]);
    }
    return status;
}

static tddp_status check_all(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    task->number = tddp_store_values_have(&log->values, task->keys, task->count);
    return TDDP_OK;
}

static tddp_status count_all(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    task->number = (int64_t)log->values.count;
    return TDDP_OK;
}

static tddp_status put_sum(tddp_file_log *log, tddp_file_access *access, tddp_slice key,
                           int64_t delta, int64_t *sum)
{
    char text[TDDP_STORE_NUMBER_BYTES];
    tddp_status status = tddp_store_values_sum(&log->values, key, delta, sum);
    return status ? status : tddp_file_put(access, key, tddp_store_number(*sum, text));
}

static tddp_status add_one(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    return put_sum(log, access, task->keys[0], task->number, &task->number);
}

static tddp_status compare_set_one(file_task *task, tddp_file_log *log, tddp_file_access *access)
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

static tddp_status delete_one(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    task->number = tddp_store_map_find(&log->values, task->keys[0]) != NULL;
    return task->number ? tddp_file_put_deletion(access, task->keys[0]) : TDDP_OK;
}

static tddp_status append_one(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    const tddp_store_entry *entry = tddp_store_map_find(&log->values, task->keys[0]);
    if (!entry) {
        return put_all(task, log, access);
    }
    tddp_bytes whole = {0};
    tddp_status status = tddp_bytes_append(&whole, entry->value.data, entry->value.size);
    status =
        status ? status : tddp_bytes_append(&whole, task->values[0].data, task->values[0].size);
    if (status == TDDP_OK) {
        status = tddp_file_put(access, task->keys[0], (tddp_slice){whole.data, whole.size});
    }
    tddp_bytes_free(&whole);
    return status;
}

static tddp_status file_multi_set(tddp_store *store, const tddp_slice *keys,
                                  const tddp_slice *values, size_t count,
                                  const tddp_store_call *call)
{
    file_task task = {.body = put_all, .write = true, .values = values};
    return run_on_keys(store, &task, keys, count, call);
}

static tddp_status file_set(tddp_store *store, tddp_slice key, tddp_slice value,
                            const tddp_store_call *call)
{
    return file_multi_set(store, &key, &value, 1, call);
}

static tddp_status file_append(tddp_store *store, tddp_slice key, tddp_slice value,
                               const tddp_store_call *call)
{
    file_task task = {.body = append_one, .write = true, .values = &value};
    return run_on_keys(store, &task, &key, 1, call);
}

static tddp_status file_multi_get(tddp_store *store, const tddp_slice *keys, size_t count,
                                  const tddp_store_call *call, tddp_blob *out)
{
    file_task task = {.body = get_all, .blobs = out};
    return run_on_keys(store, &task, keys, count, call);
}

static tddp_status file_get(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                            tddp_blob *out)
{
    return file_multi_get(store, &key, 1, call, out);
}

static tddp_status file_add(tddp_store *store, tddp_slice key, int64_t delta,
                            const tddp_store_call *call, int64_t *out)
{
    file_task task = {.body = add_one, .write = true, .number = delta};
    tddp_status status = run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}

static tddp_status file_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                    tddp_slice desired, const tddp_store_call *call, tddp_blob *out)
{
    tddp_slice values[] = {expected, desired};
    tddp_blob blob = {0};
    file_task task = {.body = compare_set_one, .write = true, .values = values, .blobs = &blob};
    tddp_status status = run_on_keys(store, &task, &key, 1, call);
    if (status) {
        tddp_blob_free(&blob);
    } else {
        *out = blob;
    }
    return status;
}

static tddp_status file_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                   int *deleted)
{
    file_task task = {.body = delete_one, .write = true};
    tddp_status status = run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *deleted = (int)task.number;
    }
    return status;
}

static tddp_status file_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    file_task task = {.body = count_all};
    tddp_status status = run(store, &task, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}

static tddp_status file_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_store_call *call)
{
    file_task task = {.body = need_all};
    return run_on_keys(store, &task, keys, count, call);
}

static tddp_status file_check(tddp_store *store, const tddp_slice *keys, size_t count,
                              const tddp_store_call *call, int *all_exist)
{
    file_task task = {.body = check_all};
    tddp_status status = run_on_keys(store, &task, keys, count, call);
    if (status == TDDP_OK) {
        *all_exist = (int)task.number;
    }
    return status;
}

static tddp_status file_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out)
{
    (void)call;
    *out = tddp_store_retain(store); /* every access opens the file anew anyway */
    return TDDP_OK;
}

static tddp_status count_in(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    return put_sum(log, access, users_key, 1, &task->number);
}

/* Counts out; `number` holds the world size. The last of so many removes the file, while it still
 * has the lock. */
static tddp_status count_out(file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    int64_t finished;
    int64_t users;
    tddp_status status = put_sum(log, access, finished_key, 1, &finished);
    status = status ? status : put_sum(log, access, users_key, -1, &users);
    if (status == TDDP_OK && task->number > 0 && users <= 0 && finished >= task->number) {
        (void)unlink(log->path);
    }
    return status;
}

static void free_file(file_store *file)
{
    tddp_store_map_clear(&file->log.values);
    (void)pthread_mutex_destroy(&file->mutex);
    free(file->path);
    free(file);
}

static void file_destroy(tddp_store *store)
{
    file_store *file = (file_store *)store;
    if (file->pid == getpid() && access(file->path, F_OK) == 0) {
        file_task task = {.body = count_out, .write = true, .number = file->world_size};
        tddp_store_call call = {.deadline_ns = tddp_deadline_after_ms(LEAVE_MS)};
        if (run(store, &task, &call)) {
            tddp_log(TDDP_LOG_WARN, "store", "cannot count out of a file store: %s",
                     tddp_error_message());
        }
    }
    free_file(file);
}

static const tddp_store_ops file_ops = {
    .set = file_set,
    .get = file_get,
    .add = file_add,
    .compare_set = file_compare_set,
    .delete_key = file_delete_key,
    .num_keys = file_num_keys,
    .wait = file_wait,
    .check = file_check,
    .append = file_append,
    .multi_get = file_multi_get,
    .multi_set = file_multi_set,
    .clone = file_clone,
    .destroy = file_destroy,
};

tddp_status tddp_file_store_open(const char *path, int world_size, int64_t timeout_ms,
                                 tddp_store **out)
{
    if (!path || !*path || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "file store: expected a path and a result");
    }
    if (world_size < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "file store: world size %d, expected 0 or more",
                         world_size);
    }
    file_store *file = tddp_alloc(sizeof *file);
    if (!file) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_store_init(&file->base, &file_ops, timeout_ms);
    (void)pthread_mutex_init(&file->mutex, NULL);
    file->pid = getpid();
    file->world_size = world_size;
    file->path = tddp_copy_string(path);
    file->log.path = file->path;
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (file->path) {
        file_task task = {.body = count_in, .write = true};
        tddp_store_call call = tddp_store_call_begin(NULL, tddp_store_timeout(&file->base));
        status = run(&file->base, &task, &call);
    }
    if (status) {
        free_file(file);
        return status;
    }
    *out = &file->base;
    return TDDP_OK;
}
