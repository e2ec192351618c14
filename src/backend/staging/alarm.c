/*
 * Tells the thread that polls a context's operations that copies have ended: CUDA calls a function
 * of the host's from the copies' stream, which counts an event among those that the operations wait
 * for. CUDA's own thread; nothing here calls CUDA.
 *
 * Invariant: the events are there until tddp_staging_alarm_end() returns, and not used afterwards;
 * what CUDA still has to call then finds none.
 */
#include <stdlib.h>

#include "backend/staging/staging.h"

struct tddp_staging_alarm {
    atomic_int references;   /* the context's, and one for each call that CUDA still has to make */
    pthread_mutex_t mutex;   /* guards the next */
    tddp_eventcount *events; /* NULL: the context has ended */
};

tddp_status tddp_staging_alarm_create(tddp_eventcount *events, tddp_staging_alarm **out)
{
    tddp_staging_alarm *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&self->references, 1);
    pthread_mutex_init(&self->mutex, NULL);
    self->events = events;
    *out = self;
    return TDDP_OK;
}

static void release(tddp_staging_alarm *self)
{
    if (atomic_fetch_sub(&self->references, 1) == 1) {
        pthread_mutex_destroy(&self->mutex);
        free(self);
    }
}

static void ring(void *data)
{
    tddp_staging_alarm *self = data;
    pthread_mutex_lock(&self->mutex);
    if (self->events) {
        tddp_eventcount_notify(self->events);
    }
    pthread_mutex_unlock(&self->mutex);
    release(self);
}

void tddp_staging_alarm_set(tddp_staging_alarm *self, const tddp_cuda *cuda,
                            tddp_cuda_stream stream)
{
    if (!self) {
        return;
    }
    atomic_fetch_add(&self->references, 1);
    if (cuda->cudaLaunchHostFunc(stream, ring, self)) {
        (void)cuda->cudaGetLastError();
        release(self);
    }
}

void tddp_staging_alarm_end(tddp_staging_alarm *self)
{
    if (self) {
        pthread_mutex_lock(&self->mutex);
        self->events = NULL;
        pthread_mutex_unlock(&self->mutex);
        release(self);
    }
}
