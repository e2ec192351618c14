/*
 * all_reduce, reduce and reduce_scatter: the ranks of a host reduce slices to their leaders, the
 * leaders of all hosts reduce those, and the result goes to the ranks that receive it. Runs on the
 * operation's thread.
 *
 * Each slice is reduced by one rank on each host, then once between hosts, in an order that depends
 * only on the placement of ranks: the bits are equal on all ranks and in every run.
 *
 * all_reduce works in the caller's memory. The others must not change the input, and work in chunks
 * in scratch memory, so that it stays small.
 */
#include "backend/hosts/hosts.h"

/* Of a leader's scratch memory for each host; larger chunks aren't faster. */
enum { CHUNK_BYTES = 4 * 1024 * 1024 };

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* --- factors --------------------------------------------------------------------------------- */

/* A mean is a sum that is divided at the end. The sum of float16 could overflow before that:
 * there each host computes a mean, which is weighted between hosts by its number of ranks. */
static void set_local_reduction(const tddp_hosts_run *run, tddp_op *stage)
{
    const tddp_op *op = run->op;
    stage->reduce =
        op->reduce == TDDP_REDUCE_AVG && !is_half(op->input.dtype) ? TDDP_REDUCE_SUM : op->reduce;
    stage->premul = op->premul;
}

static void set_leader_reduction(const tddp_hosts_run *run, tddp_op *stage)
{
    const tddp_op *op = run->op;
    const tddp_hosts *self = run->self;
    stage->reduce = op->reduce;
    if (op->reduce == TDDP_REDUCE_AVG && is_half(op->input.dtype)) {
        stage->reduce = TDDP_REDUCE_PREMUL_SUM;
        stage->premul = (double)self->local_size / self->world_size;
    } else if (op->reduce == TDDP_REDUCE_AVG || op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        stage->reduce = TDDP_REDUCE_SUM;
    }
}

static tddp_status divide(tddp_hosts_run *run, const tddp_buffer *sum)
{
    if (run->op->reduce != TDDP_REDUCE_AVG || is_half(sum->dtype) || !tddp_hosts_begin_stage(run)) {
        return TDDP_OK;
    }
    tddp_scale(sum->dtype, sum->data, sum->count, 1.0 / run->self->world_size);
    return tddp_hosts_end_stage(run, TDDP_OK);
}

/* --- all_reduce ------------------------------------------------------------------------------ */

/* Reduces the parts of this host's ranks, each leader its own, into `sum`. */
static tddp_status reduce_to_leaders(tddp_hosts_run *run, const tddp_buffer *parts, tddp_buffer sum)
{
    tddp_op stage = {.kind = TDDP_OP_REDUCE_SCATTER,
                     .input = tddp_buffers_joined(parts, (size_t)run->self->local_size),
                     .output = sum,
                     .input_parts = parts};
    set_local_reduction(run, &stage);
    return tddp_hosts_run_local(run, &stage);
}

/* Whether this leader takes part between hosts. The first leaders do even without data, to
 * synchronise. */
static bool has_leader_part(const tddp_hosts *self, const tddp_buffer *slice)
{
    return tddp_hosts_is_leader(self) && (slice->count > 0 || self->local_rank == 0);
}

tddp_status tddp_hosts_all_reduce(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    tddp_buffer *slices = run->send_parts;
    tddp_hosts_slice(self, &run->op->output, slices);
    tddp_buffer local_slice = slices[self->local_rank];
    tddp_status status = reduce_to_leaders(run, slices, local_slice);
    if (status == TDDP_OK && has_leader_part(self, &local_slice)) {
        tddp_op stage = {.kind = TDDP_OP_ALL_REDUCE, .input = local_slice, .output = local_slice};
        set_leader_reduction(run, &stage);
        status = tddp_hosts_run_leaders(run, &stage);
        status = status ? status : divide(run, &local_slice);
    }
    if (status) {
        return status;
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = local_slice,
                     .output = run->op->output,
                     .output_parts = slices};
    return tddp_hosts_run_local(run, &stage);
}

/* --- reduce ---------------------------------------------------------------------------------- */

