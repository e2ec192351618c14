/*
 * Reads what the kernel tells in small text files.
 */
#ifndef TDDP_SCAN_FILE_H
#define TDDP_SCAN_FILE_H

#include <stdbool.h>

/* Reads the first line that the format of scanf(3) matches from its start, with at least one value;
 * false, with the values as they were, if there is none or no such file (NULL: no file). Any
 * thread. */
__attribute__((format(scanf, 2, 3))) bool tddp_scan_file(const char *path, const char *format, ...);

#endif
