/*
 * A store in a file, in the format of PyTorch's FileStore. Any thread and any process: a mutex,
 * held for one access at a time, guards this process's copy of the values, and the file's lock
 * guards the file. Waits poll every ten milliseconds, without mutex or lock. Users' keys begin with
 * a slash in the file; `refcount/` and `cleanup/` count its users. The operations are in ops.c and
 * queue.c.
 */
#include <stdlib.h>
#include <unistd.h>

#include "net/net.h"
#include "store/file/file.h"

enum { LOOK_AGAIN_MS = 10, LOCK_AGAIN_MS = 1, LEAVE_MS = 5000 };

static const tddp_slice users_key = {"refcount/", 9};
static const tddp_slice finished_key = {"cleanup/", 8};

/* One access, tried again until the deadline while another process has the lock, or while the body
 * returns TDDP_NOT_FOUND. */
tddp_status tddp_file_run(tddp_store *store, tddp_file_task *task, const tddp_store_call *call)
{
    tddp_file_store *file = (tddp_file_store *)store;
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

tddp_status tddp_file_run_keys(tddp_store *store, tddp_file_task *task, const tddp_slice *keys,
                               size_t count, const tddp_store_call *call)
{
    tddp_slice *full;
    tddp_status status = tddp_store_prefixed((tddp_slice){"/", 1}, keys, count, &full);
    if (status) {
        return status;
    }
    task->keys = full;
    task->count = count;
    status = tddp_file_run(store, task, call);
    free(full);
    return status;
}

tddp_status tddp_file_run_on_keys(tddp_store *store, tddp_file_task *task, const tddp_slice *keys,
                                  size_t count, const tddp_store_call *call)
{
    tddp_status status = tddp_file_run_keys(store, task, keys, count, call);
    if (status == TDDP_NOT_FOUND || status == TDDP_CANCELED) {
        const char *name = ((tddp_file_store *)store)->path;
        return tddp_store_fail_wait(status == TDDP_NOT_FOUND ? TDDP_TIMEOUT : status, keys, count,
                                    call, name);
    }
    return status;
}

tddp_status tddp_file_put_sum(tddp_file_log *log, tddp_file_access *access, tddp_slice key,
                              int64_t delta, int64_t *sum)
{
    char text[TDDP_STORE_NUMBER_BYTES];
    tddp_status status = tddp_store_values_sum(&log->values, key, delta, sum);
    return status ? status : tddp_file_put(access, key, tddp_store_number(*sum, text));
}

static bool file_extended(const tddp_store *store)
{
    (void)store;
    return true;
}

static tddp_status file_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out)
{
    (void)call;
    *out = tddp_store_retain(store); /* every access opens the file anew anyway */
    return TDDP_OK;
}

static tddp_status count_in(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    return tddp_file_put_sum(log, access, users_key, 1, &task->number);
}

/* Counts out; `number` holds the world size. The last of so many removes the file, while it still
 * has the lock. */
static tddp_status count_out(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    int64_t finished;
    int64_t users;
    tddp_status status = tddp_file_put_sum(log, access, finished_key, 1, &finished);
    status = status ? status : tddp_file_put_sum(log, access, users_key, -1, &users);
    if (status == TDDP_OK && task->number > 0 && users <= 0 && finished >= task->number) {
        (void)unlink(log->path);
    }
    return status;
}

static void free_file(tddp_file_store *file)
{
    tddp_store_map_clear(&file->log.values);
    (void)pthread_mutex_destroy(&file->mutex);
    free(file->path);
    free(file);
}

static void file_destroy(tddp_store *store)
{
    tddp_file_store *file = (tddp_file_store *)store;
    if (file->pid == getpid() && access(file->path, F_OK) == 0) {
        tddp_file_task task = {.body = count_out, .write = true, .number = file->world_size};
        tddp_store_call call = {.deadline_ns = tddp_deadline_after_ms(LEAVE_MS)};
        if (tddp_file_run(store, &task, &call)) {
            tddp_log(TDDP_LOG_WARN, "store", "cannot count out of a file store: %s",
                     tddp_error_message());
        }
    }
    free_file(file);
}

static const tddp_store_ops file_ops = {
    .set = tddp_file_set,
    .get = tddp_file_get,
    .add = tddp_file_add,
    .compare_set = tddp_file_compare_set,
    .delete_key = tddp_file_delete_key,
    .num_keys = tddp_file_num_keys,
    .wait = tddp_file_wait,
    .check = tddp_file_check,
    .append = tddp_file_append,
    .multi_get = tddp_file_multi_get,
    .multi_set = tddp_file_multi_set,
    .queue_push = tddp_file_queue_push,
    .queue_pop = tddp_file_queue_pop,
    .queue_len = tddp_file_queue_len,
    .list_keys = tddp_file_list_keys,
    .barrier = tddp_file_barrier,
    .extended = file_extended,
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
    tddp_file_store *file = tddp_alloc(sizeof *file);
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
        tddp_file_task task = {.body = count_in, .write = true};
        tddp_store_call call = tddp_store_call_begin(NULL, tddp_store_timeout(&file->base));
        status = tddp_file_run(&file->base, &task, &call);
    }
    if (status) {
        free_file(file);
        return status;
    }
    *out = &file->base;
    return TDDP_OK;
}
