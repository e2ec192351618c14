/*
 * Sends and receives. They are posted by their caller's thread, and finish concurrently with each
 * other and the queue: each on a thread lent to it, which is reserved before anything is posted, or
 * on the caller's if it waits; or all on the engine's thread, if that polls the group (p2p_poll.c).
 * Those on devices are launched, as collectives are (device.c).
 *
 * Invariant: messages are numbered and posted with `order` held, so that messages to one peer match
 * in the order of their numbers. Locks are taken in the order `order`, then `mutex`, then the
 * group's; only `order` is ever held while the backend runs.
 */
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

/* Between tests of what a device has, by a thread that waits for its end. */
enum { TEST_MS = 1 };

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
    } else {
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        status = own->backend->finish(own->context, work->request, &source);
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
    tddp_recorder_started(group, work, tddp_now_ns());
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
    if (status) {
        return status;
    }
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return own->backend->post(own->context, &work->op, &work->request);
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

static tddp_status prepare_work(const tddp_group *group, const tddp_op *op,
                                const tddp_op_args *args, tddp_work **out)
{
    tddp_work here;
    tddp_status status = tddp_group_prepare(group, op, args, &here);
    status = status ? status : tddp_group_work_move(&here, out);
    tddp_group_work_clear(&here);
    return status;
}

/* Makes a work of a message and begins it, or does nothing. `waits`: the caller does, and finishes
 * it. */
static tddp_status make(tddp_group *group, const tddp_op *op, const tddp_op_args *args, bool waits,
                        tddp_work **out)
{
    const bool polls = !waits && tddp_group_p2p_polls(group, op);
    tddp_work *work;
    tddp_status status = prepare_work(group, op, args, &work);
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
    const bool launches = tddp_group_is_launched(group, op);
    tddp_work *work;
    tddp_status status =
        launches ? prepare_work(group, op, args, &work) : make(group, op, args, !out, &work);
    if (status) {
        return status;
    }
    if (launches) {
        return tddp_group_launch_one(group, work, args, out);
    }
    go(group, work, args, !out);
    return tddp_group_return_or_wait(work, out);
}

void tddp_group_p2p_stop(tddp_group *group)
{
    tddp_group_p2p_poll_drain(group);
    pthread_mutex_lock(&group->mutex);
    while (group->in_flight > 0) {
        if (tddp_group_p2p_complete_failed(group)) {
            continue;
        }
        pthread_mutex_unlock(&group->mutex);
        const bool progressed = tddp_group_device_test(group) & TDDP_GROUP_PROGRESSED;
        pthread_mutex_lock(&group->mutex);
        if (!progressed && group->in_flight > 0 && !group->failed) {
            (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                                       tddp_deadline_after_ms(TEST_MS));
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

/* Undoes what was made and not posted. */
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

/* One launch for all. */
static tddp_status launch_batch(tddp_group *group, tddp_op *ops, const tddp_op_args *messages,
                                size_t count, tddp_work **works)
{
    tddp_status status = TDDP_OK;
    size_t made = 0;
    for (; made < count && status == TDDP_OK; made += status == TDDP_OK) {
        ops[made].batched = 1;
        status = prepare_work(group, &ops[made], &messages[made], &works[made]);
    }
    for (size_t i = 0; i < made && status; i++) {
        tddp_work_release(works[i]);
        tddp_work_release(works[i]);
    }
    status = status ? status : tddp_group_launch(group, works, count, messages->cancel);
    for (size_t i = 0; i < count && status; i++) {
        works[i] = NULL; /* freed */
    }
    return status;
}

/* Each by itself: all have what finishes them before the first is posted. */
static tddp_status post_each(tddp_group *group, const tddp_op *ops, const tddp_op_args *messages,
                             size_t count, tddp_work **works)
{
    tddp_status status = TDDP_OK;
    size_t made = 0;
    for (; made < count && status == TDDP_OK; made += status == TDDP_OK) {
        status = make(group, &ops[made], &messages[made], false, &works[made]);
    }
    if (status) {
        discard(group, works, made, status);
        return status;
    }
    for (size_t i = 0; i < count; i++) {
        go(group, works[i], &messages[i], false);
    }
    return TDDP_OK;
}

tddp_status tddp_group_batch(tddp_group *group, const tddp_op_args *messages, size_t count,
                             tddp_work **works)
{
    tddp_op *ops = tddp_alloc_array(count, sizeof *ops);
    tddp_status status = ops ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    size_t launched = 0;
    size_t on_device = 0;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        works[i] = NULL;
        status = tddp_group_read_args(group, &messages[i], false, &ops[i]);
        launched += status == TDDP_OK && tddp_group_is_launched(group, &ops[i]);
        on_device += status == TDDP_OK && ops[i].input.device_type != TDDP_CPU;
    }
    /* One backend launches them. */
    if (status == TDDP_OK && launched > 0 && on_device > 0 && on_device < count) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "a batch of %zu messages has %zu in a device's memory: expected all or "
                           "none",
                           count, on_device);
    }
    if (status == TDDP_OK) {
        status = launched > 0 ? launch_batch(group, ops, messages, count, works)
                              : post_each(group, ops, messages, count, works);
    }
    free(ops);
    return status;
}
