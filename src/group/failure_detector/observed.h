/*
 * What this rank's backend has seen of the group's other ranks. Any thread adds to it, from the
 * creation of the backend to its end; texts stay until it is freed.
 */
#ifndef TDDP_GROUP_OBSERVED_H
#define TDDP_GROUP_OBSERVED_H

#include <pthread.h>

#include <tddp/observation.h>

#include "base/base.h"

typedef struct tddp_observed_entry {
    struct tddp_observed_entry *before; /* what said most of the rank until then */
    tddp_observation seen;
    char text[];
} tddp_observed_entry;

typedef struct tddp_observed {
    pthread_mutex_t mutex;
    int count; /* the group's ranks */
    /* What says most, by rank; made with the first entry. All ranks are asked for, several times,
     * for one description. */
    tddp_observed_entry **latest;
} tddp_observed;

void tddp_observed_init(tddp_observed *self, int count);

/* Also in a forked child, with `forked`. */
void tddp_observed_free(tddp_observed *self, bool forked);

/* The observer's function; without memory for the observation it is lost. */
void tddp_observed_add(void *self, const tddp_observation *seen);

/* What says most of a rank; the kind may be TDDP_OBSERVED_NOTHING. */
tddp_observation tddp_observed_of(tddp_observed *self, int rank);

/* Writes a backend's error text to `out`, and what was seen of ranks that it doesn't name. */
void tddp_observed_describe(tddp_observed *self, const char *text, char *out, size_t size);

#endif