/* One chunk of the buffer: reduced in scratch memory and gathered at the root. */
static tddp_status reduce_chunk(tddp_hosts_run *run, const tddp_buffer *chunk, void *scratch)
{
    const tddp_hosts *self = run->self;
    const int root_host = self->host_of[run->op->root];
    tddp_buffer *slices = run->send_parts;
    tddp_hosts_slice(self, chunk, slices);
    tddp_buffer sum = slices[self->local_rank];
    sum.data = sum.count > 0 ? scratch : NULL;
    tddp_status status = reduce_to_leaders(run, slices, sum);
    if (status == TDDP_OK && has_leader_part(self, &sum)) {
        tddp_op stage = {.kind = TDDP_OP_REDUCE, .input = sum, .output = sum, .root = root_host};
        set_leader_reduction(run, &stage);
        status = tddp_hosts_run_leaders(run, &stage);
    }
    if (status || self->host != root_host) {
        return status;
    }
    status = divide(run, &sum);
    tddp_op stage = {.kind = TDDP_OP_GATHER,
                     .input = sum,
                     .output = *chunk,
                     .root = self->local_of[run->op->root]};
    stage.output_parts = self->rank == run->op->root ? slices : NULL;
    if (self->rank != run->op->root) {
        stage.output = tddp_hosts_subrange(chunk, 0, 0);
    }
    return status ? status : tddp_hosts_run_local(run, &stage);
}

tddp_status tddp_hosts_reduce(tddp_hosts_run *run)
{
    tddp_hosts *self = run->self;
    const tddp_buffer *buffer = &run->op->output;
    const size_t slice = CHUNK_BYTES / tddp_dtype_size(buffer->dtype);
    const size_t step = slice * (size_t)self->leaders;
    void *scratch = NULL;
    size_t max_count = buffer->count < slice ? buffer->count : slice;
    tddp_status status = TDDP_OK;
    if (tddp_hosts_is_leader(self)) {
        status =
            tddp_hosts_scratch(self, (max_count + 1) * tddp_dtype_size(buffer->dtype), &scratch);
    }
    size_t at = 0;
    do {
        tddp_buffer chunk = tddp_hosts_subrange(buffer, at, step);
        status = status ? status : reduce_chunk(run, &chunk, scratch);
        at += step;
    } while (status == TDDP_OK && at < buffer->count);
    if (status == TDDP_OK && self->host != self->host_of[run->op->root]) {
        status = tddp_hosts_local_barrier(run);
    }
    return status;
}

/* --- reduce_scatter -------------------------------------------------------------------------- */

/* A chunk of every part: `count` elements from `at` on. Leader i reduces the parts of local rank
 * first + i of each host. */
typedef struct scatter_round {
    size_t at;
    size_t count;
    int first;
    tddp_buffer *sums; /* on leaders, by host */
    tddp_buffer result;
} scatter_round;

static tddp_buffer chunk_for(const tddp_hosts_run *run, const scatter_round *round, int host,
                             int leader)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer *parts = run->op->input_parts;
    int local = round->first + leader;
    if (leader >= self->leaders || local >= tddp_hosts_size_of(self, host)) {
        return tddp_hosts_subrange(&parts[0], 0, 0);
    }
    return tddp_hosts_subrange(&parts[tddp_hosts_member(self, host, local)], round->at,
                               round->count);
}

/* Reduces among the ranks of this host, for the ranks of each host. */
static tddp_status reduce_for_all_hosts(tddp_hosts_run *run, scatter_round *round, char *scratch)
{
    const tddp_hosts *self = run->self;
    const size_t bytes = round->count * tddp_dtype_size(run->op->output.dtype);
    tddp_status status = TDDP_OK;
    for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
        for (int i = 0; i < self->local_size; i++) {
            run->send_parts[i] = chunk_for(run, round, host, i);
        }
        tddp_buffer sum = run->send_parts[self->local_rank];
        sum.data = sum.count > 0 ? scratch + (size_t)host * bytes : NULL;
        status = reduce_to_leaders(run, run->send_parts, sum);
        if (tddp_hosts_is_leader(self)) {
            round->sums[host] = sum;
        }
    }
    return status;
}

