/*
 * A log file that torchrun writes for a worker, or for all of them.
 */
#ifndef TDDP_LAUNCH_LOG_FILE_H
#define TDDP_LAUNCH_LOG_FILE_H

#include "launch/output/console.h"

typedef struct tddp_launch_log_file {
    int fd;        /* -1: there is none */
    char *path;    /* owned */
    bool told;     /* people know that it cannot be written */
    bool behind;   /* something was lost: what comes begins anew with a line */
    bool mid_line; /* what came last did not end a line */
} tddp_launch_log_file;

/* Makes the file; takes over `path` in any case (NULL is short memory). Errors: TDDP_SYSTEM,
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_log_file_open(tddp_launch_log_file *file, char *path);

/* Appends bytes. Where that fails, once a file `console` is told why; the bytes are lost, and
 * later ones are tried again from the start of a line on. */
void tddp_launch_log_file_write(tddp_launch_log_file *file, const char *data, size_t size,
                                tddp_launch_console *console);

void tddp_launch_log_file_close(tddp_launch_log_file *file);

#endif
