/*
 * What failed: which workers, how, and in which order; the report for people, and files for
 * programs: JSON with every failed attempt, and the root cause in the form in which PyTorch's
 * launchers report it to their parent.
 */
#ifndef TDDP_LAUNCH_REPORT_H
#define TDDP_LAUNCH_REPORT_H

#include "launch/output/console.h"
#include "launch/output/output.h"
#include "launch/report/json.h"
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
 * The worker that failed by itself after `after` (NULL: the first, which is the root cause), or
 * NULL. By the time in its error file, else by when its end was seen. One that failed, by its error
 * file, because another rank had comes after those that do not.
 */
const tddp_launch_worker *tddp_launch_failure(const tddp_launch_worker *workers, int count,
                                              const tddp_launch_worker *after);

/* When it failed, in seconds since 1970: the time in its error file, else when its end was seen. */
int64_t tddp_launch_failure_second(const tddp_launch_worker *worker);

/* As PyTorch counts it: the exit status, or the negated number of the signal that killed it. */
int tddp_launch_exit_code(const tddp_launch_worker *worker);

/* "exit code 3" or "killed by SIGSEGV (core dumped)"; returns `text`. */
enum { TDDP_LAUNCH_ENDING_BYTES = 80 };
const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES]);

/*
 * For the other nodes: a first line that names the root cause's rank, node, host and how it ended,
 * then its message and traceback as far as there is room; what is too long loses its middle. Empty
 * if no worker failed by itself. Returns `text`.
 */
const char *tddp_launch_report_summary(const tddp_launch_worker *workers, int count, int node_rank,
                                       char *text, size_t size);

/* --- report.c: an attempt, and the job ------------------------------------------------------- */

/* The attempts that failed so far, for programs. All zero is an empty one; tddp_bytes_free() of
 * json.text. */
typedef struct tddp_launch_record {
    tddp_launch_json json;
    int count;
    int omitted; /* earlier ones that took too much room */
} tddp_launch_record;

/*
 * Records an attempt that failed, and queues its report, root cause first, for standard error. Of
 * another node's failure `elsewhere` is that node's tddp_launch_report_summary(); else it is NULL.
 * Once the workers have ended and before they are forgotten.
 */
void tddp_launch_report(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                        const char *elsewhere, tddp_launch_console *console);

/* How the job ended; texts are borrowed and may be NULL. */
typedef struct tddp_launch_outcome {
    int exit_status;
    int signal;              /* that ended torchrun; 0: none */
    const char *cause;       /* when it is no worker of this node */
    const char *report_file; /* --report-file */
    const char *error_file;  /* TORCHELASTIC_ERROR_FILE of torchrun itself */
} tddp_launch_outcome;

/*
 * Writes outcome->report_file, if there is one, and, if the job failed, outcome->error_file. A file
 * that cannot be written is named on the console. The record is complete then.
 */
void tddp_launch_record_write(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                              const tddp_launch_outcome *outcome, tddp_launch_console *console);

#endif
