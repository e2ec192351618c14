/*
 * NCCL's stand-in: communicators. The ranks of one share a file, made by the one that makes the id
 * and unlinked as soon as all have come.
 *
 * A rank whose process is gone, or that aborts, is told of as NCCL does: by the communicator's
 * asynchronous error, while the work that waits for it goes on waiting until it is aborted.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin/nccl.h"

#include "standin/cudart.h"

enum { MOST_LOOKS = 500 * 1000, LOOKS_AT_A_SPLIT = 3 };

static _Atomic int abort_hangs;
static _Atomic int made_so_far[2];

int standin_communicators(int blocking)
{
    return atomic_load(&made_so_far[blocking]);
}

void standin_set_abort_hangs(int hangs)
{
    atomic_store(&abort_hangs, hangs);
}

tddp_nccl_result ncclGetUniqueId(tddp_nccl_id *id)
{
    FAIL_IF_NCCL_IS_TOLD();
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
    FAIL_IF_NCCL_IS_TOLD();
    *result = TDDP_NCCL_SUCCESS;
    if (comm->splitting > 0 && --comm->splitting == 0 && comm->split) {
        *comm->split_out = comm->split;
    }
    if (comm->splitting > 0) {
        *result = TDDP_NCCL_IN_PROGRESS;
        return TDDP_NCCL_SUCCESS;
    }
    if (!standin_nccl_connect(comm)) {
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
    while (atomic_load(&comm->under_way) > 0 && !atomic_load(&comm->aborted)) {
        standin_nccl_nap();
    }
}

/* As the real one, it waits for the device, and so for what other communicators have there. */
tddp_nccl_result ncclCommAbort(tddp_nccl_comm comm)
{
    atomic_store(&comm->aborted, true);
    while (standin_kernels(comm->device) > 0 || atomic_load(&comm->inside) > 0 ||
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
    FAIL_IF_NCCL_IS_TOLD();
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
    FAIL_IF_NCCL_IS_TOLD();
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
