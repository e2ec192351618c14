/*
 * Operations on a device (tddp_backend_v1.launches): posted, numbered and launched by the thread
 * that calls them, as in c10d, so that their order on the device is the program's; then tested by
 * the watchdog (engine.c), or the thread that shuts the group down, which completes them.
 *
 * Invariants: a work is in the group's list from before its launch to its end, and counts as in
 * flight. The thread that launches a work removes it if that fails, the thread that tests it once
 * it is launched. One collective at a time is between its post and its launch (`launching`); what
 * is called after an interrupted launch follows it (`continued`). A work's request lives from post
 * to finish; a thread that has a stream wait for it holds the work's lock, under which it is taken
 * out before it is finished.
 */
#include <stdio.h>
#include <stdlib.h>

#include "group/recorder/recorder.h"

/* A launch that reports its own timeout, as one that waits for ranks to connect, does so first. */
#define LAUNCH_GRACE_NS (100 * TDDP_NS_PER_MS)

enum { TEXT_BYTES = 2048 };

/* One launch: of a collective, a message, or a batch of messages. */
typedef struct launch {
    tddp_group *group;
    tddp_blocking_call call; /* of the thread that continues it after an interrupt */
    size_t count;
    tddp_work **works;
    void **requests; /* of the works */
    bool continued;  /* after an interrupt, on a lent thread */
} launch;

bool tddp_group_reduces_on_device(const tddp_group *group, tddp_device_type type)
{
    bool copied = (unsigned)type < TDDP_DEVICE_TYPES && group->backends[type].copies;
    return (type != TDDP_CPU) != copied;
}

/* Lists may not be joined yet; some ranks have only an input or an output. */
static tddp_device_type memory_of(const tddp_op *op)
{
    const tddp_buffer *sides[] = {&op->input, &op->output, op->input_parts, op->output_parts};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++) {
        if (sides[i] && sides[i]->device_type != TDDP_CPU) {
            return sides[i]->device_type;
        }
    }
    return TDDP_CPU;
}

bool tddp_group_is_launched(const tddp_group *group, const tddp_op *op)
{
    const bool barrier = op->kind == TDDP_OP_BARRIER;
    const tddp_device_type type = memory_of(op);
    const tddp_inner *own =
        barrier ? tddp_group_backend_for(group, op) : tddp_group_backend_on(group, type);
    return (own->backend->launches >> op->kind & 1u) != 0 &&
           (barrier || tddp_group_reduces_on_device(group, type));
}

static tddp_status fail_late(const char *what)
{
    return tddp_fail(TDDP_TIMEOUT,
                     "not %s in the time given; a rank has not done its part: slow, stuck, or in "
                     "another operation?",
                     what);
}

/* --- the end of a work ----------------------------------------------------------------------- */

/* Ends what the backend has of a work, whose outcome so far stays, with its text. */
static tddp_status finish(tddp_group *group, tddp_work *work, tddp_status status)
{
    char text[TEXT_BYTES];
    int source = TDDP_ANY_SOURCE;
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    pthread_mutex_lock(&work->mutex);
    void *request = work->request;
    work->request = NULL;
    pthread_mutex_unlock(&work->mutex);
    (void)snprintf(text, sizeof text, "%s", status ? tddp_error_message() : "");
    tddp_status finished = request ? own->backend->finish(own->context, request, &source) : TDDP_OK;
    if (status) {
        return tddp_fail(status, "%s", text);
    }
    if (finished == TDDP_OK && work->op.kind == TDDP_OP_RECV) {
        work->source = source;
    }
    return finished;
}

/* With the list's lock held. */
static void unlink_work(tddp_group_device *device, const tddp_work *work)
{
    tddp_work **at = &device->head;
    tddp_work *before = NULL;
    while (*at != work) {
        before = *at;
        at = &before->next;
    }
    *at = work->next;
    if (device->tail == work) {
        device->tail = before;
    }
}

/* --- launching ------------------------------------------------------------------------------- */

