/*
 * The stages of each collective. Runs on the operation's thread.
 *
 * all_reduce, reduce and reduce_scatter: the ranks of a host reduce slices to their leaders, the
 * leaders of all hosts reduce those, and the result goes to the ranks that receive it. Each slice
 * is reduced by one rank on each host, then once between hosts, in an order that depends only on
 * the placement of ranks: the bits are equal on all ranks and in every run. all_reduce works in the
 * caller's memory; the others must not change the input, and work in chunks in scratch memory.
 *
 * broadcast and all_gather send each byte once from host to host, between leaders. gather, scatter
 * and all_to_all move different data for each pair of ranks: within a host through shared memory,
 * all other pairs in the global communicator. The first leaders synchronise before that, since
 * ranks whose calls differ may not use that communicator at all.
 */
#include "backend/hosts/hosts.h"

enum {
    CHUNK_BYTES = 4 * 1024 * 1024, /* of a leader's scratch memory; larger ones aren't faster */
    MIN_SLICE = 8 * 1024,          /* smaller ones cost more in messages than they save in bytes */
    LINE = 64,
};

typedef tddp_hosts_stage stage;

static const stage WHOLE = {.count = SIZE_MAX};

static void add(tddp_hosts *self, tddp_hosts_where where, tddp_hosts_fill *fill, stage it)
{
    it.where = where;
    it.fill = fill;
    tddp_hosts_add(self, &it);
}

static void barrier(tddp_hosts *self, const stage *at, tddp_op *out)
{
    (void)self, (void)at;
    out->kind = TDDP_OP_BARRIER;
}

/* --- parts ----------------------------------------------------------------------------------- */

/* Elements of a buffer from `at` on; fewer at its end. */
static tddp_buffer subrange(const tddp_buffer *buffer, size_t at, size_t count)
{
    tddp_buffer chunk = *buffer;
    const size_t left = at < buffer->count ? buffer->count - at : 0;
    chunk.count = count < left ? count : left;
    chunk.data =
        chunk.count > 0 ? (char *)buffer->data + at * tddp_dtype_size(buffer->dtype) : NULL;
    return chunk;
}

static tddp_buffer empty_like(const tddp_buffer *buffer)
{
    return subrange(buffer, 0, 0);
}

/* The stage's chunk of the part of a host's local rank; empty if the host has no such rank. */
static tddp_buffer part_of(const tddp_hosts *self, const stage *at, const tddp_buffer *parts,
                           int host, int local)
{
    return local < tddp_hosts_size_of(self, host)
               ? subrange(&parts[tddp_hosts_member(self, host, local)], at->start, at->count)
               : empty_like(&parts[0]);
}

static void set_input_parts(tddp_op *out, const tddp_buffer *parts, int count)
{
    out->input_parts = parts;
    out->input = tddp_buffers_joined(parts, (size_t)count);
}

static void set_output_parts(tddp_op *out, const tddp_buffer *parts, int count)
{
    out->output_parts = parts;
    out->output = tddp_buffers_joined(parts, (size_t)count);
}

/* Cuts the stage's chunk of the operation's only buffer into a slice for each leader, which are
 * then in send_parts. Returns where this rank has the sum of its own. */
static tddp_buffer cut(const tddp_hosts *self, const stage *at)
{
    const tddp_buffer chunk = subrange(&self->op->output, at->start, at->count);
    const size_t element = tddp_dtype_size(chunk.dtype);
    const size_t line = LINE / element;
    const size_t even = (chunk.count + (size_t)self->leaders - 1) / (size_t)self->leaders;
    const size_t lines = (even + line - 1) / line * line;
    const size_t each = lines > MIN_SLICE / element ? lines : MIN_SLICE / element;
    for (int i = 0; i < self->local_size; i++) {
        self->send_parts[i] = subrange(&chunk, (size_t)i * each, i < self->leaders ? each : 0);
    }
    tddp_buffer sum = self->send_parts[self->local_rank];
    if (self->op->kind == TDDP_OP_REDUCE && sum.count > 0) {
        sum.data = self->scratch_data;
    }
    return sum;
}

