/*
 * Queues, barriers and lists of a file store. PyTorch's has no queues and no barriers, so these are
 * records that it ignores: like `refcount/` they do not begin with a slash, and a dash in front
 * removes them. Any thread and any process; file.c has deadlines and locks.
 *
 *     queue/k      "FIRST COUNT": which values the queue of the key k holds; absent while empty
 *     queue@7/k    its value number 7
 *     barrier/k    how often a barrier of the key k was complete (who arrived is counted in /k)
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "store/file/file.h"

/* A word in front of a key that has its slash. */
static tddp_status own_key(tddp_bytes *to, const char *word, tddp_slice key)
{
    to->size = 0;
    tddp_status status = tddp_bytes_append(to, word, strlen(word));
    return status ? status : tddp_bytes_append(to, key.data, key.size);
}

static tddp_slice slice_of(const tddp_bytes *bytes)
{
    return (tddp_slice){bytes->data, bytes->size};
}

/* The value of a record of ours, NULL if there is none. */
static tddp_status find(const tddp_file_log *log, const char *word, tddp_slice key,
                        const tddp_store_entry **out)
{
    tddp_bytes name = {0};
    tddp_status status = own_key(&name, word, key);
    if (status == TDDP_OK) {
        *out = tddp_store_map_find(&log->values, slice_of(&name));
    }
    tddp_bytes_free(&name);
    return status;
}

static tddp_status put(tddp_file_access *access, const char *word, tddp_slice key,
                       const tddp_slice *value)
{
    tddp_bytes name = {0};
    tddp_status status = own_key(&name, word, key);
    if (status == TDDP_OK) {
        status = value ? tddp_file_put(access, slice_of(&name), *value)
                       : tddp_file_put_deletion(access, slice_of(&name));
    }
    tddp_bytes_free(&name);
    return status;
}

/* --- queues ---------------------------------------------------------------------------------- */

typedef struct ends {
    int64_t first;
    int64_t count;
} ends;

enum { ENDS_TEXT = 48, WORD_TEXT = 32 };

static tddp_status read_ends(const tddp_file_log *log, tddp_slice key, ends *out)
{
    const tddp_store_entry *entry;
    char text[ENDS_TEXT] = "";
    ends found = {0};
    tddp_status status = find(log, "queue", key, &entry);
    if (status == TDDP_OK && entry) {
        tddp_slice value = tddp_store_entry_value(entry);
        memcpy(text, value.data, value.size < sizeof text ? value.size : sizeof text - 1);
        if (sscanf(text, "%" SCNd64 " %" SCNd64, &found.first, &found.count) != 2) {
            status = tddp_fail(TDDP_STORE, "file store %s: a queue's record reads \"%s\"",
                               log->path, text);
        }
    }
    if (status == TDDP_OK) {
        *out = found;
    }
    return status;
}

static tddp_status write_ends(tddp_file_access *access, tddp_slice key, ends now)
{
    char text[ENDS_TEXT];
    int size = snprintf(text, sizeof text, "%" PRId64 " %" PRId64, now.first, now.count);
    return put(access, "queue", key, now.count ? &(tddp_slice){text, (size_t)size} : NULL);
}

static const char *item_word(int64_t number, char text[WORD_TEXT])
{
    snprintf(text, WORD_TEXT, "queue@%" PRId64, number);
    return text;
}

static tddp_status push_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    ends now;
    char word[WORD_TEXT];
    tddp_status status = read_ends(log, task->keys[0], &now);
    if (status == TDDP_OK) {
        const char *item = item_word(now.first + now.count, word);
        status = put(access, item, task->keys[0], task->values);
        now.count++;
    }
    return status ? status : write_ends(access, task->keys[0], now);
}

/* `number` becomes how many there were. */
static tddp_status pop_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    ends now;
    char word[WORD_TEXT];
    const tddp_store_entry *entry = NULL;
    tddp_status status = read_ends(log, task->keys[0], &now);
    task->number = status ? 0 : now.count;
    if (task->number == 0) {
        return status;
    }
    const char *item = item_word(now.first, word);
    status = find(log, item, task->keys[0], &entry);
    if (status == TDDP_OK && !entry) {
        status = tddp_fail(TDDP_STORE, "file store %s: the record \"%s\" of a queue is missing",
                           log->path, item);
    }
    status = status ? status : put(access, item, task->keys[0], NULL);
    now = (ends){now.first + 1, now.count - 1};
    status = status ? status : write_ends(access, task->keys[0], now);
    return status ? status : tddp_blob_copy(tddp_store_entry_value(entry), task->blobs);
}

static tddp_status count_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    ends now;
    tddp_status status = read_ends(log, task->keys[0], &now);
    task->number = status ? 0 : now.count;
    return status;
}

static tddp_status need_one(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    tddp_status status = count_one(task, log, access);
    return status || task->number ? status : TDDP_NOT_FOUND;
}

bool tddp_file_has_queue(const tddp_file_log *log, tddp_slice key)
{
    const tddp_store_entry *entry;
    return find(log, "queue", key, &entry) == TDDP_OK && entry;
}

