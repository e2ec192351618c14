/*
 * Dtypes and reductions as MPI knows them. Where it has none (half precision, bool, a minimum that
 * propagates NaN) they are made of bytes and of tddp_combine(), once for the process.
 */
#include <pthread.h>

#include "backend/mpi/mpi.h"

enum { DTYPES = TDDP_FLOAT8_E5M2 + 1, REDUCTIONS = TDDP_REDUCE_PREMUL_SUM + 1 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static tddp_status made;
static MPI_Datatype types[DTYPES];
static MPI_Op ops[REDUCTIONS];
static bool made_any;
static tddp_mpi_reduction comparing;
static const tddp_dtype from_bytes[] = {TDDP_FLOAT16, TDDP_BFLOAT16, TDDP_BOOL, TDDP_FLOAT8_E4M3FN,
                                        TDDP_FLOAT8_E5M2};

static void combine(tddp_reduce_op op, const void *from, void *into, const int *count,
                    const MPI_Datatype *type)
{
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        if (types[dtype] == *type) {
            tddp_combine(op, (tddp_dtype)dtype, into, from, (size_t)*count);
            return;
        }
    }
}

/* MPI_User_function has no argument for the operation. */
#define COMBINE(name, code, text)                                                      \
    static void combine_##name(void *from, void *into, int *count, MPI_Datatype *type) \
    {                                                                                  \
        combine(TDDP_REDUCE_##name, from, into, count, type);                          \
    }
TDDP_REDUCE_OP_MAP(COMBINE)

static uint64_t greatest(uint64_t one, uint64_t other)
{
    return one > other ? one : other;
}

/* Data are reduced as long as all calls so far are the same. */
static void compare(void *from, void *into, int *count, MPI_Datatype *type)
{
    const tddp_mpi_comparison *other = from;
    tddp_mpi_comparison *all = into;
    (void)type;
    for (int i = 0; i < *count; i++, other++, all++) {
        if (all->digest == other->digest && all->inverse == other->inverse &&
            all->digest == ~all->inverse) {
            tddp_combine((tddp_reduce_op)all->reduce, (tddp_dtype)all->dtype, all->data,
                         other->data, all->carried);
        }
        all->digest = greatest(all->digest, other->digest);
        all->inverse = greatest(all->inverse, other->inverse);
        all->differing = greatest(all->differing, other->differing);
    }
}

static tddp_status make_type(size_t bytes, MPI_Datatype *type)
{
    tddp_status status =
        tddp_mpi_check(MPI_Type_contiguous((int)bytes, MPI_BYTE, type), "MPI_Type_contiguous");
    return status ? status : tddp_mpi_check(MPI_Type_commit(type), "MPI_Type_commit");
}

static void make(void)
{
    made_any = true;
    const MPI_Datatype known[DTYPES] = {
        [TDDP_UINT8] = MPI_UINT8_T,
        [TDDP_INT8] = MPI_INT8_T,
        [TDDP_INT16] = MPI_INT16_T,
        [TDDP_INT32] = MPI_INT32_T,
        [TDDP_INT64] = MPI_INT64_T,
        [TDDP_FLOAT32] = MPI_FLOAT,
        [TDDP_FLOAT64] = MPI_DOUBLE,
        [TDDP_COMPLEX64] = MPI_C_FLOAT_COMPLEX,
        [TDDP_COMPLEX128] = MPI_C_DOUBLE_COMPLEX,
    };
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        types[dtype] = known[dtype];
    }
    for (size_t i = 0; i < sizeof from_bytes / sizeof *from_bytes && made == TDDP_OK; i++) {
        made = make_type(tddp_dtype_size(from_bytes[i]), &types[from_bytes[i]]);
    }
    made = made ? made : make_type(sizeof(tddp_mpi_comparison), &comparing.type);
    made = made ? made : tddp_mpi_check(MPI_Op_create(compare, 1, &comparing.op), "MPI_Op_create");
#define MAKE(name, code, text) \
    made = made ? made         \
                : tddp_mpi_check(MPI_Op_create(combine_##name, 1, &ops[code]), "MPI_Op_create");
    TDDP_REDUCE_OP_MAP(MAKE)
}

static bool is_integer(tddp_dtype dtype)
{
    return dtype <= TDDP_INT64;
}

/* MPI's own operation with the same result for these numbers; MPI_OP_NULL: none. */
static MPI_Op own_op(tddp_dtype dtype, tddp_reduce_op op)
{
    const bool is_number = is_integer(dtype) || (dtype >= TDDP_FLOAT32 && dtype <= TDDP_COMPLEX128);
    switch (op) {
    case TDDP_REDUCE_SUM:
    case TDDP_REDUCE_AVG:
    case TDDP_REDUCE_PREMUL_SUM:
        return is_number ? MPI_SUM : MPI_OP_NULL;
    case TDDP_REDUCE_PRODUCT:
        return is_number ? MPI_PROD : MPI_OP_NULL;
    case TDDP_REDUCE_MIN:
        return is_integer(dtype) ? MPI_MIN : MPI_OP_NULL;
    case TDDP_REDUCE_MAX:
        return is_integer(dtype) ? MPI_MAX : MPI_OP_NULL;
    case TDDP_REDUCE_BAND:
        return is_integer(dtype) ? MPI_BAND : MPI_OP_NULL;
    case TDDP_REDUCE_BOR:
        return is_integer(dtype) ? MPI_BOR : MPI_OP_NULL;
    case TDDP_REDUCE_BXOR:
        return is_integer(dtype) ? MPI_BXOR : MPI_OP_NULL;
    default:
        return MPI_OP_NULL;
    }
}

tddp_status tddp_mpi_make_reductions(void)
{
    (void)pthread_once(&once, make);
    return made ? tddp_fail(made, "MPI has no memory for types of its user's") : TDDP_OK;
}

tddp_mpi_reduction tddp_mpi_comparing(void)
{
    return comparing;
}

tddp_status tddp_mpi_reduction_of(tddp_dtype dtype, tddp_reduce_op op, tddp_mpi_reduction *out)
{
    tddp_status status = tddp_reduce_check(op, dtype);
    if (status) {
        return status;
    }
    out->type = types[dtype];
    out->op = own_op(dtype, op);
    if (out->op == MPI_OP_NULL) {
        out->op = ops[op];
    }
    return TDDP_OK;
}

void tddp_mpi_free_reductions(void)
{
    if (!made_any || made) {
        return;
    }
    for (size_t i = 0; i < sizeof from_bytes / sizeof *from_bytes; i++) {
        (void)MPI_Type_free(&types[from_bytes[i]]);
    }
    for (int op = 0; op < REDUCTIONS; op++) {
        (void)MPI_Op_free(&ops[op]);
    }
    (void)MPI_Type_free(&comparing.type);
    (void)MPI_Op_free(&comparing.op);
}
