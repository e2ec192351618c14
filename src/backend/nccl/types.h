/*
 * What NCCL has for the group's dtypes and reductions. Pure functions, any thread.
 */
#ifndef TDDP_NCCL_TYPES_H
#define TDDP_NCCL_TYPES_H

#include <tddp/backend.h>

/* A dtype as NCCL moves it: so many elements of its own for each of ours. */
typedef struct tddp_nccl_type {
    int type;
    size_t each;
} tddp_nccl_type;

/* For moving bits alone: any dtype. */
tddp_nccl_type tddp_nccl_type_to_move(tddp_dtype dtype);

/*
 * For reducing; `*redop` is NCCL's operation, where it is not TDDP_REDUCE_PREMUL_SUM.
 * `version` is NCCL's. Errors: TDDP_UNSUPPORTED, with what NCCL has.
 */
TDDP_NODISCARD tddp_status tddp_nccl_type_to_reduce(tddp_dtype dtype, tddp_reduce_op op,
                                                    int version, tddp_nccl_type *type, int *redop);

/* A factor in the dtype's own bits, at most 8 bytes. The dtype is a floating-point one. */
void tddp_nccl_scalar(tddp_dtype dtype, double factor, void *out);

#endif
