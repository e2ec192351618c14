/*
 * NCCL's stand-in. The ranks of a communicator share a file, made by the one that makes the id and
 * unlinked as soon as all have come. Calls put their work on streams, whose threads carry it out:
 * collectives by all ranks writing to the file and reading each other's, piece by piece; messages
 * through a box for each pair of ranks.
 *
 * A rank whose process is gone, or that aborts, is told of as NCCL does: by the communicator's
 * asynchronous error, while the work that waits for it goes on waiting until it is aborted.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin/nccl.h"

#include "standin/cudart.h"

enum { MOST_LOOKS = 500 * 1000, LOOKS_AT_A_SPLIT = 3 };

static _Thread_local int depth;
static _Thread_local batch *gathered;

#define DECLARE(result, name, arguments) STANDIN_API result name arguments;
TDDP_NCCL_CALLS(DECLARE)
#undef DECLARE

#undef FAIL_IF_TOLD
#define FAIL_IF_TOLD()                            \
    do {                                          \
        int error = standin_failure_of(__func__); \
        if (error) {                              \
            return error;                         \
        }                                         \
    } while (0)

/* --- calls ----------------------------------------------------------------------------------- */

enum { DEVICES = 8 };

static _Atomic int serial;
static _Atomic int abort_hangs;
static _Atomic int made_so_far[2];
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

int standin_communicators(int blocking)
{
    return atomic_load(&made_so_far[blocking]);
}

void standin_set_abort_hangs(int hangs)
{
    atomic_store(&abort_hangs, hangs);
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
    FAIL_IF_TOLD();
    return enqueue((call){ALL_REDUCE, input, output, count, dtype, op, 0, comm, stream, 0});
}

tddp_nccl_result ncclBroadcast(const void *input, void *output, size_t count, int dtype, int root,
                               tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){BROADCAST, input, output, count, dtype, 0, root, comm, stream, 0});
}

tddp_nccl_result ncclReduce(const void *input, void *output, size_t count, int dtype, int op,
                            int root, tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){REDUCE, input, output, count, dtype, op, root, comm, stream, 0});
}

tddp_nccl_result ncclAllGather(const void *input, void *output, size_t count, int dtype,
                               tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){ALL_GATHER, input, output, count, dtype, 0, 0, comm, stream, 0});
}

tddp_nccl_result ncclReduceScatter(const void *input, void *output, size_t count, int dtype, int op,
                                   tddp_nccl_comm comm, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){REDUCE_SCATTER, input, output, count, dtype, op, 0, comm, stream, 0});
}

tddp_nccl_result ncclSend(const void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,
                          tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){SEND, data, NULL, count * tddp_dtype_size(standin_nccl_dtype(dtype)),
                          dtype, 0, peer, comm, stream, 0});
}

tddp_nccl_result ncclRecv(void *data, size_t count, int dtype, int peer, tddp_nccl_comm comm,
                          tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    return enqueue((call){RECV, NULL, data, count * tddp_dtype_size(standin_nccl_dtype(dtype)),
                          dtype, 0, peer, comm, stream, 0});
}

/* --- communicators --------------------------------------------------------------------------- */

