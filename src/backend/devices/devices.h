/*
 * A backend for each kind of device, by PyTorch's notation: "cpu:gloo,cuda:nccl". An operation goes
 * to the one of its memory.
 *
 *     text.c   what such a name says, and the table of that name
 *     table.c  what a group has: a context of each part
 */
#ifndef TDDP_DEVICES_H
#define TDDP_DEVICES_H

#include <stdbool.h>

#include <tddp/backend.h>

enum { TDDP_DEVICE_TYPES = TDDP_CUDA + 1 };

/* A table, and what serves each kind of memory beneath it; NULL: what serves the other kind does,
 * and the group copies. Lives as long as the process. */
typedef struct tddp_devices {
    tddp_backend_v1 table; /* first: a pointer to it is one to this */
    const tddp_backend_v1 *parts[TDDP_DEVICE_TYPES];
    struct tddp_devices *serving; /* those that serve in its place, by what serves in the parts' */
    struct tddp_devices *next;
} tddp_devices;

/* Whether a backend's name is such a text, fit or not. */
bool tddp_devices_is_text(const char *name);

/* Makes the table for a text; what it names is found and loaded. tddp_devices_discard().
 * Errors: TDDP_INVALID_ARGUMENT (unknown devices, one twice, a backend that does not take such
 * memory), those of tddp_backend_find(). */
TDDP_NODISCARD tddp_status tddp_devices_create(const char *text, tddp_devices **out);

/* For one that nobody knows of. */
void tddp_devices_discard(tddp_devices *self);

/* The one whose table this is; NULL: it is another backend's. */
tddp_devices *tddp_devices_of(const tddp_backend_v1 *backend);

/* Opens all parts, each as tddp_backend_open() does, with a store of its own. */
TDDP_NODISCARD tddp_status tddp_devices_open(tddp_devices *self, const tddp_backend_opts *opts,
                                             const tddp_wait *wait, const tddp_backend_v1 **serving,
                                             void **context);

/* table.c: fills in a table for these parts. */
void tddp_devices_fill(tddp_devices *self, const char *name);

/* What carries out an operation in a context of a table that serves, and its context. */
const tddp_backend_v1 *tddp_devices_part(void *context, const tddp_op *op, void **part_context);

#endif
