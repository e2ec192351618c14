/*
 * What NCCL's stand-in does on the streams' threads: collectives by all ranks writing to the file
 * and reading each other's, piece by piece; messages through a box for each pair of ranks.
 */
#include "standin/nccl.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void standin_nccl_nap(void)
{
    nanosleep(&(struct timespec){0, 20000}, NULL);
}

tddp_dtype standin_nccl_dtype(int type)
{
    switch (type) {
    case TDDP_NCCL_INT8:
        return TDDP_INT8;
    case TDDP_NCCL_UINT8:
        return TDDP_UINT8;
    case TDDP_NCCL_INT32:
        return TDDP_INT32;
    case TDDP_NCCL_INT64:
        return TDDP_INT64;
    case TDDP_NCCL_FLOAT16:
        return TDDP_FLOAT16;
    case TDDP_NCCL_BFLOAT16:
        return TDDP_BFLOAT16;
    case TDDP_NCCL_FLOAT64:
        return TDDP_FLOAT64;
    default:
        return TDDP_FLOAT32;
    }
}

static tddp_reduce_op reduction_of(int op)
{
    static const tddp_reduce_op ops[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_PRODUCT, TDDP_REDUCE_MAX,
                                         TDDP_REDUCE_MIN, TDDP_REDUCE_SUM};
    return op >= FIRST_FACTOR ? TDDP_REDUCE_SUM : ops[op];
}

/* Until it is another one, or for a moment: an abort does not tell. */
static void await_change(_Atomic int *generation, int from)
{
    static const struct timespec moment = {.tv_nsec = 1000000};
    (void)syscall(SYS_futex, generation, FUTEX_WAIT, from, &moment, NULL, 0);
}

/* All ranks; false: aborted. */
static bool meet(struct ncclComm *comm)
{
    meeting *all = comm->shared;
    int generation = atomic_load(&all->generation);
    if (atomic_fetch_add(&all->arrived, 1) == comm->size - 1) {
        atomic_store(&all->arrived, 0);
        atomic_fetch_add(&all->generation, 1);
        (void)syscall(SYS_futex, &all->generation, FUTEX_WAKE, RANKS, NULL, NULL, 0);
        return true;
    }
    while (atomic_load(&all->generation) == generation) {
        if (atomic_load(&comm->aborted)) {
            return false;
        }
        await_change(&all->generation, generation);
    }
    return true;
}

/* Every rank shows `bytes` of its own, and `take` looks at what all show. */
static bool show(struct ncclComm *comm, const char *own, size_t bytes,
                 void (*take)(const call *it, size_t from, size_t bytes), const call *it,
                 size_t from)
{
    if (own && bytes > 0) {
        memcpy(comm->shared->pieces[comm->rank], own, bytes);
    }
    if (!meet(comm)) {
        return false;
    }
    take(it, from, bytes);
    return meet(comm);
}

/* Ranks' pieces, the own one scaled by its factor before: combined in the order of ranks. */
static void combine_pieces(const call *it, char *into, size_t bytes)
{
    const struct ncclComm *comm = it->comm;
    tddp_dtype dtype = standin_nccl_dtype(it->dtype);
    size_t count = bytes / tddp_dtype_size(dtype);
    memcpy(into, comm->shared->pieces[0], bytes);
    for (int rank = 1; rank < comm->size; rank++) {
        tddp_combine(reduction_of(it->op), dtype, into, comm->shared->pieces[rank], count);
    }
    if (it->op == TDDP_NCCL_AVG) {
        tddp_scale(dtype, into, count, 1.0 / comm->size);
    }
}

static void take_reduced(const call *it, size_t from, size_t bytes)
{
    if (it->kind == ALL_REDUCE || it->peer == it->comm->rank) {
        combine_pieces(it, it->output + from, bytes);
    }
}

static void take_scattered(const call *it, size_t from, size_t bytes)
{
    if (it->peer == it->comm->rank) {
        combine_pieces(it, it->output + from, bytes);
    }
}

static void take_root(const call *it, size_t from, size_t bytes)
{
    memcpy(it->output + from, it->comm->shared->pieces[it->peer], bytes);
}

static void take_all(const call *it, size_t from, size_t bytes)
{
    size_t each = it->count * tddp_dtype_size(standin_nccl_dtype(it->dtype));
    for (int rank = 0; rank < it->comm->size; rank++) {
        memcpy(it->output + (size_t)rank * each + from, it->comm->shared->pieces[rank], bytes);
    }
}

static void scale_own(const call *it, char *own, size_t bytes)
{
    if (it->op >= FIRST_FACTOR) {
        tddp_dtype dtype = standin_nccl_dtype(it->dtype);
        tddp_scale(dtype, own, bytes / tddp_dtype_size(dtype), it->factor);
    }
}

