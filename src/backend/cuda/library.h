/*
 * Finding a shared library that nothing links: by an environment variable, among what the process
 * has loaded, by name, and beside libtorch, where its wheels bring libraries along. Any thread;
 * keeps nothing. Compiled into libtddp and into the modules that need it.
 */
#ifndef TDDP_BACKEND_LIBRARY_H
#define TDDP_BACKEND_LIBRARY_H

#include <stdbool.h>

#include <tddp/status.h>

enum { TDDP_LIBRARY_PATH_BYTES = 4096 };

/* What is looked for. */
typedef struct tddp_library_quest {
    const char *title;          /* for messages: "NCCL" */
    const char *variable;       /* an environment variable that names the file, and no other */
    const char *prefix;         /* what the names of its files begin with */
    const char *const *names;   /* for the loader, the newest first; up to NULL */
    const char *const *folders; /* beside libtorch, with a name each; up to NULL */
    const char *cure;
} tddp_library_quest;

/* A library that was found; it stays loaded. */
typedef struct tddp_library {
    void *handle;
    char path[TDDP_LIBRARY_PATH_BYTES];
} tddp_library;

/* Errors: TDDP_UNAVAILABLE, with what was tried and the cure. */
TDDP_NODISCARD tddp_status tddp_library_find(const tddp_library_quest *quest, tddp_library *out);

/* One of its functions, written to `*into`; false if it has none of this name. */
bool tddp_library_symbol(const tddp_library *library, const char *name, void *into);

/* Sets the text for a library without a call that it should have; TDDP_UNAVAILABLE. */
tddp_status tddp_library_lacks(const tddp_library *library, const char *name, const char *expected);

#endif
