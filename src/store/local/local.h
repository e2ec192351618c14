/*
 * Stores of one machine, in a file or in this process's memory. Their parts:
 *
 *   local.c  opening and closing, and one access with its deadline
 *   log.c    the file: lock and records
 *   ops.c    the operations, of both kinds
 *   queues.c those that only the one in memory has
 */
#ifndef TDDP_STORE_LOCAL_H
#define TDDP_STORE_LOCAL_H

#include <pthread.h>
#include <sys/types.h>

#include "store/store_impl.h"
#include "store/values.h"

/* What is known of a file of records, or the store in memory itself. Not for several threads at
 * once. */
typedef struct tddp_local_log {
    const char *path;      /* NULL: in memory */
    tddp_store_map queues; /* in memory; see queue.h */
    tddp_store_map values; /* by the keys in the file: "/k" for users', others without slash */
    off_t read_to;
    dev_t device; /* of the file that `values` came from */
    ino_t inode;
} tddp_local_log;

typedef struct tddp_local_access {
    int fd; /* -1: there is no file, which reads as an empty one */
    tddp_bytes records;
} tddp_local_access;

/* Opens and locks the file and reads what is new. TDDP_TIMEOUT: another process has the lock now;
 * try again. A writer makes the file if it is absent. */
TDDP_NODISCARD tddp_status tddp_local_begin(tddp_local_log *log, bool write,
                                            tddp_local_access *access);

/* Adds a record to those to be written. The values known follow at the next access, from the file.
 */
TDDP_NODISCARD tddp_status tddp_local_put(tddp_local_access *access, tddp_slice key,
                                          tddp_slice value);
TDDP_NODISCARD tddp_status tddp_local_put_deletion(tddp_local_access *access, tddp_slice key);

/* Writes the records if `status` is TDDP_OK, and unlocks and closes the file. Returns the first
 * failure. */
TDDP_NODISCARD tddp_status tddp_local_end(tddp_local_log *log, tddp_local_access *access,
                                          tddp_status status);

/* --- local.c --------------------------------------------------------------------------------- */

typedef struct tddp_local_store {
    tddp_store base;
    pthread_mutex_t mutex;
    pid_t pid; /* that counted in; a forked child must not count out */
    int world_size;
    char *path; /* NULL: in memory */
    tddp_local_log log;
    tddp_waiter *waiters; /* for a change of a store in memory */
} tddp_local_store;

/* For texts. */
static inline const char *tddp_local_name(const tddp_store *store)
{
    const tddp_local_store *local = (const tddp_local_store *)store;
    return local->path ? local->path : store->name;
}

/* What one access is to do; the values are up to date. */
typedef struct tddp_local_task {
    tddp_status (*body)(struct tddp_local_task *task, tddp_local_log *log,
                        tddp_local_access *access);
    bool write;
    const tddp_slice *keys;
    const tddp_slice *values;
    size_t count;
    int64_t number; /* delta in, sum out; or a result */
    int64_t other;  /* the body's own second number */
    tddp_blob *blobs;
    tddp_blob_list *list;
} tddp_local_task;

/* One access, tried again until the deadline while another process has the lock, or while the body
 * returns TDDP_NOT_FOUND, which it does before it changes anything. */
TDDP_NODISCARD tddp_status tddp_local_run(tddp_store *store, tddp_local_task *task,
                                          const tddp_store_call *call);

/* The same on keys, which a failure names if time runs out. */
TDDP_NODISCARD tddp_status tddp_local_run_on_keys(tddp_store *store, tddp_local_task *task,
                                                  const tddp_slice *keys, size_t count,
                                                  const tddp_store_call *call);

/* Adds to a counter and has the sum written. */
TDDP_NODISCARD tddp_status tddp_local_put_sum(tddp_local_log *log, tddp_local_access *access,
                                              tddp_slice key, int64_t delta, int64_t *sum);

void tddp_local_destroy(tddp_store *store);

/* --- ops.c ----------------------------------------------------------------------------------- */

extern const tddp_store_ops tddp_file_ops;
extern const tddp_store_ops tddp_hash_ops;

/* --- queues.c -------------------------------------------------------------------------------- */

tddp_status tddp_local_queue_push(tddp_store *, tddp_slice key, tddp_slice value,
                                  const tddp_store_call *);
tddp_status tddp_local_queue_pop(tddp_store *, tddp_slice key, bool block, const tddp_store_call *,
                                 tddp_blob *out);
tddp_status tddp_local_queue_len(tddp_store *, tddp_slice key, const tddp_store_call *,
                                 int64_t *out);

#endif
