/*
 * The text that ranks compare with a bucket's first operation, in addition to its size: for the
 * first bucket of all the communication hook; with opts.describe (for debugging) the names and
 * shapes of every bucket's parameters. Called under the reducer's lock, before the operation is
 * submitted; allocates nothing.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/file.h>

#include "reducer/reducer.h"

typedef tddp_reducer_description description;

/* Truncates what doesn't fit, at the same place on every rank. */
__attribute__((format(printf, 2, 3))) static void append(description *to, const char *format, ...)
{
    size_t room = sizeof to->text - to->length;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(to->text + to->length, room, format, arguments);
    va_end(arguments);
    if (length > 0) {
        to->length += (size_t)length < room ? (size_t)length : room - 1;
    }
}

/* Settings that are too long are truncated, with a checksum of the full text. */
static void append_hook(description *to, const tddp_comm_hook *hook)
{
    enum { MOST = 160, SHOWN = 140 };
    const char *settings = tddp_comm_hook_settings(hook);
    size_t length = strlen(settings);
    append(to, "%s", tddp_comm_hook_name(hook));
    if (length > MOST) {
        append(to, " (%.*s... %08" PRIx32 ")", SHOWN, settings, tddp_crc32(0, settings, length));
    } else if (length > 0) {
        append(to, " (%s)", settings);
    }
}

static void describe_hook(const tddp_reducer *reducer, description *to)
{
    if (reducer->hook) {
        append(to, "gradients through the communication hook ");
        append_hook(to, reducer->hook);
    } else {
        append(to, "gradients without a communication hook");
    }
}

static void append_param(description *to, const tddp_param *param)
{
    append(to, "%s [", param->name);
    for (size_t i = 0; i < param->ndim; i++) {
        append(to, "%s%" PRId64, i > 0 ? ", " : "", param->dims[i]);
    }
    append(to, "]");
}

static void describe_bucket(const tddp_reducer *reducer, size_t bucket, description *to)
{
    if (reducer->hook && bucket == 0) {
        append_hook(to, reducer->hook);
        append(to, " of ");
    } else if (reducer->hook) {
        append(to, "%s of ", tddp_comm_hook_name(reducer->hook));
    }
    append(to, "bucket %zu of %zu: ", bucket + 1, reducer->layout.buffer_count);
    const char *separator = "";
    const tddp_flat_buffer *of = &reducer->layout.buffers[bucket];
    for (size_t i = 0; i < of->slice_count && to->length + 1 < sizeof to->text; i++) {
        append(to, "%s", separator);
        append_param(to, &reducer->params[of->slices[i].param]);
        separator = ", ";
    }
}

const char *tddp_reducer_describe(const tddp_reducer *reducer, size_t bucket,
                                  tddp_reducer_description *to)
{
    bool first = reducer->finished == 0 && reducer->current_times.first_launch_ns == 0;
    if (reducer->world_size == 1 || (!reducer->describe && !first)) {
        return NULL;
    }
    to->length = 0;
    if (reducer->describe) {
        describe_bucket(reducer, bucket, to);
    } else {
        describe_hook(reducer, to);
    }
    return to->text;
}
