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

enum { MOST_LOOKS = 500 * 1000, LOOKS_AT_A_SPLIT = 3 };

static _Thread_local int depth;
static _Thread_local batch *gathered;

#define DECLARE(result, name, arguments) STANDIN_API result name arguments;
TDDP_NCCL_CALLS(DECLARE)
#undef DECLARE

#define FAIL_IF_TOLD()                            \
    do {                                          \
        int error = standin_failure_of(__func__); \
        if (error) {                              \
            return error;                         \
        }                                         \
    } while (0)

/* --- calls ----------------------------------------------------------------------------------- */

static void put(batch *all)
{
    atomic_fetch_add(&all->calls[0].comm->under_way, 1);
    standin_put(all->calls[0].stream, standin_nccl_carry_out, all);
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
    put(one);
    return TDDP_NCCL_SUCCESS;
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
        put(all);
    } else {
        free(all);
    }
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
        config->blocking != 0 || ranks > RANKS) {
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
    atomic_store(&made->shared->pids[rank], getpid());
    if (atomic_fetch_add(&made->shared->joined, 1) + 1 == ranks) {
        (void)unlink(made->path);
    }
    *comm = made;
    return TDDP_NCCL_IN_PROGRESS;
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
    while (atomic_load(&comm->under_way) > 0) {
        standin_nccl_nap();
    }
}

tddp_nccl_result ncclCommAbort(tddp_nccl_comm comm)
{
    atomic_store(&comm->aborted, true);
    await_streams(comm);
    if (!comm->seen) {
        (void)unlink(comm->path);
    }
    leave(comm, -1);
    return TDDP_NCCL_SUCCESS;
}

tddp_nccl_result ncclCommFinalize(tddp_nccl_comm comm)
{
    FAIL_IF_TOLD();
    await_streams(comm);
    return TDDP_NCCL_SUCCESS;
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
        return split_later(comm, NULL, NULL);
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
