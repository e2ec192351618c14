/*
 * Where a worker's core dump is.
 */
#ifndef TDDP_LAUNCH_CORE_H
#define TDDP_LAUNCH_CORE_H

#include <stdbool.h>
#include <sys/types.h>

/* For a worker that a signal killed: free(). NULL if that signal dumps none, or memory is short. */
char *tddp_launch_core_note(pid_t pid, int number, bool dumped);

/* The same, given what the kernel is told to do with core dumps; `limit` is the size allowed here.
 */
char *tddp_launch_core_place(const char *pattern, bool uses_pid, unsigned long long limit,
                             pid_t pid, bool dumped);

#endif
