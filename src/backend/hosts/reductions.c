/*
 * all_reduce, reduce and reduce_scatter: a host's ranks sum up slices for their carriers, the
 * carriers of all hosts sum up those, and what comes out is given to those it is for. On the thread
 * that runs the operation.
 *
 * Each slice is summed up by one rank on each host and then once between the hosts, in an order
 * that depends on where ranks are alone: the bits are the same on all ranks, and in every run.
 *
 * all_reduce works in the caller's memory. The others, whose memory must stay as it is, work in
 * scratch memory, piece by piece, so that it stays small.
 */
#include "backend/hosts/hosts.h"

/* Of a carrier's scratch memory for each host; larger pieces than these are not faster. */
enum { PIECE_BYTES = 4 * 1024 * 1024 };

static bool is_half(tddp_dtype dtype)
{
    return dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16;
}

/* --- factors --------------------------------------------------------------------------------- */

/*
 * A mean is a sum that is divided at the end. Sums of float16 could overflow before that, so those
 * are means already inside a host, and weighed between hosts by how many ranks they stand for.
 */
static void set_local_sum(const tddp_hosts_run *run, tddp_op *stage)
{
    const tddp_op *op = run->op;
    stage->reduce =
        op->reduce == TDDP_REDUCE_AVG && !is_half(op->input.dtype) ? TDDP_REDUCE_SUM : op->reduce;
    stage->premul = op->premul;
}

static void set_sum_across(const tddp_hosts_run *run, tddp_op *stage)
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

static void divide(const tddp_hosts_run *run, const tddp_buffer *sum)
{
    if (run->op->reduce == TDDP_REDUCE_AVG && !is_half(sum->dtype)) {
        tddp_scale(sum->dtype, sum->data, sum->count, 1.0 / run->self->world_size);
    }
}

/* --- all_reduce ------------------------------------------------------------------------------ */

/* Sums up the host's ranks' parts, each carrier its own, into `sum`. */
static tddp_status sum_up(tddp_hosts_run *run, const tddp_buffer *parts, tddp_buffer sum)
{
    tddp_op stage = {.kind = TDDP_OP_REDUCE_SCATTER,
                     .input = tddp_hosts_joined(parts, run->self->local_size),
                     .output = sum,
                     .input_parts = parts};
    set_local_sum(run, &stage);
    return tddp_hosts_local(run, &stage);
}

/* Sums up what carriers have. The first ones meet also when there is nothing. */
static bool has_part_across(const tddp_hosts *self, const tddp_buffer *slice)
{
    return tddp_hosts_carries(self) && (slice->count > 0 || self->local_rank == 0);
}

tddp_status tddp_hosts_all_reduce(tddp_hosts_run *run)
{
    const tddp_hosts *self = run->self;
    tddp_buffer *slices = run->given;
    tddp_hosts_slice(self, &run->op->output, slices);
    tddp_buffer own = slices[self->local_rank];
    tddp_status status = sum_up(run, slices, own);
    if (status == TDDP_OK && has_part_across(self, &own)) {
        tddp_op stage = {.kind = TDDP_OP_ALL_REDUCE, .input = own, .output = own};
        set_sum_across(run, &stage);
        status = tddp_hosts_across(run, &stage);
        divide(run, &own);
    }
    if (status) {
        return status;
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_GATHER,
                     .input = own,
                     .output = run->op->output,
                     .output_parts = slices};
    return tddp_hosts_local(run, &stage);
}

/* --- reduce ---------------------------------------------------------------------------------- */

