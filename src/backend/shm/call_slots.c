/*
 * Enters an operation, and checks that all ranks have entered the same one. Runs on the operation's
 * thread.
 *
 * Invariant: the call of epoch n is in the rank's slot n mod 2. It is complete before `entered`
 * says so, and stays until the rank enters n + 2. No rank does that before all have entered n + 1,
 * and so have finished n. Epochs count the operations entered here; the group's sequence numbers
 * may have gaps, the same on all ranks.
 *
 * Calls with equal digests agree. Calls with different digests may still agree (parts of different
 * size, a fingerprint that only one rank has): then the calls themselves are compared.
 */
#include <string.h>

#include "backend/shm/control.h"

/* --- comparing calls ------------------------------------------------------------------------- */

/* Whether the call is the same to all ranks. */
static bool same_to_all_ranks(const tddp_call *call)
{
    return call->layout != 0 || !tddp_op_has_parts((tddp_op_kind)call->kind);
}

static uint64_t mix(uint64_t digest, uint64_t value)
{
    digest = (digest ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return digest ^ digest >> 32;
}

/* 0 only for calls that must be compared themselves. */
static uint64_t digest_of(const tddp_call *call, const tddp_op *op, int size)
{
    size_t count = call->sends;
    if (!same_to_all_ranks(call) && !tddp_op_is_uniform(op, size, &count)) {
        return 0;
    }
    uint64_t digest = mix(call->sequence, (uint64_t)call->kind << 32 | call->dtype);
    digest = mix(digest, (uint64_t)call->reduce << 32 | (uint32_t)call->root);
    digest = mix(digest, (uint64_t)call->fingerprint << 32 | call->layout);
    digest = mix(digest, count);
    return digest ? digest : 1;
}

/* --- entering -------------------------------------------------------------------------------- */

static uint64_t shared_offset(const tddp_shm *shm, const tddp_buffer *buffer)
{
    size_t bytes = tddp_buffer_bytes(buffer);
    return bytes > 0 ? tddp_shm_offset_of(shm, buffer->data, bytes) : TDDP_SHM_NOT_SHARED;
}

static uint64_t fill_slot(const tddp_shm *shm, const tddp_op *op, tddp_shm_slot *slot)
{
    slot->calls[0] = tddp_call_of(op, shm->rank, 0);
    if (!same_to_all_ranks(&slot->calls[0])) {
        for (int peer = 1; peer < shm->size; peer++) {
            slot->calls[peer] = tddp_call_of(op, shm->rank, peer);
        }
    }
    slot->digest = digest_of(&slot->calls[0], op, shm->size);
    slot->premul = op->premul;
    slot->input = shared_offset(shm, &op->input);
    slot->output = shared_offset(shm, &op->output);
    return (slot->input != TDDP_SHM_NOT_SHARED ? TDDP_SHM_INPUT_SHARED : 0u) |
           (slot->output != TDDP_SHM_NOT_SHARED ? TDDP_SHM_OUTPUT_SHARED : 0u);
}

bool tddp_shm_entered(const tddp_shm *shm, const tddp_op *op)
{
    return shm->sequence == op->sequence;
}

void tddp_shm_enter(tddp_shm *shm, const tddp_op *op, const void *payload, size_t bytes)
{
    shm->op = op;
    if (tddp_shm_entered(shm, op)) {
        return; /* resumed */
    }
    shm->sequence = op->sequence;
    shm->epoch++;
    shm->cursor = (tddp_shm_cursor){0};
    shm->deadline = 0;
    tddp_shm_stop_polling(shm);
    shm->entry_announced = false;
    tddp_shm_slot *slot = tddp_shm_self(shm)->slots[shm->epoch & 1];
    if (bytes > 0) {
        memcpy(slot->payload, payload, bytes);
    }
    shm->flags = fill_slot(shm, op, slot);
    shm->digest = slot->digest;
    atomic_store_explicit(&slot->entered, shm->epoch << TDDP_SHM_FLAG_BITS | shm->flags,
                          memory_order_release);
}

/* --- waiting for all ranks ------------------------------------------------------------------- */

/* A rank's call to another one, of the epoch in its slot. */
static const tddp_call *call_to(const tddp_shm *shm, int from, int to, uint64_t epoch)
{
    const tddp_call *calls = shm->peers[from].slots[epoch & 1]->calls;
    return same_to_all_ranks(calls) ? calls : calls + to;
}

static tddp_calls calls_with(const tddp_shm *shm, int peer, uint64_t epoch)
{
    tddp_calls both = {0};
    if (epoch > 0) {
        both.mine = *call_to(shm, shm->rank, peer, epoch);
        both.theirs = *call_to(shm, peer, shm->rank, epoch);
    }
    return both;
}

static tddp_status compare(const tddp_shm *shm, int peer)
{
    tddp_calls now = calls_with(shm, peer, shm->epoch);
    if (tddp_calls_agree(&now.mine, &now.theirs)) {
        return TDDP_OK;
    }
    tddp_calls before = calls_with(shm, peer, shm->epoch - 1);
    return tddp_calls_mismatch(tddp_shm_rank_name(shm, shm->rank), tddp_shm_rank_name(shm, peer),
                               &now, &before);
}

tddp_status tddp_shm_sync(tddp_shm *shm)
{
    const uint64_t epoch = shm->epoch;
    uint64_t flags = shm->flags;
    for (int peer = 0; peer < shm->size; peer++) {
        const tddp_shm_slot *slot = shm->peers[peer].slots[epoch & 1];
        if (peer == shm->rank) {
            continue;
        }
        uint64_t entered = atomic_load_explicit(&slot->entered, memory_order_acquire);
        if (entered >> TDDP_SHM_FLAG_BITS < epoch) {
            tddp_status status =
                tddp_shm_wait_word(shm, peer, &slot->entered, TDDP_SHM_FLAG_BITS, epoch);
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
    tddp_shm_announce_entry(shm);
    return TDDP_OK;
}

const void *tddp_shm_payload(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].slots[shm->epoch & 1]->payload;
}

double tddp_shm_premul(const tddp_shm *shm, int rank)
{
    return shm->peers[rank].slots[shm->epoch & 1]->premul;
}

const void *tddp_shm_input(const tddp_shm *shm, int rank)
{
    return tddp_shm_address(shm, rank, shm->peers[rank].slots[shm->epoch & 1]->input);
}

void *tddp_shm_output(const tddp_shm *shm, int rank)
{
    return tddp_shm_address(shm, rank, shm->peers[rank].slots[shm->epoch & 1]->output);
}

bool tddp_shm_all_inputs(const tddp_shm *shm)
{
    return shm->flags & TDDP_SHM_INPUT_SHARED;
}

bool tddp_shm_all_outputs(const tddp_shm *shm)
{
    return shm->flags & TDDP_SHM_OUTPUT_SHARED;
}

static void *staging_half(const tddp_shm *shm, int rank, uint64_t epoch)
{
    return shm->peers[rank].view + shm->layout.staging + (epoch & 1) * TDDP_SHM_STAGING_BYTES;
}

void *tddp_shm_staging(const tddp_shm *shm, int rank)
{
    return staging_half(shm, rank, shm->epoch);
}

void *tddp_shm_next_staging(const tddp_shm *shm)
{
    /* Operation n - 1 used it, and all ranks have finished that: they have entered n. */
    return staging_half(shm, shm->rank, shm->epoch + 1);
}

/* --- failed waits ---------------------------------------------------------------------------- */

static bool has_entered(const tddp_shm *shm, int peer)
{
    const tddp_shm_slot *slot = shm->peers[peer].slots[shm->epoch & 1];
    return atomic_load_explicit(&slot->entered, memory_order_acquire) >> TDDP_SHM_FLAG_BITS ==
           shm->epoch;
}

uint64_t tddp_shm_sequence_of(const tddp_shm *shm, int rank, uint64_t epoch)
{
    return epoch > 0 ? call_to(shm, rank, shm->rank, epoch)->sequence : 0;
}

/* Reports who has entered the operation, and what the others have entered last. */
static void observe_entries(const tddp_shm *shm)
{
    for (int peer = 0; peer < shm->size; peer++) {
        tddp_observation seen = {.kind = TDDP_OBSERVED_ENTERED,
                                 .rank = tddp_shm_rank_name(shm, peer)};
        if (!has_entered(shm, peer)) {
            const uint64_t last = shm->epoch - 1;
            seen.kind = TDDP_OBSERVED_NOT_ENTERED;
            seen.sequence = tddp_shm_sequence_of(shm, peer, last);
            seen.text = last > 0
                            ? tddp_op_name((tddp_op_kind)call_to(shm, peer, shm->rank, last)->kind)
                            : NULL;
        }
        if (peer != shm->rank) {
            tddp_observe(&shm->observer, &seen);
        }
    }
}

tddp_status tddp_shm_fail_wait(tddp_shm *shm, tddp_status status, int rank)
{
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted");
    }
    if (status == TDDP_GROUP_FAILED) {
        return tddp_fail(status, "aborted");
    }
    for (int peer = 0; peer < shm->size; peer++) {
        if (peer != shm->rank && has_entered(shm, peer) && compare(shm, peer)) {
            return TDDP_MISMATCH;
        }
    }
    if (status == TDDP_PEER_LOST) {
        return tddp_shm_fail_lost(shm, rank, shm->epoch);
    }
    observe_entries(shm);
    /* A part of an operation has only the rest of its caller's timeout. */
    const tddp_op *reported = shm->op->part_of ? shm->op->part_of : shm->op;
    return tddp_fail(status, "not done after %lld ms; rank %d has not done its part",
                     (long long)reported->timeout_ms, tddp_shm_rank_name(shm, rank));
}
