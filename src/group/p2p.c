/*
 * Sends and receives. They are posted by their caller's thread, and finish concurrently with each
 * other and the queue: each on a thread lent to it, which is reserved before anything is posted, or
 * on the caller's if it waits; or all on the engine's thread, if that polls the group (p2p_poll.c).
 *
 * Invariant: messages are numbered and posted with `order` held, so that messages to one peer match
 * in the order of their numbers. Locks are taken in the order `order`, then `mutex`, then the
 * group's; only `order` is ever held while the backend runs.
 */
#include <stdio.h>
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

void tddp_group_p2p_init(tddp_group_p2p *p2p)
{
    pthread_mutex_init(&p2p->order, NULL);
    pthread_mutex_init(&p2p->mutex, NULL);
}

void tddp_group_p2p_destroy(tddp_group_p2p *p2p)
{
    pthread_mutex_destroy(&p2p->order);
    pthread_mutex_destroy(&p2p->mutex);
}

tddp_status tddp_group_p2p_finish(tddp_group *group, tddp_work *work)
{
    int source = TDDP_ANY_SOURCE;
    tddp_status status = TDDP_OK;
    if (work->pending_status) {
        status = tddp_group_kept_failure(work);
    } else if (work->on_device) {
        status = work->launched ? TDDP_OK : tddp_group_device_launch(group, work);
        if (status == TDDP_OK) {
            status = tddp_group_device_finish(group, work, &source);
        }
    } else {
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        status = own->backend->finish(own->context, work->request, &source);
        if (status != TDDP_CANCELED) {
            tddp_group_release_turn(group, work);
        }
    }
    if (status == TDDP_OK && work->op.kind == TDDP_OP_RECV) {
        work->source = source;
    }
    return status;
}

/* Completes a work that no other thread has. */
static void complete(tddp_group *group, tddp_work *work, tddp_status status)
{
    tddp_group_complete_in_flight(group, work, status);
    tddp_work_release(work);
    tddp_group_end_in_flight(group, true);
}

/* On a lent thread. */
static void finish_and_complete(void *data, void *posted)
{
    tddp_group *group = data;
    tddp_group_enter_thread(group);
    tddp_status status = tddp_group_p2p_finish(group, posted);
    tddp_group_complete_in_flight(group, posted, status);
    tddp_work_release(posted);
    tddp_group_enter_thread(NULL);
    tddp_group_end_in_flight(group, true);
}

/* Hands a posted work over to the thread that is reserved for it, which is given back if it could
 * not be posted. */
static void hand_over(tddp_group *group, tddp_work *work, tddp_status status)
{
    if (status) {
        tddp_blocking_release();
    } else {
        work->call = (tddp_blocking_call){finish_and_complete, group, work, NULL};
        tddp_blocking_start(&work->call);
    }
}

static tddp_status prepare(tddp_group *group, tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return own->backend->prepare
               ? own->backend->prepare(own->context, &work->op, &work->op.prepared)
               : TDDP_OK;
}

/* Numbers a work, and posts it unless it could not be prepared. With `order` held. */
static tddp_status post_in_order(tddp_group *group, tddp_work *work, tddp_status status)
{
    work->op.sequence = ++group->p2p.sequence;
    tddp_recorder_queued_and_started(group, work, tddp_now_ns());
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
    if (status == TDDP_OK && work->op.batch_index == 0) { /* a batch has one turn */
        status = tddp_group_reserve_turn(group, work);
    }
    if (status == TDDP_OK) {
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        status = tddp_group_queues(group, &work->op)
                     ? tddp_group_device_post(group, work)
                     : own->backend->post(own->context, &work->op, &work->request);
    }
    if (status) {
        tddp_group_release_turn(group, work);
    }
    return status;
}

/* Launches a posted work that would not wait for that. With `order` held. */
static void launch_inline(tddp_group *group, tddp_work *work)
{
    if (tddp_group_launches_at_once(group, work)) {
        tddp_status status = tddp_group_device_launch(group, work);
        if (status) {
            tddp_group_keep_failure(work, status);
        }
    }
}

/* Posts a work, and with `on_thread` queues it for the reserved thread. It is prepared before it
 * has a number, so that other messages don't wait for that. */
static tddp_status post(tddp_group *group, tddp_work *work, bool on_thread)
{
    tddp_group_p2p *p2p = &group->p2p;
    atomic_store(&work->expiry, tddp_deadline_after_ms(work->op.timeout_ms));
    tddp_status status = prepare(group, work);
    pthread_mutex_lock(&p2p->order);
    status = post_in_order(group, work, status);
    if (on_thread) {
        if (status == TDDP_OK) {
            launch_inline(group, work);
        }
        hand_over(group, work, status);
    }
    pthread_mutex_unlock(&p2p->order);
    return status;
}

/* Counts a work as in flight, and reserves a thread for it if it needs one. */
static tddp_status begin(tddp_group *group, const tddp_work *work, bool on_thread)
{
    tddp_status status = tddp_group_begin_in_flight(group, tddp_op_name(work->op.kind));
    if (status == TDDP_OK && on_thread) {
        status = tddp_blocking_reserve();
        if (status) {
            tddp_group_end_in_flight(group, false);
        }
    }
    return status;
}

/* Makes a work of a message and begins it, or does nothing. `waits`: the caller does, and finishes
 * it. */
static tddp_status make(tddp_group *group, const tddp_op *op, const tddp_op_args *args, bool waits,
                        tddp_work **out)
{
    const bool polls = !waits && tddp_group_p2p_polls(group, op);
    tddp_work *work;
    tddp_status status = tddp_group_prepare(group, op, args, &work);
    if (status) {
        return status;
    }
    work->group = polls ? group : NULL;
    status = begin(group, work, !waits && !polls);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    *out = work;
    return TDDP_OK;
}

