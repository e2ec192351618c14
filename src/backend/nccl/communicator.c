/*
 * Creates, aborts and polls communicators. They are non-blocking: an NCCL call may return before it
 * is complete, and is polled until it is, so that a deadline, a cancel token or an abort ends the
 * wait.
 *
 * Invariant: `comm` is used with the mutex held, and the thread that aborts it sets it to NULL
 * first.
 */
#include "backend/nccl/communicator.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tddp/log.h>

#define NS_PER_MS INT64_C(1000000)

enum {
    MAX_YIELDS = 200,          /* before a wait sleeps between polls */
    MIN_SLEEP_NS = 5 * 1000,   /* the first sleep */
    MAX_SLEEP_NS = 200 * 1000, /* the longest sleep */
    POLLS_PER_CHECK = 8,       /* polls of an event for each check of the communicator */
    CLOSING_MS = 10 * 1000,
    MIN_KEY_POLL_NS = 1000 * 1000, /* between polls for a key */
    MAX_KEY_POLL_NS = 8 * 1000 * 1000,
    SCRATCH_BYTES = 64,
};

int64_t tddp_nccl_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 * NS_PER_MS + now.tv_nsec;
}

int64_t tddp_nccl_deadline(int64_t timeout_ms)
{
    const int64_t now = tddp_nccl_now();
    return timeout_ms < (INT64_MAX - now) / NS_PER_MS ? now + timeout_ms * NS_PER_MS : INT64_MAX;
}

tddp_wait tddp_nccl_time_left(tddp_nccl_limits limits)
{
    const int64_t left = (limits.deadline_ns - tddp_nccl_now()) / NS_PER_MS;
    return (tddp_wait){left > 0 ? left : 0, limits.cancel};
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

static tddp_status status_of(tddp_nccl_result result)
{
    switch (result) {
    case TDDP_NCCL_SUCCESS:
    case TDDP_NCCL_IN_PROGRESS:
        return TDDP_OK;
    case TDDP_NCCL_REMOTE_ERROR:
        return TDDP_PEER_LOST;
    case TDDP_NCCL_SYSTEM_ERROR:
        return TDDP_NETWORK;
    case TDDP_NCCL_INVALID_ARGUMENT:
    case TDDP_NCCL_INVALID_USAGE:
        return TDDP_INVALID_ARGUMENT;
    default:
        return TDDP_SYSTEM;
    }
}

static tddp_status fail_nccl(const tddp_nccl_communicator *communicator, tddp_nccl_result result,
                             const char *what)
{
    const tddp_nccl *nccl = &communicator->libraries->nccl;
    const char *more = communicator->comm ? nccl->ncclGetLastError(communicator->comm) : NULL;
    return tddp_fail(status_of(result), "%s: %s%s%s", what, nccl->ncclGetErrorString(result),
                     more && *more ? ": " : "", more && *more ? more : "");
}

/* NCCL's state of the communicator: of the call in progress, or an error of its own threads. */
static tddp_nccl_result async_result(const tddp_nccl_communicator *communicator)
{
    tddp_nccl_result result = TDDP_NCCL_SUCCESS;
    tddp_nccl_result failed =
        communicator->libraries->nccl.ncclCommGetAsyncError(communicator->comm, &result);
    return failed ? failed : result;
}

static tddp_status fail_aborted(const char *what)
{
    return tddp_fail(TDDP_GROUP_FAILED, "%s: aborted", what);
}

tddp_status tddp_nccl_wait_call(tddp_nccl_communicator *communicator, tddp_nccl_result result,
                                const char *what, int64_t deadline_ns)
{
    for (int polls = 0; result == TDDP_NCCL_IN_PROGRESS;) {
        if (atomic_load(&communicator->aborted)) {
            return fail_aborted(what);
        }
        if (tddp_nccl_now() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "%s: not done in the time given", what);
        }
        back_off(&polls);
        result = async_result(communicator);
    }
    return result == TDDP_NCCL_SUCCESS ? TDDP_OK : fail_nccl(communicator, result, what);
}

