/*
 * NCCL's stand-in: calls. They put their work on streams, whose threads carry it out: collectives
 * by all ranks writing to a file and reading each other's, piece by piece; messages through a box
 * for each pair of ranks.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "standin/nccl.h"

static _Thread_local int depth;
static _Thread_local batch *gathered;

/* --- calls ----------------------------------------------------------------------------------- */

enum { DEVICES = 8 };

static _Atomic int serial;
static _Atomic int kernels[DEVICES]; /* under way, of all communicators of this process */
static _Atomic unsigned tickets[DEVICES];
static _Atomic unsigned served[DEVICES];
static pthread_t launcher;
static pthread_mutex_t launcher_lock = PTHREAD_MUTEX_INITIALIZER;

void standin_set_serial(int is_serial)
{
    atomic_store(&serial, is_serial);
}

int standin_kernels(int device)
{
    return atomic_load(&kernels[device]);
}

int standin_launched_here(void)
{
    pthread_mutex_lock(&launcher_lock);
    int here = pthread_equal(launcher, pthread_self());
    pthread_mutex_unlock(&launcher_lock);
    return here;
}

void standin_nccl_begin_kernel(const batch *all)
{
    while (atomic_load(&serial) && atomic_load(&served[all->device]) != all->ticket) {
        standin_nccl_nap();
    }
}

void standin_nccl_end_kernel(const batch *all)
{
    atomic_fetch_add(&served[all->device], 1);
    atomic_fetch_sub(&kernels[all->device], 1);
}

static void put(batch *all)
{
    struct ncclComm *comm = all->calls[0].comm;
    all->device = comm->device;
    pthread_mutex_lock(&launcher_lock);
    all->ticket = atomic_fetch_add(&tickets[all->device], 1);
    launcher = pthread_self();
    atomic_fetch_add(&kernels[all->device], 1);
    atomic_fetch_add(&comm->under_way, 1);
    standin_put(all->calls[0].stream, standin_nccl_carry_out, all);
    pthread_mutex_unlock(&launcher_lock);
}

/* The first call of a kind, or to or from a rank, connects: that takes the other ranks' calls. */
static void begin_to_connect(const batch *all)
{
    for (int i = 0; i < all->count; i++) {
        const call *it = &all->calls[i];
        meeting *shared = it->comm->shared;
        if (it->kind == SEND) {
            atomic_store(&shared->sent[it->comm->rank][it->peer], 1);
        } else if (it->kind == RECV) {
            atomic_store(&shared->received[it->peer][it->comm->rank], 1);
        } else if (!it->comm->begun[it->kind]) {
            it->comm->begun[it->kind] = true;
            atomic_fetch_add(&shared->begun[it->kind], 1);
        }
    }
}

static bool is_connected(const batch *all)
{
    bool all_connected = true;
    for (int i = 0; i < all->count; i++) {
        const call *it = &all->calls[i];
        meeting *shared = it->comm->shared;
        if (it->kind == SEND) {
            all_connected &= atomic_load(&shared->received[it->comm->rank][it->peer]);
        } else if (it->kind == RECV) {
            all_connected &= atomic_load(&shared->sent[it->peer][it->comm->rank]);
        } else {
            all_connected &= atomic_load(&shared->begun[it->kind]) >= it->comm->size;
        }
    }
    return all_connected;
}

/* Blocks until other ranks call as well, or, as the configuration says, is complete once the
 * communicator's state says so. */
static tddp_nccl_result connect_and_put(batch *all)
{
    struct ncclComm *comm = all->calls[0].comm;
    if (comm->connecting) {
        free(all);
        return TDDP_NCCL_INVALID_USAGE;
    }
    begin_to_connect(all);
    atomic_fetch_add(&comm->inside, 1);
    while (comm->blocking && !is_connected(all) && !atomic_load(&comm->aborted)) {
        standin_nccl_nap();
    }
    tddp_nccl_result result = TDDP_NCCL_SUCCESS;
    if (atomic_load(&comm->aborted)) {
        free(all);
        result = TDDP_NCCL_INTERNAL_ERROR;
    } else if (is_connected(all)) {
        put(all);
    } else {
        comm->connecting = all;
        result = TDDP_NCCL_IN_PROGRESS;
    }
    atomic_fetch_sub(&comm->inside, 1);
    return result;
}

static tddp_nccl_result enqueue(call it)
{
    it.factor = it.op >= FIRST_FACTOR ? it.comm->factors[it.op - FIRST_FACTOR] : 1;
    if (depth > 0) {
        if (!gathered) {
            gathered = calloc(1, sizeof *gathered);
        }
        if (!gathered || gathered->count == MOST_IN_GROUP) {
            abort();
        }
        gathered->calls[gathered->count++] = it;
        return TDDP_NCCL_SUCCESS;
    }
    batch *one = calloc(1, sizeof *one);
    if (!one) {
        abort();
    }
    one->calls[one->count++] = it;
    return connect_and_put(one);
}

