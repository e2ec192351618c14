/*
 * The collectives that only move data. Runs on the operation's thread.
 *
 * broadcast and all_gather send each byte once from host to host, between leaders, and work in the
 * caller's memory. gather, scatter and all_to_all move different data for each pair of ranks:
 * within a host through shared memory, all other pairs in the global communicator. The first
 * leaders synchronise before that, since ranks whose calls differ may not use that communicator at
 * all.
 */
#include "backend/hosts/hosts.h"

static tddp_buffer empty_like(const tddp_buffer *buffer)
{
    return tddp_hosts_subrange(buffer, 0, 0);
}

/* --- barrier --------------------------------------------------------------------------------- */

tddp_status tddp_hosts_barrier(tddp_hosts_run *run)
{
    tddp_status status = tddp_hosts_local_barrier(run);
    if (status == TDDP_OK) {
        status = tddp_hosts_leader_barrier(run);
    }
    return status ? status : tddp_hosts_local_barrier(run);
}

/* --- broadcast ------------------------------------------------------------------------------- */

static tddp_status broadcast_local(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BROADCAST,
                     .input = run->op->output,
                     .output = run->op->output,
                     .root = run->self->local_of[run->op->root]};
    return tddp_hosts_run_local(run, &stage);
}

tddp_status tddp_hosts_broadcast(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const int root_host = self->host_of[run->op->root];
    const bool root_is_here = self->host == root_host;
    tddp_buffer *slices = run->send_parts;
    tddp_hosts_slice(self, &run->op->output, slices);
    tddp_buffer local_slice = slices[self->local_rank];
    tddp_status status = root_is_here ? broadcast_local(run) : tddp_hosts_local_barrier(run);
    if (status == TDDP_OK && tddp_hosts_is_leader(self) &&
        (local_slice.count > 0 || self->local_rank == 0)) {
        tddp_op stage = {.kind = TDDP_OP_BROADCAST,
                         .input = local_slice,
                         .output = local_slice,
                         .root = root_host};
        status = tddp_hosts_run_leaders(run, &stage);
    }
    if (status || root_is_here) {
        return status ? status : tddp_hosts_local_barrier(run);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = local_slice,
                     .output = run->op->output,
                     .output_parts = slices};
    return tddp_hosts_run_local(run, &stage);
}

/* --- all_gather ------------------------------------------------------------------------------ */

/* The output of a local rank's part of a host; empty if the host has no such rank. */
static tddp_buffer output_part(const tddp_hosts_run *run, int host, int local)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer *parts = run->op->output_parts;
    if (local >= tddp_hosts_size_of(self, host)) {
        return empty_like(&parts[0]);
    }
    return parts[tddp_hosts_member(self, host, local)];
}

static tddp_status gather_local(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; i < self->local_size; i++) {
        run->recv_parts[i] = output_part(run, self->host, i);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->op->input,
                     .output = tddp_buffers_joined(run->recv_parts, (size_t)self->local_size),
                     .output_parts = run->recv_parts};
    return tddp_hosts_run_local(run, &stage);
}

/* This leader exchanges the part of local rank `first` + its own with the same leaders of all
 * hosts. */
static tddp_status gather_leaders(tddp_hosts_run *run, int first)
{
    const tddp_hosts *self = run->self;
    if (!tddp_hosts_is_leader(self)) {
        return TDDP_OK;
    }
    for (int host = 0; host < self->host_count; host++) {
        run->recv_parts[host] = output_part(run, host, first + self->local_rank);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->recv_parts[self->host],
                     .output = tddp_buffers_joined(run->recv_parts, (size_t)self->host_count),
                     .output_parts = run->recv_parts};
    return tddp_hosts_run_leaders(run, &stage);
}

/* The leaders pass the parts of another host to all ranks of this one. */
static tddp_status forward(tddp_hosts_run *run, int host, int first)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; i < self->local_size; i++) {
        run->recv_parts[i] = output_part(run, host, first + i);
        if (i >= self->leaders) {
            run->recv_parts[i] = empty_like(&run->recv_parts[i]);
        }
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->recv_parts[self->local_rank],
                     .output = tddp_buffers_joined(run->recv_parts, (size_t)self->local_size),
                     .output_parts = run->recv_parts};
    return tddp_hosts_run_local(run, &stage);
}

