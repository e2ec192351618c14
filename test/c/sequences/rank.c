/* A rank's process. */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/cuda.h>

#include "sequences/sequence.h"

enum { TIMEOUT_MS = 60000 };

typedef struct member {
    const seq_program *program;
    seq_shared *shared;
    int rank;
    seq_random own;
    tddp_store *stores[SEQ_GROUPS]; /* of each group; the first for all that need none */
    tddp_group *groups[SEQ_GROUPS]; /* NULL where this rank is not in it */
    tddp_cuda_stream stream;
    seq_call *pending[SEQ_PENDING]; /* calls that are waited for later */
    int pending_count;
} member;

/* --- groups ---------------------------------------------------------------------------------- */

static tddp_store *connect_to(int port)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    at.host = "127.0.0.1";
    at.port = port;
    at.wait_for_workers = 0;
    at.timeout_ms = TIMEOUT_MS;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &store));
    return store;
}

/* All ranks, as NCCL needs it before a batch of which some have no message. */
static void connect_devices(tddp_group *group)
{
    static float one[1];
    const tddp_buffer buffer = {one, 1, TDDP_FLOAT32, TDDP_CUDA, 0, NULL};
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
}

static void make_group(member *self, int group, int port, const char *name)
{
    const seq_program *program = self->program;
    char own[128];
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    (void)snprintf(own, sizeof own, "%s.%d", name, group);
    opts.backend = program->carrier->backend;
    opts.name = own;
    if (group == 0 || program->carrier->stores) {
        self->stores[group] = connect_to(port);
    }
    opts.store = self->stores[program->carrier->stores ? group : 0];
    opts.rank = seq_rank_in(program, group, self->rank);
    opts.world_size = seq_group_size(program, group);
    opts.timeout_ms = TIMEOUT_MS;
    opts.parent = program->child[group] ? self->groups[0] : NULL;
    opts.split = program->split[group];
    if (opts.rank >= 0) {
        CHECK_OK(tddp_group_create(&opts, NULL, &self->groups[group]));
        if (program->carrier->nccl) {
            connect_devices(self->groups[group]);
        }
    } else if (program->split[group]) {
        CHECK_OK(tddp_group_decline(self->groups[0], NULL));
    }
}

static void open_member(member *self, int port, const char *name)
{
    const seq_program *program = self->program;
    if (program->carrier->cuda) {
        const tddp_cuda *cuda;
        CHECK_OK(tddp_cuda_get(&cuda));
        CHECK_INT(cuda->cudaStreamCreateWithPriority(&self->stream, 1, 0), 0);
    }
    for (int group = 0; group < program->groups; group++) {
        make_group(self, group, port, name);
    }
}

static void close_member(member *self)
{
    const tddp_cuda *cuda;
    for (int group = self->program->groups - 1; group >= 0; group--) {
        /* What is done may still be put away: without a moment for that the group is aborted. */
        tddp_group_shutdown(self->groups[group], TIMEOUT_MS);
        tddp_group_release(self->groups[group]);
    }
    if (self->stream) {
        CHECK_OK(tddp_cuda_get(&cuda));
        CHECK_INT(cuda->cudaStreamDestroy(self->stream), 0);
    }
    for (int group = 0; group < self->program->groups; group++) {
        tddp_store_release(self->stores[group]);
    }
}

/* --- operations ------------------------------------------------------------------------------ */

static void end_pending(member *self, int index)
{
    seq_call *call = self->pending[index];
    self->pending[index] = self->pending[--self->pending_count];
    seq_end(call);
    free(call);
}

static void drain(member *self)
{
    while (self->pending_count > 0) {
        end_pending(self, (int)seq_below(&self->own, (uint32_t)self->pending_count));
    }
}

static void run_op(member *self, const seq_op *op)
{
    seq_call *call = calloc(1, sizeof *call);
    CHECK(call != NULL);
    *call = (seq_call){.program = self->program,
                       .op = op,
                       .group = self->groups[op->group],
                       .rank = seq_rank_in(self->program, op->group, self->rank),
                       .size = seq_group_size(self->program, op->group),
                       .own = seq_random_of(self->program->seed, 3,
                                            (uint64_t)(op->number * SEQ_RANKS + self->rank)),
                       .stream = op->device == TDDP_CUDA ? self->stream : NULL};
    if (seq_begin(call, true)) {
        self->pending[self->pending_count++] = call;
    } else {
        seq_end(call);
        free(call);
    }
    if (self->pending_count == SEQ_PENDING || seq_once_in(&self->own, 5)) {
        drain(self);
    }
}

