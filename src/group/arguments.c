/*
 * Reads the arguments of an operation: checks those that its kind has (tddp_op_row_of()), and makes
 * an operation of them. What cannot be seen here, whether another rank's part has the size of ours,
 * the backend finds out with the operation. Any thread; no state.
 */
#include "group/checks.h"

/* No elements, but of the right dtype and place. */
static tddp_buffer nothing_like(tddp_buffer buffer)
{
    buffer.data = NULL;
    buffer.count = 0;
    return buffer;
}

/* A piece, and parts in a list of the caller's or one after the other in a buffer; which of both is
 * the input follows from the kind. */
typedef struct halves {
    const char *piece_name;
    const tddp_buffer *piece;
    const char *parts_name;
    const tddp_buffer *parts;
    size_t count;
    const char *joined_name;
    const tddp_buffer *joined;
} halves;

/* Checks a buffer of which the piece is one of `world_size` parts. */
static tddp_status check_joined(const tddp_group *group, tddp_op_kind kind, const halves *of)
{
    const char *op = tddp_op_name(kind);
    const tddp_buffer *piece = of->piece;
    const tddp_buffer *joined = of->joined;
    const size_t world = (size_t)group->world_size;
    tddp_status status = tddp_group_check_buffer(group, kind, of->piece_name, piece);
    status = status ? status : tddp_group_check_buffer(group, kind, of->joined_name, joined);
    status = status
                 ? status
                 : tddp_group_check_same_type(kind, of->piece_name, piece, of->joined_name, joined);
    if (status) {
        return status;
    }
    if (joined->count % world != 0 || joined->count / world != piece->count) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT, "%s: %s has %zu elements, %s %zu: expected %d times as many", op,
            of->piece_name, piece->count, of->joined_name, joined->count, group->world_size);
    }
    /* The one valid overlap: the piece as this rank's part. */
    const size_t offset = (size_t)group->rank * piece->count * tddp_dtype_size(piece->dtype);
    if (tddp_group_overlap(piece, joined) &&
        (uintptr_t)piece->data != (uintptr_t)joined->data + offset) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: input and output overlap: only part %d of %s may be %s", op,
                         group->rank, of->joined_name, of->piece_name);
    }
    return TDDP_OK;
}

static tddp_status check_list(const tddp_group *group, tddp_op_kind kind, const halves *of)
{
    tddp_status status = tddp_group_check_buffer(group, kind, of->piece_name, of->piece);
    status =
        status ? status : tddp_group_check_parts(group, kind, of->parts_name, of->parts, of->count);
    return status ? status
                  : tddp_group_check_piece(group, kind, of->piece_name, of->piece, of->parts_name,
                                           of->parts, group->rank);
}

/* Parts exist at the root alone: on other ranks the list says so by its absence. */
static tddp_status check_no_list(const tddp_group *group, const tddp_op *op, const halves *of)
{
    tddp_status status = tddp_group_check_buffer(group, op->kind, of->piece_name, of->piece);
    if (status == TDDP_OK && (of->parts || of->count > 0)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "%s: %s given on rank %d, root is %d: expected NULL and 0 there",
                           tddp_op_name(op->kind), of->parts_name, group->rank, op->root);
    }
    return status;
}

/* The kinds with a piece on one side, and parts on the other. */
static tddp_status read_halves(const tddp_group *group, const tddp_op_args *args, bool listed,
                               tddp_op *out)
{
    const tddp_op_row *row = tddp_op_row_of(args->kind);
    const bool gathers = row->output == TDDP_SIDE_PARTS;
    const halves of = {
        .piece_name = gathers ? "input" : "output",
        .piece = gathers ? &args->input : &args->output,
        .parts_name = gathers ? "outputs" : "inputs",
        .parts = !listed   ? NULL
                 : gathers ? args->outputs
                           : args->inputs,
        .count = !listed   ? 0
                 : gathers ? args->output_count
                           : args->input_count,
        .joined_name = gathers ? "output" : "input",
        .joined = gathers ? &args->output : &args->input,
    };
    const bool has_parts = !row->has_root || args->root == group->rank;
    tddp_status status = !listed     ? check_joined(group, args->kind, &of)
                         : has_parts ? check_list(group, args->kind, &of)
                                     : check_no_list(group, out, &of);
    if (status == TDDP_OK && gathers && listed && has_parts) {
        status = tddp_group_check_disjoint(args->kind, of.parts_name, of.parts, of.count);
    }
    const tddp_buffer other = listed ? nothing_like(*of.piece) : *of.joined;
    out->input = gathers ? *of.piece : other;
    out->output = gathers ? other : *of.piece;
    if (listed && has_parts) {
        *(gathers ? &out->output_parts : &out->input_parts) = of.parts;
    }
    return status;
}

