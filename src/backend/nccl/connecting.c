/*
 * Connects the ranks of a communicator, on a lent thread: the stream and memory on the
 * device, the unique id through the store, NCCL's call. In blocking mode that call returns when all
 * ranks have come, and nothing ends it before: if all that waited for it have given up, this thread
 * aborts what it has made.
 */
#include <stdio.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/nccl/communicator.h"

enum { SCRATCH_BYTES = 64 };

/* --- the unique id --------------------------------------------------------------------------- */

/* Of rank 0: gives the id, or says why there is none. */
static tddp_status give_id(const tddp_nccl_libraries *libraries, const tddp_meeting_opts *opts,
                           tddp_meeting *meeting, const tddp_wait *wait, tddp_nccl_id *id)
{
    tddp_nccl_result result = libraries->nccl.ncclGetUniqueId(id);
    if (result) {
        char text[1024];
        tddp_status status = tddp_nccl_fail(libraries, NULL, result, "ncclGetUniqueId");
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_meeting_fail(opts, text);
        return tddp_fail(status, "%s", text);
    }
    return tddp_meeting_give(meeting, (tddp_slice){id->internal, sizeof id->internal}, wait);
}

static tddp_status take_id(tddp_meeting *meeting, const tddp_wait *wait, tddp_nccl_id *id)
{
    tddp_status status = tddp_meeting_await(meeting, wait);
    const tddp_slice record = tddp_meeting_records(meeting)[0];
    if (status == TDDP_OK && record.size != sizeof id->internal) {
        status = tddp_fail(TDDP_PROTOCOL,
                           "the id of a communicator in the store has %zu bytes: expected %zu",
                           record.size, sizeof id->internal);
    }
    if (status == TDDP_OK) {
        memcpy(id->internal, record.data, sizeof id->internal);
    }
    return status;
}

tddp_status tddp_nccl_share_id(const tddp_nccl_libraries *libraries, tddp_store *store,
                               const char *key, int rank, int size, tddp_nccl_limits limits,
                               tddp_nccl_id *id)
{
    tddp_wait left = tddp_nccl_time_left(limits);
    tddp_meeting *meeting = NULL;
    tddp_store *own = NULL;
    /* A store of several threads has one connection, which a wait keeps from the others; one of
     * them may have to give what the other ranks wait for. */
    tddp_status status = rank == 0 ? TDDP_OK : tddp_store_clone(store, &left, &own);
    const tddp_meeting_opts opts = {
        .store = own ? own : store, .name = key, .rank = rank, .world_size = size, .sender = 0};
    status = status ? status : tddp_meeting_open(&opts, &meeting);
    if (status == TDDP_OK) {
        left = tddp_nccl_time_left(limits);
        status =
            rank == 0 ? give_id(libraries, &opts, meeting, &left, id) : take_id(meeting, &left, id);
    }
    tddp_meeting_close(meeting);
    tddp_store_release(own);
    return status;
}

/* --- the device ------------------------------------------------------------------------------ */

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

/* --- NCCL's calls ---------------------------------------------------------------------------- */

static tddp_nccl_config config_of(const tddp_nccl_communicator *communicator)
{
    return (tddp_nccl_config){.size = sizeof(tddp_nccl_config),
                              .magic = (unsigned)TDDP_NCCL_CONFIG_MAGIC,
                              .version = TDDP_NCCL_CONFIG_VERSION,
                              .blocking = communicator->blocking,
                              .cga_cluster_size = TDDP_NCCL_UNSET,
                              .min_ctas = TDDP_NCCL_UNSET,
                              .max_ctas = TDDP_NCCL_UNSET,
                              .split_share = TDDP_NCCL_UNSET};
}

/* Polls what connects without blocking, for as long as anybody waits for it. */
static tddp_status await_comm(tddp_nccl_communicator *communicator, tddp_nccl_comm comm,
                              tddp_nccl_result result, const char *what)
{
    return tddp_nccl_wait_call(communicator, comm, result, what, INT64_MAX);
}

