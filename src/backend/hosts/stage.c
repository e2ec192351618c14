/*
 * Runs the stages of an operation, and cuts buffers for them. Runs on the operation's thread.
 *
 * An operation that was interrupted is run again from its beginning, and stages that it has done do
 * nothing then. So whatever it does between them must be idempotent, or a stage too.
 *
 * Invariant: a stage's sequence number follows the last one of its communicator, or of this host's
 * shared memory. All participants count the same, since the stages of an operation depend only on
 * the operation and the placement of ranks.
 */
#include "backend/hosts/hosts.h"

/* Smaller slices would cost more in messages than they save in bytes. */
enum { MIN_SLICE = 8 * 1024, LINE = 64 };

static bool has_layout(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_GATHER || kind == TDDP_OP_REDUCE_SCATTER;
}

bool tddp_hosts_begin_stage(tddp_hosts_run *run)
{
    return run->stage++ >= run->self->stages_done;
}

tddp_status tddp_hosts_end_stage(tddp_hosts_run *run, tddp_status status)
{
    run->self->stages_done += status == TDDP_OK;
    run->self->stage_begun = status == TDDP_CANCELED;
    return status;
}

/* Each wait checks the remaining time; a stage always gets some. */
static void fill_in(const tddp_hosts_run *run, tddp_op *stage, uint64_t *sequence)
{
    const tddp_op *op = run->op;
    int left = tddp_deadline_poll_ms(run->self->deadline);
    *sequence += !run->self->stage_begun;
    stage->sequence = *sequence;
    stage->timeout_ms = left > 0 ? left : 1;
    stage->awaited = op->awaited;
    stage->part_of = op;
    stage->fingerprint = has_layout(op->kind) ? run->layout : 0;
    stage->cancel = op->cancel;
}

tddp_status tddp_hosts_run_local(tddp_hosts_run *run, tddp_op *stage)
{
    tddp_hosts *self = run->self;
    if (!tddp_hosts_begin_stage(run)) {
        return TDDP_OK;
    }
    fill_in(run, stage, &self->local_sequence);
    return tddp_hosts_end_stage(run, tddp_shm_backend()->run[stage->kind](self->shm, stage));
}

static tddp_status run_on(tddp_hosts_run *run, tddp_hosts_comm *comm, tddp_op *stage)
{
    if (!tddp_hosts_begin_stage(run)) {
        return TDDP_OK;
    }
    fill_in(run, stage, &comm->sequence);
    const tddp_inner *inner = &comm->inner;
    return tddp_hosts_end_stage(run, inner->backend->run[stage->kind](inner->context, stage));
}

tddp_status tddp_hosts_run_leaders(tddp_hosts_run *run, tddp_op *stage)
{
    return run_on(run, &run->self->leader_comm, stage);
}

tddp_status tddp_hosts_run_global(tddp_hosts_run *run, tddp_op *stage)
{
    tddp_status status = tddp_hosts_await_global(run->self, run->op, run->self->deadline);
    return status ? status : run_on(run, &run->self->global_comm, stage);
}

tddp_status tddp_hosts_local_barrier(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BARRIER};
    return tddp_hosts_run_local(run, &stage);
}

tddp_status tddp_hosts_leader_barrier(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BARRIER};
    return run->self->local_rank == 0 ? tddp_hosts_run_leaders(run, &stage) : TDDP_OK;
}

/* --- memory ---------------------------------------------------------------------------------- */

tddp_buffer tddp_hosts_subrange(const tddp_buffer *buffer, size_t at, size_t count)
{
    tddp_buffer chunk = *buffer;
    size_t left = at < buffer->count ? buffer->count - at : 0;
    chunk.count = count < left ? count : left;
    chunk.data =
        chunk.count > 0 ? (char *)buffer->data + at * tddp_dtype_size(buffer->dtype) : NULL;
    return chunk;
}

void tddp_hosts_slice(const tddp_hosts *self, const tddp_buffer *buffer, tddp_buffer *parts)
{
    size_t line = LINE / tddp_dtype_size(buffer->dtype);
    size_t min_count = MIN_SLICE / tddp_dtype_size(buffer->dtype);
    size_t leaders = (size_t)self->leaders;
    size_t each = (buffer->count + leaders - 1) / leaders;
    each = (each + line - 1) / line * line;
    each = each > min_count ? each : min_count;
    for (int i = 0; i < self->local_size; i++) {
        parts[i] = tddp_hosts_subrange(buffer, (size_t)i * each, i < self->leaders ? each : 0);
    }
}
