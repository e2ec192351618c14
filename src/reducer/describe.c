/*
 * What ranks compare of a bucket beside its size: of the first of all the hook that it goes
 * through, and for those who look for a fault, of each the names and shapes of its parameters.
 * Called with the reducer's lock held, before the bucket's operation begins; allocates nothing.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/file.h>

#include "reducer/reducer.h"

typedef tddp_reducer_description description;

/* What does not fit is cut off, alike on every rank. */
__attribute__((format(printf, 2, 3))) static void add(description *to, const char *format, ...)
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

/* Settings that are too long end with the checksum of all of them. */
static void add_hook(description *to, const tddp_comm_hook *hook)
{
    enum { MOST = 160, SHOWN = 140 };
    const char *settings = tddp_comm_hook_settings(hook);
    size_t length = strlen(settings);
    add(to, "%s", tddp_comm_hook_name(hook));
    if (length > MOST) {
        add(to, " (%.*s... %08" PRIx32 ")", SHOWN, settings, tddp_crc32(0, settings, length));
    } else if (length > 0) {
        add(to, " (%s)", settings);
    }
}

static void describe_way(const tddp_reducer *reducer, description *to)
{
    if (reducer->hook) {
        add(to, "gradients through the communication hook ");
        add_hook(to, reducer->hook);
    } else {
        add(to, "gradients as they are");
    }
}

static void add_param(description *to, const tddp_param *param)
{
    add(to, "%s [", param->name);
    for (size_t i = 0; i < param->ndim; i++) {
        add(to, "%s%" PRId64, i > 0 ? ", " : "", param->dims[i]);
    }
    add(to, "]");
}

static void describe_bucket(const tddp_reducer *reducer, size_t bucket, description *to)
{
    if (reducer->hook && bucket == 0) {
        add_hook(to, reducer->hook);
        add(to, " of ");
    } else if (reducer->hook) {
        add(to, "%s of ", tddp_comm_hook_name(reducer->hook));
    }
    add(to, "bucket %zu of %zu: ", bucket + 1, reducer->layout.buffer_count);
    const char *between = "";
    const tddp_flat_buffer *of = &reducer->layout.buffers[bucket];
    for (size_t i = 0; i < of->slice_count && to->length + 1 < sizeof to->text; i++) {
        add(to, "%s", between);
        add_param(to, &reducer->params[of->slices[i].param]);
        between = ", ";
    }
}

/* The first operation of all tells which hook there is: it must be the same on every rank. */
const char *tddp_reducer_describe(const tddp_reducer *reducer, size_t bucket,
                                  tddp_reducer_description *to)
{
    bool first = reducer->finished == 0 && reducer->now.first_launch_ns == 0;
    if (reducer->world_size == 1 || (!reducer->describe && !first)) {
        return NULL;
    }
    to->length = 0;
    if (reducer->describe) {
        describe_bucket(reducer, bucket, to);
    } else {
        describe_way(reducer, to);
    }
    return to->text;
}