/* Called by all ranks of the parent; ranks that decline get NULL. NCCL fills in the new
 * communicator when the call on the parent is complete, which, unless that is blocking, only the
 * parent's state says: the call itself returns ncclSuccess at once, seen with 2.28. */
static tddp_status split_comm(tddp_nccl_communicator *communicator, tddp_nccl_comm *created)
{
    static const char what[] = "ncclCommSplit";
    const tddp_nccl_communicator_opts *opts = &communicator->opts;
    tddp_nccl_communicator *parent = opts->parent;
    tddp_nccl_config config = config_of(communicator);
    tddp_nccl_comm comm;
    tddp_status status = tddp_nccl_begin_calls(parent, INT64_MAX, &comm);
    if (status) {
        return status;
    }
    tddp_nccl_result result = parent->libraries->nccl.ncclCommSplit(
        comm, opts->declines ? TDDP_NCCL_NO_COLOR : 0, opts->rank,
        opts->declines ? &parent->none : created, &config);
    if (result == TDDP_NCCL_SUCCESS && !parent->blocking) {
        result = TDDP_NCCL_IN_PROGRESS;
    }
    while (result == TDDP_NCCL_IN_PROGRESS && status == TDDP_OK) {
        status = tddp_nccl_wait_call(parent, comm, result, what, tddp_deadline_after_ms(100));
        const bool goes_on = status == TDDP_TIMEOUT && !atomic_load(&communicator->aborted);
        result = goes_on ? result : TDDP_NCCL_SUCCESS;
        status = goes_on ? TDDP_OK : status;
    }
    if (result) {
        status = tddp_nccl_fail(parent->libraries, comm, result, what);
    }
    tddp_nccl_end_calls(parent);
    return status;
}

static tddp_status init_comm(tddp_nccl_communicator *communicator, tddp_nccl_comm *created)
{
    static const char what[] = "ncclCommInitRankConfig";
    const tddp_nccl_communicator_opts *opts = &communicator->opts;
    const tddp_nccl_limits limits = {INT64_MAX, communicator->stop};
    tddp_nccl_config config = config_of(communicator);
    tddp_nccl_result result = TDDP_NCCL_IN_PROGRESS;
    tddp_nccl_id id = opts->id;
    tddp_status status = TDDP_OK;
    if (opts->parent) {
        status = split_comm(communicator, created);
    } else if (!opts->has_id) {
        status = tddp_nccl_share_id(communicator->libraries, opts->store, opts->key, opts->rank,
                                    opts->size, limits, &id);
    }
    if (status || opts->declines) {
        return status;
    }
    if (!opts->parent) {
        result = communicator->libraries->nccl.ncclCommInitRankConfig(created, opts->size, id,
                                                                      opts->rank, &config);
    }
    if (communicator->blocking && opts->parent) {
        result = TDDP_NCCL_SUCCESS;
    }
    return await_comm(communicator, *created, result, what);
}

/* --- the thread ------------------------------------------------------------------------------ */

void tddp_nccl_connecting(tddp_nccl_communicator *communicator)
{
    tddp_nccl_comm comm = NULL;
    tddp_nccl_communicator *parent = communicator->opts.parent;
    tddp_status status = init_comm(communicator, &comm);
    pthread_mutex_lock(&communicator->mutex);
    communicator->comm = comm;
    communicator->opts.parent = NULL;
    pthread_mutex_unlock(&communicator->mutex);
    tddp_nccl_release(parent);
    /* After that: a thread that stays in NCCL's call has nothing on the device. */
    status = status ? status : create_resources(communicator);
    tddp_nccl_set_state(communicator, status ? TDDP_NCCL_FAILED : TDDP_NCCL_CONNECTED, status);
    if (status || atomic_load(&communicator->aborted)) {
        tddp_nccl_end_comm(communicator);
    }
}
