/*
 * tddp_log()'s lines, which any thread may write, on their way to the console: no thread of
 * torchrun waits for the reader of standard error.
 */
#ifndef TDDP_LAUNCH_LOG_QUEUE_H
#define TDDP_LAUNCH_LOG_QUEUE_H

#include "launch/output/console.h"

/* From now on the loop passes lines on. Both are borrowed until the end. Errors: TDDP_SYSTEM,
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_log_queue_open(tddp_launch_loop *loop,
                                                      tddp_launch_console *console);

/* Passes on what has come; later lines are lost. Nothing happens if it is not open. */
void tddp_launch_log_queue_close(void);

#endif