static bool in_pieces(const call *it, const char *input, size_t total,
                      void (*take)(const call *it, size_t from, size_t bytes))
{
    char own[PIECE];
    for (size_t from = 0; from < total; from += PIECE) {
        size_t bytes = total - from < PIECE ? total - from : PIECE;
        if (input) {
            memcpy(own, input + from, bytes);
            scale_own(it, own, bytes);
        }
        if (!show(it->comm, input ? own : NULL, bytes, take, it, from)) {
            return false;
        }
    }
    return true;
}

/* Ranks that call different things wait for ever, or until they are aborted. */
static bool agree(const call *it)
{
    struct ncclComm *comm = it->comm;
    const bool rooted = it->kind == BROADCAST || it->kind == REDUCE;
    title *titles = comm->shared->titles[comm->collectives++ % 2];
    titles[comm->rank] = (title){.kind = (int)it->kind,
                                 .dtype = it->dtype,
                                 .op = it->op < FIRST_FACTOR ? it->op : FIRST_FACTOR,
                                 .root = rooted ? it->peer : 0,
                                 .count = it->count};
    if (!meet(comm)) {
        return false;
    }
    for (int rank = 0; rank < comm->size; rank++) {
        const title *own = &titles[comm->rank];
        const title *other = &titles[rank];
        if (own->kind == other->kind && own->dtype == other->dtype && own->op == other->op &&
            own->root == other->root && own->count == other->count) {
            continue;
        }
        fprintf(stderr, "stand-in for NCCL: rank %d calls %d of %zu, rank %d calls %d of %zu\n",
                comm->rank, own->kind, own->count, rank, other->kind, other->count);
        while (!atomic_load(&comm->aborted)) {
            standin_nccl_nap();
        }
        return false;
    }
    return true;
}

static void collective(const call *it)
{
    if (!agree(it)) {
        return;
    }
    size_t each = it->count * tddp_dtype_size(standin_nccl_dtype(it->dtype));
    switch (it->kind) {
    case ALL_REDUCE:
    case REDUCE:
        (void)in_pieces(it, it->input, each, take_reduced);
        break;
    case BROADCAST:
        (void)in_pieces(it, it->comm->rank == it->peer ? it->input : NULL, each, take_root);
        break;
    case ALL_GATHER:
        (void)in_pieces(it, it->input, each, take_all);
        break;
    default:
        for (int rank = 0; rank < it->comm->size; rank++) {
            call part = *it;
            part.peer = rank;
            if (!in_pieces(&part, it->input + (size_t)rank * each, each, take_scattered)) {
                break;
            }
        }
    }
}

/* A step of a message; true: it is through. */
static bool pass(const call *it, size_t *at)
{
    struct ncclComm *comm = it->comm;
    bool sends = it->kind == SEND;
    box *way = sends ? &comm->shared->boxes[comm->rank][it->peer]
                     : &comm->shared->boxes[it->peer][comm->rank];
    size_t held = atomic_load(&way->bytes);
    if (*at < it->count && sends && held == 0) {
        size_t bytes = it->count - *at < PIECE ? it->count - *at : PIECE;
        memcpy(way->data, it->input + *at, bytes);
        *at += bytes;
        atomic_store(&way->bytes, bytes);
    } else if (*at < it->count && !sends && held > 0) {
        memcpy(it->output + *at, way->data, held);
        *at += held;
        atomic_store(&way->bytes, 0);
    }
    return *at == it->count;
}

/* Whether an earlier message of the group, the same way, is not through. */
static bool waits(const batch *all, const size_t *at, int i)
{
    const call *it = &all->calls[i];
    for (int before = 0; before < i; before++) {
        const call *other = &all->calls[before];
        if (other->kind == it->kind && other->peer == it->peer && at[before] < other->count) {
            return true;
        }
    }
    return false;
}

/* Messages of a group go all at once, those of one way and its collectives in their order. */
void standin_nccl_carry_out(void *data)
{
    batch *all = data;
    size_t at[MOST_IN_GROUP] = {0};
    struct ncclComm *comm = all->calls[0].comm;
    standin_nccl_begin_kernel(all);
    for (int i = 0; i < all->count; i++) {
        if (all->calls[i].kind < SEND) {
            collective(&all->calls[i]);
        }
    }
    for (bool through = false; !through && !atomic_load(&comm->aborted);) {
        through = true;
        for (int i = 0; i < all->count; i++) {
            through &=
                all->calls[i].kind < SEND || (!waits(all, at, i) && pass(&all->calls[i], &at[i]));
        }
        if (!through) {
            standin_nccl_nap();
        }
    }
    atomic_fetch_sub(&comm->under_way, 1);
    standin_nccl_end_kernel(all);
    free(all);
}
