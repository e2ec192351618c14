/*
 * Finds a shared library that nothing links: by an environment variable, among the process's loaded
 * libraries, by name, and beside libtorch, where its wheels install libraries. Any thread; keeps no
 * state. Compiled into libtddp and into modules that need it.
 */
#ifndef TDDP_BACKEND_LIBRARY_H
#define TDDP_BACKEND_LIBRARY_H

#include <stdbool.h>

#include <tddp/status.h>

enum { TDDP_LIBRARY_PATH_BYTES = 4096 };

/* Describes a library to find, and what it must have. */
typedef struct tddp_library_spec {
    const char *title;          /* for messages: "NCCL" */
    const char *expected;       /* likewise, with the oldest version: "NCCL 2.18 or newer" */
    const char *variable;       /* an environment variable that names the only file to try */
    const char *prefix;         /* of its file names */
    const char *const *names;   /* for the loader, the newest first; ends with NULL */
    const char *const *folders; /* paths relative to libtorch's directory; ends with NULL */
    const char *const *symbols; /* functions; ends with NULL */
    const char *hint;
} tddp_library_spec;

/* A loaded library; never unloaded. */
typedef struct tddp_library {
    void *handle;
    char path[TDDP_LIBRARY_PATH_BYTES];
} tddp_library;

/* Loads it, and writes the addresses of its functions to a table of as many pointers to functions,
 * in the order of `symbols`. Errors: TDDP_UNAVAILABLE, with what was tried and the hint, or the
 * function that is missing. */
TDDP_NODISCARD tddp_status tddp_library_load(const tddp_library_spec *spec, tddp_library *out,
                                             void *table);

/* Writes the address of a function to `*into`; false if the library has no such symbol. */
bool tddp_library_symbol(const tddp_library *library, const char *name, void *into);

#endif
