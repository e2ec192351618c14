/*
 * The parts of the file store.
 *
 *   file.c   opening and closing, and one access with its deadline
 *   log.c    the file: lock and records
 *   ops.c    the operations on keys
 *   queue.c  queues, barriers, lists
 */
#ifndef TDDP_STORE_FILE_H
#define TDDP_STORE_FILE_H

#include <pthread.h>
#include <sys/types.h>

#include "store/store_impl.h"
#include "store/values.h"

/* What is known of a file of records. Not for several threads at once. */
typedef struct tddp_file_log {
    const char *path;
    tddp_store_map values; /* by the keys in the file: "/k" for users', others without slash */
    off_t read_to;
    dev_t device; /* of the file that `values` came from */
    ino_t inode;
} tddp_file_log;

typedef struct tddp_file_access {
    int fd; /* -1: there is no file, which reads as an empty one */
    tddp_bytes records;
} tddp_file_access;

/* Opens and locks the file and reads what is new. TDDP_TIMEOUT: another process has the lock now;
 * try again. A writer makes the file if it is absent. */
TDDP_NODISCARD tddp_status tddp_file_begin(tddp_file_log *log, bool write,
                                           tddp_file_access *access);

/* Adds a record to those to be written. The values known follow at the next access, from the file.
 */
TDDP_NODISCARD tddp_status tddp_file_put(tddp_file_access *access, tddp_slice key,
                                         tddp_slice value);
TDDP_NODISCARD tddp_status tddp_file_put_deletion(tddp_file_access *access, tddp_slice key);

/* Writes the records if `status` is TDDP_OK, and unlocks and closes the file. Returns the first
 * failure. */
TDDP_NODISCARD tddp_status tddp_file_end(tddp_file_log *log, tddp_file_access *access,
                                         tddp_status status);

/* --- file.c ---------------------------------------------------------------------------------- */

typedef struct tddp_file_store {
    tddp_store base;
    pthread_mutex_t mutex;
    pid_t pid; /* that counted in; a forked child must not count out */
    int world_size;
    char *path;
    tddp_file_log log;
} tddp_file_store;

/* What one access is to do; the values are up to date. */
typedef struct tddp_file_task {
    tddp_status (*body)(struct tddp_file_task *task, tddp_file_log *log, tddp_file_access *access);
    bool write;
    const tddp_slice *keys; /* with their slashes */
    const tddp_slice *values;
    size_t count;
    int64_t number; /* delta in, sum out; or a result */
    int64_t other;  /* the body's own second number */
    tddp_blob *blobs;
    tddp_blob_list *list;
} tddp_file_task;

/* One access, tried again until the deadline while another process has the lock, or while the body
 * returns TDDP_NOT_FOUND. */
TDDP_NODISCARD tddp_status tddp_file_run(tddp_store *store, tddp_file_task *task,
                                         const tddp_store_call *call);

/* The same with the user's keys given their slashes. Sets no text for TDDP_NOT_FOUND (time ran out)
 * and TDDP_CANCELED. */
TDDP_NODISCARD tddp_status tddp_file_run_keys(tddp_store *store, tddp_file_task *task,
                                              const tddp_slice *keys, size_t count,
                                              const tddp_store_call *call);

/* The same, and names the keys if time runs out. */
TDDP_NODISCARD tddp_status tddp_file_run_on_keys(tddp_store *store, tddp_file_task *task,
                                                 const tddp_slice *keys, size_t count,
                                                 const tddp_store_call *call);

/* Adds to a counter and has the sum written. */
TDDP_NODISCARD tddp_status tddp_file_put_sum(tddp_file_log *log, tddp_file_access *access,
                                             tddp_slice key, int64_t delta, int64_t *sum);

/* --- ops.c, queue.c -------------------------------------------------------------------------- */

tddp_status tddp_file_set(tddp_store *, tddp_slice key, tddp_slice value, const tddp_store_call *);
tddp_status tddp_file_get(tddp_store *, tddp_slice key, const tddp_store_call *, tddp_blob *out);
tddp_status tddp_file_add(tddp_store *, tddp_slice key, int64_t delta, const tddp_store_call *,
                          int64_t *out);
tddp_status tddp_file_compare_set(tddp_store *, tddp_slice key, tddp_slice expected,
                                  tddp_slice desired, const tddp_store_call *, tddp_blob *out);
tddp_status tddp_file_delete_key(tddp_store *, tddp_slice key, const tddp_store_call *,
                                 int *deleted);
tddp_status tddp_file_num_keys(tddp_store *, const tddp_store_call *, int64_t *out);
tddp_status tddp_file_wait(tddp_store *, const tddp_slice *keys, size_t count,
                           const tddp_store_call *);
tddp_status tddp_file_check(tddp_store *, const tddp_slice *keys, size_t count,
                            const tddp_store_call *, int *all_exist);
tddp_status tddp_file_append(tddp_store *, tddp_slice key, tddp_slice value,
                             const tddp_store_call *);
tddp_status tddp_file_multi_get(tddp_store *, const tddp_slice *keys, size_t count,
                                const tddp_store_call *, tddp_blob *out);
tddp_status tddp_file_multi_set(tddp_store *, const tddp_slice *keys, const tddp_slice *values,
                                size_t count, const tddp_store_call *);
tddp_status tddp_file_queue_push(tddp_store *, tddp_slice key, tddp_slice value,
                                 const tddp_store_call *);
tddp_status tddp_file_queue_pop(tddp_store *, tddp_slice key, bool block, const tddp_store_call *,
                                tddp_blob *out);
tddp_status tddp_file_queue_len(tddp_store *, tddp_slice key, const tddp_store_call *,
                                int64_t *out);
tddp_status tddp_file_list_keys(tddp_store *, const tddp_store_call *, tddp_blob_list *out);
tddp_status tddp_file_barrier(tddp_store *, tddp_slice key, int world_size,
                              const tddp_store_call *);

/* Whether the file holds a queue for a key that has its slash. */
bool tddp_file_has_queue(const tddp_file_log *log, tddp_slice key);

/* Whether a key of the file is one of ours for queues and barriers, which PyTorch does not know. */
bool tddp_file_is_extra(tddp_slice key);

#endif
