/**
 * @file call.h
 * @brief What ranks compare of an operation, so that those who call different ones are told so.
 *
 * For backends: each rank sends every other one its call, and both sides compare. Pure functions,
 * any thread.
 */
#ifndef TDDP_CALL_H
#define TDDP_CALL_H

#include <tddp/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/** An operation as one rank puts it towards another. Plain data of fixed size, to be sent as it is
 * between ranks of one byte order. Those of an operation with `part_of` are that one's; its own
 * fingerprint says then how large the parts of all ranks are, where this rank knows. */
typedef struct tddp_call {
    uint64_t sequence;
    uint64_t gives;   /**< elements for the other rank */
    uint64_t expects; /**< elements from it */
    double premul;    /**< of PREMUL_SUM; may differ */
    uint32_t kind;    /**< tddp_op_kind */
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
    uint32_t fingerprint; /**< 0 agrees with all */
    uint32_t layout;      /**< of the sizes of all parts, in place of gives and expects; or 0 */
} tddp_call;

/** The call of `op` on `rank` towards `peer`. */
TDDP_API tddp_call tddp_call_of(const tddp_op *op, int rank, int peer);

/** Whether this rank's call towards a peer and the peer's towards it are the same operation. */
TDDP_API int tddp_calls_agree(const tddp_call *mine, const tddp_call *theirs);

/** One operation's calls between two ranks; of the operation before, zero if there was none. */
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

/** Sets the text for calls that do not agree, with both sides: ranks are called by the names given
 * here. Returns TDDP_MISMATCH. */
TDDP_API tddp_status tddp_calls_disagree(int rank_name, int peer_name, const tddp_calls *now,
                                         const tddp_calls *before);

#ifdef __cplusplus
}
#endif

#endif
