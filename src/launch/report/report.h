/*
 * What people read when workers have failed.
 */
#ifndef TDDP_LAUNCH_REPORT_H
#define TDDP_LAUNCH_REPORT_H

#include "launch/output/console.h"
#include "launch/workers/worker.h"

/*
 * The worker that failed first by itself, or NULL: by the time in its error file, else by when its
 * end was seen. One that says it failed because another rank had comes after those that do not.
 */
const tddp_launch_worker *tddp_launch_root_cause(const tddp_launch_worker *workers, int count);

/* "exit code 3" or "killed by SIGSEGV (core dumped)"; returns `text`. */
enum { TDDP_LAUNCH_ENDING_BYTES = 80 };
const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES]);

/* Queues the report, root cause first, for standard error. */
void tddp_launch_report(const char *program, const tddp_launch_worker *workers, int count,
                        tddp_launch_console *console);

#endif