/* Whether this rank has a slice between hosts. The first leaders do even without data, to
 * synchronise. */
static bool has_slice(tddp_hosts *self, const stage *at)
{
    return self->local_rank == 0 || (tddp_hosts_is_leader(self) && cut(self, at).count > 0);
}

/* --- factors --------------------------------------------------------------------------------- */

/* A mean is a sum that is divided at the end. The sum of float16 could overflow before that:
 * there each host computes a mean, which is weighted between hosts by its number of ranks. */
static bool is_mean_of_halves(const tddp_hosts *self)
{
    const tddp_dtype dtype = self->op->input.dtype;
    return self->op->reduce == TDDP_REDUCE_AVG && (dtype == TDDP_FLOAT16 || dtype == TDDP_BFLOAT16);
}

static bool is_divided(const tddp_hosts *self)
{
    return self->op->reduce == TDDP_REDUCE_AVG && !is_mean_of_halves(self);
}

static void set_local_reduction(const tddp_hosts *self, tddp_op *out)
{
    out->reduce = is_divided(self) ? TDDP_REDUCE_SUM : self->op->reduce;
    out->premul = self->op->premul;
}

static void set_leader_reduction(const tddp_hosts *self, tddp_op *out)
{
    out->reduce = self->op->reduce;
    if (is_mean_of_halves(self)) {
        out->reduce = TDDP_REDUCE_PREMUL_SUM;
        out->premul = (double)self->local_size / self->world_size;
    } else if (self->op->reduce == TDDP_REDUCE_AVG || self->op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        out->reduce = TDDP_REDUCE_SUM;
    }
}

static void add_division(tddp_hosts *self, tddp_hosts_fill *fill, stage where)
{
    if (is_divided(self)) {
        add(self, TDDP_HOSTS_DIVIDE, fill, where);
    }
}

/* --- all_reduce, reduce, broadcast: by slices ------------------------------------------------ */

static void reduce_slices(tddp_hosts *self, const stage *at, tddp_op *out)
{
    out->kind = TDDP_OP_REDUCE_SCATTER;
    out->output = cut(self, at);
    set_input_parts(out, self->send_parts, self->local_size);
    set_local_reduction(self, out);
}

static void exchange_slices(tddp_hosts *self, const stage *at, tddp_op *out)
{
    out->kind = self->op->kind;
    out->input = out->output = cut(self, at);
    out->root = self->op->kind == TDDP_OP_ALL_REDUCE ? 0 : self->host_of[self->op->root];
    set_leader_reduction(self, out);
}

static void gather_slices(tddp_hosts *self, const stage *at, tddp_op *out)
{
    out->kind = TDDP_OP_ALL_GATHER;
    out->input = cut(self, at);
    out->output = self->op->output;
    out->output_parts = self->send_parts;
}

static void gather_at_root(tddp_hosts *self, const stage *at, tddp_op *out)
{
    const bool is_root = self->rank == self->op->root;
    out->kind = TDDP_OP_GATHER;
    out->input = cut(self, at);
    out->output = subrange(&self->op->output, at->start, is_root ? at->count : 0);
    out->output_parts = is_root ? self->send_parts : NULL;
    out->root = self->local_of[self->op->root];
}

static void broadcast_on_host(tddp_hosts *self, const stage *at, tddp_op *out)
{
    (void)at;
    out->kind = TDDP_OP_BROADCAST;
    out->input = out->output = self->op->output;
    out->root = self->local_of[self->op->root];
}

static bool root_is_here(const tddp_hosts *self)
{
    return self->op->kind != TDDP_OP_ALL_TO_ALL && self->host_of[self->op->root] == self->host;
}

static tddp_status all_reduce(tddp_hosts *self)
{
    add(self, TDDP_HOSTS_LOCAL, reduce_slices, WHOLE);
    if (has_slice(self, &WHOLE)) {
        add(self, TDDP_HOSTS_LEADERS, exchange_slices, WHOLE);
        add_division(self, exchange_slices, WHOLE);
    }
    add(self, TDDP_HOSTS_LOCAL, gather_slices, WHOLE);
    return TDDP_OK;
}

