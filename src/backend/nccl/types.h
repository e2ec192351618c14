/* Maps the group's dtypes and reductions to NCCL's. Pure functions, any thread. */
#ifndef TDDP_NCCL_TYPES_H
#define TDDP_NCCL_TYPES_H

#include <tddp/backend.h>

/* An NCCL dtype, and how many of its elements make one of the dtype's. */
typedef struct tddp_nccl_type {
    int type;
    size_t each;
} tddp_nccl_type;

/* For reductions; `*redop` is NCCL's operation, unless it is TDDP_REDUCE_PREMUL_SUM. `version`
 * is NCCL's. Errors: TDDP_UNSUPPORTED, with what NCCL supports. */
TDDP_NODISCARD tddp_status tddp_nccl_type_to_reduce(tddp_dtype dtype, tddp_reduce_op op,
                                                    int version, tddp_nccl_type *type, int *redop);

/* Writes a factor in the dtype's own representation, at most 8 bytes. Floating-point dtypes. */
void tddp_nccl_scalar(tddp_dtype dtype, double factor, void *out);

#endif
