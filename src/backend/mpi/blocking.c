/*
 * MPI's blocking reductions, which are faster than its others on large data: their time is over
 * only for who waits. Each is called on a thread of its own, once all ranks take part; a thread
 * that gives up waiting leaves it behind with its memory.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/mpi/mpi.h"

enum { LOOK_NS = 20 * 1000 * 1000 };

typedef struct blocking_call {
    tddp_mpi_piece what;
    MPI_Comm comm;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t ended;
    bool has_ended;
    int code;
} blocking_call;

static void *body(void *data)
{
    blocking_call *self = data;
    const tddp_mpi_piece *what = &self->what;
    int code = what->root < 0 ? MPI_Allreduce(what->from, what->into, what->count, what->how.type,
                                              what->how.op, self->comm)
                              : MPI_Reduce(what->from, what->into, what->count, what->how.type,
                                           what->how.op, what->root, self->comm);
    pthread_mutex_lock(&self->mutex);
    self->code = code;
    self->has_ended = true;
    pthread_cond_signal(&self->ended);
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

static blocking_call *make(const tddp_mpi_limits *limits, const tddp_mpi_piece *what)
{
    pthread_condattr_t attributes;
    blocking_call *made = malloc(sizeof *made);
    if (!made) {
        return NULL;
    }
    *made = (blocking_call){.what = *what, .comm = limits->group->collectives};
    pthread_mutex_init(&made->mutex, NULL);
    if (pthread_condattr_init(&attributes)) {
        free(made);
        return NULL;
    }
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int error = pthread_cond_init(&made->ended, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    if (error) {
        free(made);
        return NULL;
    }
    return made;
}

/* Signals are the host language's. */
static int start(pthread_t *thread, blocking_call *call)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error == 0) {
        error = pthread_create(thread, NULL, body, call);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return error;
}

/* Until it has ended, or the limits. */
static tddp_status await(blocking_call *self, const tddp_mpi_limits *limits)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&self->mutex);
    while (!self->has_ended && status == TDDP_OK) {
        const int64_t soon = tddp_mpi_now_ns() + LOOK_NS;
        const int64_t look = soon < limits->deadline_ns ? soon : limits->deadline_ns;
        const struct timespec until = {(time_t)(look / 1000000000), (long)(look % 1000000000)};
        if (pthread_cond_timedwait(&self->ended, &self->mutex, &until) == ETIMEDOUT &&
            !self->has_ended) {
            status = tddp_mpi_check_limits(limits);
        }
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

tddp_status tddp_mpi_reduce_blocking(const tddp_mpi_limits *limits, const tddp_mpi_piece *what)
{
    pthread_t thread;
    blocking_call *call = make(limits, what);
    int error = call ? start(&thread, call) : ENOMEM;
    if (error) {
        free(call);
        tddp_mpi_give_up(); /* the other ranks have begun theirs */
        return tddp_fail(TDDP_SYSTEM, "cannot start a thread for MPI: %s", strerror(error));
    }
    tddp_status status = await(call, limits);
    if (status) {
        (void)pthread_detach(thread);
        tddp_mpi_give_up();
        return status;
    }
    (void)pthread_join(thread, NULL);
    status = tddp_mpi_check(call->code, what->root < 0 ? "all_reduce" : "reduce");
    if (status) {
        tddp_mpi_give_up();
    }
    pthread_cond_destroy(&call->ended);
    pthread_mutex_destroy(&call->mutex);
    free(call);
    return status;
}
