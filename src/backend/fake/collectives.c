/*
 * The `fake` backend's collectives, over a store. Runs on a thread lent to the queue.
 *
 * Invariant: for every operation every rank sets a key, `op/<sequence>/<rank>`: its call, how many
 * elements it sends to and expects from each rank, and its data. Each rank reads all keys and
 * compares every pair of ranks, so that all see the same errors, and only then writes its result. A
 * rank that has read all keys of an operation removes its own key of the one before, since all
 * ranks have finished that.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/fake/context.h"

enum { KEY_BYTES = 64, TELL_MS = 1000 };

typedef tddp_fake_context context;

/* Precedes each rank's data: its call. Two numbers for each rank follow: elements sent to it,
 * elements expected from it. */
typedef struct header {
    uint32_t kind;
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
    uint32_t fingerprint;
    uint32_t zero;
    uint64_t count; /* if equal for all ranks */
} header;

/* A rank's value, parsed. */
typedef struct contribution {
    tddp_blob value;
    const header *head;
    const uint64_t *sends;
    const uint64_t *expects;
    const char *data;
} contribution;

static tddp_slice key_of(char text[KEY_BYTES], uint64_t sequence, int rank)
{
    int length = snprintf(text, KEY_BYTES, "op/%" PRIu64 "/%d", sequence, rank);
    return (tddp_slice){text, (size_t)length};
}

/* For operations whose parts may differ in size the header has no count: the numbers are
 * compared. */
static header header_of(const tddp_op *op)
{
    return (header){
        .kind = (uint32_t)op->kind,
        .dtype = (uint32_t)op->input.dtype,
        .reduce = tddp_op_reduces(op->kind) ? (uint32_t)op->reduce : 0,
        .root = tddp_op_has_root(op->kind) ? op->root : 0,
        .fingerprint = op->fingerprint,
        .count = tddp_op_has_parts(op->kind) ? 0 : op->input.count,
    };
}

static tddp_status append_buffer(tddp_bytes *value, const tddp_buffer *buffer)
{
    return tddp_bytes_append(value, buffer->data, buffer->count * tddp_dtype_size(buffer->dtype));
}

/* This rank's data: its parts in order, or one buffer. */
static tddp_status append_data(const context *self, const tddp_op *op, tddp_bytes *value)
{
    if (op->kind == TDDP_OP_BARRIER || (op->kind == TDDP_OP_BROADCAST && op->root != self->rank)) {
        return TDDP_OK;
    }
    if (!op->input_parts) {
        return append_buffer(value, &op->input);
    }
    tddp_status status = TDDP_OK;
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        status = append_buffer(value, &op->input_parts[peer]);
    }
    return status;
}

static tddp_status build(const context *self, const tddp_op *op, tddp_bytes *value)
{
    header head = header_of(op);
    tddp_status status = tddp_bytes_append(value, &head, sizeof head);
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        uint64_t count = tddp_op_sends(op, self->rank, peer).count;
        status = tddp_bytes_append(value, &count, sizeof count);
    }
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        uint64_t count = tddp_op_receives(op, self->rank, peer).count;
        status = tddp_bytes_append(value, &count, sizeof count);
    }
    size_t start = value->size;
    if (status == TDDP_OK) {
        status = append_data(self, op, value);
    }
    if (status == TDDP_OK && tddp_op_reduces(op->kind) && op->reduce == TDDP_REDUCE_PREMUL_SUM) {
        /* The header's size is a multiple of 8 bytes, which keeps the elements aligned. */
        size_t size = tddp_dtype_size(op->input.dtype);
        tddp_scale(op->input.dtype, value->data + start, (value->size - start) / size, op->premul);
    }
    return status;
}

static tddp_status publish(const context *self, const tddp_op *op, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    tddp_bytes value = {0};
    tddp_status status = build(self, op, &value);
    if (status == TDDP_OK) {
        status = tddp_store_set(self->store, key_of(key, op->sequence, self->rank),
                                (tddp_slice){value.data, value.size}, wait);
    }
    tddp_bytes_free(&value);
    return status;
}

