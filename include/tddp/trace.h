/**
 * @file trace.h
 * @brief A trace of what one rank did when, for chrome://tracing and ui.perfetto.dev.
 *
 * Each rank writes DIR/trace_rank_N.json, a JSON array of Chrome's trace events: complete events
 * ("ph": "X") with the rank as `pid`, the lane as `cat` and as the name of its thread, and `ts` and
 * `dur` in microseconds of the monotonic clock, which all processes of a host share. The first
 * event, "tddp", has in its `args`: rank, host, pid, version, and wall_offset_ns, which added to
 * the monotonic clock's nanoseconds gives those since 1970. Lanes are "training" and
 * "communication", where process groups put their operations by themselves, and any others; spans
 * that overlap without one holding the other get a further row of their lane.
 *
 * Spans are kept in memory and written about once a second by a thread that lives from open to
 * close; the file is valid JSON after each of these writes, also if the process is killed. A kill
 * within a write leaves what it had written of it, one event a line: the last may be cut and the
 * closing bracket missing, which viewers and torchtrace do without. When it cannot be written, or
 * would become larger than TDDP_TRACE_MAX_BYTES (1 GiB), one line is logged and tracing stops; the
 * program goes on. A forked child does not trace until it
 * opens a trace of its own.
 */
#ifndef TDDP_TRACE_H
#define TDDP_TRACE_H

#include <stdint.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Begins this process's trace; `dir` is made if it is not there. A file of that name is replaced,
 * except if it is this process's own, closed before: that one is continued. Any thread. Errors:
 * TDDP_INVALID_ARGUMENT (also if a trace is open, or for a variable whose value is none),
 * TDDP_SYSTEM (the text has the path), TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_trace_open(const char *dir, int rank);

/** Writes what is left and ends the trace; nothing happens if there is none. Any thread; blocks for
 * as long as the disk takes. It is also called when the program calls exit(). */
TDDP_API void tddp_trace_close(void);

/** Whether spans are left out, of an open trace, until it is called again; an open begins without a
 *  pause. Of what begins or ends meanwhile there is no span. Any thread. */
TDDP_API void tddp_trace_pause(int paused);

/** Whether spans are taken: one relaxed load. Any thread. */
TDDP_API int tddp_trace_enabled(void);

/** Now, on the clock of spans: nanoseconds of the monotonic clock. */
TDDP_API int64_t tddp_trace_now(void);

/**
 * Adds what lasted from `start_ns` to `end_ns`. `args_json` is a JSON object with what else is to
 * be shown, or NULL. All texts are copied. Any thread; takes a short lock and never waits for the
 * disk. Nothing happens without a trace.
 */
TDDP_API void tddp_trace_span(const char *lane, const char *name, int64_t start_ns, int64_t end_ns,
                              const char *args_json);

#ifdef __cplusplus
}
#endif

#endif