static void run_ops(member *self, seq_op *ops)
{
    const seq_program *program = self->program;
    for (int number = 0; number < program->count; number++) {
        seq_draw_op(program, number, &ops[number]);
        if (!self->shared->skipped[number] && self->groups[ops[number].group]) {
            atomic_store(&self->shared->at[self->rank], number);
            run_op(self, &ops[number]);
        }
    }
    drain(self);
}

/* --- faults ---------------------------------------------------------------------------------- */

static tddp_status sum(tddp_group *group, tddp_device_type device, int32_t *data, size_t count)
{
    tddp_buffer buffer = {.data = data, .count = count, .dtype = TDDP_INT32, .device_type = device};
    return tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL);
}

static tddp_status call_otherwise(member *self, tddp_group *group, tddp_device_type device)
{
    int32_t data[8] = {0};
    tddp_buffer buffer = {.data = data, .count = 8, .dtype = TDDP_INT32, .device_type = device};
    switch (seq_below(&self->own, 4)) {
    case 0:
        return tddp_broadcast(group, buffer, 0, NULL);
    case 1:
        return tddp_all_reduce(group, buffer, TDDP_REDUCE_MAX, 0, NULL);
    case 2:
        buffer.dtype = TDDP_FLOAT32;
        return tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL);
    default:
        return sum(group, device, data, 7);
    }
}

/* The one at fault dies, or calls something else; the others are told so, with its name. */
static void be_at_fault(member *self, tddp_group *group, int rank)
{
    const seq_program *program = self->program;
    const bool dies = program->fault == SEQ_DEATH;
    const tddp_device_type device = program->carrier->cpu ? TDDP_CPU : TDDP_CUDA;
    int32_t data[8] = {0};
    tddp_status status;
    if (rank == program->culprit && dies) {
        _exit(0);
    }
    status = rank == program->culprit ? call_otherwise(self, group, device)
                                      : sum(group, device, data, 8);
    CHECK_STATUS(status, dies ? TDDP_PEER_LOST : TDDP_MISMATCH);
    if (dies) {
        char name[32];
        (void)snprintf(name, sizeof name, "rank %d", program->culprit);
        CHECK_CONTAINS(tddp_error_message(), name);
    }
    CHECK_STATUS(sum(group, device, data, 8), TDDP_GROUP_FAILED);
}

static bool culprit_is_in(const seq_program *program, int group)
{
    for (int rank = 0; rank < program->ranks; rank++) {
        if (seq_rank_in(program, program->fault_group, rank) == program->culprit) {
            return seq_rank_in(program, group, rank) >= 0;
        }
    }
    return false;
}

/* Nobody waits for the one at fault in another operation any more. Groups that it is not in go on,
 * and so do those of a rank that has only called something else. */
static void end_with_fault(member *self)
{
    const seq_program *program = self->program;
    const tddp_device_type device = program->carrier->cpu ? TDDP_CPU : TDDP_CUDA;
    atomic_fetch_add(&self->shared->drained, 1);
    while (atomic_load(&self->shared->drained) < program->ranks) {
        sched_yield();
    }
    const int rank = seq_rank_in(program, program->fault_group, self->rank);
    if (rank >= 0) {
        be_at_fault(self, self->groups[program->fault_group], rank);
    }
    for (int group = 0; group < program->groups; group++) {
        bool goes_on = group != program->fault_group &&
                       !(program->fault == SEQ_DEATH && culprit_is_in(program, group));
        if (goes_on && self->groups[group]) {
            int32_t data[3] = {1, 2, 3};
            CHECK_OK(sum(self->groups[group], device, data, 3));
            CHECK_INT(data[2], 3 * seq_group_size(program, group));
        }
    }
}

void seq_run_rank(const seq_program *program, seq_shared *shared, int rank, int port,
                  const char *name)
{
    member self = {.program = program,
                   .shared = shared,
                   .rank = rank,
                   .own = seq_random_of(program->seed, 4, (uint64_t)rank)};
    seq_op *ops = calloc((size_t)program->count, sizeof *ops);
    CHECK(ops != NULL);
    open_member(&self, port, name);
    run_ops(&self, ops);
    if (program->fault != SEQ_NO_FAULT) {
        atomic_store(&shared->at[rank], program->count);
        end_with_fault(&self);
    }
    close_member(&self);
    free(ops);
}