/* The size that a rank's data must have according to its header. */
static uint64_t bytes_sent(const context *self, const contribution *from, int rank)
{
    tddp_op_kind kind = (tddp_op_kind)from->head->kind;
    uint64_t size = tddp_dtype_size((tddp_dtype)from->head->dtype);
    uint64_t count = from->head->count;
    if (kind == TDDP_OP_BARRIER || (kind == TDDP_OP_BROADCAST && from->head->root != rank)) {
        return 0;
    }
    if (kind == TDDP_OP_ALL_GATHER) {
        return from->sends[0] * size;
    }
    for (int peer = 0; tddp_op_has_parts(kind) && peer < self->world_size; peer++) {
        count += from->sends[peer];
    }
    return count * size;
}

static tddp_status read_value(const context *self, int rank, contribution *from)
{
    const tddp_blob *value = &from->value;
    size_t start = sizeof(header) + 2 * (size_t)self->world_size * sizeof(uint64_t);
    if (value->size >= start) {
        /* A blob has its own allocation, so its data are aligned. */
        from->head = (const header *)(const void *)value->data;
        from->sends = (const uint64_t *)(const void *)(value->data + sizeof(header));
        from->expects = from->sends + self->world_size;
        from->data = value->data + start;
    }
    if (!from->head || bytes_sent(self, from, rank) != value->size - start) {
        return tddp_fail(TDDP_INTERNAL, "rank %d left %zu bytes, which do not fit what they say",
                         rank, value->size);
    }
    return TDDP_OK;
}

static tddp_status check_heads(const header *mine, int rank, const header *theirs, int peer)
{
    header plain[2] = {*mine, *theirs};
    bool described = mine->fingerprint && theirs->fingerprint;
    plain[0].fingerprint = plain[1].fingerprint = 0;
    if (memcmp(&plain[0], &plain[1], sizeof plain[0]) != 0) {
        return tddp_fail(
            TDDP_MISMATCH,
            "rank %d runs %s (%s, %s, root %d) on %" PRIu64 " elements, rank %d runs "
            "%s (%s, %s, root %d) on %" PRIu64 " elements",
            rank, tddp_op_name((tddp_op_kind)mine->kind), tddp_dtype_name((tddp_dtype)mine->dtype),
            tddp_reduce_op_name((tddp_reduce_op)mine->reduce), mine->root, mine->count, peer,
            tddp_op_name((tddp_op_kind)theirs->kind), tddp_dtype_name((tddp_dtype)theirs->dtype),
            tddp_reduce_op_name((tddp_reduce_op)theirs->reduce), theirs->root, theirs->count);
    }
    if (described && mine->fingerprint != theirs->fingerprint) {
        return tddp_fail(TDDP_MISMATCH, "rank %d and rank %d describe it differently", rank, peer);
    }
    return TDDP_OK;
}

/* Checks every pair of ranks, so that all ranks see a mismatch. */
static tddp_status check_pieces(const context *self, const contribution *all)
{
    for (int from = 0; from < self->world_size; from++) {
        for (int to = 0; to < self->world_size; to++) {
            if (all[from].sends[to] != all[to].expects[from]) {
                return tddp_fail(TDDP_MISMATCH,
                                 "rank %d sends %" PRIu64 " elements to rank %d, which expects "
                                 "%" PRIu64,
                                 from, all[from].sends[to], to, all[to].expects[from]);
            }
        }
    }
    return TDDP_OK;
}

static void copy(const tddp_buffer *to, const char *data)
{
    if (to->count > 0) {
        memcpy(to->data, data, to->count * tddp_dtype_size(to->dtype));
    }
}

/* The offset of this rank's part in another rank's data. */
static const char *part_for(const context *self, const contribution *from)
{
    uint64_t before = 0;
    for (int peer = 0; peer < self->rank; peer++) {
        before += from->sends[peer];
    }
    return from->data + before * tddp_dtype_size((tddp_dtype)from->head->dtype);
}

/* Adds the data of `peer` to the result; called for all ranks in order. */
static void combine(const context *self, const tddp_op *op, int peer, const contribution *from)
{
    const char *data = from->data;
    switch (op->kind) {
    case TDDP_OP_BROADCAST:
        if (peer == op->root) {
            copy(&op->output, data);
        }
        break;
    case TDDP_OP_SCATTER:
        if (peer == op->root) {
            copy(&op->output, part_for(self, from));
        }
        break;
    case TDDP_OP_ALL_TO_ALL:
        copy(&op->output_parts[peer], part_for(self, from));
        break;
    case TDDP_OP_ALL_GATHER:
    case TDDP_OP_GATHER:
        if (op->output_parts) {
            copy(&op->output_parts[peer], data);
        }
        break;
    case TDDP_OP_REDUCE_SCATTER:
        data = part_for(self, from);
        /* fall through */
    case TDDP_OP_REDUCE:
    case TDDP_OP_ALL_REDUCE:
        if (op->kind == TDDP_OP_REDUCE && op->root != self->rank) {
            break;
        }
        if (peer == 0) {
            copy(&op->output, data);
        } else {
            tddp_combine(op->reduce, op->output.dtype, op->output.data, data, op->output.count);
        }
        break;
    default:
        break;
    }
}

