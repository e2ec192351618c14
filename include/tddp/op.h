/**
 * @file op.h
 * @brief What operations of process groups there are, and how they combine numbers.
 */
#ifndef TDDP_OP_H
#define TDDP_OP_H

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/** PyTorch's numbers (c10d::ReduceOp). X(name, code, text) */
#define TDDP_REDUCE_OP_MAP(X) \
    X(SUM, 0, "sum")          \
    X(AVG, 1, "avg")          \
    X(PRODUCT, 2, "product")  \
    X(MIN, 3, "min")          \
    X(MAX, 4, "max")          \
    X(BAND, 5, "band")        \
    X(BOR, 6, "bor")          \
    X(BXOR, 7, "bxor")        \
    X(PREMUL_SUM, 8, "premul_sum")

/** How numbers are combined. */
typedef enum tddp_reduce_op {
#define TDDP_REDUCE_OP_ENUM(name, code, text) TDDP_REDUCE_##name = code,
    TDDP_REDUCE_OP_MAP(TDDP_REDUCE_OP_ENUM)
#undef TDDP_REDUCE_OP_ENUM
} tddp_reduce_op;

/** "sum" and so on; "unknown" for a value that is no operation. Static. */
TDDP_API const char *tddp_reduce_op_name(tddp_reduce_op op);

/** New kinds are added at the end: X(name, text) */
#define TDDP_OP_MAP(X)                  \
    X(ALL_REDUCE, "all_reduce")         \
    X(BROADCAST, "broadcast")           \
    X(BARRIER, "barrier")               \
    X(ALL_GATHER, "all_gather")         \
    X(REDUCE_SCATTER, "reduce_scatter") \
    X(REDUCE, "reduce")                 \
    X(GATHER, "gather")                 \
    X(SCATTER, "scatter")               \
    X(ALL_TO_ALL, "all_to_all")         \
    X(SEND, "send")                     \
    X(RECV, "recv")

/** The kinds of operations. */
typedef enum tddp_op_kind {
#define TDDP_OP_ENUM(name, text) TDDP_OP_##name,
    TDDP_OP_MAP(TDDP_OP_ENUM)
#undef TDDP_OP_ENUM
        TDDP_OP_COUNT
} tddp_op_kind;

/** What a rank has on one side of an operation, its input or its output. */
typedef enum tddp_op_side {
    TDDP_SIDE_NONE,
    TDDP_SIDE_WHOLE, /**< as large as every other rank's */
    TDDP_SIDE_PIECE, /**< what one rank's part on the other side is */
    TDDP_SIDE_PARTS, /**< one for each rank, of sizes that may differ */
} tddp_op_side;

/** What a kind of operation is. */
typedef struct tddp_op_row {
    const char *name;
    tddp_op_side input;
    tddp_op_side output;
    int reduces;      /**< it combines numbers */
    int has_root;     /**< one rank is the root, */
    int roots_input;  /**< whose alone the input is, */
    int roots_output; /**< or the output */
} tddp_op_row;

/** Never NULL: that of a value that is no kind has the name "unknown", and nothing. Static. */
TDDP_API const tddp_op_row *tddp_op_row_of(tddp_op_kind kind);

/** "all_reduce" and so on; "unknown" for a value that is no kind. Static. */
TDDP_API const char *tddp_op_name(tddp_op_kind kind);

/** Whether it combines numbers: all_reduce, reduce, reduce_scatter. */
TDDP_API int tddp_op_reduces(tddp_op_kind kind);

/** Whether one rank is the root: broadcast, reduce, gather, scatter. */
TDDP_API int tddp_op_has_root(tddp_op_kind kind);

/** Whether it has a part for each rank, of sizes that may differ. */
TDDP_API int tddp_op_has_parts(tddp_op_kind kind);

/** The sender of a message that may come from any rank. */
#define TDDP_ANY_SOURCE (-1)

#ifdef __cplusplus
}
#endif

#endif
