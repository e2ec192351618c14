/*
 * Operations as spans of the trace's lane "communication": from the call of the backend until the
 * outcome is known, with the operation's arguments and its time in the queue. Entered by the
 * threads that queue operations and by the group's.
 *
 * Invariant: a work's times are set by the thread that owns it, before the next thread gets it
 * under the queue's lock; an operation that started before the trace was opened has no span.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/trace.h>

#include "group/group.h"

enum { FIELD_BYTES = 192 };

void tddp_group_span_queued(tddp_work *work)
{
    if (tddp_trace_enabled()) {
        work->queued_ns = tddp_trace_now();
    }
}

void tddp_group_span_started(tddp_work *work)
{
    if (tddp_trace_enabled()) {
        work->started_ns = tddp_trace_now();
    }
}

static void append(tddp_bytes *args, const char *format, ...) TDDP_PRINTF(2, 3);

/* Without memory the span has no arguments. */
static void append(tddp_bytes *args, const char *format, ...)
{
    char text[FIELD_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (tddp_bytes_append(args, text, strlen(text))) {
        tddp_bytes_free(args);
    }
}

static void append_op(tddp_bytes *args, const tddp_op *op)
{
    const tddp_buffer *larger = op->input.count > op->output.count ? &op->input : &op->output;
    append(args, "{\"sequence\": %" PRIu64, op->sequence);
    if (op->kind != TDDP_OP_BARRIER) {
        append(args, ", \"bytes\": %zu, \"dtype\": \"%s\"",
               larger->count * tddp_dtype_size(larger->dtype), tddp_dtype_name(larger->dtype));
    }
    if (tddp_op_has_root(op->kind)) {
        append(args, ", \"root\": %d", op->root);
    }
    if (tddp_op_is_p2p(op->kind)) {
        append(args, ", \"peer\": %d, \"tag\": %" PRIu32, op->peer, op->tag);
    }
}

void tddp_group_span_ended(const tddp_group *group, const tddp_work *work, tddp_status status)
{
    if (!tddp_trace_enabled() || work->started_ns == 0) {
        return;
    }
    int64_t now = tddp_trace_now();
    int64_t waited = work->queued_ns ? work->started_ns - work->queued_ns : 0;
    tddp_bytes args = {0};
    append_op(&args, &work->op);
    append(&args, ", \"queued_us\": %" PRId64 ".%03d, \"group\": ", waited / 1000,
           (int)(waited % 1000));
    if (tddp_bytes_append_json(&args, group->name)) {
        tddp_bytes_free(&args);
    }
    append(&args, status ? ", \"status\": \"%s\"}" : "}", tddp_status_name(status));
    bool complete =
        args.size > 1 && tddp_bytes_append(&args, "", 1) == TDDP_OK && args.data[0] == '{';
    tddp_trace_span("communication", tddp_op_name(work->op.kind), work->started_ns, now,
                    complete ? args.data : NULL);
    tddp_bytes_free(&args);
}
