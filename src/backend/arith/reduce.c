/*
 * The arithmetic that <tddp/backend.h> offers to backends, on top of tddp_arith_reduce(), and which
 * operations are defined. Pure functions, any thread.
 */
#include "backend/arith/set.h"

static bool defined(tddp_reduce_op op, tddp_dtype dtype)
{
    return (unsigned)op < TDDP_ARITH_OPS && (unsigned)dtype < TDDP_ARITH_DTYPES &&
           tddp_arith_baseline.kernels[dtype][op];
}

const char *tddp_reduce_op_name(tddp_reduce_op op)
{
    switch (op) {
#define TEXT(name, code, text) \
    case TDDP_REDUCE_##name:   \
        return text;
        TDDP_REDUCE_OP_MAP(TEXT)
#undef TEXT
    }
    return "unknown";
}

tddp_status tddp_reduce_check(tddp_reduce_op op, tddp_dtype dtype)
{
    if ((unsigned)op >= TDDP_ARITH_OPS) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "reduce operation %d: expected 0 to %d", (int)op,
                         TDDP_ARITH_OPS - 1);
    }
    if (tddp_dtype_size(dtype) == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "dtype %d: expected 0 to %d", (int)dtype,
                         (int)TDDP_FLOAT8_E5M2);
    }
    if (defined(op, dtype)) {
        return TDDP_OK;
    }
    const char *expected = op >= TDDP_REDUCE_BAND && op <= TDDP_REDUCE_BXOR ? "integers or bool"
                           : op == TDDP_REDUCE_MIN || op == TDDP_REDUCE_MAX
                               ? "numbers that have an order"
                               : "floating-point or complex numbers";
    return tddp_fail(TDDP_UNSUPPORTED, "cannot reduce %s by %s: expected %s",
                     tddp_dtype_name(dtype), tddp_reduce_op_name(op), expected);
}

void tddp_combine(tddp_reduce_op op, tddp_dtype dtype, void *into, const void *from, size_t count)
{
    if (!defined(op, dtype)) {
        return;
    }
    tddp_arith_reduce(&(tddp_arith_job){
        .op = op,
        .dtype = dtype,
        .count = count,
        .sources = (const void *const[]){into, from},
        .source_count = 2,
        .results = (void *const[]){into},
        .result_count = 1,
        .factor = 1,
    });
}

void tddp_scale(tddp_dtype dtype, void *data, size_t count, double factor)
{
    if (!defined(TDDP_REDUCE_AVG, dtype)) {
        return;
    }
    tddp_arith_reduce(&(tddp_arith_job){
        .op = TDDP_REDUCE_SUM,
        .dtype = dtype,
        .count = count,
        .sources = (const void *const[]){data},
        .source_count = 1,
        .results = (void *const[]){data},
        .result_count = 1,
        .factor = factor,
    });
}