/* Posts what was made. From here on a failure is the work's. */
static void go(tddp_group *group, tddp_work *work, const tddp_op_args *args, bool waits)
{
    const bool polls = work->group;
    tddp_status status = post(group, work, !waits && !polls);
    if (status || waits) {
        complete(group, work, status ? status : tddp_group_p2p_finish(group, work));
    } else if (polls) {
        tddp_group_p2p_poll(group, work, args);
    }
}

static tddp_status submit(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                          tddp_work **out)
{
    tddp_work *work;
    tddp_status status = make(group, op, args, !out, &work);
    if (status) {
        return status;
    }
    go(group, work, args, !out);
    return tddp_group_return_or_wait(work, out);
}

void tddp_group_p2p_stop(tddp_group *group)
{
    tddp_group_p2p_poll_drain(group);
    pthread_mutex_lock(&group->mutex);
    while (group->in_flight > 0) {
        if (!tddp_group_p2p_complete_failed(group)) {
            pthread_cond_wait(&group->idle, &group->mutex);
        }
    }
    pthread_mutex_unlock(&group->mutex);
}

tddp_status tddp_group_send_or_recv(tddp_group *group, tddp_op *op, const tddp_op_args *args,
                                    tddp_work **work)
{
    op->awaited = work == NULL;
    return submit(group, op, args, work);
}

/* --- batches --------------------------------------------------------------------------------- */

/* Ends a posted work of a batch that is not launched. */
static void drop(tddp_group *group, tddp_work *work)
{
    int source;
    if (work->on_device) {
        tddp_group_device_drop(group, work);
    } else {
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        (void)!own->backend->finish(own->context, work->request, &source);
    }
    tddp_group_release_turn(group, work);
}

/* Posts the first `count` messages of a batch in one go, if all of it could be prepared; else, or
 * if one can't be posted, none is launched. With `order` held. */
static tddp_status post_batch(tddp_group *group, tddp_work *const *works, size_t count,
                              tddp_status status)
{
    char text[1024];
    size_t posted = 0;
    for (size_t i = 0; i < count; i++) {
        tddp_status failed = post_in_order(group, works[i], TDDP_OK);
        if (failed) {
            status = status ? status : failed;
            break;
        }
        posted++;
    }
    (void)snprintf(text, sizeof text, "%s", status ? tddp_error_message() : "");
    for (size_t i = 0; i < posted; i++) {
        if (status) {
            drop(group, works[i]);
        } else {
            launch_inline(group, works[i]);
        }
    }
    return status ? tddp_fail(status, "%s", text) : TDDP_OK;
}

/* The same after what may block. */
static tddp_status prepare_and_post_batch(tddp_group *group, tddp_work *const *works, size_t count)
{
    tddp_group_p2p *p2p = &group->p2p;
    tddp_status status = TDDP_OK;
    size_t prepared = 0;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        atomic_store(&works[i]->expiry, tddp_deadline_after_ms(works[i]->op.timeout_ms));
        works[i]->op.batch = count;
        works[i]->op.batch_index = i;
        status = prepare(group, works[i]);
        prepared += status == TDDP_OK;
    }
    pthread_mutex_lock(&p2p->order);
    status = post_batch(group, works, prepared, status);
    for (size_t i = 0; i < count; i++) {
        hand_over(group, works[i], status);
    }
    pthread_mutex_unlock(&p2p->order);
    return status;
}

/* Gives up works that were made and not posted. */
static void discard(tddp_group *group, tddp_work **works, size_t count, tddp_status status)
{
    for (size_t i = 0; i < count; i++) {
        if (!works[i]->group) {
            hand_over(group, works[i], status);
        }
        tddp_work_release(works[i]);
        tddp_work_release(works[i]);
        works[i] = NULL;
        tddp_group_end_in_flight(group, false);
    }
}

/* Posts all of them in one go, which one launch carries out. */
static void go_together(tddp_group *group, tddp_work *const *works, size_t count)
{
    tddp_status status = prepare_and_post_batch(group, works, count);
    if (status) {
        char text[1024];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        for (size_t i = 0; i < count; i++) {
            complete(group, works[i], tddp_fail(status, "%s", text));
        }
    }
}

/* Whether a backend that launches batches has the message, or a copy of it, on a device. */
static bool goes_to_device(const tddp_group *group, const tddp_op_args *message)
{
    const tddp_buffer *buffer = message->kind == TDDP_OP_SEND ? &message->input : &message->output;
    return tddp_group_backend_on(group, buffer->device_type)->backend->reserve &&
           tddp_group_reduces_on_device(group, buffer->device_type);
}

/* All messages have a work and what finishes it, or none has, before the first is posted. */
tddp_status tddp_group_batch(tddp_group *group, const tddp_op_args *messages, size_t count,
                             tddp_work **works)
{
    tddp_op *ops = tddp_alloc_array(count, sizeof *ops);
    tddp_status status = ops ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    bool together = true;
    size_t made = 0;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        works[i] = NULL;
        status = tddp_group_read_args(group, &messages[i], false, &ops[i]);
        together = together && status == TDDP_OK && goes_to_device(group, &messages[i]);
    }
    for (; made < count && status == TDDP_OK; made += status == TDDP_OK) {
        status = make(group, &ops[made], &messages[made], false, &works[made]);
    }
    free(ops);
    if (status) {
        discard(group, works, made, status);
    } else if (together) {
        go_together(group, works, count);
    }
    for (size_t i = 0; i < count && status == TDDP_OK && !together; i++) {
        go(group, works[i], &messages[i], false);
    }
    return status;
}
