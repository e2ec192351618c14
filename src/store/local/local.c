/*
 * A store in a file, in the format of PyTorch's FileStore, or in this process's memory, for threads
 * and tests. Any thread, and any process of one in a file: a mutex, held for one access at a time,
 * guards this process's copy of the values, and the file's lock guards the file. Waits for a file
 * poll every ten milliseconds, without mutex or lock; those in memory look again after each change.
 * `refcount/` and `cleanup/` count the file's users.
 */
#include <stdlib.h>
#include <unistd.h>

#include "net/net.h"
#include "store/local/local.h"
#include "store/queue.h"

enum { LOOK_AGAIN_MS = 10, LOCK_AGAIN_MS = 1, LEAVE_MS = 5000 };

static const tddp_slice users_key = {"refcount/", 9};
static const tddp_slice finished_key = {"cleanup/", 8};

/* With the mutex, after something was not there or another had the file. */
static tddp_status await_turn(tddp_local_store *local, const tddp_store_call *call,
                              tddp_status reason)
{
    if (!local->path) {
        tddp_waiter self = {.next = NULL};
        tddp_status status = tddp_waiter_wait(&self, &local->waiters, &local->mutex, call);
        return status == TDDP_TIMEOUT ? TDDP_OK : status; /* a last look */
    }
    int64_t again =
        tddp_deadline_after_ms(reason == TDDP_NOT_FOUND ? LOOK_AGAIN_MS : LOCK_AGAIN_MS);
    again = again < call->deadline_ns ? again : call->deadline_ns;
    (void)pthread_mutex_unlock(&local->mutex);
    tddp_status status = tddp_net_sleep(again, tddp_store_call_cancel_fd(call));
    (void)pthread_mutex_lock(&local->mutex);
    return status;
}

static tddp_status try_once(tddp_local_store *local, tddp_local_task *task)
{
    tddp_local_access access;
    tddp_status status = tddp_local_begin(&local->log, task->write, &access);
    if (status == TDDP_OK) {
        status = tddp_local_end(&local->log, &access, task->body(task, &local->log, &access));
    }
    for (tddp_waiter *each = local->waiters; each && task->write; each = each->next) {
        tddp_waiter_wake(each);
    }
    return status;
}

tddp_status tddp_local_run(tddp_store *store, tddp_local_task *task, const tddp_store_call *call)
{
    tddp_local_store *local = (tddp_local_store *)store;
    (void)pthread_mutex_lock(&local->mutex);
    tddp_status status = try_once(local, task);
    while ((status == TDDP_TIMEOUT || status == TDDP_NOT_FOUND) &&
           tddp_now_ns() < call->deadline_ns) {
        status = await_turn(local, call, status);
        status = status ? status : try_once(local, task);
    }
    (void)pthread_mutex_unlock(&local->mutex);
    return status;
}

tddp_status tddp_local_run_on_keys(tddp_store *store, tddp_local_task *task, const tddp_slice *keys,
                                   size_t count, const tddp_store_call *call)
{
    task->keys = keys;
    task->count = count;
    tddp_status status = tddp_local_run(store, task, call);
    if (status == TDDP_NOT_FOUND || status == TDDP_CANCELED) {
        return tddp_store_fail_wait(status == TDDP_NOT_FOUND ? TDDP_TIMEOUT : status, keys, count,
                                    call, tddp_local_name(store));
    }
    return status;
}

tddp_status tddp_local_put_sum(tddp_local_log *log, tddp_local_access *access, tddp_slice key,
                               int64_t delta, int64_t *sum)
{
    char text[TDDP_STORE_NUMBER_BYTES];
    tddp_status status = tddp_store_values_sum(&log->values, key, delta, sum);
    return status ? status : tddp_local_put(access, key, tddp_store_number(*sum, text));
}

static tddp_status count_in(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    return tddp_local_put_sum(log, access, users_key, 1, &task->number);
}

/* Counts out; `number` holds the world size. The last of so many removes the file, while it still
 * has the lock. */
static tddp_status count_out(tddp_local_task *task, tddp_local_log *log, tddp_local_access *access)
{
    int64_t finished;
    int64_t users;
    tddp_status status = tddp_local_put_sum(log, access, finished_key, 1, &finished);
    status = status ? status : tddp_local_put_sum(log, access, users_key, -1, &users);
    if (status == TDDP_OK && task->number > 0 && users <= 0 && finished >= task->number) {
        (void)unlink(log->path);
    }
    return status;
}

static void free_local(tddp_local_store *local)
{
    tddp_store_map_clear(&local->log.values);
    tddp_store_queues_clear(&local->log.queues);
    (void)pthread_mutex_destroy(&local->mutex);
    free(local->path);
    free(local);
}

void tddp_local_destroy(tddp_store *store)
{
    tddp_local_store *local = (tddp_local_store *)store;
    if (local->path && local->pid == getpid() && access(local->path, F_OK) == 0) {
        tddp_local_task task = {.body = count_out, .write = true, .number = local->world_size};
        tddp_store_call call = {.deadline_ns = tddp_deadline_after_ms(LEAVE_MS)};
        if (tddp_local_run(store, &task, &call)) {
            tddp_log(TDDP_LOG_WARN, "store", "cannot count out of a file store: %s",
                     tddp_error_message());
        }
    }
    free_local(local);
}

static tddp_local_store *make(const tddp_store_ops *ops, const char *name, int64_t timeout_ms)
{
    tddp_local_store *local = tddp_alloc(sizeof *local);
    if (local) {
        tddp_store_init(&local->base, ops, name, timeout_ms);
        (void)pthread_mutex_init(&local->mutex, NULL);
        local->pid = getpid();
    }
    return local;
}

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
    tddp_local_store *file = make(&tddp_file_ops, "file store", timeout_ms);
    if (!file) {
        return TDDP_OUT_OF_MEMORY;
    }
    file->world_size = world_size;
    file->path = tddp_copy_string(path);
    file->log.path = file->path;
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (file->path) {
        tddp_local_task task = {.body = count_in, .write = true};
        tddp_store_call call = tddp_store_call_begin(NULL, tddp_store_timeout(&file->base));
        status = tddp_local_run(&file->base, &task, &call);
    }
    if (status) {
        free_local(file);
    } else {
        *out = &file->base;
    }
    return status;
}

tddp_status tddp_hash_store_create(int64_t timeout_ms, tddp_store **out)
{
    if (!out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the result is NULL");
    }
    tddp_local_store *hash = make(&tddp_hash_ops, "hash store", timeout_ms);
    if (hash) {
        *out = &hash->base;
    }
    return hash ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}
