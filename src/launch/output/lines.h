/*
 * Whole lines out of a stream of bytes, so that the lines of several workers never mix.
 */
#ifndef TDDP_LAUNCH_LINES_H
#define TDDP_LAUNCH_LINES_H

#include "base/base.h"

/* A line longer than this goes out in pieces: memory is bounded, whatever a worker writes. */
#define TDDP_LAUNCH_LONGEST_LINE ((size_t)16 << 20)

/* All zero is an empty one. Append to `pending`, ask what is ready, pass it on, consume it. */
typedef struct tddp_launch_lines {
    tddp_bytes pending;
    size_t scanned; /* the first so many bytes of `pending` have no newline */
} tddp_launch_lines;

/* Bytes at the start of `pending` that may go out: all up to the last newline, or everything once
 * the line has become too long. */
size_t tddp_launch_lines_ready(tddp_launch_lines *lines);

/* Removes bytes that have gone out. */
void tddp_launch_lines_consume(tddp_launch_lines *lines, size_t size);

void tddp_launch_lines_free(tddp_launch_lines *lines);

#endif