tddp_status tddp_hosts_all_gather(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const tddp_op *op = run->op;
    if (op->input.count != op->output_parts[self->rank].count) {
        return tddp_fail(TDDP_MISMATCH,
                         "all_gather: rank %d sends itself %zu elements and expects %zu",
                         self->rank, op->input.count, op->output_parts[self->rank].count);
    }
    tddp_status status = gather_local(run);
    for (int first = 0; first < self->max_local_size && status == TDDP_OK; first += self->leaders) {
        status = gather_leaders(run, first);
        for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
            if (host != self->host && first < tddp_hosts_size_of(self, host)) {
                status = forward(run, host, first);
            }
        }
    }
    return status;
}

/* --- gather, scatter, all_to_all ------------------------------------------------------------- */

/* The parts of this host's ranks, as a list. */
static const tddp_buffer *local_parts(const tddp_hosts_run *run, const tddp_buffer *parts,
                                      tddp_buffer *list)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; parts && i < self->local_size; i++) {
        list[i] = parts[tddp_hosts_member(self, self->host, i)];
    }
    return parts ? list : NULL;
}

/* The parts of all ranks, with those of this host empty. */
static const tddp_buffer *remote_parts(const tddp_hosts_run *run, const tddp_buffer *parts,
                                       tddp_buffer *list)
{
    const tddp_hosts *self = run->self;
    for (int rank = 0; parts && rank < self->world_size; rank++) {
        list[rank] = self->host_of[rank] == self->host ? empty_like(&parts[rank]) : parts[rank];
    }
    return parts ? list : NULL;
}

/* A stage of the operation's own kind, on the parts selected by `parts_of`. */
static tddp_op exchange(tddp_hosts_run *run, int ranks,
                        const tddp_buffer *(*parts_of)(const tddp_hosts_run *run,
                                                       const tddp_buffer *parts, tddp_buffer *list))
{
    const tddp_op *op = run->op;
    tddp_op stage = {.kind = op->kind, .input = op->input, .output = op->output};
    stage.input_parts = parts_of(run, op->input_parts, run->send_parts);
    stage.output_parts = parts_of(run, op->output_parts, run->recv_parts);
    if (stage.input_parts) {
        stage.input = tddp_buffers_joined(stage.input_parts, (size_t)ranks);
    }
    if (stage.output_parts) {
        stage.output = tddp_buffers_joined(stage.output_parts, (size_t)ranks);
    }
    return stage;
}

static tddp_status exchange_local(tddp_hosts_run *run, int root)
{
    tddp_op stage = exchange(run, run->self->local_size, local_parts);
    stage.root = root;
    return tddp_hosts_run_local(run, &stage);
}

tddp_status tddp_hosts_all_to_all(tddp_hosts_run *run)
{
    tddp_status status = exchange_local(run, 0);
    if (status == TDDP_OK) {
        status = tddp_hosts_leader_barrier(run);
    }
    if (status) {
        return status;
    }
    tddp_op stage = exchange(run, run->self->world_size, remote_parts);
    return tddp_hosts_run_global(run, &stage);
}

/* gather and scatter: the root's host locally, then the root with all other hosts. */
static tddp_status exchange_with_root(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const int root = run->op->root;
    const bool root_is_here = self->host_of[root] == self->host;
    tddp_status status =
        root_is_here ? exchange_local(run, self->local_of[root]) : tddp_hosts_local_barrier(run);
    if (status == TDDP_OK) {
        status = tddp_hosts_leader_barrier(run);
    }
    if (status) {
        return status;
    }
    tddp_op stage = exchange(run, self->world_size, remote_parts);
    stage.root = root;
    /* The root's host has exchanged these locally; the root has lists instead. */
    if (root_is_here && !stage.input_parts) {
        stage.input = empty_like(&stage.input);
    }
    if (root_is_here && !stage.output_parts) {
        stage.output = empty_like(&stage.output);
    }
    return tddp_hosts_run_global(run, &stage);
}

tddp_status tddp_hosts_gather(tddp_hosts_run *run)
{
    return exchange_with_root(run);
}

tddp_status tddp_hosts_scatter(tddp_hosts_run *run)
{
    return exchange_with_root(run);
}
