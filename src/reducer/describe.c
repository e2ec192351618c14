/*
 * What ranks compare of a bucket beside its size: of the first of all the hook that it goes
 * through, and for those who look for a fault, of each the names and shapes of its parameters.
 * Called with the reducer's lock held, before the bucket is handed to the group; allocates nothing.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/file.h>

#include "reducer/reducer.h"

/* As much as tddp_describe_next() takes; what does not fit is cut off, alike on every rank. */
typedef struct description {
    char text[256];
    size_t length;
} description;

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

void tddp_reducer_describe_way(const tddp_reducer *reducer)
{
    description it = {.length = 0};
    if (reducer->hook) {
        add(&it, "gradients through the communication hook ");
        add_hook(&it, reducer->hook);
    } else {
        add(&it, "gradients as they are");
    }
    tddp_describe_next(it.text);
}

static void add_param(description *to, const tddp_reducer_param *param)
{
    add(to, "%s [", param->name);
    for (size_t i = 0; i < param->ndim; i++) {
        add(to, "%s%" PRId64, i > 0 ? ", " : "", param->dims[i]);
    }
    add(to, "]");
}

void tddp_reducer_describe(const tddp_reducer *reducer, size_t bucket)
{
    description it = {.length = 0};
    if (reducer->hook && bucket == 0) {
        add_hook(&it, reducer->hook);
        add(&it, " of ");
    } else if (reducer->hook) {
        add(&it, "%s of ", tddp_comm_hook_name(reducer->hook));
    }
    add(&it, "bucket %zu of %zu: ", bucket + 1, reducer->layout.bucket_count);
    const char *between = "";
    const tddp_reducer_bucket *of = &reducer->layout.buckets[bucket];
    for (size_t i = 0; i < of->params && it.length + 1 < sizeof it.text; i++) {
        add(&it, "%s", between);
        add_param(&it, &reducer->params[of->gradients[i].param]);
        between = ", ";
    }
    tddp_describe_next(it.text);
}
