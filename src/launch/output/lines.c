/*
 * Splits a stream at its newlines. Bytes are bytes: NULs and broken UTF-8 pass as they are. What
 * has been searched is not searched again, so a line of megabytes costs no more than its bytes.
 * Pure.
 */
#include <string.h>

#include "launch/output/lines.h"

/* Memory kept for the next line; more is given back. */
enum { KEPT_CAPACITY = 256 * 1024 };

size_t tddp_launch_lines_ready(tddp_launch_lines *lines)
{
    tddp_bytes *pending = &lines->pending;
    const char *fresh = pending->data + lines->scanned;
    size_t fresh_size = pending->size - lines->scanned;
    const char *newline = fresh_size > 0 ? memrchr(fresh, '\n', fresh_size) : NULL;
    if (newline) {
        return (size_t)(newline - pending->data) + 1;
    }
    lines->scanned = pending->size;
    return pending->size >= TDDP_LAUNCH_LONGEST_LINE ? pending->size : 0;
}

void tddp_launch_lines_consume(tddp_launch_lines *lines, size_t size)
{
    tddp_bytes_consume(&lines->pending, size);
    /* What follows the last newline has none. */
    lines->scanned = lines->pending.size;
    if (lines->pending.size == 0 && lines->pending.capacity > KEPT_CAPACITY) {
        tddp_bytes_free(&lines->pending);
    }
}

void tddp_launch_lines_free(tddp_launch_lines *lines)
{
    tddp_bytes_free(&lines->pending);
    lines->scanned = 0;
}
