/*
 * Where workers' output goes: the console, files of a log folder, or both. Made once a run; each
 * attempt (start of all workers) has folders and files of its own:
 * RUN/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}, with filtered_stdout.log and
 * filtered_stderr.log beside the ranks. RUN is LOG_DIR/RUN_ID_RANDOM, or the private folder, which
 * goes with the run.
 */
#ifndef TDDP_LAUNCH_OUTPUT_H
#define TDDP_LAUNCH_OUTPUT_H

#include "launch/command/options.h"
#include "launch/output/console.h"
#include "launch/world.h"

typedef struct tddp_launch_output tddp_launch_output;

/*
 * Makes the log folder, if there are to be files. `options`, `run_id` and `console` are borrowed
 * until tddp_launch_output_free(). Errors: TDDP_SYSTEM if a log folder that was asked for cannot be
 * made (the text names it), TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_output_create(const tddp_launch_options *options,
                                                     const char *run_id,
                                                     tddp_launch_console *console,
                                                     tddp_launch_output **out);

/* Before an attempt's workers start: their folders, files and prefixes. A file that cannot be made
 * is reported, and the console gets what was meant for it. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_output_begin(tddp_launch_output *output,
                                                    const tddp_launch_world *world);

/* What the worker gets as its stdout (TDDP_LAUNCH_OUT) or stderr: a descriptor, borrowed, or -1: a
 * pipe whose other end tddp_launch_output_watch() gets. */
int tddp_launch_output_fd(const tddp_launch_output *output, int local_rank, int stream);

/* Has the loop pass on what a worker writes to its pipes, which are taken over; -1: there is none.
 * Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_output_watch(tddp_launch_output *output,
                                                    tddp_launch_loop *loop, int local_rank,
                                                    const int pipes[TDDP_LAUNCH_STREAMS]);

/* Before each turn of the loop: pipes are not read while too much waits for where they lead. NULL
 * is fine. */
void tddp_launch_output_hold_back(tddp_launch_output *output);

/* Once all workers have ended: passes on what is left, and closes the pipes. NULL is fine. */
void tddp_launch_output_drain(tddp_launch_output *output);

/* The path of a worker's error file in this attempt: free(). NULL if there is none. */
char *tddp_launch_output_error_file(const tddp_launch_output *output, int local_rank);

/* The path of a worker's log file in this attempt: free(). NULL if the stream has none. */
char *tddp_launch_output_log_file(const tddp_launch_output *output, int local_rank, int stream);

/* The run's folder within the log folder, or NULL if no logs were asked for. */
const char *tddp_launch_output_folder(const tddp_launch_output *output);

/* Closes the files. NULL is fine. */
void tddp_launch_output_free(tddp_launch_output *output);

/* --- folders.c ------------------------------------------------------------------------------- */

/* Makes the folder PARENT/NAME_RANDOM for this user alone; `parent` is made too if it is not there,
 * and NULL is TMPDIR or /tmp. Returns its path from the root, since workers may go to another
 * folder: free(). NULL with a text. */
char *tddp_launch_folder_make(const char *parent, const char *name);

/* Makes the folders of an attempt of `local_size` workers, attempt_N after N restarts; once more
 * with the same N (other nodes came or left): attempt_N.1, attempt_N.2 and so on. Returns the
 * path: free(). NULL with a text. */
char *tddp_launch_folder_begin(const char *run, int restart, int local_size);

/* Removes a folder with all that is in it; no links are followed. NULL is fine. */
void tddp_launch_folder_remove(const char *path);

#endif
