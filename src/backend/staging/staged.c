/*
 * An operation on copies: memory for them, the copies in, the inner backend's operation, the copies
 * out. Runs on the thread that executes the operation, or posts or finishes a message.
 *
 * Invariants: what a rank doesn't send isn't copied in, and what it doesn't receive isn't copied
 * out. Memory with copies that are not known to have ended is not used again.
 */
#include <stdlib.h>

#include "backend/staging/staging.h"

/* --- what is copied -------------------------------------------------------------------------- */

static bool sends(const tddp_staging *owner, const tddp_op *op)
{
    bool at_root = op->root == owner->rank;
    bool only_root = op->kind == TDDP_OP_BROADCAST || op->kind == TDDP_OP_SCATTER;
    return op->kind != TDDP_OP_RECV && (!only_root || at_root);
}

static bool receives(const tddp_staging *owner, const tddp_op *op)
{
    bool at_root = op->root == owner->rank;
    bool only_root = op->kind == TDDP_OP_REDUCE || op->kind == TDDP_OP_GATHER;
    bool only_others = op->kind == TDDP_OP_BROADCAST;
    return op->kind != TDDP_OP_SEND && (!only_root || at_root) && (!only_others || !at_root);
}

/* The buffers of one side; contiguous parts as one. */
static void add_side(tddp_staging_layout *layout, const tddp_buffer *whole,
                     const tddp_buffer *parts, size_t count, bool in, bool out)
{
    if (whole->data || !parts) {
        tddp_staging_layout_add(layout, whole, in, out);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        tddp_staging_layout_add(layout, &parts[i], in, out);
    }
}

static void collect(const tddp_staging *owner, const tddp_op *op, tddp_staging_layout *layout)
{
    const size_t world = (size_t)owner->world_size;
    bool in = sends(owner, op);
    bool out = receives(owner, op);
    if (op->bundled > 0) {
        add_side(layout, &op->input, op->output_parts, op->bundled, true, true);
    } else if (op->input.data && op->input.data == op->output.data &&
               op->input.count == op->output.count && !op->input_parts && !op->output_parts) {
        tddp_staging_layout_add(layout, &op->input, in, out);
    } else {
        add_side(layout, &op->input, op->input_parts, world, in, false);
        add_side(layout, &op->output, op->output_parts, world, false, out);
    }
}

/* --- the inner backend's operation ----------------------------------------------------------- */

static tddp_buffer moved(const tddp_staged *self, tddp_buffer buffer)
{
    buffer.device_type = self->type;
    buffer.device_index = self->type == TDDP_CUDA ? self->device : 0;
    buffer.stream = self->block ? self->block->stream : NULL;
    if (buffer.data && buffer.count > 0) {
        buffer.data = self->block->data + tddp_staging_layout_find(&self->layout, buffer.data);
    }
    return buffer;
}

/* Moves parts, which may be contiguous only there; `*whole` is then all of them. */
static void move_parts(const tddp_staged *self, const tddp_buffer *from, tddp_buffer *into,
                       size_t count, tddp_buffer *whole)
{
    for (size_t i = 0; i < count; i++) {
        into[i] = moved(self, from[i]);
    }
    *whole = tddp_buffers_joined(into, count);
}

/* A backend on the host combines only single buffers: there the copies are one. */
static void set_bundle(tddp_staged *self)
{
    tddp_op *op = &self->op;
    op->output = op->input;
    op->output_parts = self->type == TDDP_CPU ? NULL : op->output_parts;
    op->bundled = self->type == TDDP_CPU ? 0 : op->bundled;
}

