/*
 * What people and programs read when workers have failed.
 */
#ifndef TDDP_LAUNCH_REPORT_H
#define TDDP_LAUNCH_REPORT_H

#include "launch/output/console.h"
#include "launch/workers/worker.h"

/* --- failures.c: who failed, and how --------------------------------------------------------- */

/* Whether it failed without having been told to end. */
bool tddp_launch_failed_by_itself(const tddp_launch_worker *worker);

/*
 * The worker that failed first by itself, or NULL: by the time in its error file, else by when its
 * end was seen. One that says it failed because another rank had comes after those that do not.
 */
const tddp_launch_worker *tddp_launch_root_cause(const tddp_launch_worker *workers, int count);

/* As PyTorch counts it: the exit status, or the negated number of the signal that killed it. */
int tddp_launch_exit_code(const tddp_launch_worker *worker);

/* "exit code 3" or "killed by SIGSEGV (core dumped)"; returns `text`. */
enum { TDDP_LAUNCH_ENDING_BYTES = 80 };
const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES]);

/*
 * For the other nodes: a first line that names the root cause's rank, node, host and how it ended,
 * then its message and traceback as far as there is room; what is too long loses its middle.
 * Empty if no worker failed by itself. Returns `text`.
 */
const char *tddp_launch_report_summary(const tddp_launch_worker *workers, int count, int node_rank,
                                       char *text, size_t size);

/* --- report.c -------------------------------------------------------------------------------- */

/* Queues the report, root cause first, for standard error. */
void tddp_launch_report(const char *program, const tddp_launch_worker *workers, int count,
                        tddp_launch_console *console);

#endif
