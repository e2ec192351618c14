/* A group's backends: one for each kind of memory, or a single one. */
#ifndef TDDP_GROUP_BACKENDS_H
#define TDDP_GROUP_BACKENDS_H

#include <stdbool.h>

#include <tddp/group.h>

#include "backend/wrapper.h"

/* All zero: none. */
typedef struct tddp_device_backend {
    tddp_inner inner;      /* with the table below */
    tddp_backend_v1 table; /* a copy, which outlives the context */
    bool copies;           /* its memory is copied for the CPU's, which it owns (staging) */
} tddp_device_backend;

/* Finds those that the name stands for. */
TDDP_NODISCARD tddp_status tddp_group_backends_find(tddp_group *group, const char *name);

/* Opens them, as a split of those of `parent` (NULL: none): all, or none. */
TDDP_NODISCARD tddp_status tddp_group_backends_open(tddp_group *group, const tddp_group *parent,
                                                    const tddp_backend_opts *opts,
                                                    const tddp_wait *wait);
void tddp_group_backends_close(tddp_group *group);
/* Makes their operations, and waits for copies, end soon. Not with the group's lock. */
void tddp_group_backends_abort(const tddp_group *group);

/* Whether a group made from this one shares its backends' resources; and this rank's part in making
 * such a one, of which it is no member. */
bool tddp_group_splits(const tddp_group *group);
TDDP_NODISCARD tddp_status tddp_group_backends_decline(const tddp_group *group,
                                                       const tddp_wait *wait);

/* What wakes the engine: of the backend for the CPU; NULL: nothing does. */
tddp_eventcount *tddp_group_events(const tddp_group *group);

#endif
