/*
 * Operations that a device carries out (TDDP_BACKEND_QUEUES): posted by their caller, launched in
 * turn by the thread that executes the queue, or by the caller where nothing is before it, awaited
 * one after the other by a thread of their own, so that the queue goes on while the device works.
 * Sends and receives take the same steps on the threads of p2p.c.
 *
 * Invariant: a work's request lives from post to finish; who uses it in between, to have a stream
 * wait for it, holds the work's lock, under which it is taken out before it is finished. A work
 * that is on its way counts as under way in the group, whose end waits for that.
 */
#include <stdio.h>

#include "group/recorder/recorder.h"

bool tddp_group_reduces_on_device(const tddp_group *group, tddp_device_type type)
{
    bool copied = (tddp_group_backend_on(group, type)->backend->copied_types >> type & 1u) != 0;
    return (type != TDDP_CPU) != copied;
}

bool tddp_group_queues(const tddp_group *group, const tddp_op *op)
{
    return (tddp_group_backend_for(group, op)->backend->traits & TDDP_BACKEND_QUEUES) &&
           op->kind != TDDP_OP_BARRIER &&
           (op->input.device_type != TDDP_CPU || op->output.device_type != TDDP_CPU);
}

/* On the thread that numbers the work. */
tddp_status tddp_group_reserve_turn(tddp_group *group, tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return own->backend->reserve ? own->backend->reserve(own->context, &work->op, &work->op.turn)
                                 : TDDP_OK;
}

void tddp_group_release_turn(tddp_group *group, tddp_work *work)
{
    if (work->op.turn) {
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        own->backend->release(own->context, work->op.turn);
        work->op.turn = NULL;
    }
}

tddp_status tddp_group_device_post(tddp_group *group, tddp_work *work)
{
    work->op.device_ns = &work->device_ns;
    work->on_device = group;
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return own->backend->post(own->context, &work->op, &work->request);
}

/* What was launched is known to those who wait for that, or that it never will be. */
static void set_launched(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    work->launched = true;
    pthread_cond_broadcast(&work->cond);
    pthread_mutex_unlock(&work->mutex);
}

static void *take_request(tddp_work *work)
{
    pthread_mutex_lock(&work->mutex);
    void *request = work->request;
    work->request = NULL;
    pthread_mutex_unlock(&work->mutex);
    return request;
}

void tddp_group_device_drop(tddp_group *group, tddp_work *work)
{
    char text[1024];
    int source;
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    tddp_status status = own->backend->finish(own->context, take_request(work), &source);
    tddp_group_release_turn(group, work);
    (void)tddp_fail(status ? status : TDDP_GROUP_FAILED, "%s", text); /* the text is what it was */
}

tddp_status tddp_group_device_launch(tddp_group *group, tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    tddp_status status = own->backend->launch(own->context, work->request);
    if (status) {
        tddp_group_device_drop(group, work);
    } else {
        tddp_group_release_turn(group, work);
        set_launched(work);
    }
    return status;
}

bool tddp_group_launches_at_once(const tddp_group *group, const tddp_work *work)
{
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    return work->on_device && own->backend->launches_at_once &&
           own->backend->launches_at_once(own->context, work->request);
}

tddp_status tddp_group_device_finish(tddp_group *group, tddp_work *work, int *source)
{
    char text[2048] = "";
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    tddp_status status = own->backend->await(own->context, work->request);
    if (status) {
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    }
    tddp_status finished = own->backend->finish(own->context, take_request(work), source);
    return status ? tddp_fail(status, "%s", text) : finished;
}

void tddp_group_device_leave(tddp_group *group, tddp_work *work)
{
    tddp_group_device *device = &group->device;
    pthread_mutex_lock(&group->mutex);
    group->in_flight++;
    atomic_store(&group->completing, true); /* from now on it is one of these */
    pthread_mutex_unlock(&group->mutex);
    pthread_mutex_lock(&device->mutex);
    work->next = NULL;
    if (device->tail) {
        device->tail->next = work;
    } else {
        device->head = work;
    }
    device->tail = work;
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->mutex);
}

/* --- the thread ------------------------------------------------------------------------------ */

/* NULL: the group ends. */
static tddp_work *take_launched(tddp_group_device *device)
{
    pthread_mutex_lock(&device->mutex);
    while (!device->head && !device->ending) {
        pthread_cond_wait(&device->wake, &device->mutex);
    }
    tddp_work *work = device->head;
    if (work) {
        device->head = work->next;
        device->tail = device->head ? device->tail : NULL;
        work->next = NULL;
    }
    pthread_mutex_unlock(&device->mutex);
    return work;
}

static void *body(void *data)
{
    tddp_group *group = data;
    tddp_group_enter_thread(group);
    tddp_work *work;
    while ((work = take_launched(&group->device))) {
        int source;
        tddp_group_complete_in_flight(group, work, tddp_group_device_finish(group, work, &source));
        tddp_work_release(work);
        tddp_group_end_in_flight(group, true);
    }
    return NULL;
}

tddp_status tddp_group_device_start(tddp_group *group)
{
    tddp_group_device *device = &group->device;
    if (!group->queues) {
        return TDDP_OK;
    }
    tddp_status status = tddp_cond_init(&device->wake);
    if (status) {
        return status;
    }
    pthread_mutex_init(&device->mutex, NULL);
    status = tddp_thread_start(&device->thread, "tddp-device", body, group);
    if (status) {
        pthread_mutex_destroy(&device->mutex);
        pthread_cond_destroy(&device->wake);
        return status;
    }
    device->started = true;
    return TDDP_OK;
}

void tddp_group_device_stop(tddp_group *group)
{
    tddp_group_device *device = &group->device;
    if (!device->started) {
        return;
    }
    pthread_mutex_lock(&device->mutex);
    device->ending = true;
    pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->mutex);
    pthread_join(device->thread, NULL);
    pthread_mutex_destroy(&device->mutex);
    pthread_cond_destroy(&device->wake);
    device->started = false;
}
