/*
 * Headers, by which ranks compare their calls. On the thread that runs the operation.
 *
 * In every collective each pair of ranks exchanges a header, even if no data go between them; by
 * recursive doubling (doubling.c) only those that are partners. It contains the rank's call, and
 * a payload of at most EAGER_BYTES.
 *
 * Invariant: in each operation a rank sends all of its headers before it waits for any, and does
 * not complete before it has received all. So a peer is at most one header ahead, and two inboxes
 * suffice; and a rank that detects a mismatch has sent its call to all others, so that they detect
 * it too. (By recursive doubling only to the partners, and one after the other; but there too no
 * rank completes before all have entered.)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"

_Static_assert(sizeof(tddp_call) <= HEADER_BYTES, "a header has its place");

/* --- links ----------------------------------------------------------------------------------- */

static tddp_status make_link(tddp_coll *coll, int peer)
{
    const size_t bytes = HEADER_BYTES + EAGER_BYTES;
    tddp_coll_link *link = &coll->links[peer];
    link->memory = tddp_alloc(3 * bytes);
    if (!link->memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    link->inbox[0] = link->memory;
    link->inbox[1] = link->memory + bytes;
    link->outbox = link->memory + 2 * bytes;
    return TDDP_OK;
}

tddp_status tddp_coll_make_links(tddp_coll *coll)
{
    coll->links = tddp_alloc_array((size_t)coll->size, sizeof *coll->links);
    tddp_status status = coll->links ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (int peer = 0; peer < coll->size && status == TDDP_OK; peer++) {
        status = peer == coll->rank ? TDDP_OK : make_link(coll, peer);
    }
    return status;
}

/* A receive of the peer's next header but one, or, at first, of the next. */
static tddp_status post_arrival(tddp_coll *coll, int peer, unsigned index)
{
    tddp_coll_link *link = &coll->links[peer];
    return tddp_coll_start_recv(coll, peer, HEADER_TAG, link->inbox[index],
                                HEADER_BYTES + EAGER_BYTES, &link->arrivals[index]);
}

tddp_status tddp_coll_expect_headers(tddp_coll *coll)
{
    tddp_status status = TDDP_OK;
    for (int peer = 0; peer < coll->size && status == TDDP_OK; peer++) {
        status = peer == coll->rank ? TDDP_OK : post_arrival(coll, peer, 0);
    }
    return status;
}

void tddp_coll_free_links(tddp_coll *coll)
{
    for (int peer = 0; coll->links && peer < coll->size; peer++) {
        tddp_coll_link *link = &coll->links[peer];
        tddp_coll_release(coll, &link->departure);
        tddp_coll_release(coll, &link->arrivals[0]);
        tddp_coll_release(coll, &link->arrivals[1]);
        free(link->memory);
    }
    free(coll->links);
}

/* --- steps ----------------------------------------------------------------------------------- */

tddp_status tddp_coll_post_inbox(tddp_coll *coll, int peer)
{
    return post_arrival(coll, peer, coll->links[peer].next ^ 1u);
}

tddp_status tddp_coll_post_header(tddp_coll *coll, const tddp_op *op, const tddp_coll_step *step)
{
    tddp_coll_link *link = &coll->links[step->peer];
    const tddp_call call = tddp_call_of(op, coll->rank, step->peer);
    memcpy(link->outbox, &call, sizeof call);
    if (step->bytes > 0) {
        memcpy(link->outbox + HEADER_BYTES, step->from, step->bytes);
    }
    return tddp_coll_start_send(coll, step->peer, HEADER_TAG, link->outbox,
                                HEADER_BYTES + step->bytes, &link->departure);
}

static tddp_status compare(tddp_coll *coll, const tddp_op *op, int peer, tddp_calls *now)
{
    const tddp_coll_link *link = &coll->links[peer];
    now->mine = tddp_call_of(op, coll->rank, peer);
    memcpy(&now->theirs, link->inbox[link->next], sizeof now->theirs);
    return tddp_calls_agree(&now->mine, &now->theirs)
               ? TDDP_OK
               : tddp_calls_mismatch(tddp_coll_rank_name(coll, coll->rank),
                                     tddp_coll_rank_name(coll, peer), now, &link->before);
}

tddp_status tddp_coll_await_header(tddp_coll *coll, const tddp_op *op, int peer)
{
    tddp_coll_link *link = &coll->links[peer];
    tddp_calls now;
    tddp_status status =
        tddp_coll_await(coll, &coll->program.wait, link->arrivals[link->next], peer, NULL);
    if (status == TDDP_OK) {
        status = compare(coll, op, peer, &now);
    }
    if (status == TDDP_OK) {
        tddp_coll_release(coll, &link->arrivals[link->next]);
        link->next ^= 1u;
        link->before = now;
        link->agreed = op->sequence;
    }
    return status;
}

/* --- failures -------------------------------------------------------------------------------- */

/* Whether a peer has sent its header for this collective. */
static bool has_entered(const tddp_coll *coll, const tddp_op *op, int peer)
{
    const tddp_coll_link *link = &coll->links[peer];
    return link->agreed == op->sequence || tddp_coll_is_complete(coll, link->arrivals[link->next]);
}

/* Reports which ranks have sent their headers; all of them do, unless headers are exchanged with
 * partners alone. */
static void observe_entries(const tddp_coll *coll, const tddp_op *op)
{
    size_t partners = 0;
    for (size_t i = 0; i < coll->program.count; i++) {
        partners += coll->program.steps[i].kind == STEP_HEADER;
    }
    for (int peer = 0; peer < coll->size && partners >= (size_t)coll->size - 1; peer++) {
        tddp_observation seen = {.kind = TDDP_OBSERVED_ENTERED,
                                 .rank = tddp_coll_rank_name(coll, peer)};
        if (peer != coll->rank && !has_entered(coll, op, peer)) {
            const tddp_call *last = &coll->links[peer].before.theirs;
            seen.kind = TDDP_OBSERVED_NOT_ENTERED;
            seen.sequence = last->sequence;
            seen.text = last->sequence > 0 ? tddp_op_name((tddp_op_kind)last->kind) : NULL;
        }
        if (peer != coll->rank) {
            tddp_observe(&coll->observer, &seen);
        }
    }
}

tddp_status tddp_coll_describe(tddp_coll *coll, const tddp_op *op, tddp_status status)
{
    char text[4096];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    for (size_t i = 0; i < coll->program.count; i++) {
        const tddp_coll_step *step = &coll->program.steps[i];
        tddp_calls now;
        if (step->kind == STEP_HEADER && coll->links[step->peer].agreed != op->sequence &&
            has_entered(coll, op, step->peer) && compare(coll, op, step->peer, &now)) {
            return TDDP_MISMATCH;
        }
    }
    if (status == TDDP_TIMEOUT) {
        observe_entries(coll, op);
    }
    return tddp_fail(status, "%s", text);
}
