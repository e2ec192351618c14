/*
 * Making, aborting and watching communicators. NCCL is asked not to block: each of its calls may be
 * under way when it returns, and is looked at until it is through, so that a deadline, a token and
 * an abort end it.
 *
 * Invariant: `comm` is used with the mutex held, and aborted once, by whoever takes it out.
 */
#include "backend/nccl/channel.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tddp/log.h>

#define NS_PER_MS INT64_C(1000000)

enum {
    YIELDS = 200,             /* before a wait sleeps between its looks */
    LEAST_NAP_NS = 5 * 1000,  /* the first sleep */
    MOST_NAP_NS = 200 * 1000, /* grows up to this */
    LOOKS_A_CHECK = 8,        /* of the event, for one of the communicator */
    CLOSING_MS = 10 * 1000,
    ID_BRIEFLY_MS = 1000,
    LEAST_PAUSE_NS = 1000 * 1000, /* between looks for a key */
    MOST_PAUSE_NS = 8 * 1000 * 1000,
    SCRATCH_BYTES = 64,
};

/* What rank 0 leaves in place of an id when it has none. */
static const char FAILED[] = "failed: ";

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

tddp_wait tddp_nccl_left(tddp_nccl_until until)
{
    const int64_t left = (until.deadline_ns - tddp_nccl_now()) / NS_PER_MS;
    return (tddp_wait){left > 0 ? left : 0, until.cancel};
}

/* --- looking --------------------------------------------------------------------------------- */

/* Waits a little longer each time. */
static void nap(int *looks)
{
    if (++*looks <= YIELDS) {
        (void)sched_yield();
        return;
    }
    int64_t ns = (int64_t)LEAST_NAP_NS * (*looks - YIELDS);
    struct timespec time = {0, (long)(ns < MOST_NAP_NS ? ns : MOST_NAP_NS)};
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

static tddp_status fail_nccl(const tddp_nccl_channel *channel, tddp_nccl_result result,
                             const char *what)
{
    const tddp_nccl *nccl = &channel->libraries->nccl;
    const char *more = channel->comm ? nccl->ncclGetLastError(channel->comm) : NULL;
    return tddp_fail(status_of(result), "%s: %s%s%s", what, nccl->ncclGetErrorString(result),
                     more && *more ? ": " : "", more && *more ? more : "");
}

static tddp_status aborted(const char *what)
{
    return tddp_fail(TDDP_GROUP_FAILED, "%s: aborted", what);
}

tddp_status tddp_nccl_settle(tddp_nccl_channel *channel, tddp_nccl_result result, const char *what,
                             int64_t deadline_ns)
{
    const tddp_nccl *nccl = &channel->libraries->nccl;
    for (int looks = 0; result == TDDP_NCCL_IN_PROGRESS;) {
        if (atomic_load(&channel->aborted)) {
            return aborted(what);
        }
        if (tddp_nccl_now() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "%s: not done in the time given", what);
        }
        nap(&looks);
        tddp_nccl_result own = nccl->ncclCommGetAsyncError(channel->comm, &result);
        result = own ? own : result;
    }
    return result == TDDP_NCCL_SUCCESS ? TDDP_OK : fail_nccl(channel, result, what);
}

/* Whether the communicator has met an error, which comes to it from its own threads. */
static tddp_status check_comm(tddp_nccl_channel *channel)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&channel->mutex);
    if (channel->comm) {
        tddp_nccl_result result = TDDP_NCCL_SUCCESS;
        tddp_nccl_result own =
            channel->libraries->nccl.ncclCommGetAsyncError(channel->comm, &result);
        result = own ? own : result;
        if (result != TDDP_NCCL_SUCCESS && result != TDDP_NCCL_IN_PROGRESS) {
            status = fail_nccl(channel, result, "communication");
        }
    }
    pthread_mutex_unlock(&channel->mutex);
    return status;
}

tddp_status tddp_nccl_await(tddp_nccl_channel *channel, tddp_cuda_event event, int64_t deadline_ns)
{
    const tddp_cuda *cuda = channel->libraries->cuda;
    for (int looks = 0;;) {
        tddp_cuda_error error = cuda->cudaEventQuery(event);
        /* What an abort has ended is not done, whatever the event says. */
        if (atomic_load(&channel->aborted)) {
            return aborted("waiting for the device");
        }
        if (error == TDDP_CUDA_SUCCESS) {
            return TDDP_OK;
        }
        if (error != TDDP_CUDA_NOT_READY) {
            return tddp_cuda_check(cuda, error, "cudaEventQuery");
        }
        (void)cuda->cudaGetLastError();
        if (looks % LOOKS_A_CHECK == 0) {
            tddp_status status = check_comm(channel);
            if (status) {
                return status;
            }
        }
        if (tddp_nccl_now() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "not done in the time given; a rank has not done its "
                                           "part: slow, stuck, or in another operation?");
        }
        nap(&looks);
    }
}

/* Rather than to wait for it in the store, which would keep other threads of this process from
 * using that, one of which may have to say what the other rank waits for: as where two ranks send
 * each other their first messages at once. */
