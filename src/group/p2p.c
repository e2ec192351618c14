/*
 * Sends and receives. They are posted by their caller's thread, and finish concurrently with each
 * other and the queue: each on a thread of the group's, or on the caller's if it waits; or all on
 * the engine's thread, if that polls the group (p2p_poll.c).
 *
 * Only the system's limit of threads bounds how many are in flight: with another bound, receives
 * that wait for a peer could block the sends that this peer waits for. So a thread is reserved
 * before anything is posted; if none can be had, the call fails without effect.
 *
 * Invariants: `idle_threads` threads of the group's wait and are reserved for no work. Messages are
 * numbered and posted with `order` held, so that messages to one peer match in the order of their
 * numbers. Locks are taken in the order `order`, then `mutex`, then the group's; only `order` is
 * ever held while the backend runs. All threads end before the backend's context is destroyed.
 */
#include <stdlib.h>

#include "group/checks.h"
#include "group/recorder/recorder.h"

enum {
    MOST_IDLE_THREADS = 8, /* further threads end after their message */
    STACK_BYTES = 512 * 1024,
};

struct tddp_group_finisher {
    pthread_t thread;
    tddp_group *group;
    bool ended; /* does not use the group any more: to be joined */
    struct tddp_group_finisher *next;
};

typedef struct tddp_group_finisher finisher;

tddp_status tddp_group_p2p_init(tddp_group_p2p *p2p)
{
    tddp_status status = tddp_cond_init(&p2p->wake);
    if (status == TDDP_OK) {
        pthread_mutex_init(&p2p->order, NULL);
        pthread_mutex_init(&p2p->mutex, NULL);
    }
    return status;
}

void tddp_group_p2p_destroy(tddp_group_p2p *p2p)
{
    pthread_mutex_destroy(&p2p->order);
    pthread_mutex_destroy(&p2p->mutex);
    pthread_cond_destroy(&p2p->wake);
}

static void join_all(finisher *list)
{
    while (list) {
        finisher *next = list->next;
        pthread_join(list->thread, NULL);
        free(list);
        list = next;
    }
}

/* Removes the ended threads from the list. With the lock held. */
static finisher *remove_ended(tddp_group_p2p *p2p)
{
    finisher *ended = NULL;
    for (finisher **link = &p2p->finishers; *link;) {
        finisher *each = *link;
        if (each->ended) {
            *link = each->next;
            each->next = ended;
            ended = each;
        } else {
            link = &each->next;
        }
    }
    return ended;
}

/* Waits for a posted work; NULL: the group shuts down. With the lock held. */
static tddp_work *dequeue_posted(tddp_group_p2p *p2p)
{
    while (!p2p->head && !p2p->ending) {
        pthread_cond_wait(&p2p->wake, &p2p->mutex);
    }
    tddp_work *work = p2p->head;
    if (work) {
        p2p->head = work->next;
        if (!p2p->head) {
            p2p->tail = NULL;
        }
        work->next = NULL;
    }
    return work;
}

/* Makes this thread available for another message; false if it has to end. With the lock held. */
static bool become_idle(tddp_group_p2p *p2p)
{
    bool stays = p2p->idle_threads < MOST_IDLE_THREADS;
    p2p->idle_threads += stays;
    return stays;
}

tddp_status tddp_group_p2p_finish(tddp_group *group, tddp_work *work)
{
    int source = TDDP_ANY_SOURCE;
    tddp_status status = TDDP_OK;
    if (work->on_device) {
        status = tddp_group_device_launch(group, work);
        if (status == TDDP_OK) {
            status = tddp_group_device_finish(group, work, &source);
        }
    } else {
        status = group->backend->finish(group->context, work->request, &source);
    }
    if (status == TDDP_OK && work->op.kind == TDDP_OP_RECV) {
        work->source = source;
    }
    return status;
}

static void *finisher_body(void *data)
{
    finisher *self = data;
    tddp_group *group = self->group;
    tddp_group_p2p *p2p = &group->p2p;
    tddp_group_enter_thread(group);
    bool stays = true;
    pthread_mutex_lock(&p2p->mutex);
    while (stays) {
        tddp_work *work = dequeue_posted(p2p);
        if (!work) {
            break;
        }
        pthread_mutex_unlock(&p2p->mutex);
        tddp_status status = tddp_group_p2p_finish(group, work);
        if (status == TDDP_OK) {
            /* Before the completion: a thread that waits for it may post the next message. */
            pthread_mutex_lock(&p2p->mutex);
            stays = become_idle(p2p);
            pthread_mutex_unlock(&p2p->mutex);
        }
        tddp_group_complete_in_flight(group, work, status);
        tddp_work_release(work);
        pthread_mutex_lock(&p2p->mutex);
        if (status) {
            stays = become_idle(p2p); /* completing a failure takes a while */
        }
        self->ended = !stays;
        pthread_mutex_unlock(&p2p->mutex);
        tddp_group_end_in_flight(group, true);
        if (!stays) {
            return NULL;
        }
        pthread_mutex_lock(&p2p->mutex);
    }
    pthread_mutex_unlock(&p2p->mutex);
    return NULL;
}

static tddp_status add_finisher(tddp_group *group)
{
    tddp_group_p2p *p2p = &group->p2p;
    finisher *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    added->group = group;
    pthread_mutex_lock(&p2p->mutex);
    tddp_status status =
        tddp_thread_start_sized(&added->thread, "tddp-p2p", finisher_body, added, STACK_BYTES);
    if (status == TDDP_OK) {
        added->next = p2p->finishers;
        p2p->finishers = added;
    }
    pthread_mutex_unlock(&p2p->mutex);
    if (status) {
        free(added);
    }
    return status;
}

