/*
 * The end of communicators, and the threads on which NCCL's calls may block.
 *
 * ncclCommAbort() may wait for the device, which may wait for a kernel of another communicator that
 * hangs as well. So all that are to end are marked first, without a lock, and then aborted side by
 * side, each on a lent thread, which the caller awaits for a moment only. If one takes longer than
 * TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (as in PyTorch, 480 by default), a process that cannot go on is
 * ended.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <tddp/log.h>

#include "backend/blocking.h"
#include "backend/nccl/communicator.h"

enum {
    CALLS_MS = 1000,    /* for calls to end by themselves */
    ABORTING_MS = 2000, /* for the threads that abort */
    CLOSING_MS = 10 * 1000,
    HEARTBEAT_S = 480,
};

/* --- references ------------------------------------------------------------------------------ */

tddp_nccl_communicator *tddp_nccl_retain(tddp_nccl_communicator *communicator)
{
    atomic_fetch_add(&communicator->references, 1);
    return communicator;
}

static void free_resources(tddp_nccl_communicator *communicator)
{
    const tddp_cuda *cuda = communicator->libraries->cuda;
    tddp_cuda_place before;
    if ((!communicator->scratch && !communicator->stream) ||
        tddp_cuda_enter(cuda, communicator->opts.device, &before)) {
        return;
    }
    if (communicator->scratch) {
        (void)cuda->cudaFree(communicator->scratch);
    }
    if (communicator->stream) {
        (void)cuda->cudaStreamDestroy(communicator->stream);
    }
    tddp_cuda_leave(cuda, &before);
}

static void free_communicator(tddp_nccl_communicator *communicator)
{
    free_resources(communicator);
    tddp_nccl_release(communicator->opts.parent);
    tddp_store_release(communicator->opts.store);
    tddp_cancel_free(communicator->stop);
    pthread_cond_destroy(&communicator->changed);
    pthread_mutex_destroy(&communicator->mutex);
    free(communicator);
}

void tddp_nccl_release(tddp_nccl_communicator *communicator)
{
    if (communicator && atomic_fetch_sub(&communicator->references, 1) == 1) {
        free_communicator(communicator);
    }
}

/* --- threads --------------------------------------------------------------------------------- */

typedef struct task {
    tddp_blocking_call call;
    tddp_nccl_communicator *communicator;
    void (*body)(tddp_nccl_communicator *communicator);
} task;

/* The thread that waits for these finds their references given back as well. */
static void end_thread(tddp_nccl_communicator *communicator)
{
    pthread_mutex_lock(&communicator->mutex);
    communicator->threads--;
    const bool last = atomic_fetch_sub(&communicator->references, 1) == 1;
    pthread_cond_broadcast(&communicator->changed);
    pthread_mutex_unlock(&communicator->mutex);
    if (last) {
        free_communicator(communicator);
    }
}

static tddp_status check_device(const tddp_cuda *cuda, int device)
{
    int count = 0;
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (status == TDDP_OK && (device < 0 || device >= count)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected a GPU's number, 0 to %d",
                           device, count - 1);
    }
    return status;
}

static void run(void *context, void *nothing)
{
    task it = *(task *)context;
    free(context);
    (void)nothing;
    const tddp_cuda *cuda = it.communicator->libraries->cuda;
    const int device = it.communicator->opts.device;
    tddp_cuda_place before;
    tddp_cuda_keep_device();
    tddp_status status = check_device(cuda, device);
    status = status ? status : tddp_cuda_enter(cuda, device, &before);
    if (status && it.body == tddp_nccl_connecting) {
        tddp_nccl_set_state(it.communicator, TDDP_NCCL_FAILED, status);
    } else {
        it.body(it.communicator); /* an abort also on a device that has failed */
    }
    if (status == TDDP_OK) {
        tddp_cuda_leave(cuda, &before);
    }
    end_thread(it.communicator);
}