/* Whether the communicator has failed, which NCCL's own threads may find. */
static tddp_status check_comm(tddp_nccl_communicator *communicator)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&communicator->mutex);
    if (communicator->comm) {
        tddp_nccl_result result = async_result(communicator);
        if (result != TDDP_NCCL_SUCCESS && result != TDDP_NCCL_IN_PROGRESS) {
            status = fail_nccl(communicator, result, "communication");
        }
    }
    pthread_mutex_unlock(&communicator->mutex);
    return status;
}

tddp_status tddp_nccl_wait_event(tddp_nccl_communicator *communicator, tddp_cuda_event event,
                                 int64_t deadline_ns)
{
    const tddp_cuda *cuda = communicator->libraries->cuda;
    for (int polls = 0;;) {
        tddp_cuda_error error = cuda->cudaEventQuery(event);
        /* After an abort the operation isn't complete, whatever the event says. */
        if (atomic_load(&communicator->aborted)) {
            return fail_aborted("waiting for the device");
        }
        if (error == TDDP_CUDA_SUCCESS) {
            return TDDP_OK;
        }
        if (error != TDDP_CUDA_NOT_READY) {
            return tddp_cuda_check(cuda, error, "cudaEventQuery");
        }
        (void)cuda->cudaGetLastError();
        if (polls % POLLS_PER_CHECK == 0) {
            tddp_status status = check_comm(communicator);
            if (status) {
                return status;
            }
        }
        if (tddp_nccl_now() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "not done in the time given; a rank has not done its "
                                           "part: slow, stuck, or in another operation?");
        }
        back_off(&polls);
    }
}

/* Polls instead of waiting in the store. A wait would block the store's connection for other
 * threads of this process, one of which may have to set the key that the other rank waits for:
 * as when two ranks send each other their first message at the same time. */
tddp_status tddp_nccl_wait_key(tddp_store *store, tddp_slice key, tddp_nccl_limits limits,
                               const char *timeout_text)
{
    const int64_t start = tddp_nccl_now();
    for (int64_t pause = MIN_KEY_POLL_NS;;
         pause = 2 * pause < MAX_KEY_POLL_NS ? 2 * pause : pause) {
        int is_there = 0;
        const int64_t now = tddp_nccl_now();
        const tddp_wait left = tddp_nccl_time_left(limits);
        if (left.timeout_ms == 0) {
            return tddp_fail(
                TDDP_TIMEOUT, "timed out after %" PRId64 " ms waiting for the key \"%.*s\": %s",
                (now - start) / NS_PER_MS, (int)key.size, (const char *)key.data, timeout_text);
        }
        tddp_status status = tddp_store_check(store, &key, 1, &left, &is_there);
        if (status || is_there) {
            return status;
        }
        if (atomic_load(limits.aborted_flag)) {
            return fail_aborted("waiting for another rank");
        }
        (void)nanosleep(&(struct timespec){0, pause}, NULL);
    }
}

/* --- creation -------------------------------------------------------------------------------- */

/* Rank 0 publishes the id, or why there is none. */
tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries,
                               const tddp_nccl_communicator_opts *opts, tddp_nccl_id *id)
{
    const tddp_nccl_communicator without_comm = {.libraries = libraries};
    const tddp_slice key = {opts->key, strlen(opts->key)};
    const tddp_wait left = tddp_nccl_time_left(opts->limits);
    if (opts->rank == 0) {
        tddp_nccl_result result = libraries->nccl.ncclGetUniqueId(id);
        if (result) {
            tddp_status status = fail_nccl(&without_comm, result, "ncclGetUniqueId");
            char text[1024];
            (void)snprintf(text, sizeof text, "%s", tddp_error_message());
            tddp_backend_publish_failure(opts->store, key, text);
            return tddp_fail(status, "%s", text);
        }
        return tddp_store_set(opts->store, key, (tddp_slice){id->internal, sizeof id->internal},
                              &left);
    }
    tddp_blob blob = {0};
    tddp_status status =
        tddp_nccl_wait_key(opts->store, key, opts->limits, "a rank has not begun to connect");
    if (status == TDDP_OK) {
        status = tddp_store_get(opts->store, key, &left, &blob);
    }
    if (status) {
        return status;
    }
    const char *reason = tddp_backend_published_failure((tddp_slice){blob.data, blob.size});
    if (reason) {
        status = tddp_fail(TDDP_PEER_LOST, "rank 0 could not begin: %s", reason);
    } else if (blob.size == sizeof id->internal) {
        memcpy(id->internal, blob.data, sizeof id->internal);
    } else {
        status = tddp_fail(TDDP_PROTOCOL,
                           "the id of a communicator in the store has %zu bytes: "
                           "expected %zu",
                           blob.size, sizeof id->internal);
    }
    tddp_blob_free(&blob);
    return status;
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

/* The device is current. */
static tddp_status create_resources(tddp_nccl_communicator *communicator)
{
    const tddp_cuda *cuda = communicator->libraries->cuda;
    int least = 0;
    int greatest = 0;
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaDeviceGetStreamPriorityRange(&least, &greatest),
                        "cudaDeviceGetStreamPriorityRange");
    if (status == TDDP_OK) {
        /* Highest priority: kernels that compute at the same time have thousands of blocks to
         * start, these have few, and threads wait for them. */
        status = tddp_cuda_check(cuda,
                                 cuda->cudaStreamCreateWithPriority(
                                     &communicator->stream, TDDP_CUDA_NON_BLOCKING, greatest),
                                 "cudaStreamCreateWithPriority");
    }
    if (status == TDDP_OK) {
        status = tddp_cuda_check(cuda, cuda->cudaMalloc(&communicator->scratch, SCRATCH_BYTES),
                                 "cudaMalloc");
    }
    return status;
}

