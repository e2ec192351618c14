/*
 * The file store's two parts: file_log.c (the file: its lock, its records) and file.c (the
 * operations).
 */
#ifndef TDDP_STORE_FILE_H
#define TDDP_STORE_FILE_H

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

/* Writes the records if `status` is TDDP_OK, lets go of the file, returns how it went. */
TDDP_NODISCARD tddp_status tddp_file_end(tddp_file_log *log, tddp_file_access *access,
                                         tddp_status status);

#endif
