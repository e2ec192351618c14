/*
 * A thread's calls, of everything there is. Each returns what it may return; sums and messages that
 * are returned as good are right.
 */
#include <stdio.h>
#include <stdlib.h>

#include <tddp/recorder.h>

#include "endings/endings.h"

enum { COUNT = 5 /* elements */ };

/* --- numbers --------------------------------------------------------------------------------- */

uint64_t endings_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

uint32_t endings_below(uint64_t *state, uint32_t limit)
{
    return (uint32_t)(endings_next(state) >> 33) % limit;
}

uint64_t endings_stream_of(uint64_t seed, int rank, int number)
{
    uint64_t state = seed * 1000003 + (uint64_t)(rank * 100 + number);
    (void)endings_next(&state);
    return state;
}

/* --- operands -------------------------------------------------------------------------------- */

static tddp_buffer floats(caller *self, size_t count, float value, tddp_device_type type)
{
    piece *made = malloc(sizeof *made + count * sizeof(float));
    CHECK(made != NULL);
    made->next = self->pieces;
    self->pieces = made;
    for (size_t i = 0; i < count; i++) {
        made->data[i] = value;
    }
    return (tddp_buffer){made->data, count, TDDP_FLOAT32, type, 0, NULL};
}

static tddp_device_type memory_of(const medium *carrier, uint64_t *state)
{
    const bool device = !carrier->host || (carrier->device && endings_below(state, 2));
    return device ? TDDP_CUDA : TDDP_CPU;
}

static void check_all(tddp_buffer buffer, float expected)
{
    for (size_t i = 0; i < buffer.count; i++) {
        CHECK_DOUBLE((double)((float *)buffer.data)[i], (double)expected, 0);
    }
}

/* --- calls ----------------------------------------------------------------------------------- */

/* What a call may return here. */
static tddp_status expect(caller *self, tddp_status status)
{
    switch (status) {
    case TDDP_OK:
    case TDDP_GROUP_CLOSED:
    case TDDP_GROUP_FAILED:
    case TDDP_PEER_LOST:
    case TDDP_CANCELED:
    case TDDP_TIMEOUT:
        break;
    case TDDP_MISMATCH:
        CHECK(self->member->program->disagree);
        break;
    default:
        check_failed(__FILE__, __LINE__, "seed %llu, rank %d, thread %d: %s: %s",
                     (unsigned long long)self->member->program->seed, self->member->rank,
                     self->number, tddp_status_name(status), tddp_error_message());
    }
    self->last = status;
    return status;
}

/* Waits for a work, now and then only for a moment, and gives it up. TDDP_OK: it has succeeded. */
static tddp_status end_work(caller *self, tddp_work *work)
{
    const uint32_t way = endings_below(&self->state, 8);
    const tddp_wait brief = {(int64_t)endings_below(&self->state, 3), self->cancel};
    const tddp_wait interrupted = {-1, self->cancel};
    tddp_status status = TDDP_OK;
    if (way == 0) {
        status = tddp_work_completed(work) ? tddp_work_status(work) : TDDP_CANCELED;
    } else if (way < 3) {
        status = tddp_work_wait(work, way == 1 ? &brief : &interrupted);
    } else if (way == 3 && work && tddp_work_kind(work) != TDDP_OP_BARRIER) {
        status = tddp_work_order(work, NULL, NULL);
        status = status ? status : tddp_work_wait(work, NULL);
    } else {
        status = tddp_work_wait(work, NULL);
    }
    tddp_work_release(work);
    return expect(self, status);
}

static tddp_status submit(caller *self, tddp_op_args *args)
{
    tddp_work *work = NULL;
    const bool waits = endings_below(&self->state, 2);
    args->size = sizeof *args;
    args->inline_us = endings_below(&self->state, 3) ? 0 : 100;
    tddp_status status = tddp_submit(self->member->group, args, waits ? NULL : &work);
    if (status || waits) {
        return expect(self, status);
    }
    return end_work(self, work);
}

enum { COLLECTIVES = 8 };

/* All ranks draw the same, unless they are to disagree. */
static tddp_status call_collective(caller *self, uint64_t *agreed)
{
    const plan *program = self->member->program;
    const size_t ranks = (size_t)program->ranks;
    const uint32_t kind = endings_below(agreed, COLLECTIVES);
    const tddp_device_type type = memory_of(program->carrier, agreed);
    const int root = (int)endings_below(agreed, (uint32_t)ranks);
    const float own = (float)(self->member->rank + 1);
    const float sum = (float)(ranks * (ranks + 1) / 2);
    tddp_buffer one = floats(self, COUNT, own, type);
    tddp_buffer all = floats(self, COUNT * ranks, own, type);
    tddp_buffer list[2] = {one, floats(self, 2, own, type)};
    tddp_op_args args = {.reduce = TDDP_REDUCE_SUM, .root = root};
    tddp_status status;
    switch (kind) {
    case 0:
        args.kind = TDDP_OP_BARRIER;
        return submit(self, &args);
    case 1:
        args.kind = TDDP_OP_BROADCAST;
        args.output = one;
        status = submit(self, &args);
        if (status == TDDP_OK && !program->disagree) {
            check_all(one, (float)(root + 1));
        }
        return status;
    case 2:
        args.kind = TDDP_OP_ALL_GATHER;
        args.input = one;
        args.output = all;
        return submit(self, &args);
    case 3:
        args.kind = TDDP_OP_REDUCE_SCATTER;
        args.input = all;
        args.output = one;
        break;
    case 4:
        args.kind = TDDP_OP_ALL_REDUCE;
        args.outputs = list;
        args.output_count = 2;
        break;
    default:
        args.kind = TDDP_OP_ALL_REDUCE;
        args.output = one;
        break;
    }
    status = submit(self, &args);
    if (status == TDDP_OK && !program->disagree) {
        check_all(one, sum);
    }
    return status;
}