static tddp_status make_launch(tddp_group *group, tddp_work *const *works, size_t count,
                               launch **out)
{
    launch *made = tddp_alloc(sizeof *made);
    void **pointers = tddp_alloc_array(count, 2 * sizeof *pointers);
    if (!made || !pointers) {
        free(made);
        free(pointers);
        return TDDP_OUT_OF_MEMORY;
    }
    made->group = group;
    made->count = count;
    made->requests = pointers;
    made->works = (tddp_work **)(pointers + count);
    for (size_t i = 0; i < count; i++) {
        made->works[i] = works[i];
    }
    *out = made;
    return TDDP_OK;
}

static void free_launch(launch *self)
{
    if (self) {
        free(self->requests);
        free(self);
    }
}

static bool is_collective(const launch *self)
{
    return !tddp_op_is_p2p(self->works[0]->op.kind);
}

/* A failure after which other ranks may wait is the works', and so the group's: it is stored with
 * the first work. Others, as of arguments, are returned. */
static tddp_status post(const launch *self)
{
    tddp_group *group = self->group;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < self->count && status == TDDP_OK; i++) {
        tddp_work *work = self->works[i];
        const tddp_inner *own = tddp_group_backend_for(group, &work->op);
        work->op.device_ns = &work->device_ns;
        work->on_device = group;
        atomic_store(&work->expiry, tddp_deadline_after_ms(work->op.timeout_ms));
        status = own->backend->post(own->context, &work->op, &work->request);
        self->requests[i] = work->request;
    }
    if (tddp_group_breaks(status)) {
        tddp_group_keep_failure(self->works[0], status);
        status = TDDP_OK;
    }
    return status;
}

static void number(tddp_group *group, tddp_work *work, uint64_t sequence)
{
    work->op.sequence = sequence;
    tddp_recorder_queued_and_started(group, work, tddp_now_ns());
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
}

/* With the group's lock held. */
static bool must_wait(const launch *self)
{
    const tddp_group_device *device = &self->group->device;
    return device->continued > 0 || (device->launching && is_collective(self));
}

/* Until all launches that precede this one have ended, each by its own deadline: the time of these
 * works begins when they are posted, afterwards. */
static tddp_status begin_launching(const launch *self, const tddp_cancel *cancel)
{
    tddp_group *group = self->group;
    const char *name = tddp_op_name(self->works[0]->op.kind);
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, name);
    while (status == TDDP_OK && must_wait(self)) {
        if (cancel && tddp_cancel_triggered(cancel)) {
            status = tddp_fail(TDDP_CANCELED, "%s: interrupted before it was launched", name);
            break;
        }
        (void)tddp_cond_wait_until(&group->idle, &group->mutex,
                                   tddp_deadline_after_ms(TDDP_GROUP_TOKEN_CHECK_MS));
        status = tddp_group_check_open(group, name);
    }
    group->device.launching = group->device.launching || (status == TDDP_OK && is_collective(self));
    pthread_mutex_unlock(&group->mutex);
    return status;
}

static void number_all(const launch *self)
{
    tddp_group *group = self->group;
    tddp_group_p2p *p2p = &group->p2p;
    if (is_collective(self)) {
        tddp_work *work = self->works[0];
        pthread_mutex_lock(&group->mutex);
        number(group, work, group->sequence + 1);
        group->sequence += work->steps;
        pthread_mutex_unlock(&group->mutex);
        return;
    }
    pthread_mutex_lock(&p2p->order);
    for (size_t i = 0; i < self->count; i++) {
        number(group, self->works[i], ++p2p->sequence);
    }
    pthread_mutex_unlock(&p2p->order);
}

static void add_to_list(const launch *self)
{
    tddp_group_device *device = &self->group->device;
    pthread_mutex_lock(&device->mutex);
    for (size_t i = 0; i < self->count; i++) {
        tddp_work *work = self->works[i];
        work->next = NULL;
        if (device->tail) {
            device->tail->next = work;
        } else {
            device->head = work;
        }
        device->tail = work;
    }
    pthread_mutex_unlock(&device->mutex);
    tddp_watchdog_wake(); /* the launch may block */
}

