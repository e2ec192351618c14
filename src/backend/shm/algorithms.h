/*
 * Selects the algorithm of an operation: a table by kind, size, number of ranks and location of the
 * memory. TDDP_SHM_ALGORITHM overrides it ("all_reduce=staged,broadcast=direct"). The choice is
 * equal on all ranks, since everything that it depends on is; the join compares the overrides.
 */
#ifndef TDDP_SHM_ALGORITHMS_H
#define TDDP_SHM_ALGORITHMS_H

#include "backend/shm/shm.h"

/* X(name, text). The details are in the operation's file. */
#define TDDP_SHM_ALGORITHM_MAP(X)                                                    \
    X(INLINE, "inline") /* data travel with the call */                              \
    X(STAGED, "staged") /* through staging; each receiver reads all senders' data */ \
    X(SLICED, "sliced") /* through staging; each rank does a slice of the work */    \
    X(DIRECT, "direct") /* in place: registered memory */

typedef enum tddp_shm_algorithm {
#define TDDP_SHM_ALGORITHM_ENUM(name, text) TDDP_SHM_##name,
    TDDP_SHM_ALGORITHM_MAP(TDDP_SHM_ALGORITHM_ENUM)
#undef TDDP_SHM_ALGORITHM_ENUM
        TDDP_SHM_ALGORITHM_COUNT
} tddp_shm_algorithm;

/* The state of this file in a context. `forced` is plain data that the ranks compare. */
typedef struct tddp_shm_choices {
    uint8_t forced[TDDP_OP_COUNT]; /* 0: by the table; else 1 + tddp_shm_algorithm */
    /* Bit n: a choice for sizes from 2^n on was logged. */
    uint64_t logged[TDDP_OP_COUNT][TDDP_SHM_ALGORITHM_COUNT];
} tddp_shm_choices;

/* Parses TDDP_SHM_ALGORITHM. Errors: TDDP_INVALID_ARGUMENT, with the possible values. */
TDDP_NODISCARD tddp_status tddp_shm_choices_parse(tddp_shm_choices *out);

/* Writes the overrides as text, to be compared and shown: "all_reduce=staged", or "" without
 * any. */
enum { TDDP_SHM_CHOICES_TEXT = 256 };
void tddp_shm_choices_text(const tddp_shm_choices *choices, char text[TDDP_SHM_CHOICES_TEXT]);

/* The context's choices; context.c. */
tddp_shm_choices *tddp_shm_choices_of(const tddp_shm *shm);

/* The algorithm for an operation of `bytes`. `registered`: the buffers of all ranks are in their
 * segments. An override that isn't applicable (too large for inline, not registered) is ignored. */
tddp_shm_algorithm tddp_shm_choose(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                                   bool registered);

/* Logs a choice if it is the first of its kind and size. */
void tddp_shm_log_choice(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                         tddp_shm_algorithm algorithm);

#endif