/* One piece of the message: summed up in scratch memory, and given to the root. */
static tddp_status reduce_piece(tddp_hosts_run *run, const tddp_buffer *piece, void *scratch)
{
    const tddp_hosts *self = run->self;
    const int root_host = self->host_of[run->op->root];
    tddp_buffer *slices = run->given;
    tddp_hosts_slice(self, piece, slices);
    tddp_buffer sum = slices[self->local_rank];
    sum.data = sum.count > 0 ? scratch : NULL;
    tddp_status status = sum_up(run, slices, sum);
    if (status == TDDP_OK && has_part_across(self, &sum)) {
        tddp_op stage = {.kind = TDDP_OP_REDUCE, .input = sum, .output = sum, .root = root_host};
        set_sum_across(run, &stage);
        status = tddp_hosts_across(run, &stage);
    }
    if (status || self->host != root_host) {
        return status;
    }
    divide(run, &sum);
    tddp_op stage = {.kind = TDDP_OP_GATHER,
                     .input = sum,
                     .output = *piece,
                     .root = self->local_of[run->op->root]};
    stage.output_parts = self->rank == run->op->root ? slices : NULL;
    if (self->rank != run->op->root) {
        stage.output = tddp_hosts_piece(piece, 0, 0);
    }
    return tddp_hosts_local(run, &stage);
}

tddp_status tddp_hosts_reduce(tddp_hosts_run *run)
{
    tddp_hosts *self = run->self;
    const tddp_buffer *whole = &run->op->output;
    const size_t slice = PIECE_BYTES / tddp_dtype_size(whole->dtype);
    const size_t step = slice * (size_t)self->carriers;
    void *scratch = NULL;
    size_t most = whole->count < slice ? whole->count : slice;
    tddp_status status = TDDP_OK;
    if (tddp_hosts_carries(self)) {
        status = tddp_hosts_scratch(self, (most + 1) * tddp_dtype_size(whole->dtype), &scratch);
    }
    size_t at = 0;
    do {
        tddp_buffer piece = tddp_hosts_piece(whole, at, step);
        status = status ? status : reduce_piece(run, &piece, scratch);
        at += step;
    } while (status == TDDP_OK && at < whole->count);
    if (status == TDDP_OK && self->host != self->host_of[run->op->root]) {
        status = tddp_hosts_meet(run);
    }
    return status;
}

/* --- reduce_scatter -------------------------------------------------------------------------- */

/* A piece of every part: `count` elements from `at` on; in the round of those local ranks that
 * begin with `first`. Carrier i serves the rank first + i of each host. */
typedef struct round_of_parts {
    size_t at;
    size_t count;
    int first;
    tddp_buffer *sums; /* of this carrier, by host */
    tddp_buffer result;
} round_of_parts;

static tddp_buffer piece_for(const tddp_hosts_run *run, const round_of_parts *round, int host,
                             int carrier)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer *parts = run->op->input_parts;
    int local = round->first + carrier;
    if (carrier >= self->carriers || local >= tddp_hosts_size_of(self, host)) {
        return tddp_hosts_piece(&parts[0], 0, 0);
    }
    return tddp_hosts_piece(&parts[tddp_hosts_member(self, host, local)], round->at, round->count);
}

/* Among the ranks of this host, for the ranks of each host. */
static tddp_status sum_for_all_hosts(tddp_hosts_run *run, round_of_parts *round, char *scratch)
{
    const tddp_hosts *self = run->self;
    const size_t bytes = round->count * tddp_dtype_size(run->op->output.dtype);
    tddp_status status = TDDP_OK;
    for (int host = 0; host < self->host_count && status == TDDP_OK; host++) {
        for (int i = 0; i < self->local_size; i++) {
            run->given[i] = piece_for(run, round, host, i);
        }
        tddp_buffer sum = run->given[self->local_rank];
        sum.data = sum.count > 0 ? scratch + (size_t)host * bytes : NULL;
        status = sum_up(run, run->given, sum);
        if (tddp_hosts_carries(self)) {
            round->sums[host] = sum;
        }
    }
    return status;
}

