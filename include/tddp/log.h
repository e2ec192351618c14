/**
 * @file log.h
 * @brief Where libtddp's lines for people go.
 *
 * Lines go to standard error, each in one write, as `[tddp] LEVEL room: text`. TDDP_LOG chooses the
 * least important level shown: error, warn (the default), info or debug. Where standard error is a
 * pipe or a terminal that nobody reads, lines are lost rather than threads blocked; the next line
 * that is written says how many.
 */
#ifndef TDDP_LOG_H
#define TDDP_LOG_H

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How important a line is. */
typedef enum tddp_log_level {
    TDDP_LOG_ERROR = 0,
    TDDP_LOG_WARN = 1,
    TDDP_LOG_INFO = 2,
    TDDP_LOG_DEBUG = 3,
} tddp_log_level;

/** Receives each line without its newline. Called on any thread, several at once; must not block.
 */
typedef void (*tddp_log_sink)(tddp_log_level level, const char *room, const char *text, void *data);

/** Sends lines to `sink` instead of standard error; NULL restores standard error. A line that
 *  another thread logs meanwhile may still go to the previous sink, with the data of either: use
 *  data that fits both, or call it before other threads use the library. */
TDDP_API void tddp_log_set_sink(tddp_log_sink sink, void *data);

/** Writes to standard error as lines are written without a sink: for sinks that have no room for
 *  one. `line` ends in a newline. Any thread; waits a tenth of a second at most. errno is
 * preserved. */
TDDP_API void tddp_log_to_stderr(const char *line);

/** Sets the least important level shown, over TDDP_LOG. */
TDDP_API void tddp_log_set_level(tddp_log_level level);

/** Whether a line of this level would be shown: spares the work of making its text. */
TDDP_API int tddp_log_enabled(tddp_log_level level);

/** Writes one line; `room` is the part of the library ("store", "gloo"). errno is preserved. */
TDDP_API void tddp_log(tddp_log_level level, const char *room, const char *format, ...)
    TDDP_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif

#endif