tddp_nccl_result ncclGetUniqueId(tddp_nccl_id *id)
{
    FAIL_IF_TOLD();
    (void)snprintf(id->internal, sizeof id->internal, "/tmp/standin_nccl.XXXXXX");
    int fd = mkstemp(id->internal);
    if (fd < 0 || ftruncate(fd, sizeof(meeting))) {
        abort();
    }
    close(fd);
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclCommInitRankConfig(tddp_nccl_comm *comm, int ranks, tddp_nccl_id id, int rank,
                                        tddp_nccl_config *config)
{
    int error = standin_failure_of(__func__);
    if (error) {
        (void)unlink(id.internal);
        return error;
    }
    if (config->size != sizeof *config || config->magic != (unsigned)TDDP_NCCL_CONFIG_MAGIC ||
        config->blocking < 0 || config->blocking > 1 || ranks > RANKS) {
        return TDDP_NCCL_INVALID_ARGUMENT;
    }
    struct ncclComm *made = calloc(1, sizeof *made);
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    if (!made || fd < 0) {
        free(made);
        return TDDP_NCCL_SYSTEM_ERROR;
    }
    made->shared = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (made->shared == MAP_FAILED) {
        abort();
    }
    memcpy(made->path, id.internal, sizeof made->path);
    made->rank = rank;
    made->size = ranks;
    made->blocking = config->blocking == 1;
    atomic_fetch_add(&made_so_far[made->blocking], 1);
    (void)cudaGetDevice(&made->device);
    atomic_store(&made->shared->pids[rank], getpid());
    if (atomic_fetch_add(&made->shared->joined, 1) + 1 == ranks) {
        (void)unlink(made->path);
    }
    if (!made->blocking) {
        *comm = made;
        return TDDP_NCCL_IN_PROGRESS;
    }
    /* Nobody can abort it: the caller has nothing to do that with. */
    while (atomic_load(&made->shared->joined) < ranks) {
        standin_nccl_nap();
    }
    made->seen = true;
    *comm = made;
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclCommGetAsyncError(tddp_nccl_comm comm, tddp_nccl_result *result)
{
    FAIL_IF_TOLD();
    *result = TDDP_NCCL_SUCCESS;
    if (comm->splitting > 0 && --comm->splitting == 0 && comm->split) {
        *comm->split_out = comm->split;
    }
    if (comm->splitting > 0) {
        *result = TDDP_NCCL_IN_PROGRESS;
        return TDDP_NCCL_SUCCESS;
    }
    if (comm->connecting) {
        if (is_connected(comm->connecting)) {
            put(comm->connecting);
            comm->connecting = NULL;
        } else {
            *result = TDDP_NCCL_IN_PROGRESS;
            return TDDP_NCCL_SUCCESS;
        }
    }
    if (!comm->seen && atomic_load(&comm->shared->joined) < comm->size) {
        *result = TDDP_NCCL_IN_PROGRESS;
        return TDDP_NCCL_SUCCESS;
    }
    if (!comm->seen) {
        /* All have come: the communicator is made, even if one of them has left since. */
        comm->seen = true;
        return TDDP_NCCL_SUCCESS;
    }
    for (int rank = 0; rank < comm->size; rank++) {
        int pid = atomic_load(&comm->shared->pids[rank]);
        if (pid < 0 || (pid > 0 && kill(pid, 0) && errno == ESRCH)) {
            *result = TDDP_NCCL_REMOTE_ERROR;
        }
    }
    return TDDP_NCCL_SUCCESS;
}

static void leave(struct ncclComm *comm, int word)
{
    atomic_store(&comm->shared->pids[comm->rank], word);
    munmap(comm->shared, sizeof(meeting));
    free(comm);
}

static void await_streams(struct ncclComm *comm)
{
    while (atomic_load(&comm->under_way) > 0 && !atomic_load(&comm->aborted)) {
        standin_nccl_nap();
    }
}

/* As the real one, it waits for the device, and so for what other communicators have there. */
tddp_nccl_result ncclCommAbort(tddp_nccl_comm comm)
{
    atomic_store(&comm->aborted, true);
    while (atomic_load(&kernels[comm->device]) > 0 || atomic_load(&comm->inside) > 0 ||
           atomic_load(&abort_hangs)) {
        standin_nccl_nap();
    }
    if (!comm->seen) {
        (void)unlink(comm->path);
    }
    free(comm->connecting);
    leave(comm, -1);
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclCommFinalize(tddp_nccl_comm comm)
{
    FAIL_IF_TOLD();
    atomic_fetch_add(&comm->inside, 1);
    await_streams(comm);
    tddp_nccl_result result =
        atomic_load(&comm->aborted) ? TDDP_NCCL_INTERNAL_ERROR : TDDP_NCCL_SUCCESS;
    atomic_fetch_sub(&comm->inside, 1);
    return result;
}

tddp_nccl_result ncclCommDestroy(tddp_nccl_comm comm)
{
    leave(comm, 0);
    return TDDP_NCCL_SUCCESS;
}

/* Waits here, as the real one does beside: for all ranks to have told their color. */
static bool know_colors(struct ncclComm *comm, int color)
{
    meeting *shared = comm->shared;
    const int turn = atomic_load(&shared->split_by[comm->rank]) % 2;
    atomic_store(&shared->colors[turn][comm->rank], color);
    const int mine = atomic_fetch_add(&shared->split_by[comm->rank], 1) + 1;
    for (int rank = 0; rank < comm->size; rank++) {
        for (int looks = 0; atomic_load(&shared->split_by[rank]) < mine; looks++) {
            if (atomic_load(&comm->aborted) || looks > MOST_LOOKS) {
                return false;
            }
            standin_nccl_nap();
        }
    }
    return true;
}

/* As the real one: it returns at once and says success, but fills in the new communicator, and
 * takes no further call, only once its state is no longer "in progress". */
static tddp_nccl_result split_later(struct ncclComm *comm, tddp_nccl_comm split,
                                    tddp_nccl_comm *out)
{
    comm->split = split;
    comm->split_out = out;
    comm->splitting = LOOKS_AT_A_SPLIT;
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclCommSplit(tddp_nccl_comm comm, int color, int key, tddp_nccl_comm *made,
                               tddp_nccl_config *config)
{
    FAIL_IF_TOLD();
    if (comm->splitting > 0) {
        return TDDP_NCCL_INVALID_ARGUMENT;
    }
    (void)key; /* ranks keep their order here */
    tddp_nccl_id id = {{0}};
    int ranks = 0;
    int rank = 0;
    const int number = atomic_load(&comm->shared->split_by[comm->rank]);
    if (!know_colors(comm, color)) {
        return TDDP_NCCL_REMOTE_ERROR;
    }
    if (color == TDDP_NCCL_NO_COLOR) {
        *made = comm->blocking ? NULL : *made;
        return comm->blocking ? TDDP_NCCL_SUCCESS : split_later(comm, NULL, NULL);
    }
    for (int i = 0; i < comm->size; i++) {
        bool same = atomic_load(&comm->shared->colors[number % 2][i]) == color;
        ranks += same;
        rank += same && i < comm->rank;
    }
    (void)snprintf(id.internal, sizeof id.internal, "%.90s.%d.%d", comm->path, number, color);
    int fd = open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(meeting))) {
        abort();
    }
    close(fd);
    tddp_nccl_comm split = NULL;
    tddp_nccl_result result = ncclCommInitRankConfig(&split, ranks, id, rank, config);
    *made = comm->blocking ? split : *made;
    return result == TDDP_NCCL_IN_PROGRESS ? split_later(comm, split, made) : result;
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
    FAIL_IF_TOLD();
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
    FAIL_IF_TOLD();
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
