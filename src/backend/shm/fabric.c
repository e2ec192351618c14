/*
 * What the groups of a rank have in common: its host's segments. The first group that shares memory
 * makes them and leaves them here. A later group of ranks among those takes a view in the arena of
 * each: it needs no descriptor, no mapping and no connection of its own, and memory of one group is
 * memory of all. Any thread, under the fabric's lock, except in a forked child, which changes
 * nothing.
 *
 * Invariant: a view is given back once every other rank of its group has detached from it. One that
 * a rank which died was part of stays until the segments end.
 */
#include <stdio.h>
#include <stdlib.h>

#include "backend/shm/control.h"

/* A view of this rank's. */
typedef struct tddp_shm_view {
    tddp_shm_control *control;
    uint32_t others; /* ranks that attach it */
    tddp_shm_span span;
    struct tddp_shm_view *next; /* of those that this rank has detached from */
} tddp_shm_view;

struct tddp_shm_fabric {
    _Atomic int references;
    pid_t pid;
    pthread_mutex_t mutex;
    char id[TDDP_SHM_FABRIC_ID_BYTES];
    int rank;
    int size;                    /* 0: no group has left its segments */
    tddp_shm_segment **segments; /* of the first group, by its ranks */
    tddp_shm_view *detached;
};

tddp_status tddp_shm_fabric_create(tddp_shm_fabric **out)
{
    tddp_shm_fabric *fabric = tddp_alloc(sizeof *fabric);
    if (!fabric) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&fabric->references, 1);
    fabric->pid = tddp_process_id();
    pthread_mutex_init(&fabric->mutex, NULL);
    *out = fabric;
    return TDDP_OK;
}

tddp_shm_fabric *tddp_shm_fabric_retain(tddp_shm_fabric *fabric)
{
    if (fabric) {
        atomic_fetch_add(&fabric->references, 1);
    }
    return fabric;
}

void tddp_shm_fabric_release(tddp_shm_fabric *fabric)
{
    if (!fabric || atomic_fetch_sub(&fabric->references, 1) != 1) {
        return;
    }
    while (fabric->detached) {
        tddp_shm_view *first = fabric->detached;
        fabric->detached = first->next;
        free(first);
    }
    for (int rank = 0; rank < fabric->size; rank++) {
        tddp_shm_segment_release(fabric->segments[rank]);
    }
    free(fabric->segments);
    if (fabric->pid == tddp_process_id()) {
        pthread_mutex_destroy(&fabric->mutex);
    }
    free(fabric);
}

void tddp_shm_fabric_fill(tddp_shm_fabric *fabric, const tddp_shm *shm, const char *id)
{
    const size_t count = (size_t)shm->size;
    tddp_shm_segment **segments = fabric ? tddp_alloc_array(count, sizeof *segments) : NULL;
    if (!segments) {
        return; /* later groups have segments of their own */
    }
    pthread_mutex_lock(&fabric->mutex);
    if (fabric->size == 0) {
        for (int rank = 0; rank < shm->size; rank++) {
            segments[rank] = tddp_shm_segment_retain(shm->peers[rank].segment);
        }
        (void)snprintf(fabric->id, sizeof fabric->id, "%s", id);
        fabric->rank = shm->rank;
        fabric->size = shm->size;
        fabric->segments = segments;
        segments = NULL;
    }
    pthread_mutex_unlock(&fabric->mutex);
    free(segments);
}

tddp_eventcount *tddp_shm_fabric_events(tddp_shm_fabric *fabric)
{
    tddp_eventcount *events = NULL;
    if (fabric) {
        pthread_mutex_lock(&fabric->mutex);
        if (fabric->size > 0) {
            char *own = fabric->segments[fabric->rank]->base;
            events = &((tddp_shm_control *)(void *)own)->events;
        }
        pthread_mutex_unlock(&fabric->mutex);
    }
    return events;
}

/* --- views ----------------------------------------------------------------------------------- */

/* Gives back the views that nobody uses any more. With the lock held. */
static void sweep(tddp_shm_fabric *fabric)
{
    for (tddp_shm_view **at = &fabric->detached; *at;) {
        tddp_shm_view *each = *at;
        if (atomic_load(&each->control->detached) < each->others) {
            at = &each->next;
            continue;
        }
        tddp_shm_arena_release(&each->span);
        *at = each->next;
        free(each);
    }
}

