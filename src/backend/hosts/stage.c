/*
 * The stages of an operation: what is filled in, where it runs, how memory is cut for it. On the
 * thread that runs the operation.
 *
 * Invariant: a stage has the number after the last one of its channel, or of this host's shared
 * memory. All who take part in it count alike, since which stages an operation has is told by the
 * operation and by where its ranks are.
 */
#include "backend/hosts/hosts.h"

/* Smaller slices would cost more messages than they save bytes. */
enum { LEAST_SLICE = 8 * 1024, LINE = 64 };

static bool has_layout(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_GATHER || kind == TDDP_OP_REDUCE_SCATTER;
}

/* The time that is left is checked by whoever waits; a stage begins with some in any case. */
static void fill_in(const tddp_hosts_run *run, tddp_op *stage, uint64_t *sequence)
{
    const tddp_op *op = run->op;
    int left = tddp_deadline_poll_ms(run->deadline);
    stage->sequence = ++*sequence;
    stage->timeout_ms = left > 0 ? left : 1;
    stage->awaited = op->awaited;
    stage->part_of = op;
    stage->fingerprint = has_layout(op->kind) ? run->layout : 0;
    stage->cancel = NULL;
}

tddp_status tddp_hosts_local(tddp_hosts_run *run, tddp_op *stage)
{
    tddp_hosts *self = run->self;
    fill_in(run, stage, &self->local_sequence);
    return tddp_shm_backend()->run[stage->kind](self->shm, stage);
}

static tddp_status run_in(tddp_hosts_run *run, tddp_hosts_channel *channel, tddp_op *stage)
{
    fill_in(run, stage, &channel->sequence);
    return run->self->between->run[stage->kind](channel->context, stage);
}

tddp_status tddp_hosts_across(tddp_hosts_run *run, tddp_op *stage)
{
    return run_in(run, &run->self->across, stage);
}

tddp_status tddp_hosts_wide(tddp_hosts_run *run, tddp_op *stage)
{
    return run_in(run, &run->self->wide, stage);
}

tddp_status tddp_hosts_meet(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BARRIER};
    return tddp_hosts_local(run, &stage);
}

tddp_status tddp_hosts_meet_across(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BARRIER};
    return run->self->local_rank == 0 ? tddp_hosts_across(run, &stage) : TDDP_OK;
}

/* --- memory ---------------------------------------------------------------------------------- */

tddp_buffer tddp_hosts_piece(const tddp_buffer *whole, size_t at, size_t count)
{
    tddp_buffer piece = *whole;
    size_t left = at < whole->count ? whole->count - at : 0;
    piece.count = count < left ? count : left;
    piece.data = piece.count > 0 ? (char *)whole->data + at * tddp_dtype_size(whole->dtype) : NULL;
    return piece;
}

tddp_buffer tddp_hosts_joined(const tddp_buffer *parts, int count)
{
    tddp_buffer whole = parts[0];
    const char *end = NULL;
    bool together = true;
    whole.data = NULL;
    whole.count = 0;
    for (int i = 0; i < count; i++) {
        if (parts[i].count == 0) {
            continue;
        }
        together = together && (!end || parts[i].data == end);
        whole.data = whole.data ? whole.data : parts[i].data;
        whole.count += parts[i].count;
        end = (const char *)parts[i].data + parts[i].count * tddp_dtype_size(parts[i].dtype);
    }
    if (!together) {
        whole.data = NULL;
    }
    return whole;
}

void tddp_hosts_slice(const tddp_hosts *self, const tddp_buffer *whole, tddp_buffer *parts)
{
    size_t line = LINE / tddp_dtype_size(whole->dtype);
    size_t least = LEAST_SLICE / tddp_dtype_size(whole->dtype);
    size_t carriers = (size_t)self->carriers;
    size_t each = (whole->count + carriers - 1) / carriers;
    each = (each + line - 1) / line * line;
    each = each > least ? each : least;
    for (int i = 0; i < self->local_size; i++) {
        parts[i] = tddp_hosts_piece(whole, (size_t)i * each, i < self->carriers ? each : 0);
    }
}
