/*
 * Before an operation the ranks meet in the store with their calls, and each compares its own with
 * all others'. Runs one operation at a time.
 */
#include "backend/nccl/call_check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/log.h>
#include <tddp/meeting.h>

enum {
    PROBE_MS = 300,
    ABORT_CHECK_MS = 100, /* between looks for an abort while other ranks' calls are awaited */
};

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

/* Compares this rank's call with what another one has given: its calls as all ranks see them, or
 * one, if all see the same. */
static tddp_status check_peer(tddp_nccl_call_checker *self, const tddp_op *op, int peer,
                              tddp_slice record)
{
    const tddp_calls before = self->calls[peer];
    tddp_calls *now = &self->calls[peer];
    const bool one = record.size == sizeof(tddp_call);
    if (!one && record.size != (size_t)self->size * sizeof(tddp_call)) {
        return tddp_fail(TDDP_PROTOCOL, "rank %d published a call of %zu bytes: expected %zu", peer,
                         record.size, (size_t)self->size * sizeof(tddp_call));
    }
    now->mine = tddp_call_of(op, self->rank, peer);
    memcpy(&now->theirs, record.data + (one ? 0 : (size_t)self->rank) * sizeof(tddp_call),
           sizeof now->theirs);
    return tddp_calls_agree(&now->mine, &now->theirs)
               ? TDDP_OK
               : tddp_calls_mismatch(self->rank, peer, now, &before);
}

static tddp_status give_calls(const tddp_nccl_call_checker *self, const tddp_op *op,
                              const tddp_meeting_opts *opts, tddp_nccl_limits limits)
{
    const tddp_wait left = {tddp_deadline_poll_ms(limits.deadline_ns), NULL}; /* once */
    tddp_meeting *meeting = NULL;
    tddp_call *mine = calloc((size_t)self->size, sizeof *mine);
    if (!mine) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    size_t count = 1; /* the records of many ranks together are a value of the store */
    for (int peer = 0; peer < self->size; peer++) {
        mine[peer] = tddp_call_of(op, self->rank, peer);
        if (memcmp(&mine[peer], &mine[0], sizeof *mine) != 0) {
            count = (size_t)self->size;
        }
    }
    const tddp_slice record = {(const char *)mine, count * sizeof *mine};
    tddp_status status = tddp_meeting_open(opts, &meeting);
    status = status ? status : tddp_meeting_give(meeting, record, &left);
    tddp_meeting_close(meeting);
    free(mine);
    return status;
}

static tddp_status await_calls(tddp_meeting *meeting, tddp_nccl_limits limits)
{
    const int64_t start = tddp_now_ns();
    const tddp_wait left = tddp_nccl_time_left(limits);
    char missing[TDDP_MEETING_TEXT_BYTES];
    tddp_status status = tddp_meeting_await(meeting, &left);
    if (status == TDDP_TIMEOUT && tddp_meeting_missing(meeting, missing) > 0) {
        return tddp_fail(status,
                         "timed out after %" PRId64 " ms: rank(s) %s did not publish their calls: "
                         "are they alive, and is TORCH_DISTRIBUTED_DEBUG the same on all ranks?",
                         (tddp_now_ns() - start) / TDDP_NS_PER_MS, missing);
    }
    return status;
}

/* All ranks have given their calls of this operation, so none needs those of the one before. */
static void remove_previous(tddp_nccl_call_checker *self, const tddp_meeting_opts *opts,
                            uint64_t sequence, tddp_nccl_limits limits)
{
    char name[TDDP_NCCL_CALL_NAME_BYTES];
    const tddp_wait left = tddp_nccl_time_left(limits);
    tddp_meeting_opts previous = *opts;
    previous.name = name;
    (void)snprintf(name, sizeof name, "calls/%" PRIu64, self->last);
    if (self->rank == 0 && self->last != 0 && tddp_meeting_remove(&previous, &left)) {
        tddp_log(TDDP_LOG_DEBUG, "nccl", "calls stay in the store: %s", tddp_error_message());
    }
    self->last = sequence;
}

static tddp_status check_aborted(void *aborted)
{
    return atomic_load((const atomic_bool *)aborted) ? tddp_nccl_fail_aborted("comparing calls")
                                                     : TDDP_OK;
}

static tddp_meeting_opts opts_of(const tddp_nccl_call_checker *self)
{
    return (tddp_meeting_opts){.store = self->own ? self->own : self->store,
                               .name = self->name,
                               .rank = self->rank,
                               .world_size = self->size,
                               .sender = TDDP_MEETING_ALL,
                               .check = check_aborted,
                               .data = (void *)(uintptr_t)self->aborted,
                               .check_ms = ABORT_CHECK_MS};
}

/* Gives this rank's calls, and opens the meeting in which it gets the others'. */
static tddp_status begin(tddp_nccl_call_checker *self, const tddp_op *op, tddp_nccl_limits limits)
{
    tddp_meeting_opts opts = opts_of(self);
    opts.store = self->store;
    if (!self->calls) {
        self->calls = calloc((size_t)self->size, sizeof *self->calls);
        if (!self->calls) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
        }
    }
    (void)snprintf(self->name, sizeof self->name, "calls/%" PRIu64, op->sequence);
    tddp_status status = give_calls(self, op, &opts, limits);
    if (status == TDDP_OK && !self->own) {
        /* A connection of its own: a wait would keep that of the group from other threads. */
        const tddp_wait left = {tddp_deadline_poll_ms(limits.deadline_ns), NULL};
        status = tddp_store_clone(self->store, &left, &self->own);
    }
    opts = opts_of(self);
    return status ? status : tddp_meeting_open(&opts, &self->meeting);
}

static tddp_status check(tddp_nccl_call_checker *self, const tddp_op *op, tddp_nccl_limits limits)
{
    tddp_status status = self->meeting ? TDDP_OK : begin(self, op, limits);
    if (status) {
        return status;
    }
    status = await_calls(self->meeting, limits);
    if (status == TDDP_CANCELED) {
        return status;
    }
    for (int peer = 0; peer < self->size && status == TDDP_OK; peer++) {
        if (peer != self->rank) {
            status = check_peer(self, op, peer, tddp_meeting_records(self->meeting)[peer]);
        }
    }
    tddp_meeting_close(self->meeting);
    self->meeting = NULL;
    if (status == TDDP_OK) {
        const tddp_meeting_opts opts = opts_of(self);
        remove_previous(self, &opts, op->sequence, limits);
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
    /* It is called again if the launch is interrupted later, while ranks connect. */
    if (self->store_ended || self->last == op->sequence) {
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
