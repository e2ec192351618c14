/*
 * What passes operations on to a backend has its table and context: a group (group/backends.c), and
 * backends over others: hosts/ (communicators between hosts), staging/ (copies of memory of the
 * other kind), fake/ (faults). open.c and group/backends.c put these together.
 */
#ifndef TDDP_WRAPPER_H
#define TDDP_WRAPPER_H

#include <tddp/backend.h>

/* A context of another backend. All zero: none; each of the functions then does nothing. */
typedef struct tddp_inner {
    const tddp_backend_v1 *backend; /* NULL: not open */
    void *context;
    tddp_store *store; /* its own prefix of the group's store; NULL: the group's store itself */
} tddp_inner;

/* The one path by which it is released: destroys the context, then releases the store. The
 * thread's error text stays. */
void tddp_inner_close(tddp_inner *self);

void tddp_inner_abort(const tddp_inner *self);

/* For slots that the other backend may not have. */
void tddp_inner_report_failure(const tddp_inner *self, tddp_status status, const char *text);
TDDP_NODISCARD tddp_status tddp_inner_decline(const tddp_inner *self, const tddp_wait *wait);

/* adapter.c: has an open backend without events() served by a table with them, unless it is one for
 * devices. Closes it on failure. */
TDDP_NODISCARD tddp_status tddp_adapter_wrap(const tddp_backend_opts *opts, tddp_inner *inner);

#endif
