/*
 * Uses of a communicator: calls, and waits for what they have begun. A call of a communicator that
 * is not blocking may return before it is complete, and is polled until it is. One that is blocking
 * returns when it is complete, or once the communicator is aborted, as libtddp's watchdog has it
 * when a launch is overdue.
 *
 * Invariant: one thread at a time uses an NCCL communicator (`in_use`), as NCCL demands. The thread
 * that aborts it takes it out of `comm` first, and waits for that one, but not for long: a call
 * that blocks is ended by nothing else.
 */
#include "backend/nccl/communicator.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MAX_YIELDS = 200,          /* before a wait sleeps between polls */
    MIN_SLEEP_NS = 5 * 1000,   /* the first sleep */
    MAX_SLEEP_NS = 200 * 1000, /* the longest sleep */
    TOKEN_CHECK_MS = 20,       /* between looks at a cancel token, which signals no condition */
};

tddp_wait tddp_nccl_time_left(tddp_nccl_limits limits)
{
    return (tddp_wait){tddp_deadline_poll_ms(limits.deadline_ns), limits.cancel};
}

bool tddp_nccl_await_change(tddp_nccl_communicator *communicator, int64_t deadline_ns)
{
    return tddp_cond_wait_until(&communicator->changed, &communicator->mutex, deadline_ns);
}

/* --- connecting ------------------------------------------------------------------------------ */

/* PyTorch's variable, and its default: blocking. */
static bool is_blocking(void)
{
    const char *asked = getenv("TORCH_NCCL_USE_COMM_NONBLOCKING");
    return !asked || strcmp(asked, "1") != 0;
}

tddp_status tddp_nccl_communicator_create(const tddp_nccl_libraries *libraries,
                                          const tddp_nccl_communicator_opts *opts,
                                          tddp_nccl_communicator **out)
{
    tddp_nccl_communicator *made = calloc(1, sizeof *made);
    if (!made) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = tddp_cancel_create(&made->stop);
    status = status ? status : tddp_cond_init(&made->changed);
    if (status) {
        tddp_cancel_free(made->stop);
        free(made);
        return status;
    }
    pthread_mutex_init(&made->mutex, NULL);
    made->libraries = libraries;
    made->opts = *opts;
    made->opts.store = tddp_store_retain(opts->store);
    made->opts.parent = opts->parent ? tddp_nccl_retain(opts->parent) : NULL;
    made->blocking = is_blocking();
    atomic_init(&made->references, 1);
    *out = made;
    return TDDP_OK;
}

static tddp_status fail_late(const tddp_nccl_communicator *communicator)
{
    return tddp_fail(TDDP_TIMEOUT,
                     "not all ranks have arrived at %s in the time given: are they alive, and can "
                     "their addresses be reached?",
                     communicator->opts.key);
}