static tddp_status sum_across(tddp_hosts_run *run, round_of_parts *round)
{
    const tddp_hosts *self = run->self;
    if (!tddp_hosts_carries(self)) {
        return TDDP_OK;
    }
    tddp_op stage = {.kind = TDDP_OP_REDUCE_SCATTER,
                     .input = tddp_hosts_joined(round->sums, self->host_count),
                     .output = round->result,
                     .input_parts = round->sums};
    set_sum_across(run, &stage);
    tddp_status status = tddp_hosts_across(run, &stage);
    divide(run, &round->result);
    return status;
}

/* Carriers give what they have summed up to the ranks that it is for. */
static tddp_status hand_over(tddp_hosts_run *run, const round_of_parts *round,
                             const tddp_buffer *output)
{
    const tddp_hosts *self = run->self;
    const tddp_buffer nothing = tddp_hosts_piece(output, 0, 0);
    int carrier = self->local_rank - round->first;
    for (int i = 0; i < self->local_size; i++) {
        run->given[i] = nothing;
        run->wanted[i] = nothing;
    }
    int receiver = round->first + self->local_rank;
    if (tddp_hosts_carries(self) && receiver < self->local_size) {
        run->given[receiver] = round->result;
    }
    if (carrier >= 0 && carrier < self->carriers) {
        run->wanted[carrier] = *output;
    }
    tddp_op stage = {.kind = TDDP_OP_ALL_TO_ALL,
                     .input = tddp_hosts_joined(run->given, self->local_size),
                     .output = tddp_hosts_joined(run->wanted, self->local_size),
                     .input_parts = run->given,
                     .output_parts = run->wanted};
    return tddp_hosts_local(run, &stage);
}

static tddp_status scatter_piece(tddp_hosts_run *run, round_of_parts *round, char *scratch)
{
    const tddp_hosts *self = run->self;
    const size_t bytes = round->count * tddp_dtype_size(run->op->output.dtype);
    tddp_buffer output = tddp_hosts_piece(&run->op->output, round->at, round->count);
    tddp_status status = TDDP_OK;
    for (round->first = 0; round->first < self->most && status == TDDP_OK;
         round->first += self->carriers) {
        status = sum_for_all_hosts(run, round, scratch);
        if (tddp_hosts_carries(self)) {
            round->result = round->sums[self->host];
            if (round->first == 0) {
                round->result = output; /* carriers first serve themselves */
            } else if (round->result.count > 0) {
                round->result.data = scratch + (size_t)self->host_count * bytes;
            }
        }
        status = status ? status : sum_across(run, round);
        if (status == TDDP_OK && round->first > 0 && self->local_size > round->first) {
            status = hand_over(run, round, &output);
        }
    }
    return status;
}

tddp_status tddp_hosts_reduce_scatter(tddp_hosts_run *run)
{
    tddp_hosts *self = run->self;
    const tddp_op *op = run->op;
    const size_t element = tddp_dtype_size(op->output.dtype);
    size_t most = 0;
    for (int rank = 0; rank < self->world_size; rank++) {
        most = op->input_parts[rank].count > most ? op->input_parts[rank].count : most;
    }
    if (op->input_parts[self->rank].count != op->output.count) {
        return tddp_fail(TDDP_MISMATCH,
                         "reduce_scatter: part %d of the input has %zu elements, the output %zu",
                         self->rank, op->input_parts[self->rank].count, op->output.count);
    }
    const size_t line = 64 / element;
    const size_t piece = PIECE_BYTES / element;
    const size_t room = most < piece ? (most + line - 1) / line * line : piece;
    round_of_parts round = {.count = room ? room : line, .sums = run->wanted};
    void *scratch = NULL;
    tddp_status status = TDDP_OK;
    if (tddp_hosts_carries(self)) {
        size_t places = (size_t)self->host_count + 1;
        status = tddp_hosts_scratch(self, places * round.count * element, &scratch);
    }
    while (status == TDDP_OK) {
        status = scatter_piece(run, &round, scratch);
        round.at += round.count;
        if (round.at >= most) {
            break;
        }
    }
    return status;
}
