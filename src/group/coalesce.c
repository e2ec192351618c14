/*
 * Carrying out operations, and several buffers combined in one of them. A device takes them all at
 * once; else small ones go together: whoever carries it out copies them into staging memory of the
 * work, has that combined, and copies it back; where they adjoin in memory, nothing is copied.
 * Large ones go by themselves, one after the other.
 *
 * Invariant: what goes together follows from the sizes alone, which are equal on all ranks; where
 * the buffers lie may differ. Each step has a sequence number of its own. If one fails the work has
 * failed: buffers of earlier steps hold results then, those of that step and later ones do not.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>

#include "group/checks.h"
#include "group/staging.h"

enum {
    /* A copy of that much takes a small part of the time that the combining takes; above it the
     * time of a step that is saved is small beside the bytes'. */
    TOGETHER_BYTES = 1 << 20,
    TEXT_BYTES = 256,
};

typedef struct tddp_group_bundle {
    const tddp_buffer *buffers; /* each in place; the work's parts */
    size_t count;
    bool on_host;  /* the backend finds them in host memory */
    char *staging; /* where small buffers go together; NULL: none need to */
    tddp_op op;    /* of the step */
    size_t at;     /* buffers that are done */
    size_t taken;  /* by the step that has begun; 0: none has */
    bool copies;   /* they are in the staging memory */
} bundle;

