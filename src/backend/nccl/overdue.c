/* Ends calls of NCCL's that block beyond their operation's deadline. */
#include "backend/nccl/overdue.h"

#include <tddp/log.h>

#include "base/base.h"

enum { LOOK_MS = 100 };

tddp_status tddp_nccl_overdue_init(tddp_nccl_overdue *self, bool (*look)(void *data), void *data)
{
    self->look = look;
    self->data = data;
    pthread_mutex_init(&self->mutex, NULL);
    return tddp_cond_init(&self->wake);
}

/* With the mutex held. */
static void doze(tddp_nccl_overdue *self)
{
    const int64_t end = tddp_deadline_after_ms(LOOK_MS);
    while (!self->ending && tddp_cond_wait_until(&self->wake, &self->mutex, end)) {
    }
}

static void *body(void *data)
{
    tddp_nccl_overdue *self = data;
    pthread_mutex_lock(&self->mutex);
    while (!self->ending) {
        /* Before the look: a call that it does not find begins later, and its thread wakes this
         * one. */
        atomic_store(&self->asleep, true);
        pthread_mutex_unlock(&self->mutex);
        const bool any = self->look(self->data);
        pthread_mutex_lock(&self->mutex);
        while (!any && atomic_load(&self->asleep) && !self->ending) {
            pthread_cond_wait(&self->wake, &self->mutex);
        }
        atomic_store(&self->asleep, false);
        doze(self);
    }
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

void tddp_nccl_overdue_watch(tddp_nccl_overdue *self)
{
    if (atomic_load(&self->started) && !atomic_load(&self->asleep)) {
        return;
    }
    pthread_mutex_lock(&self->mutex);
    if (!atomic_load(&self->started)) {
        tddp_status status = tddp_thread_start(&self->thread, "tddp-overdue", body, self);
        atomic_store(&self->started, status == TDDP_OK);
        if (status) {
            tddp_log(TDDP_LOG_WARN, "nccl", "nothing ends calls that take too long: %s",
                     tddp_error_message());
        }
    }
    atomic_store(&self->asleep, false);
    pthread_cond_signal(&self->wake);
    pthread_mutex_unlock(&self->mutex);
}

void tddp_nccl_overdue_stop(tddp_nccl_overdue *self)
{
    pthread_mutex_lock(&self->mutex);
    self->ending = true;
    const bool started = atomic_load(&self->started);
    pthread_cond_signal(&self->wake);
    pthread_mutex_unlock(&self->mutex);
    if (started) {
        pthread_join(self->thread, NULL);
    }
    pthread_cond_destroy(&self->wake);
    pthread_mutex_destroy(&self->mutex);
}
