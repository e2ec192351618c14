/*
 * What a rank knows of itself and its host, its end, and what it says when it ends. Made and freed
 * on the thread of the group; abort and farewell on any.
 *
 * Invariant: a rank says one thing of its end, before its segment goes: that it has left, or why it
 * has failed. In a forked child nothing is said: the parent lives on.
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

int tddp_shm_name(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].name;
}

tddp_shm_course *tddp_shm_course_of(tddp_shm *shm)
{
    return &shm->course;
}

tddp_shm_choices *tddp_shm_choices_of(const tddp_shm *shm)
{
    /* Kept of what was logged, which is no part of what the context is. */
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

struct tddp_shm_posts *tddp_shm_posts_of(const tddp_shm *shm)
{
    return shm->posts;
}

void *tddp_shm_mail(const tddp_shm *shm, int from)
{
    return shm->peers[from].base + shm->layout.mail;
}

void tddp_shm_attach(tddp_shm *shm, int rank, tddp_shm_segment *segment)
{
    tddp_shm_peer *peer = &shm->peers[rank];
    peer->segment = segment;
    peer->base = segment->base;
    peer->control = (tddp_shm_control *)(void *)segment->base;
    for (size_t i = 0; i < 2; i++) {
        peer->slots[i] = (tddp_shm_slot *)(void *)(segment->base + shm->layout.slots +
                                                   i * shm->layout.slot_bytes);
    }
}

/* --- the end --------------------------------------------------------------------------------- */

static void say(tddp_shm *shm, uint32_t state, tddp_status status, const char *text)
{
    uint32_t nothing = 0;
    tddp_shm_control *control = tddp_shm_self(shm)->control;
    if (!control || shm->pid != tddp_process_id() ||
        !atomic_compare_exchange_strong(&shm->said, &nothing, 1)) {
        return;
    }
    control->status = (uint32_t)status;
    /* Only where the group is whole does the turn count; then no operation is under way. */
    control->left_after = state == TDDP_SHM_LEFT ? shm->turn : 0;
    (void)snprintf(control->text, sizeof control->text, "%s", text);
    atomic_store_explicit(&control->state, state, memory_order_release);
    tddp_shm_announce(control);
}

void tddp_shm_farewell(tddp_shm *shm, tddp_status status, const char *text)
{
    say(shm, TDDP_SHM_FAILED, status, text);
}

void tddp_shm_abort(tddp_shm *shm)
{
    if (shm->pid != tddp_process_id()) {
        return;
    }
    atomic_store_explicit(&shm->aborted, 1, memory_order_release);
    tddp_shm_farewell(shm, TDDP_GROUP_FAILED, "it has ended the group");
    for (int rank = 0; rank < shm->size; rank++) {
        /* The own thread may sleep there. */
        tddp_shm_ring(shm->peers[rank].control);
    }
}

void tddp_shm_destroy(tddp_shm *shm)
{
    if (!shm) {
        return;
    }
    if (shm->posts) {
        tddp_shm_posts_destroy(shm->posts);
    }
    if (shm->peers) {
        say(shm, TDDP_SHM_LEFT, TDDP_OK, "");
    }
    for (int rank = 0; shm->peers && rank < shm->size; rank++) {
        tddp_shm_segment_release(shm->peers[rank].segment);
    }
    free(shm->peers);
    free(shm);
}
