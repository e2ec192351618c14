/*
 * Entering an operation, and finding that all ranks have entered the same one. On the thread of the
 * operation.
 *
 * Invariant: turn n of a rank stands in its slot n mod 2, whole before `entered` says so, and stays
 * there until it enters n + 2, which no rank does before all have entered n + 1 and so are through
 * with n. Turns count operations that were entered, and not the group's own numbers: of those some
 * may be left out, on all ranks.
 *
 * Calls with one digest agree. Those with different ones may agree too (parts that differ in size,
 * a description that only one of them has): then the calls themselves are compared.
 */
#include <string.h>

#include "backend/shm/control.h"

enum { TEXT_BYTES = 2048 };

/* --- what is compared ------------------------------------------------------------------------ */

/* Whether the call is the same towards all ranks. */
static bool is_alike(const tddp_call *call)
{
    return call->layout != 0 || call->kind == TDDP_OP_ALL_REDUCE || call->kind == TDDP_OP_REDUCE ||
           call->kind == TDDP_OP_BROADCAST || call->kind == TDDP_OP_BARRIER;
}

static bool all_count(const tddp_buffer *parts, int size, size_t count)
{
    bool equal = true;
    for (int peer = 0; parts && peer < size; peer++) {
        equal = equal && parts[peer].count == count;
    }
    return equal;
}

/* Elements of each part, where all parts that this rank knows of are as large. */
static bool is_uniform(const tddp_op *op, int size, uint64_t *count)
{
    switch (op->kind) {
    case TDDP_OP_ALL_GATHER:
    case TDDP_OP_GATHER:
        *count = op->input.count;
        return all_count(op->output_parts, size, op->input.count);
    case TDDP_OP_REDUCE_SCATTER:
    case TDDP_OP_SCATTER:
        *count = op->output.count;
        return all_count(op->input_parts, size, op->output.count);
    case TDDP_OP_ALL_TO_ALL:
        *count = op->input_parts[0].count;
        return all_count(op->input_parts, size, *count) &&
               all_count(op->output_parts, size, *count);
    default:
        return false;
    }
}

static uint64_t mixed(uint64_t digest, uint64_t fact)
{
    digest = (digest ^ fact) * UINT64_C(0x9e3779b97f4a7c15);
    return digest ^ digest >> 32;
}

/* Never 0 but for calls that must be compared. */
static uint64_t digest_of(const tddp_call *call, const tddp_op *op, int size)
{
    uint64_t count = call->gives;
    if (!is_alike(call) && !is_uniform(op, size, &count)) {
        return 0;
    }
    uint64_t digest = mixed(call->sequence, (uint64_t)call->kind << 32 | call->dtype);
    digest = mixed(digest, (uint64_t)call->reduce << 32 | (uint32_t)call->root);
    digest = mixed(digest, (uint64_t)call->fingerprint << 32 | call->layout);
    digest = mixed(digest, count);
    return digest ? digest : 1;
}

/* --- entering -------------------------------------------------------------------------------- */

static uint64_t place_of(const tddp_shm *shm, const tddp_buffer *buffer)
{
    size_t bytes = buffer->count * tddp_dtype_size(buffer->dtype);
    return bytes > 0 ? tddp_shm_locate(shm, buffer->data, bytes) : TDDP_SHM_NOWHERE;
}

static uint64_t fill(const tddp_shm *shm, const tddp_op *op, tddp_shm_slot *slot)
{
    slot->calls[0] = tddp_call_of(op, shm->rank, 0);
    if (!is_alike(&slot->calls[0])) {
        for (int peer = 1; peer < shm->size; peer++) {
            slot->calls[peer] = tddp_call_of(op, shm->rank, peer);
        }
    }
    slot->digest = digest_of(&slot->calls[0], op, shm->size);
    slot->premul = op->premul;
    slot->input = place_of(shm, &op->input);
    slot->output = place_of(shm, &op->output);
    return (slot->input != TDDP_SHM_NOWHERE ? TDDP_SHM_HAS_INPUT : 0u) |
           (slot->output != TDDP_SHM_NOWHERE ? TDDP_SHM_HAS_OUTPUT : 0u);
}

bool tddp_shm_entered(const tddp_shm *shm, const tddp_op *op)
{
    return shm->sequence == op->sequence;
}

void tddp_shm_enter(tddp_shm *shm, const tddp_op *op, const void *payload, size_t bytes)
{
    shm->op = op;
    if (tddp_shm_entered(shm, op)) {
        return; /* goes on */
    }
    shm->sequence = op->sequence;
    shm->turn++;
    shm->course = (tddp_shm_course){0};
    shm->deadline = 0;
    shm->announced = false;
    tddp_shm_slot *slot = tddp_shm_self(shm)->slots[shm->turn & 1];
    if (bytes > 0) {
        memcpy(slot->payload, payload, bytes);
    }
    shm->flags = fill(shm, op, slot);
    shm->digest = slot->digest;
    atomic_store_explicit(&slot->entered, shm->turn << TDDP_SHM_FLAG_BITS | shm->flags,
                          memory_order_release);
}

/* --- meeting --------------------------------------------------------------------------------- */

/* What a rank says to this one, of the turn that stands in its slot. */
static const tddp_call *said_by(const tddp_shm *shm, int from, int to, uint64_t turn)
{
    const tddp_call *calls = shm->peers[from].slots[turn & 1]->calls;
    return is_alike(calls) ? calls : calls + to;
}