tddp_status tddp_nccl_start(tddp_nccl_communicator *communicator,
                            void (*body)(tddp_nccl_communicator *communicator))
{
    task *made = malloc(sizeof *made);
    tddp_status status =
        made ? tddp_blocking_reserve() : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    if (status) {
        free(made);
        return status;
    }
    *made = (task){{.run = run, .context = made}, tddp_nccl_retain(communicator), body};
    pthread_mutex_lock(&communicator->mutex);
    communicator->threads++;
    pthread_mutex_unlock(&communicator->mutex);
    tddp_blocking_start(&made->call);
    return TDDP_OK;
}

/* --- aborting -------------------------------------------------------------------------------- */

static int64_t heartbeat_ms(void)
{
    const char *text = getenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC");
    char *end = NULL;
    const long long seconds = text ? strtoll(text, &end, 10) : 0;
    return (text && *text && !*end && seconds > 0 ? seconds : HEARTBEAT_S) * 1000;
}

/* Ends the process unless the abort ends in time. */
static void watch(tddp_nccl_communicator *communicator)
{
    const int64_t time = heartbeat_ms();
    const int64_t deadline = tddp_deadline_after_ms(time);
    bool in_time = true;
    pthread_mutex_lock(&communicator->mutex);
    while (communicator->aborting && in_time) {
        in_time = tddp_nccl_await_change(communicator, deadline) || tddp_now_ns() < deadline;
    }
    const bool hangs = communicator->aborting;
    pthread_mutex_unlock(&communicator->mutex);
    if (hangs) {
        (void)fprintf(stderr,
                      "torch-ddp: process %d ends: ncclCommAbort of the communicator %s on cuda:%d "
                      "has not returned for %" PRId64
                      " s, so the device is stuck (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC sets the "
                      "time)\n",
                      (int)getpid(), communicator->opts.key, communicator->opts.device,
                      time / 1000);
        _exit(EXIT_FAILURE);
    }
}

void tddp_nccl_end_comm(tddp_nccl_communicator *communicator)
{
    const int64_t deadline = tddp_deadline_after_ms(CALLS_MS);
    pthread_mutex_lock(&communicator->mutex);
    while (communicator->in_use && tddp_now_ns() < deadline) {
        (void)tddp_nccl_await_change(communicator, deadline);
    }
    tddp_nccl_comm comm = communicator->comm;
    communicator->comm = NULL;
    /* Two threads may come here: the one that aborts, and the one that has connected meanwhile. */
    communicator->aborting = communicator->aborting || comm;
    communicator->ended = !communicator->aborting;
    pthread_cond_broadcast(&communicator->changed);
    pthread_mutex_unlock(&communicator->mutex);
    if (comm) {
        if (tddp_nccl_start(communicator, watch)) {
            tddp_log(TDDP_LOG_WARN, "nccl", "nothing watches an abort: %s", tddp_error_message());
        }
        (void)communicator->libraries->nccl.ncclCommAbort(comm);
        pthread_mutex_lock(&communicator->mutex);
        communicator->aborting = false;
        communicator->ended = true;
        pthread_cond_broadcast(&communicator->changed);
        pthread_mutex_unlock(&communicator->mutex);
    }
}

/* Without a lock that is held across a wait: the threads that wait look at the mark. */
static void mark(tddp_nccl_communicator *communicator)
{
    atomic_store(&communicator->aborted, true);
    tddp_cancel_trigger(communicator->stop);
    pthread_mutex_lock(&communicator->mutex);
    pthread_cond_broadcast(&communicator->changed);
    pthread_mutex_unlock(&communicator->mutex);
}