static size_t bytes_of(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

/* How many of the buffers the next step takes. We cannot copy a device's memory. */
static size_t together(const bundle *self, size_t at)
{
    const tddp_buffer *buffers = self->buffers + at;
    size_t count = self->count - at;
    size_t bytes = bytes_of(buffers);
    size_t taken = 1;
    while (taken < count && self->on_host && bytes + bytes_of(&buffers[taken]) <= TOGETHER_BYTES) {
        bytes += bytes_of(&buffers[taken]);
        taken++;
    }
    return taken;
}

/* The buffers of the step, in one piece of memory. */
static void begin_step(bundle *self, int64_t deadline)
{
    int64_t left = (deadline - tddp_now_ns()) / TDDP_NS_PER_MS;
    const tddp_buffer *buffers = self->buffers + self->at;
    tddp_op *op = &self->op;
    self->taken = together(self, self->at);
    op->timeout_ms = left > 0 ? left : 1;
    tddp_group_merge_buffers(buffers, self->taken, &op->input);
    self->copies = !op->input.data && op->input.count > 0;
    char *at = self->staging;
    for (size_t i = 0; self->copies && i < self->taken; i++) {
        if (buffers[i].count > 0) {
            memcpy(at, buffers[i].data, bytes_of(&buffers[i]));
            at += bytes_of(&buffers[i]);
        }
    }
    if (self->copies) {
        op->input.data = self->staging;
    }
    op->output = op->input;
}

static void end_step(bundle *self)
{
    const tddp_buffer *buffers = self->buffers + self->at;
    const char *at = self->staging;
    for (size_t i = 0; self->copies && i < self->taken; i++) {
        if (buffers[i].count > 0) {
            memcpy(buffers[i].data, at, bytes_of(&buffers[i]));
            at += bytes_of(&buffers[i]);
        }
    }
    self->at += self->taken;
    self->taken = 0;
    self->op.sequence++;
}

/* An operation on memory that the backend takes. */
static tddp_status carry(tddp_group *group, tddp_work *work, const tddp_op *op)
{
    bundle *self = work->bundle;
    tddp_backend_run run = group->backend->run[op->kind];
    if (!self) {
        return run(group->context, op);
    }
    if (self->at == 0 && self->taken == 0) {
        self->op = *op;
    }
    self->op.cancel = op->cancel;
    self->op.awaited = op->awaited;
    tddp_status status = TDDP_OK;
    while (self->at < self->count && status == TDDP_OK) {
        if (self->taken == 0) {
            begin_step(self, atomic_load(&work->expiry));
        }
        status = run(group->context, &self->op);
        if (status == TDDP_OK) {
            end_step(self);
        }
    }
    return status;
}

tddp_status tddp_group_run(tddp_group *group, tddp_work *work)
{
    if (tddp_group_takes(group, &work->op)) {
        return carry(group, work, &work->op);
    }
    return tddp_group_run_staged(group, work, carry);
}

size_t tddp_group_bundle_count(const bundle *self)
{
    return self ? self->count : 0;
}

void tddp_group_bundle_use(bundle *self, const tddp_buffer *buffers)
{
    self->buffers = buffers;
}

void tddp_group_bundle_free(bundle *self)
{
    if (self) {
        free(self->staging);
        free(self);
    }
}

/* Counts the steps and makes what they need. */
static tddp_status plan(tddp_work *work, bundle *self)
{
    size_t most = 0;
    work->steps = 0;
    for (size_t i = 0; i < self->count; work->steps++) {
        size_t count = together(self, i);
        tddp_buffer whole;
        tddp_group_merge_buffers(self->buffers + i, count, &whole);
        if (!whole.data && bytes_of(&whole) > most) {
            most = bytes_of(&whole);
        }
        i += count;
    }
    if (most > 0) {
        self->staging = tddp_alloc(most);
        if (!self->staging) {
            return TDDP_OUT_OF_MEMORY;
        }
    }
    return TDDP_OK;
}

/* The ranks compare the sizes too, not only their sum: a text of them stands before the caller's.
 */
static tddp_status describe_sizes(tddp_work *work, size_t count)
{
    char text[TEXT_BYTES];
    int length = snprintf(text, sizeof text, "%zu buffers of", count);
    uint64_t hash =
        tddp_digest(TDDP_DIGEST_START, &work->op.fingerprint, sizeof work->op.fingerprint);
    for (size_t i = 0; i < count; i++) {
        char number[24];
        int digits = snprintf(number, sizeof number, " %zu", work->parts[i].count);
        hash = tddp_digest(hash, &work->parts[i].count, sizeof work->parts[i].count);
        if (length + digits < TEXT_BYTES) {
            memcpy(text + length, number, (size_t)digits + 1);
            length += digits;
        }
    }
    char *described =
        work->description ? tddp_format("%s; %s", text, work->description) : tddp_copy_string(text);
    if (!described) {
        return TDDP_OUT_OF_MEMORY;
    }
    free(work->description);
    work->description = described;
    work->op.fingerprint = tddp_digest_fold(hash);
    return TDDP_OK;
}

static tddp_status prepare(const tddp_group *group, tddp_work *work, const tddp_buffer *buffers,
                           size_t count)
{
    work->parts = tddp_alloc_array(count, sizeof *work->parts);
    if (!work->parts) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(work->parts, buffers, count * sizeof *work->parts);
    if (tddp_group_queues(group, &work->op) ||
        tddp_group_stages_for_queue(group, buffers->device_type)) {
        /* The device takes them all at once. */
        work->op.output_parts = work->parts;
        work->op.bundled = count;
        return describe_sizes(work, count);
    }
    work->bundle = tddp_alloc(sizeof *work->bundle);
    if (!work->bundle) {
        return TDDP_OUT_OF_MEMORY;
    }
    work->bundle->buffers = work->parts;
    work->bundle->count = count;
    work->bundle->on_host = tddp_group_carried_type(group, buffers->device_type) == TDDP_CPU;
    tddp_status status = plan(work, work->bundle);
    return status ? status : describe_sizes(work, count);
}

tddp_status tddp_group_all_reduce_list(tddp_group *group, const tddp_op_args *args, tddp_work **out)
{
    const tddp_buffer *buffers = args->outputs;
    size_t count = args->output_count;
    tddp_status status = tddp_group_check_list(group, args->kind, "buffers", buffers, count);
    if (status == TDDP_OK) {
        status = tddp_group_check_disjoint(args->kind, "buffers", buffers, count);
    }
    if (status == TDDP_OK) {
        status = tddp_group_check_reduction(group, args->reduce, buffers);
    }
    if (status) {
        return status;
    }
    tddp_op wanted = {.kind = args->kind, .reduce = args->reduce, .premul = args->premul};
    tddp_group_merge_buffers(buffers, count, &wanted.input);
    wanted.output = wanted.input;
    if (count == 1) {
        return tddp_group_submit(group, &wanted, args, out);
    }
    tddp_work *work;
    status = tddp_group_prepare(group, &wanted, args, &work);
    if (status) {
        return status;
    }
    status = prepare(group, work, buffers, count);
    if (status) {
        tddp_work_release(work);
        tddp_work_release(work);
        return status;
    }
    return tddp_group_queue(group, work, args, out);
}
