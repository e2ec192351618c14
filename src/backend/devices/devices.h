/*
 * A composite backend with a part for each kind of device, in PyTorch's notation:
 * "cpu:gloo,cuda:nccl". An operation uses the part for its memory.
 *
 *     spec.c   parses such a name and creates its table
 *     table.c  a group's contexts, one for each part
 */
#ifndef TDDP_DEVICES_H
#define TDDP_DEVICES_H

#include <stdbool.h>

#include <tddp/backend.h>

enum { TDDP_DEVICE_TYPES = TDDP_CUDA + 1 };

/* A table and its parts by kind of memory. NULL: the other part serves this kind as well, and
 * the group copies. Lives as long as the process. */
typedef struct tddp_devices {
    tddp_backend_v1 table; /* first member, so that a pointer to it is a pointer to this */
    const tddp_backend_v1 *parts[TDDP_DEVICE_TYPES];
    struct tddp_devices *serving; /* the tables that serve instead, one for each combination of
                                     backends that serve the parts */
    struct tddp_devices *next;
} tddp_devices;

/* Whether a backend's name has this notation, valid or not. */
bool tddp_devices_is_spec(const char *name);

/* Creates the table for a specification, and loads the backends that it names. Errors:
 * TDDP_INVALID_ARGUMENT (an unknown device, one named twice, a backend that doesn't support the
 * memory), those of tddp_backend_find(). */
TDDP_NODISCARD tddp_status tddp_devices_create(const char *text, tddp_devices **out);

/* Frees a table that isn't registered. */
void tddp_devices_discard(tddp_devices *self);

/* The composite backend that has this table; NULL: another backend. */
tddp_devices *tddp_devices_of(const tddp_backend_v1 *backend);

/* Opens all parts as tddp_backend_open() does, each with its own prefix of the store. */
TDDP_NODISCARD tddp_status tddp_devices_open(tddp_devices *self, const tddp_backend_opts *opts,
                                             const tddp_wait *wait, const tddp_backend_v1 **serving,
                                             void **context);

/* table.c: fills in the table for the parts. */
void tddp_devices_fill(tddp_devices *self, const char *name);

/* The part that runs an operation in a context, and the part's context. */
const tddp_backend_v1 *tddp_devices_part(void *context, const tddp_op *op, void **part_context);

#endif
