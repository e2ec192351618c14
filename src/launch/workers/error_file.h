/*
 * The file in which a worker reports its error, in PyTorch's format.
 */
#ifndef TDDP_LAUNCH_ERROR_FILE_H
#define TDDP_LAUNCH_ERROR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tddp/status.h>

typedef enum tddp_launch_error_state {
    TDDP_LAUNCH_ERROR_NONE, /* no file */
    TDDP_LAUNCH_ERROR_READ,
    TDDP_LAUNCH_ERROR_NOT_TO_BE_READ, /* no ordinary file, or not for us */
    TDDP_LAUNCH_ERROR_TIMER,          /* no file: torchrun ended the worker, and knows why */
    TDDP_LAUNCH_ERROR_NOT_UNDERSTOOD, /* neither a message nor a traceback in it */
} tddp_launch_error_state;

typedef struct tddp_launch_error {
    tddp_launch_error_state state;
    char *message;     /* "ArgumentError: boom"; NULL: none */
    char *traceback;   /* several lines; NULL: none */
    int64_t timestamp; /* seconds since 1970; 0: none */
    bool consequence;  /* it failed because another rank had: extraInfo's "consequence" is "1" */
} tddp_launch_error;

/*
 * Reads {"message": {"message": M, "extraInfo": {"py_callstack": T, "timestamp": S}}} or
 * {"message": M, "timestamp": S}. Whatever is absent or malformed stays empty. Caller:
 * tddp_launch_error_free().
 */
void tddp_launch_error_parse(const char *text, size_t size, tddp_launch_error *out);

/* The same from a file; empty if there is none. Never waits, whatever stands there. */
void tddp_launch_error_read(const char *path, tddp_launch_error *out);

void tddp_launch_error_free(tddp_launch_error *error);

#endif
