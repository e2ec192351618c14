/*
 * The `fake` backend's collectives over a store. A context is used by one progress thread; abort()
 * comes from any thread and only triggers a cancel token.
 *
 * Invariant: every rank sets one key for every operation, `op/<sequence>/<rank>`: what it was
 * asked, then its bytes. Once a rank has read all keys of operation n, all ranks are done with n -
 * 1, so it removes its own key of that.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/fake/faults.h"
#include "base/base.h"

enum { KEY_BYTES = 64, TELL_MS = 1000 };

typedef struct context {
    int rank;
    int world_size;
    tddp_store *store;
    tddp_cancel *cancel;
    tddp_fake_faults faults;
} context;

/* Precedes each rank's bytes: what it believes the operation to be. */
typedef struct header {
    uint32_t kind;
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
    uint64_t count;
} header;

static tddp_slice key_of(char text[KEY_BYTES], uint64_t sequence, int rank)
{
    int length = snprintf(text, KEY_BYTES, "op/%" PRIu64 "/%d", sequence, rank);
    return (tddp_slice){text, (size_t)length};
}

static header header_of(const tddp_op *op)
{
    bool reduces = op->kind == TDDP_OP_ALL_REDUCE || op->kind == TDDP_OP_REDUCE_SCATTER;
    return (header){
        .kind = (uint32_t)op->kind,
        .dtype = (uint32_t)op->input.dtype,
        .reduce = reduces ? (uint32_t)op->reduce : 0,
        .root = op->kind == TDDP_OP_BROADCAST ? op->root : 0,
        .count = op->input.count,
    };
}

/* An aborted group's store calls end as canceled; what they mean to the operation is this. */
static tddp_status translate(const context *self, tddp_status status, const tddp_op *op)
{
    if (status == TDDP_CANCELED && tddp_cancel_triggered(self->cancel)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(TDDP_TIMEOUT, "not done after %" PRId64 " ms (%s)", op->timeout_ms,
                         tddp_error_message());
    }
    return status;
}

static tddp_status publish(context *self, const tddp_op *op, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    header head = header_of(op);
    tddp_bytes value = {0};
    bool sends =
        op->kind != TDDP_OP_BARRIER && (op->kind != TDDP_OP_BROADCAST || op->root == self->rank);
    size_t bytes = sends ? op->input.count * tddp_dtype_size(op->input.dtype) : 0;
    tddp_status status = tddp_bytes_append(&value, &head, sizeof head);
    if (status == TDDP_OK && bytes > 0) {
        status = tddp_bytes_append(&value, op->input.data, bytes);
        if (status == TDDP_OK && op->reduce == TDDP_REDUCE_PREMUL_SUM) {
            /* The header keeps the elements aligned: it is 24 bytes and malloc's are 16-aligned. */
            tddp_scale(op->input.dtype, value.data + sizeof head, op->input.count, op->premul);
        }
    }
    if (status == TDDP_OK) {
        status = tddp_store_set(self->store, key_of(key, op->sequence, self->rank),
                                (tddp_slice){value.data, value.size}, wait);
    }
    tddp_bytes_free(&value);
    return status;
}

static tddp_status check_header(const context *self, const tddp_op *op, int peer,
                                const tddp_blob *value)
{
    header mine = header_of(op);
    header theirs;
    if (value->size < sizeof theirs) {
        return tddp_fail(TDDP_INTERNAL, "rank %d sent %zu bytes, expected a header of %zu", peer,
                         value->size, sizeof theirs);
    }
    memcpy(&theirs, value->data, sizeof theirs);
    if (memcmp(&mine, &theirs, sizeof mine) == 0) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_MISMATCH,
                     "rank %d runs %s (%s, %s, root %d) on %" PRIu64 " elements, rank %d runs %s "
                     "(%s, %s, root %d) on %" PRIu64 " elements",
                     self->rank, tddp_op_name(op->kind), tddp_dtype_name(op->input.dtype),
                     tddp_reduce_op_name((tddp_reduce_op)mine.reduce), mine.root, mine.count, peer,
                     tddp_op_name((tddp_op_kind)theirs.kind),
                     tddp_dtype_name((tddp_dtype)theirs.dtype),
                     tddp_reduce_op_name((tddp_reduce_op)theirs.reduce), theirs.root, theirs.count);
}