static void start_to_abort(tddp_nccl_communicator *communicator)
{
    pthread_mutex_lock(&communicator->mutex);
    const bool first = !communicator->ending && communicator->state != TDDP_NCCL_UNCONNECTED;
    communicator->ending = true;
    communicator->ended = communicator->ended || communicator->state == TDDP_NCCL_UNCONNECTED;
    pthread_mutex_unlock(&communicator->mutex);
    if (first && tddp_nccl_start(communicator, tddp_nccl_end_comm)) {
        tddp_nccl_end_comm(communicator);
    }
}

/* A thread that connects may stay in NCCL's call; it has nothing on the device. */
static void await_end(tddp_nccl_communicator *communicator, int64_t deadline)
{
    pthread_mutex_lock(&communicator->mutex);
    while (!communicator->ended && tddp_now_ns() < deadline) {
        (void)tddp_nccl_await_change(communicator, deadline);
    }
    pthread_mutex_unlock(&communicator->mutex);
}

/* Whether no thread has anything to do with it. */
static bool await_threads(tddp_nccl_communicator *communicator, int64_t deadline)
{
    pthread_mutex_lock(&communicator->mutex);
    while (communicator->threads > 0 && tddp_now_ns() < deadline) {
        (void)tddp_nccl_await_change(communicator, deadline);
    }
    const bool none = communicator->threads == 0;
    pthread_mutex_unlock(&communicator->mutex);
    return none;
}

void tddp_nccl_abort(tddp_nccl_communicator *list)
{
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        mark(each);
    }
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        start_to_abort(each);
    }
    const int64_t deadline = tddp_deadline_after_ms(ABORTING_MS);
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        await_end(each, deadline);
    }
}

/* --- closing --------------------------------------------------------------------------------- */

/* Waits for what is on the stream. */
static void finalize(tddp_nccl_communicator *communicator)
{
    const tddp_nccl *nccl = &communicator->libraries->nccl;
    tddp_nccl_comm comm;
    if (tddp_nccl_begin_calls(communicator, INT64_MAX, &comm)) {
        return;
    }
    tddp_status status = tddp_nccl_wait_call(communicator, comm, nccl->ncclCommFinalize(comm),
                                             "ncclCommFinalize", INT64_MAX);
    pthread_mutex_lock(&communicator->mutex);
    const bool closes = status == TDDP_OK && communicator->comm;
    if (closes) {
        communicator->comm = NULL;
    }
    pthread_mutex_unlock(&communicator->mutex);
    if (closes) {
        (void)nccl->ncclCommDestroy(comm);
    } else {
        tddp_log(TDDP_LOG_DEBUG, "nccl", "%s", tddp_error_message());
    }
    tddp_nccl_end_calls(communicator);
}

static bool is_closed(tddp_nccl_communicator *communicator)
{
    pthread_mutex_lock(&communicator->mutex);
    const bool closed = !communicator->comm && communicator->threads == 0;
    pthread_mutex_unlock(&communicator->mutex);
    return closed;
}

void tddp_nccl_close(tddp_nccl_communicator *list)
{
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        if (!is_closed(each) && !atomic_load(&each->aborted) && tddp_nccl_start(each, finalize)) {
            tddp_log(TDDP_LOG_DEBUG, "nccl", "%s", tddp_error_message());
        }
    }
    const int64_t deadline = tddp_deadline_after_ms(CLOSING_MS);
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        if (!atomic_load(&each->aborted)) {
            (void)await_threads(each, deadline);
        }
    }
    for (tddp_nccl_communicator *each = list; each; each = each->next) {
        if (!is_closed(each)) {
            mark(each);
            start_to_abort(each);
        }
    }
    const int64_t last = tddp_deadline_after_ms(ABORTING_MS);
    while (list) {
        tddp_nccl_communicator *each = list;
        list = each->next;
        if (!await_threads(each, last)) {
            tddp_log(TDDP_LOG_WARN, "nccl",
                     "the communicator %s on cuda:%d is left to the thread that aborts it, since "
                     "the device does not carry out what is on it",
                     each->opts.key, each->opts.device);
        }
        tddp_nccl_release(each);
    }
}
