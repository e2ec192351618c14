/*
 * The collectives that only move data. On the thread that runs the operation.
 *
 * broadcast and all_gather send each byte once from host to host, between carriers, and work in the
 * caller's memory. gather, scatter and all_to_all move different bytes for each pair of ranks:
 * those of one host in shared memory, all others in the wide channel. There the first carriers meet
 * before, since ranks that call something else may not come to that channel at all.
 */
#include "backend/hosts/hosts.h"

static tddp_buffer nothing_like(const tddp_buffer *buffer)
{
    return tddp_hosts_piece(buffer, 0, 0);
}

/* --- barrier --------------------------------------------------------------------------------- */

tddp_status tddp_hosts_barrier(tddp_hosts_run *run)
{
    tddp_status status = tddp_hosts_meet(run);
    if (status == TDDP_OK) {
        status = tddp_hosts_meet_across(run);
    }
    return status ? status : tddp_hosts_meet(run);
}

/* --- broadcast ------------------------------------------------------------------------------- */

static tddp_status broadcast_inside(tddp_hosts_run *run)
{
    tddp_op stage = {.kind = TDDP_OP_BROADCAST,
                     .input = run->op->output,
                     .output = run->op->output,
                     .root = run->self->local_of[run->op->root]};
    return tddp_hosts_local(run, &stage);
}

tddp_status tddp_hosts_broadcast(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const int root_host = self->host_of[run->op->root];
    const bool root_is_here = self->host == root_host;
    tddp_buffer *slices = run->given;
    tddp_hosts_slice(self, &run->op->output, slices);
    tddp_buffer own = slices[self->local_rank];
    tddp_status status = root_is_here ? broadcast_inside(run) : tddp_hosts_meet(run);
    if (status == TDDP_OK && tddp_hosts_carries(self) && (own.count > 0 || self->local_rank == 0)) {
        tddp_op stage = {.kind = TDDP_OP_BROADCAST, .input = own, .output = own, .root = root_host};
        status = tddp_hosts_across(run, &stage);
    }
    if (status || root_is_here) {
        return status ? status : tddp_hosts_meet(run);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = own,
                     .output = run->op->output,
                     .output_parts = slices};
    return tddp_hosts_local(run, &stage);
}

/* --- all_gather ------------------------------------------------------------------------------ */

/* Where the part of a host's rank is to be; empty if the host has no such rank. */
static tddp_buffer place_of(const tddp_hosts_run *run, int host, int local)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer *parts = run->op->output_parts;
    if (local >= tddp_hosts_size_of(self, host)) {
        return nothing_like(&parts[0]);
    }
    return parts[tddp_hosts_member(self, host, local)];
}

static tddp_status gather_inside(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; i < self->local_size; i++) {
        run->wanted[i] = place_of(run, self->host, i);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->op->input,
                     .output = tddp_hosts_joined(run->wanted, self->local_size),
                     .output_parts = run->wanted};
    return tddp_hosts_local(run, &stage);
}

/* This carrier exchanges the part of rank first + i of its host for those of all hosts. */
static tddp_status gather_across(tddp_hosts_run *run, int first)
{
    const tddp_hosts *self = run->self;
    if (!tddp_hosts_carries(self)) {
        return TDDP_OK;
    }
    for (int host = 0; host < self->host_count; host++) {
        run->wanted[host] = place_of(run, host, first + self->local_rank);
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->wanted[self->host],
                     .output = tddp_hosts_joined(run->wanted, self->host_count),
                     .output_parts = run->wanted};
    return tddp_hosts_across(run, &stage);
}

/* What carriers have got from a host goes to all ranks of this one. */
static tddp_status hand_on(tddp_hosts_run *run, int host, int first)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; i < self->local_size; i++) {
        run->wanted[i] = place_of(run, host, first + i);
        if (i >= self->carriers) {
            run->wanted[i] = nothing_like(&run->wanted[i]);
        }
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = run->wanted[self->local_rank],
                     .output = tddp_hosts_joined(run->wanted, self->local_size),
                     .output_parts = run->wanted};
    return tddp_hosts_local(run, &stage);
}

