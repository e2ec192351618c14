/**
 * @file call.h
 * @brief What ranks compare of an operation, so that calls that differ are reported on all of them.
 *
 * For backends: each rank sends its call to every other rank, and both sides compare. Pure
 * functions, any thread.
 */
#ifndef TDDP_CALL_H
#define TDDP_CALL_H

#include <tddp/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * An operation as one rank describes it to another. Plain data of fixed size, which can be sent
 * as it is between ranks of the same byte order. An operation with `part_of` describes that
 * operation instead; its own fingerprint is then a hash of the part sizes of all ranks, if this
 * rank knows them.
 */
typedef struct tddp_call {
    uint64_t sequence;
    uint64_t sends;   /**< elements sent to the other rank */
    uint64_t expects; /**< elements received from it */
    double premul;    /**< of PREMUL_SUM; may differ */
    uint32_t kind;    /**< tddp_op_kind */
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
    uint32_t fingerprint; /**< 0 agrees with any */
    uint32_t layout;      /**< hash of all parts' sizes, compared instead of the counts; or 0 */
} tddp_call;

/** The call of `op` on `rank` to `peer`. */
TDDP_API tddp_call tddp_call_of(const tddp_op *op, int rank, int peer);

/** Whether this rank's call to a peer and the peer's call to this rank are the same operation. */
TDDP_API int tddp_calls_agree(const tddp_call *mine, const tddp_call *theirs);

/** The two calls between two ranks. For the operation before: zero if there was none. */
typedef struct tddp_calls {
    tddp_call mine;
    tddp_call theirs;
} tddp_calls;

/** Where a digest begins. */
#define TDDP_DIGEST_START UINT64_C(14695981039346656037)

/** Extends a digest by some bytes: FNV-1a in 64 bits, the same on all ranks, and no secret. */
TDDP_API uint64_t tddp_digest(uint64_t digest, const void *data, size_t size);

/** A digest in the 32 bits of a call's `fingerprint` and `layout`, where 0 means none: never 0. */
TDDP_API uint32_t tddp_digest_fold(uint64_t digest);

/** Sets the text for calls that don't agree, with both sides; ranks have the names given here.
 * Returns TDDP_MISMATCH. */
TDDP_API tddp_status tddp_calls_mismatch(int rank_name, int peer_name, const tddp_calls *now,
                                         const tddp_calls *before);

#ifdef __cplusplus
}
#endif

#endif