static tddp_status broadcast(tddp_hosts *self)
{
    add(self, TDDP_HOSTS_LOCAL, root_is_here(self) ? broadcast_on_host : barrier, WHOLE);
    if (has_slice(self, &WHOLE)) {
        add(self, TDDP_HOSTS_LEADERS, exchange_slices, WHOLE);
    }
    add(self, TDDP_HOSTS_LOCAL, root_is_here(self) ? barrier : gather_slices, WHOLE);
    return TDDP_OK;
}

static tddp_status reduce(tddp_hosts *self)
{
    const size_t count = self->op->output.count;
    const size_t element = tddp_dtype_size(self->op->output.dtype);
    const size_t slice = CHUNK_BYTES / element;
    stage chunk = {.count = slice * (size_t)self->leaders};
    do {
        add(self, TDDP_HOSTS_LOCAL, reduce_slices, chunk);
        if (has_slice(self, &chunk)) {
            add(self, TDDP_HOSTS_LEADERS, exchange_slices, chunk);
        }
        if (root_is_here(self)) {
            add_division(self, exchange_slices, chunk);
            add(self, TDDP_HOSTS_LOCAL, gather_at_root, chunk);
        }
        chunk.start += chunk.count;
    } while (chunk.start < count);
    if (!root_is_here(self)) {
        add(self, TDDP_HOSTS_LOCAL, barrier, WHOLE);
    }
    return tddp_hosts_scratch(self, ((count < slice ? count : slice) + 1) * element);
}

/* --- reduce_scatter: in rounds, the first of which is for the leaders themselves ------------- */

/* A leader's scratch memory has a place for each host, and one for the result. */
static tddp_buffer in_place(const tddp_hosts *self, const stage *at, tddp_buffer buffer, int place)
{
    const size_t bytes = at->count * tddp_dtype_size(buffer.dtype);
    char *scratch = self->scratch_data;
    buffer.data = buffer.count > 0 ? scratch + (size_t)place * bytes : NULL;
    return buffer;
}

/* What a leader reduces for a host in this round. */
static tddp_buffer part_for(const tddp_hosts *self, const stage *at, int host, int leader)
{
    const tddp_buffer *parts = self->op->input_parts;
    return leader < self->leaders ? part_of(self, at, parts, host, at->first + leader)
                                  : empty_like(&parts[0]);
}

static tddp_buffer result_of(const tddp_hosts *self, const stage *at)
{
    return at->first == 0 ? subrange(&self->op->output, at->start, at->count)
                          : in_place(self, at, part_for(self, at, self->host, self->local_rank),
                                     self->host_count);
}

static void reduce_for_host(tddp_hosts *self, const stage *at, tddp_op *out)
{
    for (int i = 0; i < self->local_size; i++) {
        self->send_parts[i] = part_for(self, at, at->host, i);
    }
    out->kind = TDDP_OP_REDUCE_SCATTER;
    out->output = in_place(self, at, self->send_parts[self->local_rank], at->host);
    set_input_parts(out, self->send_parts, self->local_size);
    set_local_reduction(self, out);
}

static void reduce_between_hosts(tddp_hosts *self, const stage *at, tddp_op *out)
{
    for (int host = 0; host < self->host_count; host++) {
        self->send_parts[host] =
            in_place(self, at, part_for(self, at, host, self->local_rank), host);
    }
    out->kind = TDDP_OP_REDUCE_SCATTER;
    out->output = result_of(self, at);
    set_input_parts(out, self->send_parts, self->host_count);
    set_leader_reduction(self, out);
}

