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

#include "backend/wrapper.h"

enum { TDDP_DEVICE_TYPES = TDDP_CUDA + 1 };
_Static_assert((int)TDDP_DEVICE_TYPES <= (int)TDDP_MAX_INNER, "a part for each kind of device");

/* A table whose inner backends are the parts, by kind of memory. NULL: the other part serves this
 * kind as well, and its memory is copied (staging/). Once registered it lives as long as the
 * process. */
typedef tddp_wrapper tddp_devices;

/* Whether a backend's name has this notation, valid or not. */
bool tddp_devices_is_spec(const char *name);

/* Creates the table for a specification, and loads the backends that it names. Errors:
 * TDDP_INVALID_ARGUMENT (an unknown device, one named twice, a backend that doesn't support the
 * memory), those of tddp_backend_find(). */
TDDP_NODISCARD tddp_status tddp_devices_create(const char *text, tddp_devices **out);

/* Frees a table that isn't registered. */
void tddp_devices_discard(tddp_devices *self);

/* The composite backend that has this table; NULL: another backend. */
const tddp_devices *tddp_devices_of(const tddp_backend_v1 *backend);

/* Opens all parts as tddp_backend_open_inner() does, each with its own prefix of the store. */
TDDP_NODISCARD tddp_status tddp_devices_open(const tddp_devices *self,
                                             const tddp_backend_opts *opts, const tddp_wait *wait,
                                             tddp_inner *out);

/* table.c: fills in the table for the parts. */
void tddp_devices_fill(tddp_devices *self, const char *name);

#endif
