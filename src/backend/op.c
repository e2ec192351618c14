/*
 * What each kind of operation is: its name, what it has, and which part goes from whom to whom.
 * Pure functions, any thread.
 */
#include <tddp/backend.h>

const char *tddp_op_name(tddp_op_kind kind)
{
    switch (kind) {
#define TEXT(name, text) \
    case TDDP_OP_##name: \
        return text;
        TDDP_OP_MAP(TEXT)
#undef TEXT
    case TDDP_OP_COUNT:
        break;
    }
    return "unknown";
}

int tddp_op_reduces(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_REDUCE_SCATTER;
}

int tddp_op_has_root(tddp_op_kind kind)
{
    return kind == TDDP_OP_BROADCAST || kind == TDDP_OP_REDUCE || kind == TDDP_OP_GATHER ||
           kind == TDDP_OP_SCATTER;
}

int tddp_op_has_parts(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_GATHER || kind == TDDP_OP_REDUCE_SCATTER || kind == TDDP_OP_GATHER ||
           kind == TDDP_OP_SCATTER || kind == TDDP_OP_ALL_TO_ALL;
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
    switch (op->kind) {
    case TDDP_OP_ALL_GATHER:
        return op->input;
    case TDDP_OP_REDUCE_SCATTER:
    case TDDP_OP_ALL_TO_ALL:
        return op->input_parts[peer];
    case TDDP_OP_GATHER:
        return peer == op->root ? op->input : nothing_of(op);
    case TDDP_OP_SCATTER:
        return rank == op->root ? op->input_parts[peer] : nothing_of(op);
    case TDDP_OP_BROADCAST:
        return rank == op->root && peer != rank ? op->input : nothing_of(op);
    default:
        return nothing_of(op);
    }
}

tddp_buffer tddp_op_receives(const tddp_op *op, int rank, int peer)
{
    switch (op->kind) {
    case TDDP_OP_REDUCE_SCATTER:
        return op->output;
    case TDDP_OP_ALL_GATHER:
    case TDDP_OP_ALL_TO_ALL:
        return op->output_parts[peer];
    case TDDP_OP_GATHER:
        return rank == op->root ? op->output_parts[peer] : nothing_of(op);
    case TDDP_OP_SCATTER:
        return peer == op->root ? op->output : nothing_of(op);
    case TDDP_OP_BROADCAST:
        return peer == op->root && peer != rank ? op->output : nothing_of(op);
    default:
        return nothing_of(op);
    }
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
    *count = op->kind == TDDP_OP_REDUCE_SCATTER || op->kind == TDDP_OP_SCATTER ? op->output.count
             : op->kind == TDDP_OP_ALL_TO_ALL ? op->input_parts[0].count
                                              : op->input.count;
    return all_have_count(op->input_parts, size, *count) &&
           all_have_count(op->output_parts, size, *count);
}