/* With the lock held. */
static tddp_status take(const tddp_shm_fabric *fabric, const tddp_shm *shm, tddp_shm_span *out)
{
    tddp_shm_segment *segment = fabric->segments[fabric->rank];
    tddp_status status = tddp_shm_check_memory(shm->size, shm->layout.staging);
    status = status ? status : tddp_shm_arena_reserve(segment, shm->layout.bytes, out);
    if (status) {
        return status;
    }
    const size_t at = (size_t)(out->data - segment->base);
    status = tddp_shm_allocate_pages(segment->fd, at, shm->layout.staging);
    if (status) {
        tddp_shm_arena_release(out);
    }
    return status;
}

void tddp_shm_fabric_take_view(tddp_shm_fabric *fabric, tddp_shm *shm, tddp_shm_place *out)
{
    *out = (tddp_shm_place){.id = "-"};
    tddp_shm_view *view = fabric ? tddp_alloc(sizeof *view) : NULL;
    if (!view) {
        return;
    }
    pthread_mutex_lock(&fabric->mutex);
    sweep(fabric);
    if (fabric->size > 0 && take(fabric, shm, &view->span) == TDDP_OK) {
        tddp_shm_segment *own = fabric->segments[fabric->rank];
        out->at = (size_t)(view->span.data - own->base);
        tddp_shm_attach(shm, shm->rank, tddp_shm_segment_retain(own), out->at);
        view->control = tddp_shm_self(shm)->control;
        view->others = (uint32_t)shm->size - 1;
        shm->view = view;
        shm->fabric = tddp_shm_fabric_retain(fabric);
        (void)snprintf(out->id, sizeof out->id, "%s", fabric->id);
        out->rank = fabric->rank;
        view = NULL;
    }
    pthread_mutex_unlock(&fabric->mutex);
    free(view);
}

void tddp_shm_fabric_drop_view(tddp_shm *shm)
{
    if (shm->view) {
        shm->view->others = 0;
        tddp_shm_fabric_detach(shm);
        tddp_shm_segment_release(tddp_shm_self(shm)->segment);
        *tddp_shm_self(shm) = (tddp_shm_peer){.group_rank = tddp_shm_self(shm)->group_rank,
                                              .rank_name = tddp_shm_self(shm)->rank_name};
    }
}

tddp_status tddp_shm_fabric_attach(tddp_shm *shm, int rank, const tddp_shm_place *place)
{
    const tddp_shm_fabric *fabric = shm->fabric;
    const bool known = place->rank >= 0 && place->rank < fabric->size;
    tddp_shm_segment *segment = known ? fabric->segments[place->rank] : NULL;
    const size_t bytes = segment ? segment->bytes : 0;
    if (place->at % TDDP_SHM_PAGE != 0 || place->at > bytes ||
        bytes - place->at < shm->layout.bytes) {
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d has its part of a shared segment at %zu of rank %d's %zu bytes: "
                         "expected one version of libtddp on all ranks",
                         tddp_shm_rank_name(shm, rank), place->at, place->rank, bytes);
    }
    tddp_shm_attach(shm, rank, tddp_shm_segment_retain(segment), place->at);
    return TDDP_OK;
}

void tddp_shm_fabric_detach(tddp_shm *shm)
{
    tddp_shm_fabric *fabric = shm->fabric;
    if (!fabric) {
        return;
    }
    if (shm->pid == tddp_process_id()) {
        for (int rank = 0; rank < shm->size; rank++) {
            if (rank != shm->rank && shm->peers[rank].control) {
                atomic_fetch_add(&shm->peers[rank].control->detached, 1);
            }
        }
        pthread_mutex_lock(&fabric->mutex);
        shm->view->next = fabric->detached;
        fabric->detached = shm->view;
        sweep(fabric);
        pthread_mutex_unlock(&fabric->mutex);
    } else {
        free(shm->view);
    }
    shm->view = NULL;
    shm->fabric = NULL;
    tddp_shm_fabric_release(fabric);
}
