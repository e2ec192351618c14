/*
 * Each rank publishes its calls to all other ranks under one key in the store, and reads theirs.
 * Runs on the progress thread, one operation at a time.
 *
 * Invariant: a rank that has read all calls of an operation knows that all ranks have read its
 * calls of the one before, and deletes that key.
 */
#include "backend/nccl/call_check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>

#include "backend/nccl/store_key.h"

enum { KEY_BYTES = 64, PROBE_MS = 300 };

static bool is_debug_detail(void)
{
    const char *level = getenv("TORCH_DISTRIBUTED_DEBUG");
    return level && strcmp(level, "DETAIL") == 0;
}

/* A bundle always has a fingerprint of its sizes; it is compared only in DETAIL mode. */
bool tddp_nccl_checks_calls(const tddp_op *op)
{
    return op->fingerprint != 0 && (op->bundled == 0 || is_debug_detail());
}

static tddp_slice key_of(char text[KEY_BYTES], uint64_t sequence, int rank)
{
    int length = snprintf(text, KEY_BYTES, "calls/%" PRIu64 "/%d", sequence, rank);
    return (tddp_slice){text, (size_t)length};
}

static tddp_status check_peer(tddp_nccl_call_checker *self, const tddp_op *op, int peer,
                              tddp_nccl_limits limits)
{
    char text[KEY_BYTES];
    const tddp_slice key = key_of(text, op->sequence, peer);
    tddp_blob blob = {0};
    char timeout_text[128];
    (void)snprintf(timeout_text, sizeof timeout_text,
                   "rank %d has not published its call: is it alive, and is "
                   "TORCH_DISTRIBUTED_DEBUG the same on all ranks?",
                   peer);
    tddp_status status =
        tddp_nccl_await_key(self->store, &self->own, key, limits, timeout_text, &blob);
    if (status) {
        return status;
    }
    const tddp_calls before = self->calls[peer];
    tddp_calls *now = &self->calls[peer];
    if (blob.size != (size_t)self->size * sizeof(tddp_call)) {
        status = tddp_fail(TDDP_PROTOCOL, "rank %d published a call of %zu bytes: expected %zu",
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

static tddp_status publish_calls(const tddp_nccl_call_checker *self, const tddp_op *op,
                                 tddp_nccl_limits limits)
{
    char text[KEY_BYTES];
    const tddp_wait left = tddp_nccl_time_left(limits);
    tddp_call *mine = calloc((size_t)self->size, sizeof *mine);
    if (!mine) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    for (int peer = 0; peer < self->size; peer++) {
        mine[peer] = tddp_call_of(op, self->rank, peer);
    }
    const tddp_slice value = {(const char *)mine, (size_t)self->size * sizeof *mine};
    tddp_status status =
        tddp_store_set(self->store, key_of(text, op->sequence, self->rank), value, &left);
    free(mine);
    return status;
}

/* Deletes calls that all ranks have read. If that fails, the key may stay. */
static void delete_previous(tddp_nccl_call_checker *self, const tddp_op *op,
                            tddp_nccl_limits limits)
{
    char text[KEY_BYTES];
    const tddp_wait left = tddp_nccl_time_left(limits);
    int deleted = 0;
    if (self->last_published != 0) {
        (void)!tddp_store_delete_key(self->store, key_of(text, self->last_published, self->rank),
                                     &left, &deleted);
    }
    self->last_published = op->sequence;
}

static tddp_status check(tddp_nccl_call_checker *self, const tddp_op *op, tddp_nccl_limits limits)
{
    if (!self->calls) {
        self->calls = calloc((size_t)self->size, sizeof *self->calls);
        if (!self->calls) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
        }
    }
    tddp_status status = publish_calls(self, op, limits);
    for (int peer = 0; peer < self->size && status == TDDP_OK; peer++) {
        if (peer != self->rank) {
            status = check_peer(self, op, peer, limits);
        }
    }
    if (status == TDDP_OK) {
        delete_previous(self, op, limits);
    }
    return status;
}

/* Whether the server itself has ended, for all ranks, or only this rank's connection. */
static bool server_has_ended(tddp_store *store)
{
    static const tddp_wait briefly = {PROBE_MS, NULL};
    tddp_store *fresh;
    if (tddp_store_clone(store, &briefly, &fresh)) {
        return true;
    }
    tddp_store_release(fresh);
    return false;
}

tddp_status tddp_nccl_check_calls(tddp_nccl_call_checker *self, const tddp_op *op,
                                  tddp_nccl_limits limits)
{
    if (self->store_ended) {
        return TDDP_OK;
    }
    tddp_status status = check(self, op, limits);
    if (status != TDDP_NETWORK || is_debug_detail()) {
        return status;
    }
    char text[512];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (!server_has_ended(self->store)) {
        return tddp_fail(status, "%s", text);
    }
    tddp_log(TDDP_LOG_INFO, "nccl", "operations are not compared any more: %s", text);
    self->store_ended = true;
    return TDDP_OK;
}