static tddp_status reduce_across_leaders(tddp_hosts_run *run, scatter_round *round)
{
    const tddp_hosts *self = run->self;
    if (!tddp_hosts_is_leader(self)) {
        return TDDP_OK;
    }
    tddp_op stage = {.kind = TDDP_OP_REDUCE_SCATTER,
                     .input = tddp_buffers_joined(round->sums, (size_t)self->host_count),
                     .output = round->result,
                     .input_parts = round->sums};
    set_leader_reduction(run, &stage);
    tddp_status status = tddp_hosts_run_leaders(run, &stage);
    return status ? status : divide(run, &round->result);
}

/* Leaders send the results to the ranks that they are for. */
static tddp_status distribute(tddp_hosts_run *run, const scatter_round *round,
                              const tddp_buffer *output)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer nothing = tddp_hosts_subrange(output, 0, 0);
    int leader = self->local_rank - round->first;
    for (int i = 0; i < self->local_size; i++) {
        run->send_parts[i] = nothing;
        run->recv_parts[i] = nothing;
    }
    int receiver = round->first + self->local_rank;
    if (tddp_hosts_is_leader(self) && receiver < self->local_size) {
        run->send_parts[receiver] = round->result;
    }
    if (leader >= 0 && leader < self->leaders) {
        run->recv_parts[leader] = *output;
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_TO_ALL,
                     .input = tddp_buffers_joined(run->send_parts, (size_t)self->local_size),
                     .output = tddp_buffers_joined(run->recv_parts, (size_t)self->local_size),
                     .input_parts = run->send_parts,
                     .output_parts = run->recv_parts};
    return tddp_hosts_run_local(run, &stage);
}

static tddp_status scatter_chunk(tddp_hosts_run *run, scatter_round *round, char *scratch)
{
    const tddp_hosts *self = run->self;
    const size_t bytes = round->count * tddp_dtype_size(run->op->output.dtype);
    tddp_buffer output = tddp_hosts_subrange(&run->op->output, round->at, round->count);
    tddp_status status = TDDP_OK;
    for (round->first = 0; round->first < self->max_local_size && status == TDDP_OK;
         round->first += self->leaders) {
        status = reduce_for_all_hosts(run, round, scratch);
        if (tddp_hosts_is_leader(self)) {
            round->result = round->sums[self->host];
            if (round->first == 0) {
                round->result = output; /* the first round is for the leaders themselves */
            } else if (round->result.count > 0) {
                round->result.data = scratch + (size_t)self->host_count * bytes;
            }
        }
        status = status ? status : reduce_across_leaders(run, round);
        if (status == TDDP_OK && round->first > 0 && self->local_size > round->first) {
            status = distribute(run, round, &output);
        }
    }
    return status;
}

tddp_status tddp_hosts_reduce_scatter(tddp_hosts_run *run)
{
    tddp_hosts *self = run->self;
    const tddp_op *op = run->op;
    const size_t element = tddp_dtype_size(op->output.dtype);
    size_t max_count = 0;
    for (int rank = 0; rank < self->world_size; rank++) {
        max_count =
            op->input_parts[rank].count > max_count ? op->input_parts[rank].count : max_count;
    }
    if (op->input_parts[self->rank].count != op->output.count) {
        return tddp_fail(TDDP_MISMATCH,
                         "reduce_scatter: part %d of the input has %zu elements, the output %zu",
                         self->rank, op->input_parts[self->rank].count, op->output.count);
    }
    const size_t line = 64 / element;
    const size_t chunk = CHUNK_BYTES / element;
    const size_t chunk_count = max_count < chunk ? (max_count + line - 1) / line * line : chunk;
    scatter_round round = {.count = chunk_count ? chunk_count : line, .sums = run->recv_parts};
    void *scratch = NULL;
    tddp_status status = TDDP_OK;
    if (tddp_hosts_is_leader(self)) {
        size_t places = (size_t)self->host_count + 1;
        status = tddp_hosts_scratch(self, places * round.count * element, &scratch);
    }
    while (status == TDDP_OK) {
        status = scatter_chunk(run, &round, scratch);
        round.at += round.count;
        if (round.at >= max_count) {
            break;
        }
    }
    return status;
}