/* To the next rank and from the one before, with a tag that all ranks' threads of this number have.
 */
static tddp_status call_message(caller *self)
{
    const float number = (float)(self->messages++ * 10);
    const plan *program = self->member->program;
    const int ranks = program->ranks;
    const int to = (self->member->rank + 1) % ranks;
    const int from = (self->member->rank + ranks - 1) % ranks;
    uint64_t *state = &self->state;
    /* Where each kind of memory has a backend, both ends of a message have the same kind. */
    uint64_t agreed = endings_stream_of(program->seed, 51, self->messages);
    const bool apart = program->carrier->device && !program->carrier->any_source;
    const tddp_device_type type = memory_of(program->carrier, apart ? &agreed : state);
    const uint32_t tag = program->carrier->any_source ? (uint32_t)self->number : 0;
    const tddp_op_args batch[2] = {
        {.size = sizeof batch[0],
         .kind = TDDP_OP_SEND,
         .input = floats(self, COUNT, number + (float)self->member->rank, type),
         .peer = to,
         .tag = tag},
        {.size = sizeof batch[0],
         .kind = TDDP_OP_RECV,
         .output = floats(self, COUNT, -1, type),
         .peer = program->from_any ? TDDP_ANY_SOURCE : from,
         .tag = tag},
    };
    tddp_work *works[2] = {NULL, NULL};
    tddp_status status;
    if (program->carrier->bound || !program->carrier->any_source || endings_below(state, 2)) {
        status = tddp_batch_send_recv(self->member->group, batch, 2, works);
    } else {
        status = tddp_submit(self->member->group, &batch[0], &works[0]);
        if (status == TDDP_OK) {
            status = tddp_submit(self->member->group, &batch[1], &works[1]);
            if (status) {
                (void)end_work(self, works[0]);
            }
        }
    }
    if (expect(self, status)) {
        return status;
    }
    status = end_work(self, works[0]);
    tddp_status received = end_work(self, works[1]);
    if (received == TDDP_OK) {
        check_all(batch[1].output, number + (float)from);
    }
    return received ? received : status;
}

/* A group of this rank alone, made from the group; or no part of one that another would make. */
static tddp_status call_child(caller *self)
{
    static atomic_int made;
    const member *of = self->member;
    const plan *program = of->program;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *child = NULL;
    char name[64];
    (void)snprintf(name, sizeof name, "child %d", atomic_fetch_add(&made, 1));
    opts.backend = program->carrier->backend;
    opts.name = name;
    opts.store = of->store;
    opts.timeout_ms = ENDINGS_TIMEOUT_MS;
    opts.parent = of->group;
    opts.split = program->carrier->bound && program->ranks == 1;
    opts.device_index = program->carrier->bound ? 0 : -1;
    opts.device_bound = program->carrier->bound;
    if (program->ranks == 1 && endings_below(&self->state, 4) == 0) {
        return expect(self, tddp_group_decline(of->group, NULL));
    }
    tddp_status status = tddp_group_create(&opts, NULL, &child);
    if (status == TDDP_OK) {
        tddp_buffer one = floats(self, COUNT, 3, program->carrier->host ? TDDP_CPU : TDDP_CUDA);
        CHECK_OK(tddp_all_reduce(child, one, TDDP_REDUCE_SUM, 0, NULL));
        check_all(one, 3);
    }
    tddp_group_release(child);
    return expect(self, status);
}

/* What needs no other rank. */
static tddp_status call_aside(caller *self)
{
    tddp_group *group = self->member->group;
    const int rank = (int)endings_below(&self->state, (uint32_t)self->member->program->ranks);
    const tddp_wait brief = {1, self->cancel};
    tddp_group_memory *memory;
    tddp_store *store;
    tddp_peer peer;
    tddp_status status;
    int ended;
    switch (endings_below(&self->state, 7)) {
    case 0:
        status = tddp_group_memory_create(group, 64, &memory);
        if (status == TDDP_OK) {
            ((char *)tddp_group_memory_data(memory))[63] = 1;
            tddp_group_memory_release(memory);
        }
        return expect(self, status);
    case 1:
        return expect(self, tddp_group_drain(group, &brief));
    case 2:
        CHECK_STATUS(tddp_group_dump(group, "/dev/null/none"), TDDP_SYSTEM);
        return TDDP_OK;
    case 3:
        CHECK_INT(tddp_group_rank(group), self->member->rank);
        CHECK_OK(tddp_group_peer(group, rank, &peer));
        CHECK_OK(tddp_group_peer_ended(group, rank, &ended));
        CHECK_OK(tddp_group_set_timeout(group, ENDINGS_TIMEOUT_MS + rank));
        CHECK(tddp_group_timeout(group) >= ENDINGS_TIMEOUT_MS);
        CHECK(tddp_group_carrier(group)[0]);
        return TDDP_OK;
    case 4:
        store = tddp_group_store(group);
        if (store) {
            tddp_store_release(store);
        }
        return TDDP_OK;
    case 5:
        return expect(self, tddp_monitored_barrier(group, 1, 0, &brief));
    default:
        return call_child(self);
    }
}

tddp_status endings_call(caller *self, uint64_t *agreed)
{
    const plan *program = self->member->program;
    if (self->number == 0 || (program->disagree && endings_below(&self->state, 3) == 0)) {
        return call_collective(self, program->disagree ? &self->state : agreed);
    }
    if (self->number == 1 && program->ranks > 1) {
        return call_message(self);
    }
    return call_aside(self);
}