/* False: the call that is in progress waits for other ranks. */
bool standin_nccl_connect(struct ncclComm *comm)
{
    if (comm->connecting && is_connected(comm->connecting)) {
        put(comm->connecting);
        comm->connecting = NULL;
    }
    return !comm->connecting;
}

tddp_nccl_result ncclGroupStart(void)
{
    depth++;
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclGroupEnd(void)
{
    batch *all = gathered;
    if (--depth > 0) {
        return TDDP_NCCL_SUCCESS;
    }
    gathered = NULL;
    int error = standin_failure_of(__func__);
    if (all && !error) {
        return connect_and_put(all);
    }
    free(all);
    return error;
}

tddp_nccl_result ncclAllReduce(const void *input, void *output, size_t count, int dtype, int op,
                               tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){ALL_REDUCE, input, output, count, dtype, op, 0, comm, stream, 0});
}

tddp_nccl_result ncclBroadcast(const void *input, void *output, size_t count, int dtype, int root,
                               tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){BROADCAST, input, output, count, dtype, 0, root, comm, stream, 0});
}

tddp_nccl_result ncclReduce(const void *input, void *output, size_t count, int dtype, int op,
                            int root, tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){REDUCE, input, output, count, dtype, op, root, comm, stream, 0});
}

tddp_nccl_result ncclAllGather(const void *input, void *output, size_t count, int dtype,
                               tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){ALL_GATHER, input, output, count, dtype, 0, 0, comm, stream, 0});
}

tddp_nccl_result ncclReduceScatter(const void *input, void *output, size_t count, int dtype, int op,
                                   tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){REDUCE_SCATTER, input, output, count, dtype, op, 0, comm, stream, 0});
}

tddp_nccl_result ncclSend(const void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,
                          tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){SEND, data, NULL, count * tddp_dtype_size(standin_nccl_dtype(dtype)),
                          dtype, 0, peer, comm, stream, 0});
}

tddp_nccl_result ncclRecv(void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,
                          tddp_cuda_stream stream)
{
    FAIL_IF_NCCL_IS_TOLD();
    return enqueue((call){RECV, NULL, data, count * tddp_dtype_size(standin_nccl_dtype(dtype)),
                          dtype, 0, peer, comm, stream, 0});
}

/* --- the rest -------------------------------------------------------------------------------- */

static double value_of(const void *factor, int dtype)
{
    float narrow = 0;
    double wide = 0;
    if (dtype == TDDP_NCCL_FLOAT64) {
        memcpy(&wide, factor, sizeof wide);
        return wide;
    }
    if (dtype == TDDP_NCCL_FLOAT32) {
        memcpy(&narrow, factor, sizeof narrow);
        return (double)narrow;
    }
    uint16_t half;
    memcpy(&half, factor, sizeof half);
    if (dtype == TDDP_NCCL_FLOAT16) {
        int exponent = half >> 10 & 31;
        wide = ldexp((half & 1023) + (exponent > 0 ? 1024 : 0), (exponent > 0 ? exponent : 1) - 25);
        return half & 0x8000 ? -wide : wide;
    }
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&narrow, &bits, sizeof narrow);
    return (double)narrow;
}

tddp_nccl_result ncclRedOpCreatePreMulSum(int *op, void *factor, int dtype, int residence,
                                          tddp_nccl_comm comm)
{
    FAIL_IF_NCCL_IS_TOLD();
    if (residence != TDDP_NCCL_HOST_SCALAR) {
        return TDDP_NCCL_INVALID_ARGUMENT;
    }
    for (int i = 0; i < FACTORS; i++) {
        if (!comm->taken[i]) {
            comm->taken[i] = true;
            comm->factors[i] = value_of(factor, dtype);
            *op = FIRST_FACTOR + i;
            return TDDP_NCCL_SUCCESS;
        }
    }
    return TDDP_NCCL_INTERNAL_ERROR;
}

tddp_nccl_result ncclRedOpDestroy(int op, tddp_nccl_comm comm)
{
    comm->taken[op - FIRST_FACTOR] = false;
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclGetVersion(int *version)
{
    FAIL_IF_NCCL_IS_TOLD();
    const char *text = getenv("STANDIN_NCCL_VERSION");
    *version = text ? atoi(text) : 22005;
    return TDDP_NCCL_SUCCESS;
}

const char *ncclGetErrorString(tddp_nccl_result result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(tddp_nccl_comm comm)
{
    (void)comm;
    return "the stand-in was told to";
}
