/*
 * Compares the calls of two ranks, and describes the difference. Pure functions, any thread.
 *
 * Invariant: ranks that make the same call have equal tddp_calls, except that `sends` and `expects`
 * are exchanged, and that the factor may differ. Calls are compared as bytes.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/call.h>

#include "base/base.h"

_Static_assert(sizeof(tddp_call) == 4 * sizeof(uint64_t) + 6 * sizeof(uint32_t),
               "nothing lies between the fields");

/* A text that is being written; truncated if it is too long. */
typedef struct text {
    size_t size;
    char data[1024];
} text;

TDDP_PRINTF(2, 3)
static void append(text *to, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t space = sizeof to->data - to->size;
    int length = vsnprintf(to->data + to->size, space, format, args);
    va_end(args);
    if (length > 0) {
        to->size += (size_t)length < space ? (size_t)length : space - 1;
    }
}

/* --- digests --------------------------------------------------------------------------------- */

uint64_t tddp_digest(uint64_t digest, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) {
        digest = (digest ^ bytes[i]) * UINT64_C(1099511628211);
    }
    return digest;
}

uint32_t tddp_digest_fold(uint64_t digest)
{
    uint32_t folded = (uint32_t)(digest ^ digest >> 32);
    return folded ? folded : 1;
}

/* --- building a call ------------------------------------------------------------------------- */

/* Whether all ranks have one buffer of the same size, instead of a part for each other. */
static bool has_equal_buffers(tddp_op_kind kind)
{
    return !tddp_op_has_parts(kind) && kind != TDDP_OP_BARRIER;
}

static void set_counts(const tddp_op *op, int rank, int peer, tddp_call *call)
{
    if (has_equal_buffers(op->kind)) {
        call->sends = call->expects = op->input.count;
    } else {
        call->sends = tddp_op_sends(op, rank, peer).count;
        call->expects = tddp_op_receives(op, rank, peer).count;
    }
}

/* In a stage of another kind, two ranks may exchange anything: only a stage of the same kind is
 * compared by its counts. */
static void set_part_counts(const tddp_op *op, int rank, int peer, tddp_call *call)
{
    tddp_op_kind kind = op->part_of->kind;
    if (has_equal_buffers(kind) || kind == TDDP_OP_BARRIER) {
        set_counts(op->part_of, rank, peer, call);
    } else if (op->fingerprint != 0 || op->kind != kind) {
        call->layout = op->fingerprint ? op->fingerprint : 1;
    } else {
        set_counts(op, rank, peer, call);
    }
}

tddp_call tddp_call_of(const tddp_op *op, int rank, int peer)
{
    const tddp_op *reported = op->part_of ? op->part_of : op;
    tddp_call call = {
        .sequence = reported->sequence,
        .kind = reported->kind,
        .root = tddp_op_has_root(reported->kind) ? reported->root : 0,
        .fingerprint = reported->fingerprint,
    };
    if (op->part_of) {
        set_part_counts(op, rank, peer, &call);
    } else {
        set_counts(op, rank, peer, &call);
    }
    if (reported->kind != TDDP_OP_BARRIER) {
        /* Only the root has an input in scatter. */
        call.dtype =
            reported->kind == TDDP_OP_SCATTER ? reported->output.dtype : reported->input.dtype;
    }
    if (tddp_op_reduces(reported->kind)) {
        call.reduce = reported->reduce;
        call.premul = reported->reduce == TDDP_REDUCE_PREMUL_SUM ? reported->premul : 0;
    }
    /* The peer multiplies by it, also in a stage of another operation. */
    if (tddp_op_reduces(op->kind) && op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        call.premul = op->premul;
    }
    return call;
}

/* --- comparing ------------------------------------------------------------------------------- */

/* The call of a peer that agrees. */
static tddp_call mirror_of(const tddp_call *call)
{
    tddp_call mirror = *call;
    mirror.sends = call->expects;
    mirror.expects = call->sends;
    return mirror;
}

int tddp_calls_agree(const tddp_call *mine, const tddp_call *theirs)
{
    tddp_call expected = mirror_of(mine);
    /* Factors may differ. */
    expected.premul = theirs->premul;
    if (mine->fingerprint == 0 || theirs->fingerprint == 0) {
        expected.fingerprint = theirs->fingerprint;
    }
    return memcmp(&expected, theirs, sizeof expected) == 0;
}

/* Whether two calls of one rank are the same except for their number. */
static bool same_call(const tddp_call *one, const tddp_call *other)
{
    tddp_call later = *other;
    later.sequence = one->sequence;
    return memcmp(one, &later, sizeof *one) == 0;
}

/* --- descriptions ---------------------------------------------------------------------------- */

static const char *kind_of(const tddp_call *call)
{
    return tddp_op_name((tddp_op_kind)call->kind);
}

static const char *dtype_of(const tddp_call *call)
{
    return tddp_dtype_name((tddp_dtype)call->dtype);
}