/* What waits for it may be launched. */
static void end_launching(const launch *self)
{
    tddp_group *group = self->group;
    if (is_collective(self) || self->continued) {
        pthread_mutex_lock(&group->mutex);
        group->device.launching = group->device.launching && !is_collective(self);
        group->device.continued -= self->continued;
        pthread_cond_broadcast(&group->idle);
        pthread_mutex_unlock(&group->mutex);
    }
}

/* All of them are complete before the next collective, which finds the group failed. */
static void fail_all(const launch *self, tddp_status status)
{
    tddp_group *group = self->group;
    char text[TEXT_BYTES];
    status = atomic_load(&group->device.overdue) ? fail_late("launched") : status;
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    const tddp_group *before = tddp_group_set_current(group);
    for (size_t i = 0; i < self->count; i++) {
        tddp_work *work = self->works[i];
        pthread_mutex_lock(&group->device.mutex);
        unlink_work(&group->device, work);
        pthread_mutex_unlock(&group->device.mutex);
        (void)tddp_fail(status, "%s", text);
        tddp_group_complete_in_flight(group, work, finish(group, work, status));
    }
    (void)tddp_group_set_current(before);
    end_launching(self);
    for (size_t i = 0; i < self->count; i++) {
        tddp_work_release(self->works[i]);
        tddp_group_end_in_flight(group, true);
    }
}

/* Once the last work is marked as launched, it and the group may end. */
static void end_launch(launch *self, tddp_status status)
{
    if (status) {
        fail_all(self, status);
    } else {
        end_launching(self);
        for (size_t i = 0; i < self->count; i++) {
            atomic_store(&self->works[i]->launched, true);
        }
        tddp_watchdog_wake();
    }
    free_launch(self);
}

/* False: interrupted, and to be continued. */
static bool try_launch(launch *self, tddp_cancel *cancel)
{
    tddp_work *first = self->works[0]; /* all of a batch have one backend */
    const tddp_inner *own = tddp_group_backend_for(self->group, &first->op);
    tddp_status status = TDDP_OK;
    if (first->pending_status) {
        status = tddp_group_kept_failure(first);
    } else {
        first->op.cancel = cancel;
        status = own->backend->launch(own->context, self->requests, self->count);
        first->op.cancel = NULL;
    }
    if (status == TDDP_CANCELED && cancel && tddp_cancel_triggered(cancel)) {
        return false;
    }
    end_launch(self, status);
    return true;
}

/* On a lent thread. */
static void continue_launch(void *context, void *nothing)
{
    (void)nothing;
    (void)try_launch(context, NULL);
}

/* Ends works of which nothing was launched, and that have no numbers. */
static void discard(launch *self, tddp_group *group, tddp_work *const *works, size_t count,
                    size_t begun)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    for (size_t i = 0; i < count; i++) {
        (void)!finish(group, works[i], TDDP_OK);
        tddp_work_release(works[i]);
        tddp_work_release(works[i]);
    }
    for (size_t i = 0; i < begun; i++) {
        tddp_group_end_in_flight(group, false);
    }
    free_launch(self);
    (void)tddp_fail(TDDP_OK, "%s", text);
}

