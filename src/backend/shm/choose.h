/*
 * Which algorithm carries out an operation: a table by kind, size, ranks and where the memory lies,
 * which TDDP_SHM_ALGORITHM overrides ("all_reduce=staged,broadcast=direct"). Equal on all ranks, as
 * all that it depends on is; the overrides are compared at the join.
 */
#ifndef TDDP_SHM_CHOOSE_H
#define TDDP_SHM_CHOOSE_H

#include "backend/shm/shm.h"

/* X(name, text). What they mean for an operation stands with it. */
#define TDDP_SHM_ALGORITHM_MAP(X)                                            \
    X(INLINE, "inline") /* with the call */                                  \
    X(STAGED, "staged") /* through staging; all read what all gave */        \
    X(SLICED, "sliced") /* through staging; each does a slice of the work */ \
    X(DIRECT, "direct") /* where it lies: registered memory */

typedef enum tddp_shm_algorithm {
#define TDDP_SHM_ALGORITHM_ENUM(name, text) TDDP_SHM_##name,
    TDDP_SHM_ALGORITHM_MAP(TDDP_SHM_ALGORITHM_ENUM)
#undef TDDP_SHM_ALGORITHM_ENUM
        TDDP_SHM_ALGORITHM_COUNT
} tddp_shm_algorithm;

/* What a context keeps of this file. `forced` is what ranks must agree on: plain data. */
typedef struct tddp_shm_choices {
    uint8_t forced[TDDP_OP_COUNT]; /* 0: as the table has it; else 1 + tddp_shm_algorithm */
    /* Sizes, by powers of two, for which the choice was logged. */
    uint64_t told[TDDP_OP_COUNT][TDDP_SHM_ALGORITHM_COUNT];
} tddp_shm_choices;

/* From TDDP_SHM_ALGORITHM. Errors: TDDP_INVALID_ARGUMENT, with what can be chosen. */
TDDP_NODISCARD tddp_status tddp_shm_choices_read(tddp_shm_choices *out);

/* The overrides in a form to be compared and shown: "all_reduce=staged", "" without any; cut to
 * `size`. */
enum { TDDP_SHM_CHOICES_TEXT = 256 };
void tddp_shm_choices_text(const tddp_shm_choices *choices, char *text, size_t size);

/* The context's own; context.c. */
tddp_shm_choices *tddp_shm_choices_of(const tddp_shm *shm);

/* For an operation of so many bytes; `registered`: whether all ranks' memory lies where the others
 * see it. An override that cannot serve (too large to go inline, not registered) is passed over. */
tddp_shm_algorithm tddp_shm_choose(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                                   bool registered);

/* Logs the choice if it is the first of its kind and size. */
void tddp_shm_chose(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                    tddp_shm_algorithm algorithm);

#endif