tddp_status tddp_file_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                 const tddp_store_call *call)
{
    tddp_file_task task = {.body = push_one, .write = true, .values = &value};
    return tddp_file_run_on_keys(store, &task, &key, 1, call);
}

tddp_status tddp_file_queue_pop(tddp_store *store, tddp_slice key, bool block,
                                const tddp_store_call *call, tddp_blob *out)
{
    for (;;) {
        tddp_blob blob = {0};
        tddp_file_task wait = {.body = need_one};
        tddp_file_task pop = {.body = pop_one, .write = true, .blobs = &blob};
        tddp_status status = TDDP_OK;
        if (block) {
            status = tddp_file_run_on_keys(store, &wait, &key, 1, call);
        }
        status = status ? status : tddp_file_run_on_keys(store, &pop, &key, 1, call);
        if (status) {
            tddp_blob_free(&blob);
            return status;
        }
        if (pop.number) {
            *out = blob;
            return TDDP_OK;
        }
        if (!block) {
            return TDDP_NOT_FOUND;
        }
    }
}

tddp_status tddp_file_queue_len(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                int64_t *out)
{
    tddp_file_task task = {.body = count_one};
    tddp_status status = tddp_file_run_on_keys(store, &task, &key, 1, call);
    if (status == TDDP_OK) {
        *out = task.number;
    }
    return status;
}

/* --- barriers -------------------------------------------------------------------------------- */

/* Arrives at a barrier of `other` callers. `number` becomes how many have arrived, `other` how
 * often it was complete before. */
static tddp_status arrive(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    tddp_bytes name = {0};
    int64_t before = 0;
    int64_t after;
    tddp_slice key = task->keys[0];
    tddp_status status = tddp_file_put_sum(log, access, key, 1, &task->number);
    status = status ? status : own_key(&name, "barrier", key);
    status = status ? status : tddp_store_values_sum(&log->values, slice_of(&name), 0, &before);
    if (status == TDDP_OK && task->number >= task->other) {
        status = tddp_file_put_sum(log, access, slice_of(&name), 1, &after);
    }
    task->other = before;
    tddp_bytes_free(&name);
    return status;
}

/* Until it was complete more often than `other` times. */
static tddp_status need_complete(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    tddp_bytes name = {0};
    int64_t now = 0;
    tddp_status status = own_key(&name, "barrier", task->keys[0]);
    status = status ? status : tddp_store_values_sum(&log->values, slice_of(&name), 0, &now);
    tddp_bytes_free(&name);
    if (tddp_store_values_sum(&log->values, task->keys[0], 0, &task->number)) {
        task->number = -1; /* a caller has overwritten it: the count is unknown */
    }
    return status || now > task->other ? status : TDDP_NOT_FOUND;
}

tddp_status tddp_file_barrier(tddp_store *store, tddp_slice key, int world_size,
                              const tddp_store_call *call)
{
    tddp_file_task arrival = {.body = arrive, .write = true, .other = world_size};
    tddp_status status = tddp_file_run_on_keys(store, &arrival, &key, 1, call);
    if (status || arrival.number >= world_size) {
        return status;
    }
    tddp_file_task wait = {.body = need_complete, .other = arrival.other};
    status = tddp_file_run_keys(store, &wait, &key, 1, call);
    if (status == TDDP_NOT_FOUND || status == TDDP_CANCELED) {
        status = status == TDDP_NOT_FOUND ? TDDP_TIMEOUT : status;
        return tddp_store_fail_barrier(status, key, wait.number, world_size, call,
                                       ((tddp_file_store *)store)->path);
    }
    return status;
}

/* --- lists ----------------------------------------------------------------------------------- */

static bool begins(tddp_slice key, const char *word)
{
    size_t size = strlen(word);
    return key.size >= size && memcmp(key.data, word, size) == 0;
}

bool tddp_file_is_extra(tddp_slice key)
{
    return begins(key, "queue/") || begins(key, "queue@") || begins(key, "barrier/");
}

static tddp_status list_all(tddp_file_task *task, tddp_file_log *log, tddp_file_access *access)
{
    (void)access;
    tddp_blob_list list = {0};
    tddp_status status = tddp_blob_list_make(log->values.count, &list);
    size_t users = 0;
    const tddp_store_entry *entry = tddp_store_map_next(&log->values, NULL);
    while (entry && status == TDDP_OK) {
        tddp_slice key = tddp_store_entry_key(entry);
        if (begins(key, "/")) {
            key = (tddp_slice){key.data + 1, key.size - 1};
            status = tddp_blob_copy(key, &list.blobs[users++]);
        }
        entry = tddp_store_map_next(&log->values, entry);
    }
    if (status) {
        tddp_blob_list_free(&list);
        return status;
    }
    list.count = users;
    *task->list = list;
    return TDDP_OK;
}

tddp_status tddp_file_list_keys(tddp_store *store, const tddp_store_call *call, tddp_blob_list *out)
{
    tddp_file_task task = {.body = list_all, .list = out};
    return tddp_file_run(store, &task, call);
}
