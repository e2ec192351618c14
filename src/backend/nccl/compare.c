/*
 * Each rank leaves its calls towards all others under one key and reads theirs. On the progress
 * thread, one operation after the other.
 *
 * Invariant: who has read what all say of an operation knows that all have read what was said of
 * the one before: that key goes then.
 */
#include "backend/nccl/compare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

enum { KEY_BYTES = 64, PROBE_MS = 300 };

static bool is_asked_for(void)
{
    const char *level = getenv("TORCH_DISTRIBUTED_DEBUG");
    return level && strcmp(level, "DETAIL") == 0;
}

/* A bundle has a fingerprint of its sizes always; whether it is compared the variable says. */
bool tddp_nccl_compares(const tddp_op *op)
{
    return op->fingerprint != 0 && (op->bundled == 0 || is_asked_for());
}

static tddp_slice key_of(char text[KEY_BYTES], uint64_t sequence, int rank)
{
    int length = snprintf(text, KEY_BYTES, "calls/%" PRIu64 "/%d", sequence, rank);
    return (tddp_slice){text, (size_t)length};
}

static tddp_status compare_with(tddp_nccl_comparer *self, const tddp_op *op, int peer,
                                tddp_nccl_until until)
{
    char text[KEY_BYTES];
    const tddp_slice key = key_of(text, op->sequence, peer);
    tddp_blob blob = {0};
    char lack[128];
    (void)snprintf(lack, sizeof lack,
                   "rank %d has not said what it calls: is it alive, and is "
                   "TORCH_DISTRIBUTED_DEBUG the same on all ranks?",
                   peer);
    tddp_status status = tddp_nccl_await_key(self->store, key, until, lack);
    if (status == TDDP_OK) {
        const tddp_wait left = tddp_nccl_left(until);
        status = tddp_store_get(self->store, key, &left, &blob);
    }
    if (status) {
        return status;
    }
    const tddp_calls before = self->calls[peer];
    tddp_calls *now = &self->calls[peer];
    if (blob.size != (size_t)self->size * sizeof(tddp_call)) {
        status = tddp_fail(TDDP_PROTOCOL, "rank %d said %zu bytes of what it calls: expected %zu",
                           peer, blob.size, (size_t)self->size * sizeof(tddp_call));
    } else {
        now->mine = tddp_call_of(op, self->rank, peer);
        memcpy(&now->theirs, (const char *)blob.data + (size_t)self->rank * sizeof(tddp_call),
               sizeof now->theirs);
        if (!tddp_calls_agree(&now->mine, &now->theirs)) {
            status = tddp_calls_mismatch(self->rank, peer, now, &before);
        }
    }
    tddp_blob_free(&blob);
    return status;
}

static tddp_status say(const tddp_nccl_comparer *self, const tddp_op *op, tddp_nccl_until until)
{
    char text[KEY_BYTES];
    const tddp_wait left = tddp_nccl_left(until);
    tddp_call *mine = calloc((size_t)self->size, sizeof *mine);
    if (!mine) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    for (int peer = 0; peer < self->size; peer++) {
        mine[peer] = tddp_call_of(op, self->rank, peer);
    }
    const tddp_slice words = {(const char *)mine, (size_t)self->size * sizeof *mine};
    tddp_status status =
        tddp_store_set(self->store, key_of(text, op->sequence, self->rank), words, &left);
    free(mine);
    return status;
}

/* What all have read. That it stays is no harm. */
static void forget(tddp_nccl_comparer *self, const tddp_op *op, tddp_nccl_until until)
{
    char text[KEY_BYTES];
    const tddp_wait left = tddp_nccl_left(until);
    int deleted = 0;
    if (self->last != 0) {
        (void)!tddp_store_delete_key(self->store, key_of(text, self->last, self->rank), &left,
                                     &deleted);
    }
    self->last = op->sequence;
}

static tddp_status compare(tddp_nccl_comparer *self, const tddp_op *op, tddp_nccl_until until)
{
    if (!self->calls) {
        self->calls = calloc((size_t)self->size, sizeof *self->calls);
        if (!self->calls) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
        }
    }
    tddp_status status = say(self, op, until);
    for (int peer = 0; peer < self->size && status == TDDP_OK; peer++) {
        if (peer != self->rank) {
            status = compare_with(self, op, peer, until);
        }
    }
    if (status == TDDP_OK) {
        forget(self, op, until);
    }
    return status;
}

/* Whether the server itself has ended, for all ranks, and not this rank's connection alone. */
static bool has_ended(tddp_store *store)
{
    static const tddp_wait briefly = {PROBE_MS, NULL};
    tddp_store *fresh;
    if (tddp_store_clone(store, &briefly, &fresh)) {
        return true;
    }
    tddp_store_release(fresh);
    return false;
}

tddp_status tddp_nccl_compare(tddp_nccl_comparer *self, const tddp_op *op, tddp_nccl_until until)
{
    if (self->gone) {
        return TDDP_OK;
    }
    tddp_status status = compare(self, op, until);
    if (status != TDDP_NETWORK || is_asked_for()) {
        return status;
    }
    char text[512];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (!has_ended(self->store)) {
        return tddp_fail(status, "%s", text);
    }
    tddp_log(TDDP_LOG_INFO, "nccl", "operations are not compared any more: %s", text);
    self->gone = true;
    return TDDP_OK;
}