/* Reserves a thread for a work that is about to be posted. */
static tddp_status reserve(tddp_group *group)
{
    tddp_group_p2p *p2p = &group->p2p;
    pthread_mutex_lock(&p2p->mutex);
    finisher *ended = remove_ended(p2p);
    bool found = p2p->idle_threads > 0;
    p2p->idle_threads -= found;
    pthread_mutex_unlock(&p2p->mutex);
    join_all(ended);
    return found ? TDDP_OK : add_finisher(group);
}

static tddp_status prepare(tddp_group *group, tddp_work *work)
{
    const tddp_backend_v1 *backend = group->backend;
    return backend->prepare ? backend->prepare(group->context, &work->op, &work->op.prepared)
                            : TDDP_OK;
}

static tddp_status post_to_backend(tddp_group *group, tddp_work *work)
{
    if (tddp_group_queues(group, &work->op)) {
        return tddp_group_device_post(group, work);
    }
    return group->backend->post(group->context, &work->op, &work->request);
}

/* Posts a work, and with `on_thread` queues it for the reserved thread. It is prepared before it
 * has a number, so that other messages don't wait for that. */
static tddp_status post(tddp_group *group, tddp_work *work, bool on_thread)
{
    tddp_group_p2p *p2p = &group->p2p;
    atomic_store(&work->expiry, tddp_deadline_after_ms(work->op.timeout_ms));
    tddp_status status = prepare(group, work);
    pthread_mutex_lock(&p2p->order);
    work->op.sequence = ++p2p->sequence;
    tddp_recorder_queued_and_started(group, work, tddp_now_ns());
    tddp_group_span_queued(work);
    tddp_group_span_started(work);
    status = status ? status : post_to_backend(group, work);
    if (on_thread) {
        pthread_mutex_lock(&p2p->mutex);
        if (status) {
            p2p->idle_threads++;
        } else {
            if (p2p->tail) {
                p2p->tail->next = work;
            } else {
                p2p->head = work;
            }
            p2p->tail = work;
            pthread_cond_signal(&p2p->wake);
        }
        pthread_mutex_unlock(&p2p->mutex);
    }
    pthread_mutex_unlock(&p2p->order);
    return status;
}

static tddp_status submit(tddp_group *group, const tddp_op *op, const tddp_op_args *args,
                          tddp_work **out)
{
    tddp_work *work;
    const bool polls = out && tddp_group_p2p_polls(group, op);
    tddp_status status = tddp_group_prepare(group, op, args, &work);
    if (status) {
        return status;
    }
    work->group = polls ? group : NULL;
    status = tddp_group_begin_in_flight(group, op);
    if (status == TDDP_OK && out && !polls) {
        status = reserve(group);
        if (status) {
            tddp_group_end_in_flight(group, false);
        }
    }
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    status = post(group, work, out && !polls);
    if (status || !out) {
        status = status ? status : tddp_group_p2p_finish(group, work);
        tddp_group_complete_in_flight(group, work, status);
        tddp_work_release(work);
        tddp_group_end_in_flight(group, true);
    } else if (polls) {
        tddp_group_p2p_poll(group, work, args);
    }
    return tddp_group_return_or_wait(work, out);
}

void tddp_group_p2p_stop(tddp_group *group)
{
    tddp_group_p2p *p2p = &group->p2p;
    tddp_group_p2p_poll_drain(group);
    pthread_mutex_lock(&group->mutex);
    while (group->in_flight > 0) {
        if (!tddp_group_p2p_complete_failed(group)) {
            pthread_cond_wait(&group->idle, &group->mutex);
        }
    }
    pthread_mutex_unlock(&group->mutex);
    pthread_mutex_lock(&p2p->mutex);
    p2p->ending = true;
    finisher *all = p2p->finishers;
    p2p->finishers = NULL;
    pthread_cond_broadcast(&p2p->wake);
    pthread_mutex_unlock(&p2p->mutex);
    join_all(all);
}

static tddp_status check_peer(const tddp_group *group, tddp_op_kind kind, int peer)
{
    bool receives = kind == TDDP_OP_RECV;
    if (receives && peer == TDDP_ANY_SOURCE && group->world_size > 1) {
        return TDDP_OK;
    }
    if (peer < 0 || peer >= group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: peer %d: expected 0 to %d%s",
                         tddp_op_name(kind), peer, group->world_size - 1,
                         receives ? ", or any source where there are other ranks" : "");
    }
    if (peer == group->rank) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: peer %d is this rank itself: expected another one; within a rank, "
                         "copy the memory",
                         tddp_op_name(kind), peer);
    }
    return TDDP_OK;
}

tddp_status tddp_group_send_or_recv(tddp_group *group, const tddp_op_args *args, tddp_work **work)
{
    bool sends = args->kind == TDDP_OP_SEND;
    const tddp_buffer *buffer = sends ? &args->input : &args->output;
    tddp_status status = tddp_group_check_buffer(group, args->kind, "buffer", buffer);
    if (status == TDDP_OK) {
        status = check_peer(group, args->kind, args->peer);
    }
    if (status) {
        return status;
    }
    tddp_buffer empty = *buffer;
    empty.data = NULL;
    empty.count = 0;
    const tddp_op wanted = {.kind = args->kind,
                            .input = sends ? *buffer : empty,
                            .output = sends ? empty : *buffer,
                            .peer = args->peer,
                            .tag = args->tag,
                            .awaited = work == NULL};
    return submit(group, &wanted, args, work);
}
