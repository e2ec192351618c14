/*
 * The reports of failed workers, for people and programs.
 */
#ifndef TDDP_LAUNCH_REPORT_H
#define TDDP_LAUNCH_REPORT_H

#include "base/host_name.h"
#include "launch/output/console.h"
#include "launch/output/output.h"
#include "launch/workers/environment.h"
#include "launch/workers/worker.h"

/* An attempt whose workers have all ended; borrowed. */
typedef struct tddp_launch_attempt {
    const char *program;
    const tddp_launch_job *job;
    const tddp_launch_world *world;
    const tddp_launch_worker *workers;
    int count;
    const tddp_launch_output *output; /* knows the log files; NULL: there are none */
} tddp_launch_attempt;

/* --- failures.c: who failed, and how --------------------------------------------------------- */

/*
 * The worker that failed first by itself, or NULL: by the time in its error file, else by when its
 * end was seen. One that says it failed because another rank had comes after those that do not.
 */
const tddp_launch_worker *tddp_launch_root_cause(const tddp_launch_worker *workers, int count);

/* All that failed by themselves, the root cause first: free(); their number in `*found`. NULL if
 * memory is short. */
const tddp_launch_worker **tddp_launch_failures(const tddp_launch_worker *workers, int count,
                                                int *found);

/* How many were ended by torchrun. */
int tddp_launch_ended_by_us(const tddp_launch_worker *workers, int count);

/* When it failed, in seconds since 1970: the time in its error file, else when its end was seen. */
int64_t tddp_launch_failure_second(const tddp_launch_worker *worker);

/* As PyTorch counts it: the exit status, or the negated number of the signal that killed it. */
int tddp_launch_exit_code(const tddp_launch_worker *worker);

/* "exit code 3" or "killed by SIGSEGV (core dumped)"; returns `text`. */
enum { TDDP_LAUNCH_ENDING_BYTES = 80 };
const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES]);

/* Why a worker's error is not known, or NULL if it is. */
const char *tddp_launch_error_missing(const tddp_launch_worker *worker);

/*
 * For the other nodes: a first line that names the root cause's rank, node, host and how it ended,
 * then its message and traceback as far as there is room; what is too long loses its middle. Empty
 * if no worker failed by itself. Returns `text`.
 */
const char *tddp_launch_report_summary(const tddp_launch_worker *workers, int count, int node_rank,
                                       char *text, size_t size);

/* --- report.c: for people -------------------------------------------------------------------- */

/* Queues the report, root cause first, for standard error. Nothing if no worker failed. */
void tddp_launch_report(const tddp_launch_attempt *attempt, tddp_launch_console *console);

/* The same for a failure on another node, whose tddp_launch_report_summary() is `text`. */
void tddp_launch_report_elsewhere(const char *program, const char *text,
                                  tddp_launch_console *console);

#endif