/* With the mutex held, which is released meanwhile. */
static tddp_status await_connected(tddp_nccl_communicator *communicator, tddp_nccl_limits limits)
{
    while (communicator->state == TDDP_NCCL_CONNECTING) {
        if (limits.cancel && tddp_cancel_triggered(limits.cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted while ranks connect");
        }
        if (atomic_load(&communicator->aborted)) {
            return tddp_nccl_fail_aborted("connecting");
        }
        if (tddp_now_ns() >= limits.deadline_ns) {
            return fail_late(communicator);
        }
        int64_t look = limits.deadline_ns;
        if (limits.cancel) {
            const int64_t soon = tddp_deadline_after_ms(TOKEN_CHECK_MS);
            look = soon < look ? soon : look;
        }
        (void)tddp_nccl_await_change(communicator, look);
    }
    return communicator->state == TDDP_NCCL_FAILED
               ? tddp_fail(communicator->status, "%s", communicator->text)
               : TDDP_OK;
}

void tddp_nccl_set_state(tddp_nccl_communicator *communicator, tddp_nccl_state state,
                         tddp_status status)
{
    pthread_mutex_lock(&communicator->mutex);
    communicator->state = state;
    communicator->status = status;
    (void)snprintf(communicator->text, sizeof communicator->text, "%s",
                   status ? tddp_error_message() : "");
    pthread_cond_broadcast(&communicator->changed);
    pthread_mutex_unlock(&communicator->mutex);
}

tddp_status tddp_nccl_connect(tddp_nccl_communicator *communicator, tddp_nccl_limits limits)
{
    pthread_mutex_lock(&communicator->mutex);
    const bool starts =
        communicator->state == TDDP_NCCL_UNCONNECTED && !atomic_load(&communicator->aborted);
    communicator->state = starts ? TDDP_NCCL_CONNECTING : communicator->state;
    pthread_mutex_unlock(&communicator->mutex);
    tddp_status status = starts ? tddp_nccl_start(communicator, tddp_nccl_connecting) : TDDP_OK;
    if (status) {
        tddp_nccl_set_state(communicator, TDDP_NCCL_FAILED, status);
    }
    pthread_mutex_lock(&communicator->mutex);
    status = atomic_load(&communicator->aborted) ? tddp_nccl_fail_aborted("connecting")
                                                 : await_connected(communicator, limits);
    pthread_mutex_unlock(&communicator->mutex);
    return status;
}

/* --- calls ----------------------------------------------------------------------------------- */

static tddp_status fail_overdue(const char *what)
{
    return tddp_fail(TDDP_TIMEOUT, "%s: not done in the time given", what);
}

static bool is_usable(const tddp_nccl_communicator *communicator)
{
    return communicator->comm && !atomic_load(&communicator->aborted);
}

tddp_status tddp_nccl_begin_calls(tddp_nccl_communicator *communicator, int64_t deadline_ns,
                                  tddp_nccl_comm *comm)
{
    pthread_mutex_lock(&communicator->mutex);
    while (communicator->in_use && is_usable(communicator) && tddp_now_ns() < deadline_ns) {
        (void)tddp_nccl_await_change(communicator, deadline_ns);
    }
    const bool usable = is_usable(communicator);
    const bool begins = usable && !communicator->in_use;
    if (begins) {
        communicator->in_use = true;
        *comm = communicator->comm;
    }
    pthread_mutex_unlock(&communicator->mutex);
    return begins   ? TDDP_OK
           : usable ? fail_overdue("another operation's launch")
                    : tddp_nccl_fail_aborted("a call");
}

void tddp_nccl_end_calls(tddp_nccl_communicator *communicator)
{
    pthread_mutex_lock(&communicator->mutex);
    communicator->in_use = false;
    pthread_cond_broadcast(&communicator->changed);
    pthread_mutex_unlock(&communicator->mutex);
}

/* --- polling --------------------------------------------------------------------------------- */

/* Waits between polls, a little longer each time. */
static void back_off(int *polls)
{
    if (++*polls <= MAX_YIELDS) {
        (void)sched_yield();
        return;
    }
    int64_t ns = (int64_t)MIN_SLEEP_NS * (*polls - MAX_YIELDS);
    struct timespec time = {0, (long)(ns < MAX_SLEEP_NS ? ns : MAX_SLEEP_NS)};
    (void)nanosleep(&time, NULL);
}

/* NCCL's state of the communicator: of the call in progress, or an error of its own threads. */
static tddp_nccl_result async_result(const tddp_nccl_communicator *communicator,
                                     tddp_nccl_comm comm)
{
    tddp_nccl_result result = TDDP_NCCL_SUCCESS;
    tddp_nccl_result failed = communicator->libraries->nccl.ncclCommGetAsyncError(comm, &result);
    return failed ? failed : result;
}

tddp_status tddp_nccl_wait_call(tddp_nccl_communicator *communicator, tddp_nccl_comm comm,
                                tddp_nccl_result result, const char *what, int64_t deadline_ns)
{
    for (int polls = 0; result == TDDP_NCCL_IN_PROGRESS;) {
        if (atomic_load(&communicator->aborted)) {
            return tddp_nccl_fail_aborted(what);
        }
        if (tddp_now_ns() >= deadline_ns) {
            return fail_overdue(what);
        }
        back_off(&polls);
        result = async_result(communicator, comm);
    }
    if (result == TDDP_NCCL_SUCCESS) {
        return TDDP_OK;
    }
    if (atomic_load(&communicator->aborted)) {
        return tddp_nccl_fail_aborted(what);
    }
    return tddp_nccl_fail(communicator->libraries, comm, result, what);
}

tddp_status tddp_nccl_check(tddp_nccl_communicator *communicator)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&communicator->mutex);
    const bool begins = is_usable(communicator) && !communicator->in_use;
    communicator->in_use = communicator->in_use || begins;
    tddp_nccl_comm comm = communicator->comm;
    pthread_mutex_unlock(&communicator->mutex);
    if (begins) {
        tddp_nccl_result result = async_result(communicator, comm);
        if (result != TDDP_NCCL_SUCCESS && result != TDDP_NCCL_IN_PROGRESS) {
            status = tddp_nccl_fail(communicator->libraries, comm, result, "communication");
        }
        tddp_nccl_end_calls(communicator);
    }
    return status;
}
