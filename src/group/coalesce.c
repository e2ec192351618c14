/*
 * Executes operations by calling the backend, also a coalesced all_reduce of several buffers. A
 * device takes all buffers in one call. Otherwise small buffers are reduced together, in one step:
 * the executing thread copies them into the work's staging memory, reduces that, and copies the
 * result back; buffers that are contiguous are not copied. A backend that copies device memory
 * anyway gets a step's buffers as a list. Large buffers have a step each.
 *
 * Invariant: the steps follow from the buffers' sizes alone, which are equal on all ranks; their
 * addresses may differ. Each step has its own sequence number. If a step fails the work fails:
 * buffers of earlier steps then hold results, those of that step and of later ones do not.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/call.h>

#include "group/checks.h"

enum {
    /* To copy so much takes little of the time of its reduction. Above it, a step takes so long
     * that saving one gains little. */
    STEP_BYTES = 1 << 20,
    TEXT_BYTES = 256,
};

typedef struct tddp_group_bundle {
    const tddp_buffer *buffers; /* each in place; the work's parts */
    size_t count;
    bool on_host;  /* the backend reduces them in host memory */
    bool copied;   /* to which it copies them */
    char *staging; /* for steps of several buffers; NULL: not needed */
    tddp_op op;    /* the step's */
    size_t done;   /* buffers of earlier steps */
    size_t active; /* buffers of the running step; 0: none runs */
    bool copies;   /* those are copied to the staging memory */
} bundle;

/* How many buffers the step that begins with the buffer `first` has. Device memory cannot be
 * copied here. */
static size_t step_count(const bundle *self, size_t first)
{
    const tddp_buffer *buffers = self->buffers + first;
    size_t left = self->count - first;
    size_t bytes = tddp_buffer_bytes(buffers);
    size_t count = 1;
    while (count < left && self->on_host &&
           bytes + tddp_buffer_bytes(&buffers[count]) <= STEP_BYTES) {
        bytes += tddp_buffer_bytes(&buffers[count]);
        count++;
    }
    return count;
}

/* Starts the next step, with its buffers in contiguous memory or as a list. */
static void begin_step(bundle *self, int64_t deadline)
{
    int64_t left = (deadline - tddp_now_ns()) / TDDP_NS_PER_MS;
    const tddp_buffer *buffers = self->buffers + self->done;
    tddp_op *op = &self->op;
    self->active = step_count(self, self->done);
    op->timeout_ms = left > 0 ? left : 1;
    op->input = tddp_buffers_joined(buffers, self->active);
    bool listed = !op->input.data && op->input.count > 0;
    self->copies = listed && !self->copied;
    op->bundled = listed && self->copied ? self->active : 0;
    op->output_parts = op->bundled > 0 ? buffers : NULL;
    char *at = self->staging;
    for (size_t i = 0; self->copies && i < self->active; i++) {
        if (buffers[i].count > 0) {
            memcpy(at, buffers[i].data, tddp_buffer_bytes(&buffers[i]));
            at += tddp_buffer_bytes(&buffers[i]);
        }
    }
    if (self->copies) {
        op->input.data = self->staging;
    }
    op->output = op->input;
}

static void end_step(bundle *self)
{
    const tddp_buffer *buffers = self->buffers + self->done;
    const char *at = self->staging;
    for (size_t i = 0; self->copies && i < self->active; i++) {
        if (buffers[i].count > 0) {
            memcpy(buffers[i].data, at, tddp_buffer_bytes(&buffers[i]));
            at += tddp_buffer_bytes(&buffers[i]);
        }
    }
    self->done += self->active;
    self->active = 0;
    self->op.sequence++;
}

tddp_status tddp_group_run(tddp_group *group, tddp_work *work)
{
    bundle *self = work->bundle;
    const tddp_op *op = &work->op;
    const tddp_inner *own = tddp_group_backend_for(group, op);
    tddp_backend_run run = own->backend->run[op->kind];
    if (!run) {
        return tddp_fail(TDDP_UNSUPPORTED, "backend %s has no %s of %s memory", group->backend_name,
                         tddp_op_name(op->kind), tddp_device_type_name(op->input.device_type));
    }
    if (!self) {
        return run(own->context, op);
    }
    if (self->done == 0 && self->active == 0) {
        self->op = *op;
    }
    self->op.cancel = op->cancel;
    self->op.awaited = op->awaited;
    tddp_status status = TDDP_OK;
    while (self->done < self->count && status == TDDP_OK) {
        if (self->active == 0) {
            begin_step(self, atomic_load(&work->expiry));
        }
        status = run(own->context, &self->op);
        if (status == TDDP_OK) {
            end_step(self);
        }
    }
    return status;
}

void tddp_group_bundle_free(bundle *self)
{
    if (self) {
        free(self->staging);
        free(self);
    }
}

/* Counts the steps and allocates their staging memory. */
static tddp_status plan(tddp_work *work, bundle *self)
{
    size_t most = 0;
    work->steps = 0;
    for (size_t i = 0; i < self->count; work->steps++) {
        size_t count = step_count(self, i);
        tddp_buffer merged = tddp_buffers_joined(self->buffers + i, count);
        if (!merged.data && !self->copied && tddp_buffer_bytes(&merged) > most) {
            most = tddp_buffer_bytes(&merged);
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

/* Puts the sizes in front of the caller's description: ranks compare each, not only their sum. */
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
    const bool on_device = tddp_group_reduces_on_device(group, buffers->device_type);
    if (tddp_group_is_launched(group, &work->op)) {
        /* The device takes all buffers in one call. */
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
    work->bundle->on_host = !on_device;
    work->bundle->copied = !on_device && buffers->device_type != TDDP_CPU;
    tddp_status status = plan(work, work->bundle);
    return status ? status : describe_sizes(work, count);
}

tddp_status tddp_group_all_reduce_list(tddp_group *group, const tddp_op *op,
                                       const tddp_op_args *args, tddp_work **out)
{
    if (args->output_count == 1) {
        return tddp_group_submit(group, op, args, out);
    }
    tddp_work here;
    tddp_status status = tddp_group_prepare(group, op, args, &here);
    status = status ? status : prepare(group, &here, args->outputs, args->output_count);
    if (status) {
        tddp_group_work_clear(&here);
        return status;
    }
    return tddp_group_start(group, &here, args, out);
}
