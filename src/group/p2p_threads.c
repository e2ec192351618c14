/*
 * The threads that finish sends and receives which no caller and no engine finishes: each waits for
 * one at a time.
 *
 * Only the system's limit of threads bounds how many are in flight: with another bound, receives
 * that wait for a peer could block the sends that this peer waits for. So a thread is reserved
 * before anything is posted; if none can be had, the call fails without effect.
 *
 * Invariant: `idle_threads` threads of the group's wait and are reserved for no work. All threads
 * end before the backend's context is destroyed.
 */
#include <stdlib.h>

#include "group/group.h"

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

tddp_status tddp_group_p2p_reserve(tddp_group *group)
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

void tddp_group_p2p_queue(tddp_group_p2p *p2p, tddp_work *work, tddp_status status)
{
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

void tddp_group_p2p_end_threads(tddp_group_p2p *p2p)
{
    pthread_mutex_lock(&p2p->mutex);
    p2p->ending = true;
    finisher *all = p2p->finishers;
    p2p->finishers = NULL;
    pthread_cond_broadcast(&p2p->wake);
    pthread_mutex_unlock(&p2p->mutex);
    join_all(all);
}