/* Appends the buffers and settings of a call. */
static void append_settings(text *to, const tddp_call *call)
{
    tddp_op_kind kind = (tddp_op_kind)call->kind;
    if (has_equal_buffers(kind)) {
        append(to, ", %" PRIu64 " elements of %s", call->sends, dtype_of(call));
    } else if (kind != TDDP_OP_BARRIER && call->layout != 0) {
        append(to, ", elements of %s", dtype_of(call));
    } else if (kind != TDDP_OP_BARRIER) {
        append(to, ", sends %" PRIu64 " and expects %" PRIu64 " elements of %s", call->sends,
               call->expects, dtype_of(call));
    }
    if (tddp_op_reduces(kind)) {
        append(to, ", %s", tddp_reduce_op_name((tddp_reduce_op)call->reduce));
        if (call->reduce == TDDP_REDUCE_PREMUL_SUM) {
            append(to, " by %f", call->premul);
        }
    }
    if (tddp_op_has_root(kind)) {
        append(to, ", root %d", call->root);
    }
}

static void append_call(text *to, const tddp_call *call)
{
    append(to, "%s (operation %" PRIu64, kind_of(call), call->sequence);
    append_settings(to, call);
    append(to, ")");
}

static void append_position(text *to, int name, const tddp_call *call)
{
    append(to, "rank %d is at operation %" PRIu64 ", %s", name, call->sequence, kind_of(call));
    append_settings(to, call);
}

/* Appends "rank 0 sends 3 elements of float32, rank 1 expects 4"; false if they agree. */
static bool append_count_mismatch(text *to, int from, const tddp_call *sender, int receiver_name,
                                  const tddp_call *receiver)
{
    if (sender->sends == receiver->expects) {
        return false;
    }
    append(to, "rank %d sends %" PRIu64 " elements of %s, rank %d expects %" PRIu64, from,
           sender->sends, dtype_of(sender), receiver_name, receiver->expects);
    return true;
}

/* Names the rank that repeats the previous call of both, if only one does. */
static void append_hint(text *to, int rank, int peer, const tddp_calls *now,
                        const tddp_calls *before)
{
    tddp_call like_mine = mirror_of(&before->mine);
    tddp_call like_theirs = mirror_of(&before->theirs);
    bool theirs_again = same_call(&now->theirs, &like_mine);
    bool mine_again = same_call(&now->mine, &like_theirs);
    if (before->mine.sequence != 0 && theirs_again != mine_again) {
        append(to,
               "; rank %d calls what both called in operation %" PRIu64
               ": it has left out a call, or made that one twice",
               theirs_again ? peer : rank, before->mine.sequence);
    }
}

/* Describes a difference only in names, or only in sizes; false if there are others. */
static bool append_detail_mismatch(text *to, int rank, int peer, const tddp_calls *now)
{
    const tddp_call *mine = &now->mine;
    const tddp_call *theirs = &now->theirs;
    tddp_call patched = *theirs;
    patched.fingerprint = mine->fingerprint;
    if (tddp_calls_agree(mine, &patched)) {
        append(to, "shapes or names differ between rank %d and rank %d in ", rank, peer);
        append_call(to, mine);
        append(to, ": all ranks must describe the same call");
        return true;
    }
    patched.layout = mine->layout;
    if (tddp_calls_agree(mine, &patched)) {
        append(to, "rank %d and rank %d differ on the sizes of the parts in ", rank, peer);
        append_call(to, mine);
        append(to, ": a part must be as large as its receiver expects");
        return true;
    }
    patched.sends = mine->expects;
    patched.expects = mine->sends;
    if (!tddp_calls_agree(mine, &patched) || has_equal_buffers((tddp_op_kind)mine->kind)) {
        return false;
    }
    append(to, "%s (operation %" PRIu64 "): ", kind_of(mine), mine->sequence);
    if (append_count_mismatch(to, rank, mine, peer, theirs) && theirs->sends != mine->expects) {
        append(to, "; ");
    }
    (void)append_count_mismatch(to, peer, theirs, rank, mine);
    append(to, ": a part must be as large as its receiver expects");
    return true;
}

tddp_status tddp_calls_mismatch(int rank_name, int peer_name, const tddp_calls *now,
                                const tddp_calls *before)
{
    static const char advice[] = ": all ranks must make the same calls in the same order";
    text message = {0};
    if (now->mine.sequence != now->theirs.sequence) {
        append_position(&message, rank_name, &now->mine);
        append(&message, "; ");
        append_position(&message, peer_name, &now->theirs);
        append(&message, "%s", advice);
    } else if (!append_detail_mismatch(&message, rank_name, peer_name, now)) {
        append(&message, "rank %d runs ", rank_name);
        append_call(&message, &now->mine);
        append(&message, ", rank %d runs ", peer_name);
        append_call(&message, &now->theirs);
        append_hint(&message, rank_name, peer_name, now, before);
        append(&message, "%s", advice);
    }
    return tddp_fail(TDDP_MISMATCH, "%s", message.data);
}
