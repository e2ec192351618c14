/* The tables of dtypes and reductions. Pure functions, any thread. */
#include "backend/nccl/types.h"

#include <stdbool.h>
#include <string.h>

#include "backend/half.h"
#include "backend/nccl/libraries.h"

static tddp_status refuse(tddp_dtype dtype, tddp_reduce_op op, const char *has)
{
    return tddp_fail(TDDP_UNSUPPORTED, "nccl has no %s of %s: it has %s; use gloo for it",
                     tddp_reduce_op_name(op), tddp_dtype_name(dtype), has);
}

static bool find_type(tddp_dtype dtype, tddp_nccl_type *type)
{
    static const struct {
        tddp_dtype dtype;
        tddp_nccl_type type;
    } rows[] = {
        {TDDP_UINT8, {TDDP_NCCL_UINT8, 1}},
        {TDDP_INT8, {TDDP_NCCL_INT8, 1}},
        {TDDP_INT32, {TDDP_NCCL_INT32, 1}},
        {TDDP_INT64, {TDDP_NCCL_INT64, 1}},
        {TDDP_FLOAT16, {TDDP_NCCL_FLOAT16, 1}},
        {TDDP_BFLOAT16, {TDDP_NCCL_BFLOAT16, 1}},
        {TDDP_FLOAT32, {TDDP_NCCL_FLOAT32, 1}},
        {TDDP_FLOAT64, {TDDP_NCCL_FLOAT64, 1}},
        {TDDP_COMPLEX64, {TDDP_NCCL_FLOAT32, 2}},
        {TDDP_COMPLEX128, {TDDP_NCCL_FLOAT64, 2}},
        {TDDP_BOOL, {TDDP_NCCL_UINT8, 1}},
        {TDDP_FLOAT8_E4M3FN, {TDDP_NCCL_FLOAT8_E4M3, 1}},
        {TDDP_FLOAT8_E5M2, {TDDP_NCCL_FLOAT8_E5M2, 1}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].dtype == dtype) {
            *type = rows[i].type;
            return true;
        }
    }
    return false;
}

static tddp_status check_narrow(tddp_dtype dtype, tddp_reduce_op op, int version)
{
    char text[TDDP_NCCL_VERSION_TEXT];
    if (version < TDDP_NCCL_FLOAT8_VERSION) {
        return tddp_fail(TDDP_UNSUPPORTED, "NCCL %s has no %s of %s: expected 2.24 or newer",
                         tddp_nccl_version_text(version, text), tddp_reduce_op_name(op),
                         tddp_dtype_name(dtype));
    }
    return op == TDDP_REDUCE_PREMUL_SUM ? refuse(dtype, op, "sum, avg, product, min and max")
                                        : TDDP_OK;
}

tddp_status tddp_nccl_type_to_reduce(tddp_dtype dtype, tddp_reduce_op op, int version,
                                     tddp_nccl_type *type, int *redop)
{
    bool complex = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
    if (!find_type(dtype, type)) {
        return refuse(dtype, op, "no reductions of this dtype");
    }
    if (dtype == TDDP_FLOAT8_E4M3FN || dtype == TDDP_FLOAT8_E5M2) {
        tddp_status status = check_narrow(dtype, op, version);
        if (status) {
            return status;
        }
    }
    if (dtype == TDDP_BOOL) {
        /* Of 0 and 1: "or" is the maximum, "and" the minimum. */
        bool is_and = op == TDDP_REDUCE_PRODUCT || op == TDDP_REDUCE_MIN || op == TDDP_REDUCE_BAND;
        *redop = is_and ? TDDP_NCCL_MIN : TDDP_NCCL_MAX;
        return op == TDDP_REDUCE_BXOR ? refuse(dtype, op, "\"or\" and \"and\" for bool") : TDDP_OK;
    }
    switch (op) {
    case TDDP_REDUCE_SUM:
        *redop = TDDP_NCCL_SUM;
        return TDDP_OK;
    case TDDP_REDUCE_AVG:
        *redop = TDDP_NCCL_AVG;
        return TDDP_OK;
    case TDDP_REDUCE_PREMUL_SUM:
        return TDDP_OK;
    case TDDP_REDUCE_PRODUCT:
        *redop = TDDP_NCCL_PROD;
        return complex ? refuse(dtype, op, "sums of complex numbers") : TDDP_OK;
    case TDDP_REDUCE_MIN:
        *redop = TDDP_NCCL_MIN;
        return TDDP_OK;
    case TDDP_REDUCE_MAX:
        *redop = TDDP_NCCL_MAX;
        return TDDP_OK;
    default:
        return refuse(dtype, op, "sum, avg, product, min, max and premul_sum");
    }
}

void tddp_nccl_scalar(tddp_dtype dtype, double factor, void *out)
{
    const float narrow = (float)factor;
    uint16_t half;
    switch (dtype) {
    case TDDP_FLOAT16:
        half = tddp_backend_to_float16(narrow);
        memcpy(out, &half, sizeof half);
        break;
    case TDDP_BFLOAT16:
        half = tddp_backend_to_bfloat16(narrow);
        memcpy(out, &half, sizeof half);
        break;
    case TDDP_FLOAT64:
    case TDDP_COMPLEX128:
        memcpy(out, &factor, sizeof factor);
        break;
    default:
        memcpy(out, &narrow, sizeof narrow);
    }
}