tddp_status tddp_hosts_all_gather(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const tddp_op *op = run->op;
    if (op->input.count != op->output_parts[self->rank].count) {
        return tddp_fail(TDDP_MISMATCH,
                         "all_gather: rank %d gives itself %zu elements and expects %zu",
                         self->rank, op->input.count, op->output_parts[self->rank].count);
    }
    tddp_status status = gather_inside(run);
    for (int first = 0; first < self->most && status == TDDP_OK; first += self->carriers) {
        status = gather_across(run, first);
        for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
            if (host != self->host && first < tddp_hosts_size_of(self, host)) {
                status = hand_on(run, host, first);
            }
        }
    }
    return status;
}

/* --- gather, scatter, all_to_all ------------------------------------------------------------- */

/* The parts of the ranks of this host, as a list of its own. */
static const tddp_buffer *local_parts(const tddp_hosts_run *run, const tddp_buffer *parts,
                                      tddp_buffer *list)
{
    const tddp_hosts *self = run->self;
    for (int i = 0; parts && i < self->local_size; i++) {
        list[i] = parts[tddp_hosts_member(self, self->host, i)];
    }
    return parts ? list : NULL;
}

/* The parts of all ranks, those of this host empty. */
static const tddp_buffer *remote_parts(const tddp_hosts_run *run, const tddp_buffer *parts,
                                       tddp_buffer *list)
{
    const tddp_hosts *self = run->self;
    for (int rank = 0; parts && rank < self->world_size; rank++) {
        list[rank] = self->host_of[rank] == self->host ? nothing_like(&parts[rank]) : parts[rank];
    }
    return parts ? list : NULL;
}

/* `input` and `output` are what they are of an operation without parts, `parts_of` chooses the
 * parts. */
static tddp_op exchange(tddp_hosts_run *run, int ranks,
                        const tddp_buffer *(*parts_of)(const tddp_hosts_run *run,
                                                       const tddp_buffer *parts, tddp_buffer *list))
{
    const tddp_op *op = run->op;
    tddp_op stage = {.kind = op->kind, .input = op->input, .output = op->output};
    stage.input_parts = parts_of(run, op->input_parts, run->given);
    stage.output_parts = parts_of(run, op->output_parts, run->wanted);
    if (stage.input_parts) {
        stage.input = tddp_hosts_joined(stage.input_parts, ranks);
    }
    if (stage.output_parts) {
        stage.output = tddp_hosts_joined(stage.output_parts, ranks);
    }
    return stage;
}

static tddp_status exchange_inside(tddp_hosts_run *run, int root)
{
    tddp_op stage = exchange(run, run->self->local_size, local_parts);
    stage.root = root;
    return tddp_hosts_local(run, &stage);
}

tddp_status tddp_hosts_all_to_all(tddp_hosts_run *run)
{
    tddp_status status = exchange_inside(run, 0);
    if (status == TDDP_OK) {
        status = tddp_hosts_meet_across(run);
    }
    if (status) {
        return status;
    }
    tddp_op stage = exchange(run, run->self->world_size, remote_parts);
    return tddp_hosts_wide(run, &stage);
}

/* gather and scatter: with what is exchanged between the root's host and all others. */
static tddp_status exchange_with_root(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    const int root = run->op->root;
    const bool root_is_here = self->host_of[root] == self->host;
    tddp_status status =
        root_is_here ? exchange_inside(run, self->local_of[root]) : tddp_hosts_meet(run);
    if (status == TDDP_OK) {
        status = tddp_hosts_meet_across(run);
    }
    if (status) {
        return status;
    }
    tddp_op stage = exchange(run, self->world_size, remote_parts);
    stage.root = root;
    /* What the root's host exchanged inside; lists are the root's. */
    if (root_is_here && !stage.input_parts) {
        stage.input = nothing_like(&stage.input);
    }
    if (root_is_here && !stage.output_parts) {
        stage.output = nothing_like(&stage.output);
    }
    return tddp_hosts_wide(run, &stage);
}

tddp_status tddp_hosts_gather(tddp_hosts_run *run)
{
    return exchange_with_root(run);
}

tddp_status tddp_hosts_scatter(tddp_hosts_run *run)
{
    return exchange_with_root(run);
}