static tddp_nccl_config config_of(void)
{
    return (tddp_nccl_config){.size = sizeof(tddp_nccl_config),
                              .magic = (unsigned)TDDP_NCCL_CONFIG_MAGIC,
                              .version = TDDP_NCCL_CONFIG_VERSION,
                              .blocking = 0,
                              .cga_cluster_size = TDDP_NCCL_UNSET,
                              .min_ctas = TDDP_NCCL_UNSET,
                              .max_ctas = TDDP_NCCL_UNSET,
                              .split_share = TDDP_NCCL_UNSET};
}

/* Polls a communicator until NCCL has completed the call. */
static tddp_status wait_ready(const tddp_nccl_communicator *communicator, tddp_nccl_result result,
                              const tddp_nccl_communicator_opts *opts, const char *what)
{
    const tddp_nccl_limits limits = opts->limits;
    for (int polls = 0; result == TDDP_NCCL_IN_PROGRESS;) {
        if (limits.cancel && tddp_cancel_triggered(limits.cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted while ranks connect");
        }
        if (atomic_load(limits.aborted_flag) || atomic_load(&communicator->aborted)) {
            return fail_aborted("connecting");
        }
        if (tddp_nccl_now() >= limits.deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT,
                             "not all ranks have arrived at %s in the time given: are "
                             "they alive, and can their addresses be reached?",
                             opts->key);
        }
        back_off(&polls);
        result = async_result(communicator);
    }
    return result ? fail_nccl(communicator, result, what) : TDDP_OK;
}

/* Called by all ranks of the parent; ranks that are not members get NULL. NCCL fills in the new
 * communicator when the call on the parent is complete, which only the parent's state says: the
 * call itself returns ncclSuccess at once, seen with 2.28. */
static tddp_status split_comm(tddp_nccl_communicator *parent, int color,
                              const tddp_nccl_communicator_opts *opts, tddp_nccl_comm *created)
{
    static const char what[] = "ncclCommSplit";
    tddp_nccl_config config = config_of();
    tddp_status status;
    pthread_mutex_lock(&parent->mutex);
    if (parent->comm) {
        tddp_nccl_result result = parent->libraries->nccl.ncclCommSplit(
            parent->comm, color, opts->rank, created, &config);
        result = result == TDDP_NCCL_SUCCESS ? TDDP_NCCL_IN_PROGRESS : result;
        status = wait_ready(parent, result, opts, what);
    } else {
        status = fail_aborted(what);
    }
    pthread_mutex_unlock(&parent->mutex);
    return status;
}

