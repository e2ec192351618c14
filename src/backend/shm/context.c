/*
 * The context of a rank: accessors, abort, and the state that it publishes when it ends. Created
 * and destroyed on the group's thread; tddp_shm_abort() and tddp_shm_report_failure() on any.
 *
 * Invariant: a rank publishes one final state before its segment is unmapped: that it left, or why
 * it failed. A forked child publishes nothing: the parent still takes part.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/control.h"

int tddp_shm_rank(const tddp_shm *shm)
{
    return shm->rank;
}

int tddp_shm_size(const tddp_shm *shm)
{
    return shm->size;
}

int tddp_shm_rank_name(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].rank_name;
}

tddp_shm_cursor *tddp_shm_cursor_of(tddp_shm *shm)
{
    return &shm->cursor;
}

tddp_shm_choices *tddp_shm_choices_of(const tddp_shm *shm)
{
    /* Logging changes only the record of what was logged, which isn't part of the context's
     * value. */
    return &((tddp_shm *)(uintptr_t)shm)->choices;
}

size_t tddp_shm_cache_bytes(const tddp_shm *shm)
{
    return shm->cache_bytes;
}

int tddp_shm_ranks_per_core(const tddp_shm *shm)
{
    return shm->ranks_per_core;
}

struct tddp_shm_matching *tddp_shm_matching_of(const tddp_shm *shm)
{
    return shm->matching;
}

void *tddp_shm_p2p_region(const tddp_shm *shm, int from)
{
    return shm->peers[from].view + shm->layout.p2p;
}

tddp_eventcount *tddp_shm_events(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].events;
}

void tddp_shm_attach(tddp_shm *shm, int rank, tddp_shm_segment *segment, size_t at)
{
    tddp_shm_peer *peer = &shm->peers[rank];
    peer->segment = segment;
    peer->view = segment->base + at;
    peer->control = (tddp_shm_control *)(void *)peer->view;
    peer->events = &((tddp_shm_control *)(void *)segment->base)->events;
    for (size_t i = 0; i < 2; i++) {
        peer->slots[i] =
            (tddp_shm_slot *)(void *)(peer->view + shm->layout.slots + i * shm->layout.slot_bytes);
    }
}

/* --- the end --------------------------------------------------------------------------------- */

static void publish_state(tddp_shm *shm, uint32_t state, tddp_status status, const char *text)
{
    uint32_t unpublished = 0;
    tddp_shm_control *control = tddp_shm_self(shm)->control;
    if (!control || shm->pid != tddp_process_id() ||
        !atomic_compare_exchange_strong(&shm->state_published, &unpublished, 1)) {
        return;
    }
    control->status = (uint32_t)status;
    /* The epoch counts only if the group is intact; then no operation is running. */
    control->last_epoch = state == TDDP_SHM_LEFT ? shm->epoch : 0;
    (void)snprintf(control->text, sizeof control->text, "%s", text);
    atomic_store_explicit(&control->state, state, memory_order_release);
    tddp_shm_notify(shm);
}

void tddp_shm_report_failure(tddp_shm *shm, tddp_status status, const char *text)
{
    publish_state(shm, TDDP_SHM_FAILED, status, text);
}

void tddp_shm_abort(tddp_shm *shm)
{
    if (shm->pid != tddp_process_id()) {
        return;
    }
    atomic_store_explicit(&shm->aborted, 1, memory_order_release);
    tddp_shm_report_failure(shm, TDDP_GROUP_FAILED, "it aborted the group");
    for (int rank = 0; rank < shm->size; rank++) {
        /* This process's own threads wait for peers. */
        tddp_eventcount_notify(&shm->peers[rank].control->published);
    }
    tddp_eventcount_notify(tddp_shm_events(shm, shm->rank));
}

void tddp_shm_destroy(tddp_shm *shm)
{
    if (!shm) {
        return;
    }
    if (shm->matching) {
        tddp_shm_matching_destroy(shm->matching);
    }
    if (shm->peers) {
        tddp_shm_stop_polling(shm);
        publish_state(shm, TDDP_SHM_LEFT, TDDP_OK, "");
        tddp_shm_fabric_detach(shm);
    }
    for (int rank = 0; shm->peers && rank < shm->size; rank++) {
        tddp_shm_segment_release(shm->peers[rank].segment);
    }
    free(shm->peers);
    free(shm);
}