static tddp_calls calls_with(const tddp_shm *shm, int peer, uint64_t turn)
{
    tddp_calls both = {0};
    if (turn > 0) {
        both.mine = *said_by(shm, shm->rank, peer, turn);
        both.theirs = *said_by(shm, peer, shm->rank, turn);
    }
    return both;
}

static tddp_status compare(const tddp_shm *shm, int peer)
{
    tddp_calls now = calls_with(shm, peer, shm->turn);
    if (tddp_calls_agree(&now.mine, &now.theirs)) {
        return TDDP_OK;
    }
    tddp_calls before = calls_with(shm, peer, shm->turn - 1);
    return tddp_calls_disagree(tddp_shm_name(shm, shm->rank), tddp_shm_name(shm, peer), &now,
                               &before);
}

tddp_status tddp_shm_meet(tddp_shm *shm)
{
    const uint64_t turn = shm->turn;
    uint64_t flags = shm->flags;
    for (int peer = 0; peer < shm->size; peer++) {
        const tddp_shm_slot *slot = shm->peers[peer].slots[turn & 1];
        if (peer == shm->rank) {
            continue;
        }
        uint64_t entered = atomic_load_explicit(&slot->entered, memory_order_acquire);
        if (entered >> TDDP_SHM_FLAG_BITS < turn) {
            tddp_status status =
                tddp_shm_wait_for(shm, peer, &slot->entered, TDDP_SHM_FLAG_BITS, turn);
            if (status) {
                return status;
            }
            entered = atomic_load_explicit(&slot->entered, memory_order_acquire);
        }
        if (slot->digest != shm->digest || shm->digest == 0) {
            tddp_status status = compare(shm, peer);
            if (status) {
                return status;
            }
        }
        flags &= entered;
    }
    shm->flags = flags;
    tddp_shm_settle(shm);
    return TDDP_OK;
}

const void *tddp_shm_payload(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].slots[shm->turn & 1]->payload;
}

double tddp_shm_premul(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].slots[shm->turn & 1]->premul;
}

const void *tddp_shm_input(const tddp_shm *shm, int rank)
{
    return tddp_shm_at(shm, rank, shm->peers[rank].slots[shm->turn & 1]->input);
}

void *tddp_shm_output(const tddp_shm *shm, int rank)
{
    return tddp_shm_at(shm, rank, shm->peers[rank].slots[shm->turn & 1]->output);
}

bool tddp_shm_all_inputs(const tddp_shm *shm)
{
    return shm->flags & TDDP_SHM_HAS_INPUT;
}

bool tddp_shm_all_outputs(const tddp_shm *shm)
{
    return shm->flags & TDDP_SHM_HAS_OUTPUT;
}

static void *half_of(const tddp_shm *shm, int rank, uint64_t turn)
{
    return shm->peers[rank].base + shm->layout.staging + (turn & 1) * TDDP_SHM_STAGING_BYTES;
}

void *tddp_shm_staging(const tddp_shm *shm, int rank)
{
    return half_of(shm, rank, shm->turn);
}

void *tddp_shm_staging_ahead(const tddp_shm *shm)
{
    /* Turn n - 1 used it, and all have done with that: they have entered n. */
    return half_of(shm, shm->rank, shm->turn + 1);
}

/* --- bad ends -------------------------------------------------------------------------------- */

static bool has_come(const tddp_shm *shm, int peer)
{
    const tddp_shm_slot *slot = shm->peers[peer].slots[shm->turn & 1];
    return atomic_load_explicit(&slot->entered, memory_order_acquire) >> TDDP_SHM_FLAG_BITS ==
           shm->turn;
}

/* "; come to it: rank 1, rank 3; not come: rank 2 (last in barrier, operation 4)" */
static void tell_attendance(const tddp_shm *shm, char *text, size_t bytes)
{
    for (int missing = 0; missing < 2; missing++) {
        const char *before = missing ? "; not come: " : "; come to it: ";
        for (int peer = 0; peer < shm->size; peer++) {
            if (peer == shm->rank || has_come(shm, peer) == (missing == 1)) {
                continue;
            }
            tddp_add_text(text, bytes, "%srank %d", before, tddp_shm_name(shm, peer));
            before = ", ";
            if (missing && shm->turn > 1) {
                const tddp_call *last = said_by(shm, peer, shm->rank, shm->turn - 1);
                tddp_add_text(text, bytes, " (last in %s, operation %llu)",
                              tddp_op_name((tddp_op_kind)last->kind),
                              (unsigned long long)last->sequence);
            }
        }
    }
    tddp_add_text(text, bytes, ": slow, stuck, or in another operation?");
}

tddp_status tddp_shm_explain(tddp_shm *shm, tddp_status status, int rank)
{
    char text[TEXT_BYTES] = "";
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted");
    }
    if (status == TDDP_GROUP_FAILED) {
        return tddp_fail(status, "aborted");
    }
    for (int peer = 0; peer < shm->size; peer++) {
        if (peer != shm->rank && has_come(shm, peer) && compare(shm, peer)) {
            return TDDP_MISMATCH;
        }
    }
    if (status == TDDP_PEER_LOST) {
        status = tddp_shm_who_is_gone(shm, rank, shm->turn, text, sizeof text);
        return tddp_fail(status, "%s", text);
    }
    /* What is left for a part of an operation is not what its caller gave. */
    const tddp_op *whole = shm->op->part_of ? shm->op->part_of : shm->op;
    tddp_add_text(text, sizeof text, "not done after %lld ms; rank %d has not done its part",
                  (long long)whole->timeout_ms, tddp_shm_name(shm, rank));
    tell_attendance(shm, text, sizeof text);
    return tddp_fail(status, "%s", text);
}
