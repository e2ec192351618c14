/*
 * Sends and receives. They are posted by their caller's thread, beside the queue, and tried like it
 * (progress.c), within the call as long as the caller allows. Those on devices are launched, as
 * collectives are (device.c).
 *
 * Invariant: messages are numbered and posted with `order` held, so that messages to one peer match
 * in the order of their numbers; no other lock is taken before it, or held while the backend runs.
 */
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

static tddp_status prepare(tddp_group *group, tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return own->backend->prepare
               ? own->backend->prepare(own->context, &work->op, &work->op.prepared)
               : TDDP_OK;
}

/* Numbers a work and posts it. It is prepared before it has a number, so that other messages don't
 * wait for that. From here on a failure is the work's. */
static void post(tddp_group *group, tddp_work *work)
{
    tddp_group_p2p *p2p = &group->p2p;
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    atomic_store(&work->expiry, tddp_deadline_after_ms(work->op.timeout_ms));
    tddp_status status = prepare(group, work);
    pthread_mutex_lock(&p2p->order);
    work->op.sequence = ++p2p->sequence;
    tddp_recorder_started(group, work, tddp_now_ns());
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
    status = status ? status : own->backend->post(own->context, &work->op, &work->request);
    pthread_mutex_unlock(&p2p->order);
    if (status) {
        tddp_group_keep_failure(work, status);
    }
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

static void discard(tddp_work *work)
{
    tddp_work_release(work);
    tddp_work_release(work);
}

/* Makes a work of a message and counts it as in flight, or does nothing. */
static tddp_status make(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                        tddp_work **out)
{
    tddp_work *work;
    tddp_status status = prepare_work(group, op, args, &work);
    if (status) {
        return status;
    }
    work->group = group;
    status = tddp_group_begin_in_flight(group, tddp_op_name(op->kind));
    if (status) {
        discard(work);
        return status;
    }
    *out = work;
    return TDDP_OK;
}

/* Posts what was made, and tries it within the call. `waits`: the caller does. */
static void begin(tddp_group *group, tddp_work *work, const tddp_op_args *args, bool waits)
{
    tddp_cancel until;
    tddp_cancel *cancel = NULL;
    const bool tries = waits || tddp_group_limit_of(&work->op, args, &until, &cancel);
    post(group, work);
    tddp_group_add_message(group, work, cancel, tries, waits || args->inline_us != 0);
}

tddp_status tddp_group_send_or_recv(tddp_group *group, tddp_op *op, const tddp_op_args *args,
                                    tddp_work **out)
{
    const bool launches = tddp_group_is_launched(group, op);
    tddp_work *work;
    op->awaited = out == NULL;
    tddp_status status =
        launches ? prepare_work(group, op, args, &work) : make(group, op, args, &work);
    if (status) {
        return status;
    }
    if (launches) {
        return tddp_group_launch_one(group, work, args, out);
    }
    begin(group, work, args, !out);
    return tddp_group_return_or_wait(work, out);
}

/* --- batches --------------------------------------------------------------------------------- */

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
        discard(works[i]);
    }
    status = status ? status : tddp_group_launch(group, works, count, messages->cancel);
    for (size_t i = 0; i < count && status; i++) {
        works[i] = NULL; /* freed */
    }
    return status;
}

/* Each by itself, once all were made. */
static tddp_status post_each(tddp_group *group, const tddp_op *ops, const tddp_op_args *messages,
                             size_t count, tddp_work **works)
{
    tddp_status status = TDDP_OK;
    size_t made = 0;
    for (; made < count && status == TDDP_OK; made += status == TDDP_OK) {
        status = make(group, &ops[made], &messages[made], &works[made]);
    }
    for (size_t i = 0; i < made && status; i++) {
        discard(works[i]);
        works[i] = NULL;
        tddp_group_end_in_flight(group, false);
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        begin(group, works[i], &messages[i], false);
    }
    return status;
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