static tddp_status init_comm(tddp_nccl_communicator *communicator,
                             const tddp_nccl_communicator_opts *opts)
{
    static const char what[] = "ncclCommInitRankConfig";
    const tddp_nccl *nccl = &communicator->libraries->nccl;
    tddp_nccl_config config = config_of();
    tddp_nccl_id id = {{0}};
    tddp_status status = TDDP_OK;
    if (opts->parent) {
        status = split_comm(opts->parent, 0, opts, &communicator->comm);
    } else if (opts->id) {
        id = *opts->id;
    } else {
        status = tddp_nccl_share_id(communicator->libraries, opts, &id);
    }
    if (status) {
        return status;
    }
    tddp_nccl_result result = TDDP_NCCL_IN_PROGRESS;
    if (!opts->parent) {
        result =
            nccl->ncclCommInitRankConfig(&communicator->comm, opts->size, id, opts->rank, &config);
    }
    return wait_ready(communicator, result, opts, what);
}

tddp_status tddp_nccl_communicator_decline(tddp_nccl_communicator *communicator,
                                           const tddp_nccl_communicator_opts *opts)
{
    const tddp_cuda *cuda = communicator->libraries->cuda;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, communicator->device, &place);
    if (status == TDDP_OK) {
        status = split_comm(communicator, TDDP_NCCL_NO_COLOR, opts, &communicator->none);
        tddp_cuda_leave(cuda, &place);
    }
    return status;
}

tddp_status tddp_nccl_communicator_create(const tddp_nccl_libraries *libraries,
                                          const tddp_nccl_communicator_opts *opts,
                                          tddp_nccl_communicator **out)
{
    tddp_nccl_communicator *communicator = calloc(1, sizeof *communicator);
    if (!communicator) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    communicator->libraries = libraries;
    communicator->device = opts->device;
    communicator->rank = opts->rank;
    communicator->size = opts->size;
    pthread_mutex_init(&communicator->mutex, NULL);
    tddp_cuda_place place;
    tddp_status status = check_device(libraries->cuda, opts->device);
    status = status ? status : tddp_cuda_enter(libraries->cuda, opts->device, &place);
    if (status == TDDP_OK) {
        status = create_resources(communicator);
        status = status ? status : init_comm(communicator, opts);
        tddp_cuda_leave(libraries->cuda, &place);
    }
    if (status) {
        char text[2048];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_nccl_communicator_abort(communicator);
        tddp_nccl_communicator_destroy(communicator);
        return tddp_fail(status, "%s", text);
    }
    *out = communicator;
    return TDDP_OK;
}

/* --- the end --------------------------------------------------------------------------------- */

void tddp_nccl_communicator_abort(tddp_nccl_communicator *communicator)
{
    /* Before locking, since the thread that holds the mutex may be waiting for NCCL. */
    atomic_store(&communicator->aborted, true);
    pthread_mutex_lock(&communicator->mutex);
    if (communicator->comm) {
        (void)communicator->libraries->nccl.ncclCommAbort(communicator->comm);
        communicator->comm = NULL;
    }
    pthread_mutex_unlock(&communicator->mutex);
}

/* Waits for what is on the stream, unless it was aborted. */
static void finalize(tddp_nccl_communicator *communicator)
{
    const tddp_nccl *nccl = &communicator->libraries->nccl;
    int64_t deadline = tddp_nccl_now() + CLOSING_MS * NS_PER_MS;
    pthread_mutex_lock(&communicator->mutex);
    tddp_status status = tddp_nccl_wait_call(
        communicator, nccl->ncclCommFinalize(communicator->comm), "ncclCommFinalize", deadline);
    if (status == TDDP_OK) {
        (void)nccl->ncclCommDestroy(communicator->comm);
        communicator->comm = NULL;
    }
    pthread_mutex_unlock(&communicator->mutex);
    if (status) {
        tddp_log(TDDP_LOG_DEBUG, "nccl", "%s", tddp_error_message());
        tddp_nccl_communicator_abort(communicator);
    }
}

void tddp_nccl_communicator_destroy(tddp_nccl_communicator *communicator)
{
    if (!communicator) {
        return;
    }
    if (communicator->comm) {
        finalize(communicator);
    }
    if (communicator->scratch) {
        (void)communicator->libraries->cuda->cudaFree(communicator->scratch);
    }
    if (communicator->stream) {
        (void)communicator->libraries->cuda->cudaStreamDestroy(communicator->stream);
    }
    pthread_mutex_destroy(&communicator->mutex);
    free(communicator);
}
