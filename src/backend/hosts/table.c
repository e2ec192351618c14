/*
 * The backend table for several hosts: collectives and reports of failures. Collectives run on the
 * group's progress thread, or on a waiting one.
 *
 * Invariant: after a failure the ranks of this host and of its communicators are told why, in the
 * text of the stage that failed, before anything is closed.
 */
#include <stdlib.h>

#include <tddp/call.h>

#include "backend/hosts/hosts.h"

/* --- collectives ----------------------------------------------------------------------------- */

/* A digest of the part sizes if all ranks know them; 0: there are none. */
static uint32_t layout_of(const tddp_hosts *self, const tddp_op *op)
{
    const tddp_buffer *parts = NULL;
    if (op->kind == TDDP_OP_ALL_GATHER) {
        parts = op->output_parts;
    } else if (op->kind == TDDP_OP_REDUCE_SCATTER) {
        parts = op->input_parts;
    }
    uint64_t hash = TDDP_DIGEST_START;
    for (int rank = 0; parts && rank < self->world_size; rank++) {
        hash = tddp_digest(hash, &parts[rank].count, sizeof parts[rank].count);
    }
    return parts ? tddp_digest_fold(hash) : 0;
}

static tddp_status run(void *context, const tddp_op *op, tddp_status (*body)(tddp_hosts_run *))
{
    tddp_hosts *self = context;
    tddp_hosts_run it = {.self = self, .op = op, .layout = layout_of(self, op)};
    if (self->running != op->sequence) {
        self->running = op->sequence;
        self->deadline = tddp_deadline_after_ms(op->timeout_ms);
        self->stages_done = 0;
        self->stage_begun = false;
    }
    it.send_parts = tddp_alloc_array(2 * (size_t)self->world_size, sizeof *it.send_parts);
    if (!it.send_parts) {
        return tddp_hosts_report_if_fatal(self, TDDP_OUT_OF_MEMORY);
    }
    it.recv_parts = it.send_parts + self->world_size;
    tddp_status status = tddp_hosts_report_if_fatal(self, body(&it));
    self->running = status == TDDP_CANCELED ? op->sequence : 0;
    free(it.send_parts);
    return status;
}

#define SLOT(name)                                            \
    static tddp_status name(void *context, const tddp_op *op) \
    {                                                         \
        return run(context, op, tddp_hosts_##name);           \
    }
SLOT(all_reduce)
SLOT(broadcast)
SLOT(barrier)
SLOT(all_gather)
SLOT(reduce_scatter)
SLOT(reduce)
SLOT(gather)
SLOT(scatter)
SLOT(all_to_all)
#undef SLOT

/* --- the table ------------------------------------------------------------------------------- */

static void abort_all(void *context)
{
    tddp_hosts_abort(context);
}

static void destroy(void *context)
{
    tddp_hosts_destroy(context);
}

static void report_failure(void *context, tddp_status status, const char *text)
{
    (void)tddp_hosts_report_if_fatal(context, tddp_fail(status, "%s", text));
}

static tddp_status allocate(void *context, size_t bytes, void **handle, void **data)
{
    tddp_hosts *self = context;
    return tddp_shm_allocate(self->shm, bytes, handle, data);
}

static tddp_eventcount *events(void *context)
{
    const tddp_hosts *self = context;
    return tddp_shm_events(self->shm, self->local_rank);
}

const tddp_backend_v1 *tddp_hosts_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "hosts",
        .device_types = 1u << TDDP_CPU,
        .abort = abort_all,
        .destroy = destroy,
        .post = tddp_hosts_post,
        .finish = tddp_hosts_finish,
        .allocate = allocate,
        .deallocate = tddp_shm_deallocate,
        .report_failure = report_failure,
        .traits = TDDP_BACKEND_RESUMES,
        .events = events,
        .op_count = TDDP_OP_COUNT,
        .run =
            {
                [TDDP_OP_ALL_REDUCE] = all_reduce,
                [TDDP_OP_BROADCAST] = broadcast,
                [TDDP_OP_BARRIER] = barrier,
                [TDDP_OP_ALL_GATHER] = all_gather,
                [TDDP_OP_REDUCE_SCATTER] = reduce_scatter,
                [TDDP_OP_REDUCE] = reduce,
                [TDDP_OP_GATHER] = gather,
                [TDDP_OP_SCATTER] = scatter,
                [TDDP_OP_ALL_TO_ALL] = all_to_all,
            },
    };
    return &backend;
}
