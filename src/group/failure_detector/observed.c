/*
 * Keeps and formats what this rank's backend has seen of other ranks. Any thread; nothing waits.
 *
 * Invariant: an entry is never changed or removed before the end, so that its text may be used
 * without the lock.
 */
#include "group/failure_detector/observed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMED = 6, TEXT_BYTES = 600 };

void tddp_observed_init(tddp_observed *self, int count)
{
    pthread_mutex_init(&self->mutex, NULL);
    self->count = count;
    self->latest = NULL;
}

void tddp_observed_free(tddp_observed *self, bool forked)
{
    for (int rank = 0; self->latest && rank < self->count; rank++) {
        while (self->latest[rank]) {
            tddp_observed_entry *before = self->latest[rank]->before;
            free(self->latest[rank]);
            self->latest[rank] = before;
        }
    }
    free(self->latest);
    self->latest = NULL;
    if (!forked) {
        pthread_mutex_destroy(&self->mutex);
    }
}

/* With the lock held. */
static tddp_observation find(const tddp_observed *self, int rank)
{
    const bool known = self->latest && rank >= 0 && rank < self->count && self->latest[rank];
    return known ? self->latest[rank]->seen : (tddp_observation){.rank = rank};
}

void tddp_observed_add(void *data, const tddp_observation *seen)
{
    tddp_observed *self = data;
    const size_t bytes = seen->text ? strlen(seen->text) + 1 : 0;
    tddp_observed_entry *added = tddp_alloc(sizeof *added + bytes);
    if (!added || seen->rank < 0 || seen->rank >= self->count) {
        free(added);
        return;
    }
    added->seen = *seen;
    added->seen.text = bytes > 0 ? memcpy(added->text, seen->text, bytes) : NULL;
    pthread_mutex_lock(&self->mutex);
    if (!self->latest) {
        self->latest = tddp_alloc_array((size_t)self->count, sizeof(tddp_observed_entry *));
    }
    const tddp_observation before = find(self, seen->rank);
    if (self->latest && tddp_observation_precedes(seen, &before)) {
        added->before = self->latest[seen->rank];
        self->latest[seen->rank] = added;
        added = NULL;
    }
    pthread_mutex_unlock(&self->mutex);
    free(added);
}

tddp_observation tddp_observed_of(tddp_observed *self, int rank)
{
    pthread_mutex_lock(&self->mutex);
    const tddp_observation seen = find(self, rank);
    pthread_mutex_unlock(&self->mutex);
    return seen;
}

/* --- text ------------------------------------------------------------------------------------ */

static bool names(const char *text, int rank)
{
    char name[32];
    const int length = snprintf(name, sizeof name, "rank %d", rank);
    for (const char *at = text; (at = strstr(at, name)) != NULL; at += length) {
        if (at[length] < '0' || at[length] > '9') {
            return true;
        }
    }
    return false;
}

/* Adds the ranks of which that was seen, except those that `text` names; returns how many. */
static int add_ranks(tddp_observed *self, tddp_observation_kind kind, const char *before,
                     const char *text, char *out, size_t size)
{
    int found = 0;
    for (int rank = 0; rank < self->count; rank++) {
        const tddp_observation seen = tddp_observed_of(self, rank);
        if (seen.kind == kind && !(text && names(text, rank)) && found++ < NAMED) {
            char one[TEXT_BYTES];
            tddp_add_text(out, size, "%s%s", found > 1 && !text ? ", " : before,
                          tddp_observation_text(&seen, one, sizeof one));
        }
    }
    if (found > NAMED) {
        tddp_add_text(out, size, " and %d more", found - NAMED);
    }
    return found;
}

void tddp_observed_describe(tddp_observed *self, const char *text, char *out, size_t size)
{
    static const tddp_observation_kind gone[] = {TDDP_OBSERVED_ENDED, TDDP_OBSERVED_CLOSED,
                                                 TDDP_OBSERVED_FAILED, TDDP_OBSERVED_LEFT};
    (void)snprintf(out, size, "%s", text);
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) {
        (void)add_ranks(self, gone[i], "; ", text, out, size);
    }
    (void)add_ranks(self, TDDP_OBSERVED_ENTERED, "; entered: ", NULL, out, size);
    if (add_ranks(self, TDDP_OBSERVED_NOT_ENTERED, "; not entered: ", NULL, out, size) > 0) {
        tddp_add_text(out, size, ": slow, stuck, or in another operation?");
    }
}