/* Sets the text for a timeout: the missing ranks. */
static tddp_status name_missing(const context *self, const tddp_op *op)
{
    tddp_bytes ranks = {0};
    for (int peer = 0; peer < self->world_size; peer++) {
        char key[KEY_BYTES];
        char text[16];
        tddp_slice name = key_of(key, op->sequence, peer);
        tddp_wait wait = {TELL_MS, self->cancel};
        int there = 0;
        if (tddp_store_check(self->store, &name, 1, &wait, &there) == TDDP_OK && !there) {
            int length = snprintf(text, sizeof text, ranks.size ? ", %d" : "%d", peer);
            if (tddp_bytes_append(&ranks, text, (size_t)length)) {
                break;
            }
        }
    }
    tddp_status status = tddp_fail(
        TDDP_TIMEOUT, "not done after %" PRId64 " ms: waiting for rank(s) %.*s", op->timeout_ms,
        ranks.size ? (int)ranks.size : 7, ranks.size ? ranks.data : "unknown");
    tddp_bytes_free(&ranks);
    return status;
}

/* Reads every rank's key before it writes the result, which may be the same memory as the input. */
static tddp_status collect(const context *self, const tddp_op *op, const tddp_wait *wait,
                           contribution *all)
{
    tddp_status status = TDDP_OK;
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        char key[KEY_BYTES];
        status =
            tddp_store_get(self->store, key_of(key, op->sequence, peer), wait, &all[peer].value);
        if (status == TDDP_TIMEOUT) {
            status = name_missing(self, op);
        }
        if (status == TDDP_OK) {
            status = read_value(self, peer, &all[peer]);
        }
    }
    header mine = header_of(op);
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        status = check_heads(&mine, self->rank, all[peer].head, peer);
    }
    if (status == TDDP_OK) {
        status = check_pieces(self, all);
    }
    for (int peer = 0; peer < self->world_size && status == TDDP_OK; peer++) {
        combine(self, op, peer, &all[peer]);
    }
    bool result = op->kind != TDDP_OP_REDUCE || op->root == self->rank;
    if (status == TDDP_OK && result && tddp_op_reduces(op->kind) && op->reduce == TDDP_REDUCE_AVG) {
        tddp_scale(op->output.dtype, op->output.data, op->output.count, 1.0 / self->world_size);
    }
    return status;
}

static tddp_status exchange(const context *self, const tddp_op *op)
{
    size_t world = (size_t)self->world_size;
    tddp_wait wait = {op->timeout_ms, self->cancel};
    contribution *all = tddp_alloc_array(world, sizeof *all);
    if (!all) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = publish(self, op, &wait);
    if (status == TDDP_OK) {
        status = collect(self, op, &wait, all);
    }
    for (size_t peer = 0; peer < world; peer++) {
        tddp_blob_free(&all[peer].value);
    }
    free(all);
    return status;
}

static void forget(const context *self, uint64_t sequence)
{
    char key[KEY_BYTES];
    int deleted;
    tddp_wait wait = {TELL_MS, self->cancel};
    /* If the store is gone, the key may stay. */
    if (tddp_store_delete_key(self->store, key_of(key, sequence, self->rank), &wait, &deleted)) {
        tddp_log(TDDP_LOG_DEBUG, "fake", "%s", tddp_error_message());
    }
}

tddp_status tddp_fake_run(void *data, const tddp_op *op)
{
    const context *self = data;
    tddp_status status = tddp_fake_before(&self->faults, op, self->cancel);
    if (status == TDDP_OK) {
        status = exchange(self, op);
    }
    if (status == TDDP_OK && op->sequence > 1) {
        forget(self, op->sequence - 1);
    }
    return tddp_fake_translate(self, status);
}