static tddp_status read_exchange(const tddp_group *group, const tddp_op_args *args, tddp_op *out)
{
    const tddp_op_kind kind = args->kind;
    out->input_parts = args->inputs;
    out->output_parts = args->outputs;
    tddp_status status =
        tddp_group_check_parts(group, kind, "inputs", args->inputs, args->input_count);
    status =
        status ? status
               : tddp_group_check_parts(group, kind, "outputs", args->outputs, args->output_count);
    status = status ? status
                    : tddp_group_check_disjoint(kind, "outputs", args->outputs, args->output_count);
    return status ? status : tddp_group_check_exchange(group, kind, args->inputs, args->outputs);
}

/* all_reduce of several buffers. */
static tddp_status read_coalesced(const tddp_group *group, const tddp_op_args *args, tddp_op *out)
{
    const tddp_buffer *buffers = args->outputs;
    const size_t count = args->output_count;
    tddp_status status = tddp_group_check_list(group, args->kind, "buffers", buffers, count);
    status = status ? status : tddp_group_check_disjoint(args->kind, "buffers", buffers, count);
    if (status == TDDP_OK) {
        out->input = out->output = tddp_buffers_joined(buffers, count);
    }
    return status;
}

static tddp_status check_peer(const tddp_group *group, tddp_op_kind kind, int peer)
{
    const bool receives = kind == TDDP_OP_RECV;
    if (receives && peer == TDDP_ANY_SOURCE && group->world_size > 1) {
        return TDDP_OK;
    }
    if (peer < 0 || peer >= group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: peer %d: expected 0 to %d%s",
                         tddp_op_name(kind), peer, group->world_size - 1,
                         receives ? ", or any source where there are other ranks" : "");
    }
    if (peer == group->rank) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: peer %d is this rank itself: expected another one; within a rank, "
                         "copy the memory",
                         tddp_op_name(kind), peer);
    }
    return TDDP_OK;
}

static tddp_status read_message(const tddp_group *group, const tddp_op_args *args, tddp_op *out)
{
    const bool sends = args->kind == TDDP_OP_SEND;
    const tddp_buffer *buffer = sends ? &args->input : &args->output;
    tddp_status status = tddp_group_check_buffer(group, args->kind, "buffer", buffer);
    out->input = sends ? *buffer : nothing_like(*buffer);
    out->output = sends ? nothing_like(*buffer) : *buffer;
    out->peer = args->peer;
    out->tag = args->tag;
    return status ? status : check_peer(group, args->kind, args->peer);
}

static tddp_status read_buffer(const tddp_group *group, const tddp_op_args *args, tddp_op *out)
{
    out->input = out->output = args->output;
    return tddp_group_check_buffer(group, args->kind, "buffer", &args->output);
}

tddp_status tddp_group_read_args(const tddp_group *group, const tddp_op_args *args, bool listed,
                                 tddp_op *out)
{
    const tddp_op_row *row = tddp_op_row_of(args->kind);
    const bool in_parts = row->input == TDDP_SIDE_PARTS;
    const bool out_parts = row->output == TDDP_SIDE_PARTS;
    const bool coalesced = args->kind == TDDP_OP_ALL_REDUCE && listed;
    tddp_status status = TDDP_OK;
    *out = (tddp_op){.kind = args->kind};
    if (row->has_root) {
        out->root = args->root;
        status = tddp_group_check_root(group, args->kind, args->root);
    }
    if (status == TDDP_OK && args->kind != TDDP_OP_BARRIER) {
        status = tddp_op_is_p2p(args->kind) ? read_message(group, args, out)
                 : in_parts && out_parts    ? read_exchange(group, args, out)
                 : in_parts || out_parts    ? read_halves(group, args, listed || row->has_root, out)
                 : coalesced                ? read_coalesced(group, args, out)
                                            : read_buffer(group, args, out);
    }
    if (status == TDDP_OK && row->reduces) {
        out->reduce = args->reduce;
        out->premul = args->premul;
        status = tddp_group_check_reduction(group, args->reduce, &out->output);
    }
    return status;
}