/* Leaders send the results to the ranks that they are for. */
static void distribute(tddp_hosts *self, const stage *at, tddp_op *out)
{
    const int leader = self->local_rank - at->first;
    const int receiver = self->local_rank + at->first;
    for (int i = 0; i < self->local_size; i++) {
        self->send_parts[i] = self->recv_parts[i] = empty_like(&self->op->output);
    }
    if (tddp_hosts_is_leader(self) && receiver < self->local_size) {
        self->send_parts[receiver] = result_of(self, at);
    }
    if (leader >= 0 && leader < self->leaders) {
        self->recv_parts[leader] = subrange(&self->op->output, at->start, at->count);
    }
    out->kind = TDDP_OP_ALL_TO_ALL;
    set_input_parts(out, self->send_parts, self->local_size);
    set_output_parts(out, self->recv_parts, self->local_size);
}

static void add_round(tddp_hosts *self, stage round)
{
    for (round.host = 0; round.host < self->host_count; round.host++) {
        add(self, TDDP_HOSTS_LOCAL, reduce_for_host, round);
    }
    if (tddp_hosts_is_leader(self)) {
        add(self, TDDP_HOSTS_LEADERS, reduce_between_hosts, round);
        add_division(self, reduce_between_hosts, round);
    }
    if (round.first > 0 && self->local_size > round.first) {
        add(self, TDDP_HOSTS_LOCAL, distribute, round);
    }
}

static tddp_status reduce_scatter(tddp_hosts *self)
{
    const size_t element = tddp_dtype_size(self->op->output.dtype);
    const size_t own = self->op->input_parts[self->rank].count;
    const size_t line = LINE / element;
    size_t most = 0;
    for (int rank = 0; rank < self->world_size; rank++) {
        most = self->op->input_parts[rank].count > most ? self->op->input_parts[rank].count : most;
    }
    if (own != self->op->output.count) {
        return tddp_fail(TDDP_MISMATCH,
                         "reduce_scatter: part %d of the input has %zu elements, the output %zu",
                         self->rank, own, self->op->output.count);
    }
    const size_t lines = most > 0 ? (most + line - 1) / line * line : line;
    stage round = {.count = most < CHUNK_BYTES / element ? lines : CHUNK_BYTES / element};
    for (; round.start == 0 || round.start < most; round.start += round.count) {
        for (round.first = 0; round.first < self->max_local_size; round.first += self->leaders) {
            add_round(self, round);
        }
    }
    return tddp_hosts_scratch(self, ((size_t)self->host_count + 1) * round.count * element);
}

/* --- all_gather ------------------------------------------------------------------------------ */

/* Within a host, the parts of its own ranks, or those of another host's that its leaders have. */
static void gather_parts(tddp_hosts *self, const stage *at, tddp_op *out)
{
    const bool own = at->host == self->host;
    for (int i = 0; i < self->local_size; i++) {
        self->recv_parts[i] = own || i < self->leaders ? part_of(self, at, self->op->output_parts,
                                                                 at->host, at->first + i)
                                                       : empty_like(&self->op->output_parts[0]);
    }
    out->kind = TDDP_OP_ALL_GATHER;
    out->input = own ? self->op->input : self->recv_parts[self->local_rank];
    set_output_parts(out, self->recv_parts, self->local_size);
}

static void gather_between_hosts(tddp_hosts *self, const stage *at, tddp_op *out)
{
    const int local = at->first + self->local_rank;
    for (int host = 0; host < self->host_count; host++) {
        self->recv_parts[host] = part_of(self, at, self->op->output_parts, host, local);
    }
    out->kind = TDDP_OP_ALL_GATHER;
    out->input = self->recv_parts[self->host];
    set_output_parts(out, self->recv_parts, self->host_count);
}