static tddp_status translate(tddp_staged *self)
{
    const tddp_op *from = self->requested;
    const size_t world = (size_t)self->owner->world_size;
    const size_t inputs = from->input_parts ? world : 0;
    const size_t outputs = from->bundled > 0 ? from->bundled : from->output_parts ? world : 0;
    tddp_op *op = &self->op;
    *op = *from;
    op->prepared = NULL;
    op->input = moved(self, from->input);
    op->output = moved(self, from->output);
    if (inputs + outputs == 0) {
        return TDDP_OK;
    }
    self->parts = tddp_alloc_array(inputs + outputs, sizeof *self->parts);
    if (!self->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (inputs > 0) {
        op->input_parts = self->parts;
        move_parts(self, from->input_parts, self->parts, inputs, &op->input);
    }
    if (outputs > 0) {
        tddp_buffer *whole = from->bundled > 0 ? &op->input : &op->output;
        op->output_parts = self->parts + inputs;
        move_parts(self, from->output_parts, self->parts + inputs, outputs, whole);
    }
    if (from->bundled > 0) {
        set_bundle(self);
    }
    return TDDP_OK;
}

const tddp_op *tddp_staged_inner_op(tddp_staged *self)
{
    int64_t left = (self->deadline - tddp_now_ns()) / TDDP_NS_PER_MS;
    self->op.sequence = self->requested->sequence;
    self->op.cancel = self->requested->cancel;
    self->op.awaited = self->requested->awaited;
    self->op.timeout_ms = left > 0 ? left : 1;
    return &self->op;
}

/* --- the steps ------------------------------------------------------------------------------- */

tddp_status tddp_staged_create(tddp_staging *owner, const tddp_op *op, tddp_staged **out)
{
    const tddp_cuda *cuda;
    tddp_status status = tddp_cuda_get(&cuda);
    if (status) {
        return status;
    }
    tddp_staged *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    int device = atomic_load(&owner->device);
    self->owner = owner;
    self->cuda = cuda;
    self->requested = op;
    self->type = op->input.device_type == TDDP_CPU ? TDDP_CUDA : TDDP_CPU;
    self->device = self->type == TDDP_CPU ? op->input.device_index : device >= 0 ? device : 0;
    self->deadline = tddp_deadline_after_ms(op->timeout_ms);
    *out = self;
    return TDDP_OK;
}

/* Allocates everything and starts the copies. The device is current. */
static tddp_status begin(tddp_staged *self)
{
    const tddp_op *op = self->requested;
    const bool bundled = op->bundled > 0;
    const size_t max_count = bundled ? op->bundled : 2 * (size_t)self->owner->world_size;
    tddp_status status = tddp_staging_layout_init(&self->layout, max_count, bundled);
    if (status) {
        return status;
    }
    collect(self->owner, op, &self->layout);
    status = tddp_staging_layout_compute(&self->layout, tddp_dtype_size(op->input.dtype));
    if (status == TDDP_OK && self->layout.bytes > 0) {
        status = tddp_staging_block_pool_take(&self->owner->block_pool, self->cuda, self->type,
                                              self->device, self->layout.bytes, &self->block);
    }
    if (status == TDDP_OK) {
        status = translate(self);
    }
    return status ? status : tddp_staging_copies_begin(self, true);
}

/* Goes to stage `copying` from the one before it by `start`, and waits for the copies. */
static tddp_status copy(tddp_staged *self, tddp_staging_stage copying,
                        tddp_status (*start)(tddp_staged *self))
{
    tddp_cuda_place before;
    tddp_status status = tddp_cuda_enter(self->cuda, self->device, &before);
    if (status) {
        return status;
    }
    if (self->stage < copying) {
        self->stage = copying;
        status = start(self);
    }
    if (status == TDDP_OK) {
        status = tddp_staging_copies_await(self);
    }
    tddp_cuda_leave(self->cuda, &before);
    return status;
}

tddp_status tddp_staged_copy_in(tddp_staged *self)
{
    if (self->stage >= TDDP_STAGING_READY) {
        return TDDP_OK;
    }
    tddp_status status = copy(self, TDDP_STAGING_COPYING_IN, begin);
    if (status == TDDP_OK) {
        self->stage = TDDP_STAGING_READY;
    }
    return status;
}

static tddp_status begin_out(tddp_staged *self)
{
    return tddp_staging_copies_begin(self, false);
}

tddp_status tddp_staged_copy_out(tddp_staged *self)
{
    return self->block ? copy(self, TDDP_STAGING_COPYING_OUT, begin_out) : TDDP_OK;
}

/* Whether the copies are unused. An operation that was refused doesn't use them; one that failed
 * may, on a peer or a device, until the inner context is destroyed. */
static bool is_idle(const tddp_staged *self, tddp_status status)
{
    bool refused = status == TDDP_INVALID_ARGUMENT || status == TDDP_UNSUPPORTED;
    return (status == TDDP_OK || refused) && !self->block->copying;
}

void tddp_staged_end(tddp_staged *self, tddp_status status)
{
    if (self->block) {
        tddp_staging_block_pool_return(&self->owner->block_pool, self->block,
                                       is_idle(self, status));
    }
    tddp_staging_layout_free(&self->layout);
    free(self->parts);
    free(self);
}
