/*
 * The facts that ranks compare, and how a disagreement is put into words. Pure functions, any
 * thread.
 *
 * Invariant: a call holds nothing that may differ between ranks that make the same one, except what
 * each gives and expects, which mirror each other, and the own factor. It is compared as bytes.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/call.h>

#include "base/base.h"

_Static_assert(sizeof(tddp_call) == 4 * sizeof(uint64_t) + 6 * sizeof(uint32_t),
               "nothing lies between the fields");

/* A text under way; what does not fit is cut off. */
typedef struct text {
    size_t size;
    char data[1024];
} text;

TDDP_PRINTF(2, 3)
static void say(text *to, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t room = sizeof to->data - to->size;
    int length = vsnprintf(to->data + to->size, room, format, args);
    va_end(args);
    if (length > 0) {
        to->size += (size_t)length < room ? (size_t)length : room - 1;
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

/* --- facts ----------------------------------------------------------------------------------- */

static bool reduces(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_REDUCE_SCATTER;
}

static bool is_rooted(tddp_op_kind kind)
{
    return kind == TDDP_OP_BROADCAST || kind == TDDP_OP_REDUCE || kind == TDDP_OP_GATHER ||
           kind == TDDP_OP_SCATTER;
}

/* Whether all ranks have buffers of one size, rather than a part for each other. */
static bool is_whole(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_BROADCAST;
}

static void count_shares(const tddp_op *op, int rank, int peer, tddp_call *call)
{
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_BROADCAST:
        call->gives = call->expects = op->input.count;
        break;
    case TDDP_OP_ALL_GATHER:
        call->gives = op->input.count;
        call->expects = op->output_parts[peer].count;
        break;
    case TDDP_OP_REDUCE_SCATTER:
        call->gives = op->input_parts[peer].count;
        call->expects = op->output.count;
        break;
    case TDDP_OP_ALL_TO_ALL:
        call->gives = op->input_parts[peer].count;
        call->expects = op->output_parts[peer].count;
        break;
    case TDDP_OP_GATHER:
        call->gives = op->root == peer ? op->input.count : 0;
        call->expects = op->root == rank ? op->output_parts[peer].count : 0;
        break;
    case TDDP_OP_SCATTER:
        call->gives = op->root == rank ? op->input_parts[peer].count : 0;
        call->expects = op->root == peer ? op->output.count : 0;
        break;
    default:
        break;
    }
}

/* What two ranks give each other in a stage is a matter between those who carry it out, but where
 * the stage is one of the same kind. */
static void count_part(const tddp_op *op, int rank, int peer, tddp_call *call)
{
    tddp_op_kind kind = op->part_of->kind;
    if (is_whole(kind) || kind == TDDP_OP_BARRIER) {
        count_shares(op->part_of, rank, peer, call);
    } else if (op->fingerprint != 0 || op->kind != kind) {
        call->layout = op->fingerprint ? op->fingerprint : 1;
    } else {
        count_shares(op, rank, peer, call);
    }
}

tddp_call tddp_call_of(const tddp_op *op, int rank, int peer)
{
    const tddp_op *whole = op->part_of ? op->part_of : op;
    tddp_call call = {
        .sequence = whole->sequence,
        .kind = whole->kind,
        .root = is_rooted(whole->kind) ? whole->root : 0,
        .fingerprint = whole->fingerprint,
    };
    if (op->part_of) {
        count_part(op, rank, peer, &call);
    } else {
        count_shares(op, rank, peer, &call);
    }
    if (whole->kind != TDDP_OP_BARRIER) {
        /* Only the root has an input in scatter. */
        call.dtype = whole->kind == TDDP_OP_SCATTER ? whole->output.dtype : whole->input.dtype;
    }
    if (reduces(whole->kind)) {
        call.reduce = whole->reduce;
        call.premul = whole->reduce == TDDP_REDUCE_PREMUL_SUM ? whole->premul : 0;
    }
    /* The other side multiplies by it, also in a stage of something else. */
    if (reduces(op->kind) && op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        call.premul = op->premul;
    }
    return call;
}

/* --- comparing ------------------------------------------------------------------------------- */

/* What a peer would have said if it agreed. */
static tddp_call mirrored(const tddp_call *call)
{
    tddp_call mirror = *call;
    mirror.gives = call->expects;
    mirror.expects = call->gives;
    return mirror;
}

int tddp_calls_agree(const tddp_call *mine, const tddp_call *theirs)
{
    tddp_call expected = mirrored(mine);
    /* Each rank may weigh its own share as it likes. */
    expected.premul = theirs->premul;
    if (mine->fingerprint == 0 || theirs->fingerprint == 0) {
        expected.fingerprint = theirs->fingerprint;
    }
    return memcmp(&expected, theirs, sizeof expected) == 0;
}

/* Whether two calls that one rank might make are the same, perhaps at another time. */
static bool same_call(const tddp_call *one, const tddp_call *other)
{
    tddp_call later = *other;
    later.sequence = one->sequence;
    return memcmp(one, &later, sizeof *one) == 0;
}

/* --- words ----------------------------------------------------------------------------------- */

static const char *kind_of(const tddp_call *call)
{
    return tddp_op_name((tddp_op_kind)call->kind);
}

static const char *dtype_of(const tddp_call *call)
{
    return tddp_dtype_name((tddp_dtype)call->dtype);
}

/* The buffers and settings of a call. */
static void say_settings(text *to, const tddp_call *call)
{
    tddp_op_kind kind = (tddp_op_kind)call->kind;
    if (is_whole(kind)) {
        say(to, ", %" PRIu64 " elements of %s", call->gives, dtype_of(call));
    } else if (kind != TDDP_OP_BARRIER && call->layout != 0) {
        say(to, ", elements of %s", dtype_of(call));
    } else if (kind != TDDP_OP_BARRIER) {
        say(to, ", gives %" PRIu64 " and expects %" PRIu64 " elements of %s", call->gives,
            call->expects, dtype_of(call));
    }
    if (reduces(kind)) {
        say(to, ", %s", tddp_reduce_op_name((tddp_reduce_op)call->reduce));
        if (call->reduce == TDDP_REDUCE_PREMUL_SUM) {
            say(to, " by %f", call->premul);
        }
    }
    if (is_rooted(kind)) {
        say(to, ", root %d", call->root);
    }
}

static void say_call(text *to, const tddp_call *call)
{
    say(to, "%s (operation %" PRIu64, kind_of(call), call->sequence);
    say_settings(to, call);
    say(to, ")");
}

static void say_place(text *to, int name, const tddp_call *call)
{
    say(to, "rank %d is at operation %" PRIu64 ", %s", name, call->sequence, kind_of(call));
    say_settings(to, call);
}

/* "rank 0 sends 3 elements of float32, rank 1 expects 4"; false if that is not so. */
static bool say_unequal(text *to, int from, const tddp_call *sender, int receiver_name,
                        const tddp_call *receiver)
{
    if (sender->gives == receiver->expects) {
        return false;
    }
    say(to, "rank %d sends %" PRIu64 " elements of %s, rank %d expects %" PRIu64, from,
        sender->gives, dtype_of(sender), receiver_name, receiver->expects);
    return true;
}

/* Who calls again what both called in the operation before, which the other does not; nothing if
 * nobody does. */
static void say_hint(text *to, int rank, int peer, const tddp_calls *now, const tddp_calls *before)
{
    tddp_call like_mine = mirrored(&before->mine);
    tddp_call like_theirs = mirrored(&before->theirs);
    bool peer_again = same_call(&now->theirs, &like_mine);
    bool own_again = same_call(&now->mine, &like_theirs);
    if (before->mine.sequence != 0 && peer_again != own_again) {
        say(to,
            "; rank %d calls what both called in operation %" PRIu64
            ": it has left out a call, or made that one twice",
            peer_again ? peer : rank, before->mine.sequence);
    }
}

/* Differences that come from names alone, or from sizes alone, are told as such; false if there are
 * others. */
static bool say_alike(text *to, int rank, int peer, const tddp_calls *now)
{
    const tddp_call *mine = &now->mine;
    const tddp_call *theirs = &now->theirs;
    tddp_call alike = *theirs;
    alike.fingerprint = mine->fingerprint;
    if (tddp_calls_agree(mine, &alike)) {
        say(to, "shapes or names differ between rank %d and rank %d in ", rank, peer);
        say_call(to, mine);
        say(to, ": all ranks must describe the same call");
        return true;
    }
    alike.layout = mine->layout;
    if (tddp_calls_agree(mine, &alike)) {
        say(to, "rank %d and rank %d differ on the sizes of the parts in ", rank, peer);
        say_call(to, mine);
        say(to, ": a part must be as large as its receiver expects");
        return true;
    }
    alike.gives = mine->expects;
    alike.expects = mine->gives;
    if (!tddp_calls_agree(mine, &alike) || is_whole((tddp_op_kind)mine->kind)) {
        return false;
    }
    say(to, "%s (operation %" PRIu64 "): ", kind_of(mine), mine->sequence);
    if (say_unequal(to, rank, mine, peer, theirs) && theirs->gives != mine->expects) {
        say(to, "; ");
    }
    (void)say_unequal(to, peer, theirs, rank, mine);
    say(to, ": a part must be as large as its receiver expects");
    return true;
}

tddp_status tddp_calls_disagree(int rank_name, int peer_name, const tddp_calls *now,
                                const tddp_calls *before)
{
    static const char cure[] = ": all ranks must make the same calls in the same order";
    text words = {0};
    if (now->mine.sequence != now->theirs.sequence) {
        say_place(&words, rank_name, &now->mine);
        say(&words, "; ");
        say_place(&words, peer_name, &now->theirs);
        say(&words, "%s", cure);
    } else if (!say_alike(&words, rank_name, peer_name, now)) {
        say(&words, "rank %d runs ", rank_name);
        say_call(&words, &now->mine);
        say(&words, ", rank %d runs ", peer_name);
        say_call(&words, &now->theirs);
        say_hint(&words, rank_name, peer_name, now, before);
        say(&words, "%s", cure);
    }
    return tddp_fail(TDDP_MISMATCH, "%s", words.data);
}
