/*
 * What each kind of operation is: its name, what it has, and which part goes from whom to whom.
 * Pure functions, any thread.
 */
#include <tddp/backend.h>

const tddp_op_row *tddp_op_row_of(tddp_op_kind kind)
{
    static const tddp_op_row rows[TDDP_OP_COUNT + 1] = {
        [TDDP_OP_ALL_REDUCE] = {"all_reduce", TDDP_SIDE_WHOLE, TDDP_SIDE_WHOLE, .reduces = 1},
        [TDDP_OP_BROADCAST] = {"broadcast", TDDP_SIDE_WHOLE, TDDP_SIDE_WHOLE, .has_root = 1,
                               .roots_input = 1},
        [TDDP_OP_BARRIER] = {"barrier", TDDP_SIDE_NONE, TDDP_SIDE_NONE},
        [TDDP_OP_ALL_GATHER] = {"all_gather", TDDP_SIDE_PIECE, TDDP_SIDE_PARTS},
        [TDDP_OP_REDUCE_SCATTER] = {"reduce_scatter", TDDP_SIDE_PARTS, TDDP_SIDE_PIECE,
                                    .reduces = 1},
        [TDDP_OP_REDUCE] = {"reduce", TDDP_SIDE_WHOLE, TDDP_SIDE_WHOLE, .reduces = 1, .has_root = 1,
                            .roots_output = 1},
        [TDDP_OP_GATHER] = {"gather", TDDP_SIDE_PIECE, TDDP_SIDE_PARTS, .has_root = 1,
                            .roots_output = 1},
        [TDDP_OP_SCATTER] = {"scatter", TDDP_SIDE_PARTS, TDDP_SIDE_PIECE, .has_root = 1,
                             .roots_input = 1},
        [TDDP_OP_ALL_TO_ALL] = {"all_to_all", TDDP_SIDE_PARTS, TDDP_SIDE_PARTS},
        [TDDP_OP_SEND] = {"send", TDDP_SIDE_WHOLE, TDDP_SIDE_NONE},
        [TDDP_OP_RECV] = {"recv", TDDP_SIDE_NONE, TDDP_SIDE_WHOLE},
        [TDDP_OP_COUNT] = {"unknown", TDDP_SIDE_NONE, TDDP_SIDE_NONE},
    };
    return &rows[(unsigned)kind < TDDP_OP_COUNT ? kind : TDDP_OP_COUNT];
}

const char *tddp_op_name(tddp_op_kind kind)
{
    return tddp_op_row_of(kind)->name;
}

int tddp_op_reduces(tddp_op_kind kind)
{
    return tddp_op_row_of(kind)->reduces;
}

int tddp_op_has_root(tddp_op_kind kind)
{
    return tddp_op_row_of(kind)->has_root;
}

int tddp_op_has_parts(tddp_op_kind kind)
{
    const tddp_op_row *row = tddp_op_row_of(kind);
    return row->input == TDDP_SIDE_PARTS || row->output == TDDP_SIDE_PARTS;
}

static tddp_buffer nothing_of(const tddp_op *op)
{
    tddp_buffer nothing = op->input;
    nothing.data = 0;
    nothing.count = 0;
    return nothing;
}

tddp_buffer tddp_op_sends(const tddp_op *op, int rank, int peer)
{
    const tddp_op_row *row = tddp_op_row_of(op->kind);
    const int sends = !row->roots_input || rank == op->root;
    const int wanted = !row->roots_output || peer == op->root;
    if (row->input == TDDP_SIDE_PARTS && sends) {
        return op->input_parts[peer];
    }
    /* What is whole on both sides is combined instead, but for the root's alone. */
    const int whole = row->input == TDDP_SIDE_WHOLE && row->roots_input && sends && peer != rank;
    return whole || (row->input == TDDP_SIDE_PIECE && wanted) ? op->input : nothing_of(op);
}

tddp_buffer tddp_op_receives(const tddp_op *op, int rank, int peer)
{
    const tddp_op_row *row = tddp_op_row_of(op->kind);
    const int sent = !row->roots_input || peer == op->root;
    const int receives = !row->roots_output || rank == op->root;
    if (row->output == TDDP_SIDE_PARTS && receives) {
        return op->output_parts[peer];
    }
    const int whole = row->output == TDDP_SIDE_WHOLE && row->roots_input && sent && peer != rank;
    return whole || (row->output == TDDP_SIDE_PIECE && sent) ? op->output : nothing_of(op);
}

static int all_have_count(const tddp_buffer *parts, int size, size_t count)
{
    int equal = 1;
    for (int peer = 0; parts && peer < size; peer++) {
        equal = equal && parts[peer].count == count;
    }
    return equal;
}

int tddp_op_is_uniform(const tddp_op *op, int size, size_t *count)
{
    const tddp_op_row *row = tddp_op_row_of(op->kind);
    *count = row->input != TDDP_SIDE_PARTS    ? op->input.count
             : row->output != TDDP_SIDE_PARTS ? op->output.count
                                              : op->input_parts[0].count;
    return all_have_count(op->input_parts, size, *count) &&
           all_have_count(op->output_parts, size, *count);
}