/* Puts what `peer` contributes into the result; called for all ranks in their order. */
static void combine(const context *self, const tddp_op *op, int peer, const char *data)
{
    size_t size = tddp_dtype_size(op->input.dtype);
    char *output = op->output.data;
    size_t count = op->output.count;
    switch (op->kind) {
    case TDDP_OP_BROADCAST:
        if (peer == op->root && count > 0) {
            memcpy(output, data, count * size);
        }
        break;
    case TDDP_OP_ALL_GATHER:
        if (op->input.count > 0) {
            memcpy(output + (size_t)peer * op->input.count * size, data, op->input.count * size);
        }
        break;
    case TDDP_OP_REDUCE_SCATTER:
        data += (size_t)self->rank * count * size;
        /* fall through */
    case TDDP_OP_ALL_REDUCE:
        if (peer == 0 && count > 0) {
            memcpy(output, data, count * size);
        } else {
            tddp_combine(op->reduce, op->input.dtype, output, data, count);
        }
        break;
    default:
        break;
    }
}

/* Reads every rank's key before the result is touched: it may be the same memory as the input. */
static tddp_status collect(context *self, const tddp_op *op, const tddp_wait *wait,
                           tddp_blob *values)
{
    char key[KEY_BYTES];
    for (int peer = 0; peer < self->world_size; peer++) {
        tddp_status status =
            tddp_store_get(self->store, key_of(key, op->sequence, peer), wait, &values[peer]);
        if (status == TDDP_OK) {
            status = check_header(self, op, peer, &values[peer]);
        }
        if (status) {
            return status;
        }
    }
    for (int peer = 0; peer < self->world_size; peer++) {
        combine(self, op, peer, values[peer].data + sizeof(header));
    }
    if (op->kind != TDDP_OP_BARRIER && op->reduce == TDDP_REDUCE_AVG) {
        tddp_scale(op->output.dtype, op->output.data, op->output.count, 1.0 / self->world_size);
    }
    return TDDP_OK;
}

static tddp_status exchange(context *self, const tddp_op *op, const tddp_wait *wait)
{
    tddp_blob *values = tddp_alloc_array((size_t)self->world_size, sizeof *values);
    if (!values) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = publish(self, op, wait);
    if (status == TDDP_OK) {
        status = collect(self, op, wait, values);
    }
    for (int peer = 0; peer < self->world_size; peer++) {
        tddp_blob_free(&values[peer]);
    }
    free(values);
    return status;
}

static void forget(context *self, uint64_t sequence)
{
    char key[KEY_BYTES];
    int deleted;
    tddp_wait wait = {TELL_MS, self->cancel};
    /* The key is of no use any more; that it stays if the store is gone harms nobody. */
    if (tddp_store_delete_key(self->store, key_of(key, sequence, self->rank), &wait, &deleted)) {
        tddp_log(TDDP_LOG_DEBUG, "fake", "%s", tddp_error_message());
    }
}

static tddp_status run(void *data, const tddp_op *op)
{
    context *self = data;
    tddp_wait wait = {op->timeout_ms, self->cancel};
    tddp_op plain = *op;
    if (op->kind != TDDP_OP_ALL_REDUCE && op->kind != TDDP_OP_REDUCE_SCATTER) {
        plain.reduce = TDDP_REDUCE_SUM;
    }
    tddp_status status = tddp_fake_before(&self->faults, op, self->cancel);
    if (status == TDDP_OK) {
        status = exchange(self, &plain, &wait);
    }
    if (status == TDDP_OK && op->sequence > 1) {
        forget(self, op->sequence - 1);
    }
    return translate(self, status, op);
}

static void destroy(void *data)
{
    context *self = data;
    if (self) {
        tddp_store_release(self->store);
        tddp_cancel_free(self->cancel);
        free(self);
    }
}

static void stop(void *data)
{
    context *self = data;
    tddp_cancel_trigger(self->cancel);
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    (void)wait;
    context *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    tddp_status status = tddp_fake_read_faults(opts->rank, &self->faults);
    if (status == TDDP_OK && self->faults.create_fail) {
        status = tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    if (status == TDDP_OK) {
        status = tddp_cancel_create(&self->cancel);
    }
    if (status) {
        destroy(self);
        return status;
    }
    self->store = tddp_store_retain(opts->store);
    *out = self;
    return TDDP_OK;
}

const tddp_backend_v1 *tddp_fake_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "fake",
        .device_types = 1u << TDDP_CPU,
        .create = create,
        .abort = stop,
        .destroy = destroy,
        .op_count = TDDP_OP_COUNT,
        .run = {run, run, run, run, run},
    };
    return &backend;
}
