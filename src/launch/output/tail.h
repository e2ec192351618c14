/*
 * The last line that a worker wrote, as a status display shows it.
 */
#ifndef TDDP_LAUNCH_TAIL_H
#define TDDP_LAUNCH_TAIL_H

#include <stdbool.h>
#include <stddef.h>

enum { TDDP_LAUNCH_TAIL_BYTES = 256 };

/* All zero is an empty one. */
typedef struct tddp_launch_tail {
    char text[TDDP_LAUNCH_TAIL_BYTES]; /* the start of the line; bytes as they came */
    size_t size;
    bool over; /* the line has ended: what comes next begins another */
} tddp_launch_tail;

/* Takes what was written. A carriage return ends a line too, as a progress bar means it; empty
 * lines do not count. */
void tddp_launch_tail_take(tddp_launch_tail *tail, const char *data, size_t size);

/* The line without escape sequences, control characters as blanks. Returns `text`. */
const char *tddp_launch_tail_show(const tddp_launch_tail *tail, char text[TDDP_LAUNCH_TAIL_BYTES]);

#endif
