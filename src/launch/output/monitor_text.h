/*
 * The job in words, as --monitor shows it.
 */
#ifndef TDDP_LAUNCH_MONITOR_TEXT_H
#define TDDP_LAUNCH_MONITOR_TEXT_H

#include "launch/output/monitor.h"

/* Appends the block: lines without their ends, each at most `columns` wide, a newline between two;
 * `lines`, at most `most`, is how many. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_view_block(const tddp_launch_view *view, int columns,
                                                  int most, tddp_bytes *to, int *lines);

/* Puts the same into a line for where there is no terminal; cut to `size`. */
void tddp_launch_view_line(const tddp_launch_view *view, char *text, size_t size);

#endif