static tddp_status all_gather(tddp_hosts *self)
{
    stage round = {.count = SIZE_MAX, .host = self->host};
    const size_t own = self->op->output_parts[self->rank].count;
    if (self->op->input.count != own) {
        return tddp_fail(TDDP_MISMATCH,
                         "all_gather: rank %d sends itself %zu elements and expects %zu",
                         self->rank, self->op->input.count, own);
    }
    add(self, TDDP_HOSTS_LOCAL, gather_parts, round);
    for (; round.first < self->max_local_size; round.first += self->leaders) {
        if (tddp_hosts_is_leader(self)) {
            add(self, TDDP_HOSTS_LEADERS, gather_between_hosts, round);
        }
        for (round.host = 0; round.host < self->host_count; round.host++) {
            if (round.host != self->host && round.first < tddp_hosts_size_of(self, round.host)) {
                add(self, TDDP_HOSTS_LOCAL, gather_parts, round);
            }
        }
    }
    return TDDP_OK;
}

/* --- gather, scatter, all_to_all, barrier ---------------------------------------------------- */

/* The parts of this host's ranks, or those of all ranks, with this host's empty. */
static const tddp_buffer *select_parts(const tddp_hosts *self, const tddp_buffer *parts,
                                       bool on_host, tddp_buffer *list)
{
    for (int rank = 0; parts && rank < self->world_size; rank++) {
        const bool is_here = self->host_of[rank] == self->host;
        if (on_host && is_here) {
            list[self->local_of[rank]] = parts[rank];
        } else if (!on_host) {
            list[rank] = is_here ? empty_like(&parts[rank]) : parts[rank];
        }
    }
    return parts ? list : NULL;
}

static void exchange(tddp_hosts *self, const stage *at, tddp_op *out)
{
    const bool on_host = at->where == TDDP_HOSTS_LOCAL;
    const int ranks = on_host ? self->local_size : self->world_size;
    const tddp_buffer *inputs =
        select_parts(self, self->op->input_parts, on_host, self->send_parts);
    const tddp_buffer *outputs =
        select_parts(self, self->op->output_parts, on_host, self->recv_parts);
    /* The root's host has exchanged its own locally. */
    const bool is_done = !on_host && root_is_here(self);
    out->kind = self->op->kind;
    out->root = self->op->kind == TDDP_OP_ALL_TO_ALL ? 0
                : on_host                            ? self->local_of[self->op->root]
                                                     : self->op->root;
    out->input = is_done ? empty_like(&self->op->input) : self->op->input;
    out->output = is_done ? empty_like(&self->op->output) : self->op->output;
    if (inputs) {
        set_input_parts(out, inputs, ranks);
    }
    if (outputs) {
        set_output_parts(out, outputs, ranks);
    }
}

/* Each starts with the ranks of a host, then their first leaders. */
static void synchronise(tddp_hosts *self, tddp_hosts_fill *on_host)
{
    add(self, TDDP_HOSTS_LOCAL, on_host, WHOLE);
    if (self->local_rank == 0) {
        add(self, TDDP_HOSTS_LEADERS, barrier, WHOLE);
    }
}

static tddp_status exchange_all(tddp_hosts *self)
{
    const bool is_local = self->op->kind == TDDP_OP_ALL_TO_ALL || root_is_here(self);
    synchronise(self, is_local ? exchange : barrier);
    add(self, TDDP_HOSTS_GLOBAL, exchange, WHOLE);
    return TDDP_OK;
}

static tddp_status barriers(tddp_hosts *self)
{
    synchronise(self, barrier);
    add(self, TDDP_HOSTS_LOCAL, barrier, WHOLE);
    return TDDP_OK;
}

tddp_status tddp_hosts_build(tddp_hosts *self)
{
    static tddp_status (*const stages_of[TDDP_OP_COUNT])(tddp_hosts * self) = {
        [TDDP_OP_ALL_REDUCE] = all_reduce,
        [TDDP_OP_BROADCAST] = broadcast,
        [TDDP_OP_BARRIER] = barriers,
        [TDDP_OP_ALL_GATHER] = all_gather,
        [TDDP_OP_REDUCE_SCATTER] = reduce_scatter,
        [TDDP_OP_REDUCE] = reduce,
        [TDDP_OP_GATHER] = exchange_all,
        [TDDP_OP_SCATTER] = exchange_all,
        [TDDP_OP_ALL_TO_ALL] = exchange_all,
    };
    return stages_of[self->op->kind](self);
}
