/*
 * torchrun's own standard output and standard error, written without ever blocking. What torchrun
 * itself says goes through tddp_launch_console_say(), log() and put(), which let no control
 * character through: parts of it may come from workers and other nodes.
 */
#ifndef TDDP_LAUNCH_CONSOLE_H
#define TDDP_LAUNCH_CONSOLE_H

#include "launch/loop/loop.h"

enum { TDDP_LAUNCH_OUT, TDDP_LAUNCH_ERR, TDDP_LAUNCH_STREAMS };

typedef enum tddp_launch_sink_kind {
    TDDP_LAUNCH_SINK_PLAIN,    /* a file: never blocks for long */
    TDDP_LAUNCH_SINK_REOPENED, /* a pipe or a terminal, opened anew to be non-blocking */
    TDDP_LAUNCH_SINK_SOCKET,
    TDDP_LAUNCH_SINK_CAREFUL, /* none of these: small pieces, each after a poll */
} tddp_launch_sink_kind;

/* What is to be written to one descriptor. */
typedef struct tddp_launch_sink {
    int fd;
    tddp_launch_sink_kind kind;
    tddp_bytes queue;
    size_t sent; /* the first so many bytes of `queue` are written */
    size_t owed; /* the first so many have to be, before the run is over; behind them are lines that
                    may be lost */
    int error;   /* errno of the write that failed; nothing is written any more. 0: none */
    bool terminal;
    bool at_line;              /* what was queued last ended a line */
    const void *writer;        /* who queued last, where it said so: who may go on with the line */
    bool told;                 /* people know of the error */
    tddp_launch_source source; /* waits for room while something is queued */
} tddp_launch_sink;

typedef struct tddp_launch_console {
    tddp_launch_sink sinks[TDDP_LAUNCH_STREAMS];
    /* Where each stream goes: both to the same sink if both are the same file, so that a line of
     * one is never cut by a line of the other. */
    tddp_launch_sink *streams[TDDP_LAUNCH_STREAMS];
    uint64_t lost; /* lines of torchrun's for which there was no room, since that was last said */
} tddp_launch_console;

/* Looks at descriptors 1 and 2. `console` must stay where it is. */
void tddp_launch_console_open(tddp_launch_console *console);
void tddp_launch_console_close(tddp_launch_console *console);

/* Has the loop write what is queued, as soon as there is room. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_console_watch(tddp_launch_console *console,
                                                     tddp_launch_loop *loop);

/* Queues bytes for a stream; dropped if its sink has failed. */
TDDP_NODISCARD tddp_status tddp_launch_console_write(tddp_launch_console *console, int stream,
                                                     const char *data, size_t size);

/*
 * Queues a line, a piece of one, or (without a prefix) several of them, in the name of `writer`.
 * The prefix comes first where a line begins; an unfinished line of another writer is ended before.
 */
TDDP_NODISCARD tddp_status tddp_launch_console_write_line(tddp_launch_console *console, int stream,
                                                          const void *writer, const char *prefix,
                                                          const char *data, size_t size);

/* The same, but an unfinished line of this writer is taken away first: on a terminal only. */
TDDP_NODISCARD tddp_status tddp_launch_console_write_over(tddp_launch_console *console, int stream,
                                                          const void *writer, const char *prefix,
                                                          const char *data, size_t size);

/* Whether a writer may begin a line, or go on with its own, without breaking into another's, and
 * all before it is written. */
bool tddp_launch_console_is_free(const tddp_launch_console *console, int stream,
                                 const void *writer);

/* Whether a stream goes to a terminal. */
bool tddp_launch_console_is_terminal(const tddp_launch_console *console, int stream);

/* Queues torchrun's own line, "torchrun: TEXT", for standard error; further lines of the text are
 * indented. Cut beyond 8 KiB; lost if memory is short, and counted if nobody reads. */
void tddp_launch_console_say(tddp_launch_console *console, const char *format, ...)
    TDDP_PRINTF(2, 3);

/* The same for a line that the end of the run need not wait for: one that another thread logged,
 * for which somebody may be the reason who is no part of the job. `text` is overwritten. */
void tddp_launch_console_log(tddp_launch_console *console, char *text);

/* Queues a part of a report: `head`, which is torchrun's own, and a text, whose further lines are
 * indented as far. */
void tddp_launch_console_put(tddp_launch_console *console, const char *head, const char *text);

/* Counts lines of torchrun's that were lost before they came here. */
void tddp_launch_console_lose(tddp_launch_console *console, uint64_t lines);

/* Writes as much as is taken without waiting. */
void tddp_launch_console_flush(tddp_launch_console *console);

/* Whether so much waits for a stream that its workers should wait too. */
bool tddp_launch_console_full(const tddp_launch_console *console, int stream);

/* Whether anything waits to be written that has to be. */
bool tddp_launch_console_pending(const tddp_launch_console *console);

/* Whether nobody reads one of the streams any more. Another failure, such as a full disk, is said
 * once on standard error; what follows on that stream is lost. */
bool tddp_launch_console_abandoned(tddp_launch_console *console);

#endif