tddp_status tddp_group_launch(tddp_group *group, tddp_work *const *works, size_t count,
                              tddp_cancel *cancel)
{
    launch *self = NULL;
    size_t begun = 0;
    tddp_status status = make_launch(group, works, count, &self);
    status = status ? status : tddp_watchdog_start();
    for (; begun < count && status == TDDP_OK; begun += status == TDDP_OK) {
        status = tddp_group_begin_in_flight(group, tddp_op_name(works[begun]->op.kind));
    }
    status = status ? status : begin_launching(self, cancel);
    if (status == TDDP_OK) {
        status = post(self);
        if (status) {
            end_launching(self);
        }
    }
    if (status) {
        discard(self, group, works, count, begun);
        return status;
    }
    number_all(self);
    add_to_list(self);
    if (!try_launch(self, cancel)) {
        /* An interrupt ends the wait, not the operation. */
        status = tddp_blocking_reserve();
        if (status) {
            end_launch(self, status);
        } else {
            pthread_mutex_lock(&group->mutex);
            self->continued = true;
            group->device.continued++;
            pthread_mutex_unlock(&group->mutex);
            self->call = (tddp_blocking_call){.run = continue_launch, .context = self};
            tddp_blocking_start(&self->call);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_group_launch_one(tddp_group *group, tddp_work *work, const tddp_op_args *args,
                                  tddp_work **out)
{
    tddp_status status = tddp_group_launch(group, &work, 1, out ? args->cancel : NULL);
    return status ? status : tddp_group_return_or_wait(work, out);
}

/* --- testing --------------------------------------------------------------------------------- */

/* Whether a launched work has ended; a failure is stored with it. */
static bool test(tddp_group *group, tddp_work *work)
{
    int complete = 0;
    const tddp_inner *own = tddp_group_backend_for(group, &work->op);
    tddp_status status = own->backend->test(own->context, work->request, &complete);
    if (status == TDDP_OK && !complete) {
        if (tddp_now_ns() < atomic_load(&work->expiry)) {
            return false;
        }
        status = fail_late("done");
    }
    status = finish(group, work, status);
    if (status) {
        tddp_group_keep_failure(work, status);
    }
    return true;
}

/* On a lent thread: an abort may wait for the device. */
static void abort_group(void *context, void *nothing)
{
    (void)nothing;
    tddp_group_backends_abort(context);
    tddp_group_end_in_flight(context, false);
}

/* Ends a launch that blocks, by an abort. The group stays until that is over. */
static void abort_overdue(tddp_group *group)
{
    if (atomic_exchange(&group->device.overdue, true)) {
        return;
    }
    pthread_mutex_lock(&group->mutex);
    group->in_flight++;
    pthread_mutex_unlock(&group->mutex);
    if (tddp_blocking_reserve()) {
        abort_group(group, NULL);
    } else {
        group->device.abort = (tddp_blocking_call){.run = abort_group, .context = group};
        tddp_blocking_start(&group->device.abort);
    }
}

/* With the list's lock held. */
static bool has_overdue(const tddp_group_device *device)
{
    const int64_t now = tddp_now_ns();
    const tddp_work *work = device->head;
    while (work &&
           (atomic_load(&work->launched) || now - LAUNCH_GRACE_NS < atomic_load(&work->expiry))) {
        work = work->next;
    }
    return work != NULL;
}

/* Tests each launched work once, except collectives behind one that is not complete; returns those
 * that have ended. With the list's lock held, which is released meanwhile. */
static tddp_work *test_all(tddp_group *group)
{
    tddp_group_device *device = &group->device;
    tddp_work *ended = NULL;
    tddp_work **end = &ended;
    tddp_work *next;
    bool waits = false; /* a collective does */
    for (tddp_work *work = device->head; work; work = next) {
        const bool collective = !tddp_op_is_p2p(work->op.kind);
        bool has_ended = false;
        if (atomic_load(&work->launched) && !(collective && waits)) {
            pthread_mutex_unlock(&device->mutex);
            has_ended = test(group, work);
            pthread_mutex_lock(&device->mutex);
        }
        waits = waits || (collective && !has_ended);
        next = work->next;
        if (has_ended) {
            unlink_work(device, work);
            work->next = NULL;
            *end = work;
            end = &work->next;
        }
    }
    return ended;
}

unsigned tddp_group_device_test(tddp_group *group)
{
    tddp_group_device *device = &group->device;
    pthread_mutex_lock(&device->mutex);
    /* Then the abort would be the others' failure: that of the launch comes first. */
    const bool overdue = has_overdue(device);
    tddp_work *ended = overdue ? NULL : test_all(group);
    unsigned found = device->head ? TDDP_GROUP_WAITING : 0;
    pthread_mutex_unlock(&device->mutex);
    if (overdue) {
        abort_overdue(group);
    }
    while (ended) {
        tddp_work *next = ended->next;
        tddp_group_complete_polled(group, ended);
        ended = next;
        found |= TDDP_GROUP_PROGRESSED;
    }
    return found;
}