tddp_status tddp_nccl_await_key(tddp_store *store, tddp_slice key, tddp_nccl_until until,
                                const char *lack)
{
    const int64_t start = tddp_nccl_now();
    for (int64_t pause = LEAST_PAUSE_NS;; pause = 2 * pause < MOST_PAUSE_NS ? 2 * pause : pause) {
        int is_there = 0;
        const int64_t now = tddp_nccl_now();
        const tddp_wait left = tddp_nccl_left(until);
        if (left.timeout_ms == 0) {
            return tddp_fail(
                TDDP_TIMEOUT, "timed out after %" PRId64 " ms waiting for the key \"%.*s\": %s",
                (now - start) / NS_PER_MS, (int)key.size, (const char *)key.data, lack);
        }
        tddp_status status = tddp_store_check(store, &key, 1, &left, &is_there);
        if (status || is_there) {
            return status;
        }
        if (atomic_load(until.ends)) {
            return aborted("waiting for another rank");
        }
        (void)nanosleep(&(struct timespec){0, pause}, NULL);
    }
}

/* --- making ---------------------------------------------------------------------------------- */

/* The others get the id, or why there is none. */
tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries, const tddp_nccl_plan *plan,
                               tddp_nccl_id *id)
{
    const tddp_nccl_channel nothing_yet = {.libraries = libraries};
    const tddp_slice key = {plan->key, strlen(plan->key)};
    const tddp_wait left = tddp_nccl_left(plan->until);
    if (plan->rank == 0) {
        tddp_nccl_result result = libraries->nccl.ncclGetUniqueId(id);
        if (result) {
            tddp_status status = fail_nccl(&nothing_yet, result, "ncclGetUniqueId");
            char text[1024];
            int length = snprintf(text, sizeof text, "%s%s", FAILED, tddp_error_message());
            const tddp_slice words = {text, (size_t)length < sizeof text ? (size_t)length
                                                                         : sizeof text - 1};
            const tddp_wait briefly = {ID_BRIEFLY_MS, NULL};
            if (tddp_store_set(plan->store, key, words, &briefly)) {
                tddp_log(TDDP_LOG_DEBUG, "nccl", "%s", tddp_error_message());
            }
            return tddp_fail(status, "%s", text + sizeof FAILED - 1);
        }
        return tddp_store_set(plan->store, key, (tddp_slice){id->internal, sizeof id->internal},
                              &left);
    }
    tddp_blob blob = {0};
    tddp_status status =
        tddp_nccl_await_key(plan->store, key, plan->until, "a rank has not begun to connect");
    if (status == TDDP_OK) {
        status = tddp_store_get(plan->store, key, &left, &blob);
    }
    if (status) {
        return status;
    }
    if (blob.size == sizeof id->internal) {
        memcpy(id->internal, blob.data, sizeof id->internal);
    } else if (strncmp(blob.data, FAILED, sizeof FAILED - 1) == 0) {
        status =
            tddp_fail(TDDP_PEER_LOST, "rank 0 could not begin: %s", blob.data + sizeof FAILED - 1);
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

/* The device is the thread's. */
static tddp_status take_device(tddp_nccl_channel *channel)
{
    const tddp_cuda *cuda = channel->libraries->cuda;
    int least = 0;
    int greatest = 0;
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaDeviceGetStreamPriorityRange(&least, &greatest),
                        "cudaDeviceGetStreamPriorityRange");
    if (status == TDDP_OK) {
        /* What computes beside it has thousands of blocks to begin; these are few, and awaited. */
        status = tddp_cuda_check(
            cuda,
            cuda->cudaStreamCreateWithPriority(&channel->stream, TDDP_CUDA_NON_BLOCKING, greatest),
            "cudaStreamCreateWithPriority");
    }
    if (status == TDDP_OK) {
        status =
            tddp_cuda_check(cuda, cuda->cudaMalloc(&channel->scratch, SCRATCH_BYTES), "cudaMalloc");
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

/* Looks at a communicator until NCCL is through with what it began. */
static tddp_status await_ready(const tddp_nccl_channel *channel, tddp_nccl_result result,
                               const tddp_nccl_plan *plan, const char *what)
{
    const tddp_nccl *nccl = &channel->libraries->nccl;
    const tddp_nccl_until until = plan->until;
    for (int looks = 0; result == TDDP_NCCL_IN_PROGRESS;) {
        if (until.cancel && tddp_cancel_triggered(until.cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted while ranks connect");
        }
        if (atomic_load(until.ends) || atomic_load(&channel->aborted)) {
            return aborted("connecting");
        }
        if (tddp_nccl_now() >= until.deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT,
                             "not all ranks have come to %s in the time given: are "
                             "they alive, and can their addresses be reached?",
                             plan->key);
        }
        nap(&looks);
        tddp_nccl_result own = nccl->ncclCommGetAsyncError(channel->comm, &result);
        result = own ? own : result;
    }
    return result ? fail_nccl(channel, result, what) : TDDP_OK;
}

/* By all ranks of the one that it is split off from; who is not in it gets NULL. NCCL fills in the
 * new communicator once it is through with the old one. */
static tddp_status split(tddp_nccl_channel *from, int color, const tddp_nccl_plan *plan,
                         tddp_nccl_comm *made)
{
    static const char what[] = "ncclCommSplit";
    tddp_nccl_config config = config_of();
    tddp_status status;
    pthread_mutex_lock(&from->mutex);
    if (from->comm) {
        tddp_nccl_result result =
            from->libraries->nccl.ncclCommSplit(from->comm, color, plan->rank, made, &config);
        status = await_ready(from, result, plan, what);
    } else {
        status = aborted(what);
    }
    pthread_mutex_unlock(&from->mutex);
    return status;
}

static tddp_status connect_all(tddp_nccl_channel *channel, const tddp_nccl_plan *plan)
{
    static const char what[] = "ncclCommInitRankConfig";
    const tddp_nccl *nccl = &channel->libraries->nccl;
    tddp_nccl_config config = config_of();
    tddp_nccl_id id = {{0}};
    tddp_status status = TDDP_OK;
    if (plan->from) {
        status = split(plan->from, 0, plan, &channel->comm);
    } else if (plan->id) {
        id = *plan->id;
    } else {
        status = tddp_nccl_share_id(channel->libraries, plan, &id);
    }
    if (status) {
        return status;
    }
    tddp_nccl_result result = TDDP_NCCL_IN_PROGRESS;
    if (!plan->from) {
        result = nccl->ncclCommInitRankConfig(&channel->comm, plan->size, id, plan->rank, &config);
    }
    return await_ready(channel, result, plan, what);
}

tddp_status tddp_nccl_channel_decline(tddp_nccl_channel *channel, const tddp_nccl_plan *plan)
{
    const tddp_cuda *cuda = channel->libraries->cuda;
    tddp_nccl_comm none = NULL;
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(cuda, channel->device, &place);
    if (status == TDDP_OK) {
        status = split(channel, TDDP_NCCL_NO_COLOR, plan, &none);
        tddp_cuda_leave(cuda, &place);
    }
    return status;
}

tddp_status tddp_nccl_channel_open(const tddp_nccl_libraries *libraries, const tddp_nccl_plan *plan,
                                   tddp_nccl_channel **out)
{
    tddp_nccl_channel *channel = calloc(1, sizeof *channel);
    if (!channel) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    channel->libraries = libraries;
    channel->device = plan->device;
    channel->rank = plan->rank;
    channel->size = plan->size;
    pthread_mutex_init(&channel->mutex, NULL);
    tddp_cuda_place place;
    tddp_status status = check_device(libraries->cuda, plan->device);
    status = status ? status : tddp_cuda_enter(libraries->cuda, plan->device, &place);
    if (status == TDDP_OK) {
        status = take_device(channel);
        status = status ? status : connect_all(channel, plan);
        tddp_cuda_leave(libraries->cuda, &place);
    }
    if (status) {
        char text[2048];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_nccl_channel_abort(channel);
        tddp_nccl_channel_close(channel);
        return tddp_fail(status, "%s", text);
    }
    *out = channel;
    return TDDP_OK;
}

/* --- ends ------------------------------------------------------------------------------------ */

void tddp_nccl_channel_abort(tddp_nccl_channel *channel)
{
    /* First, as who holds the mutex may be waiting for NCCL. */
    atomic_store(&channel->aborted, true);
    pthread_mutex_lock(&channel->mutex);
    if (channel->comm) {
        (void)channel->libraries->nccl.ncclCommAbort(channel->comm);
        channel->comm = NULL;
    }
    pthread_mutex_unlock(&channel->mutex);
}

/* What was put on the stream is let finish, unless it was aborted. */
static void finalize(tddp_nccl_channel *channel)
{
    const tddp_nccl *nccl = &channel->libraries->nccl;
    int64_t deadline = tddp_nccl_now() + CLOSING_MS * NS_PER_MS;
    pthread_mutex_lock(&channel->mutex);
    tddp_status status = tddp_nccl_settle(channel, nccl->ncclCommFinalize(channel->comm),
                                          "ncclCommFinalize", deadline);
    if (status == TDDP_OK) {
        (void)nccl->ncclCommDestroy(channel->comm);
        channel->comm = NULL;
    }
    pthread_mutex_unlock(&channel->mutex);
    if (status) {
        tddp_log(TDDP_LOG_DEBUG, "nccl", "%s", tddp_error_message());
        tddp_nccl_channel_abort(channel);
    }
}

void tddp_nccl_channel_close(tddp_nccl_channel *channel)
{
    if (!channel) {
        return;
    }
    if (channel->comm) {
        finalize(channel);
    }
    if (channel->scratch) {
        (void)channel->libraries->cuda->cudaFree(channel->scratch);
    }
    if (channel->stream) {
        (void)channel->libraries->cuda->cudaStreamDestroy(channel->stream);
    }
    pthread_mutex_destroy(&channel->mutex);
    free(channel);
}
