/*
 * Runs collectives, stage by stage, and waits. A collective runs on any thread, one at a time;
 * messages wait on any, several at a time.
 *
 * A stage that is interrupted is run again, all others once. What it does is computed again each
 * time, since the operation that it is a part of may be at another address then.
 *
 * Invariant: a stage's sequence number follows the last one of its communicator. All participants
 * count the same, since the stages of an operation depend only on the operation and the placement
 * of ranks.
 */
#include <tddp/call.h>

#include "backend/hosts/hosts.h"

/* A waiting thread: how long it spins if it has nothing else to do; how often it checks what counts
 * no event, a token or a deadline. */
#define SPIN_NS (50 * INT64_C(1000))
#define SLEEP_NS (20 * TDDP_NS_PER_MS)

enum { FIRST_STAGES = 16 };

/* --- waiting --------------------------------------------------------------------------------- */

tddp_status tddp_hosts_try(tddp_hosts *self, const tddp_op *op,
                           tddp_status (*poll)(tddp_hosts *self, void *data), void *data)
{
    tddp_eventcount *events = tddp_shm_events(self->shm, self->local_rank);
    const bool spins = op->awaited && tddp_shm_ranks_per_core(self->shm) <= 1;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(events);
        const tddp_status status = poll(self, data);
        if (status != TDDP_CANCELED || (op->cancel && tddp_cancel_triggered(op->cancel))) {
            return status;
        }
        const int64_t left = tddp_cancel_deadline(op->cancel) - tddp_now_ns();
        tddp_eventcount_wait(events, seen, spins ? SPIN_NS : 0, left < SLEEP_NS ? left : SLEEP_NS);
    }
}

tddp_status tddp_hosts_check_global(tddp_hosts *self, int64_t deadline)
{
    return self->on_demand ? tddp_on_demand_check(self->on_demand, deadline) : TDDP_OK;
}

static tddp_status poll_global(tddp_hosts *self, void *deadline)
{
    return tddp_hosts_check_global(self, *(int64_t *)deadline);
}

tddp_status tddp_hosts_await_global(tddp_hosts *self, const tddp_op *op, int64_t deadline)
{
    return tddp_hosts_try(self, op, poll_global, &deadline);
}

/* --- running --------------------------------------------------------------------------------- */

void tddp_hosts_add(tddp_hosts *self, const tddp_hosts_stage *stage)
{
    tddp_hosts_program *program = &self->program;
    if (program->count == program->capacity) {
        const size_t capacity = program->capacity ? 2 * program->capacity : FIRST_STAGES;
        tddp_hosts_stage *grown = tddp_resize(program->stages, capacity * sizeof *grown);
        program->incomplete = program->incomplete || !grown;
        if (!grown) {
            return;
        }
        program->stages = grown;
        program->capacity = capacity;
    }
    program->stages[program->count++] = *stage;
}

/* A digest of the part sizes if all ranks know them; 0: there are none. */
static uint32_t layout_of(const tddp_hosts *self, const tddp_op *op)
{
    const tddp_buffer *parts = op->kind == TDDP_OP_ALL_GATHER       ? op->output_parts
                               : op->kind == TDDP_OP_REDUCE_SCATTER ? op->input_parts
                                                                    : NULL;
    uint64_t hash = TDDP_DIGEST_START;
    for (int rank = 0; parts && rank < self->world_size; rank++) {
        hash = tddp_digest(hash, &parts[rank].count, sizeof parts[rank].count);
    }
    return parts ? tddp_digest_fold(hash) : 0;
}

static tddp_status begin(tddp_hosts *self, const tddp_op *op)
{
    tddp_hosts_program *program = &self->program;
    program->deadline = tddp_deadline_after_ms(op->timeout_ms);
    program->layout = layout_of(self, op);
    program->count = program->position = 0;
    program->begun = program->incomplete = false;
    tddp_status status = tddp_hosts_build(self);
    return status == TDDP_OK && program->incomplete ? TDDP_OUT_OF_MEMORY : status;
}

/* Each wait checks the remaining time; a stage always gets some. */
static tddp_status run_stage(tddp_hosts *self, const tddp_op *op, const tddp_hosts_stage *stage)
{
    tddp_hosts_program *program = &self->program;
    const int left = tddp_deadline_poll_ms(program->deadline);
    tddp_op its = {.timeout_ms = left > 0 ? left : 1,
                   .awaited = op->awaited,
                   .part_of = op,
                   .fingerprint = program->layout,
                   .cancel = op->cancel};
    tddp_status status = stage->where == TDDP_HOSTS_GLOBAL
                             ? tddp_hosts_await_global(self, op, program->deadline)
                             : TDDP_OK;
    if (status) {
        return status;
    }
    stage->fill(self, stage, &its);
    if (stage->where == TDDP_HOSTS_DIVIDE) {
        tddp_scale(its.output.dtype, its.output.data, its.output.count, 1.0 / self->world_size);
        return TDDP_OK;
    }
    tddp_hosts_comm *comm = &self->comms[stage->where];
    comm->sequence += !program->begun;
    program->begun = true;
    its.sequence = comm->sequence;
    status = comm->inner.backend->run[its.kind](comm->inner.context, &its);
    program->begun = status != TDDP_OK;
    return status;
}

tddp_status tddp_hosts_run(void *context, const tddp_op *op)
{
    tddp_hosts *self = context;
    tddp_hosts_program *program = &self->program;
    self->op = op;
    tddp_status status = program->sequence == op->sequence ? TDDP_OK : begin(self, op);
    while (status == TDDP_OK && program->position < program->count) {
        status = run_stage(self, op, &program->stages[program->position]);
        program->position += status == TDDP_OK;
    }
    program->sequence = status == TDDP_CANCELED ? op->sequence : 0;
    self->op = NULL;
    return tddp_hosts_report_if_fatal(self, status);
}
