/*
 * Where workers' output goes: the console, files of a log folder, or both. Made once a run; each
 * attempt (start of all workers) has folders and files of its own.
 */
#ifndef TDDP_LAUNCH_OUTPUT_H
#define TDDP_LAUNCH_OUTPUT_H

#include "launch/command/options.h"
#include "launch/output/console.h"
#include "launch/world.h"

typedef struct tddp_launch_output tddp_launch_output;

/*
 * Makes the log folder, or a private temporary one for error files alone. `options`, `run_id` and
 * `console` are borrowed until tddp_launch_output_free(). Errors: TDDP_SYSTEM if a log folder that
 * was asked for cannot be made (the text names it), TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_output_create(const tddp_launch_options *options,
                                                     const char *run_id,
                                                     tddp_launch_console *console,
                                                     tddp_launch_output **out);

/* Before an attempt's workers start: their folders, files and prefixes. Of a file that cannot be
 * made this is said, and the console gets what was meant for it. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_output_begin(tddp_launch_output *output,
                                                    const tddp_launch_world *world);

/* What the worker gets as its stdout (TDDP_LAUNCH_OUT) or stderr: a descriptor, borrowed, or -1: a
 * pipe whose other end is read, and handed to tddp_launch_output_take(). */
int tddp_launch_output_fd(const tddp_launch_output *output, int local_rank, int stream);

/* Whether so much waits for where this stream goes that it should not be read now. */
bool tddp_launch_output_full(const tddp_launch_output *output, int local_rank, int stream);

/* Takes what a worker wrote; with `at_end` nothing more will come (`size` may be 0). Errors:
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_output_take(tddp_launch_output *output, int local_rank,
                                                   int stream, const char *data, size_t size,
                                                   bool at_end);

/* The path of a worker's error file in this attempt: free(). NULL if there is none. */
char *tddp_launch_output_error_file(const tddp_launch_output *output, int local_rank);

/* The path of a worker's log file in this attempt: free(). NULL if the stream has none. */
char *tddp_launch_output_log_file(const tddp_launch_output *output, int local_rank, int stream);

/* The run's folder within the log folder, or NULL if no logs were asked for. */
const char *tddp_launch_output_folder(const tddp_launch_output *output);

/* Closes the files and removes the private temporary folder. NULL is fine. */
void tddp_launch_output_free(tddp_launch_output *output);

#endif
