/*
 * What torchrun writes: its own standard output and standard error, which never block it, and log
 * files. A sink is one of them. torchrun's own lines go through tddp_launch_console_log() and
 * put(), which let no control character through: parts of them may come from workers and other
 * nodes.
 */
#ifndef TDDP_LAUNCH_CONSOLE_H
#define TDDP_LAUNCH_CONSOLE_H

#include "launch/loop/loop.h"

enum { TDDP_LAUNCH_OUT, TDDP_LAUNCH_ERR, TDDP_LAUNCH_STREAMS };

typedef struct tddp_launch_console tddp_launch_console;

/* All zero but for `fd` and `at_line` is an empty one. */
typedef struct tddp_launch_sink {
    int fd;           /* -1: nothing is written */
    const char *name; /* in messages; a log file's path, which is owned */
    bool own;         /* the descriptor is, and is closed */
    bool careful;     /* a write may block: small ones, each after a poll */
    bool terminal;
    bool abandoned;     /* nobody reads any more */
    bool reported;      /* that a write failed */
    bool behind;        /* something was lost: what comes starts with a line of its own */
    bool at_line;       /* what was queued last ended a line */
    bool returned;      /* or returned to its start */
    const void *writer; /* who queued last: who may go on with the line */
    tddp_bytes queue;
    size_t sent; /* the first so many bytes of `queue` are written */
    size_t owed; /* the first so many have to be, before the run is over; behind them are lines that
                    may be lost */
    tddp_launch_source source; /* the console's: waits for room while something is queued */
} tddp_launch_sink;

struct tddp_launch_console {
    tddp_launch_sink sinks[TDDP_LAUNCH_STREAMS];
    /* Where each stream goes: both to the same sink if both are the same file, so that a line of
     * one is never cut by a line of the other. */
    tddp_launch_sink *streams[TDDP_LAUNCH_STREAMS];
    tddp_launch_source logs; /* lines of tddp_log(), which any thread may write */
    tddp_bytes logged;       /* of these, what is not complete */
    uint64_t lost;           /* lines for which there was no room, since that was last reported */
};

/*
 * Opens descriptors 1 and 2. From now on the loop writes what is queued as soon as there is room,
 * and lines of tddp_log() come to standard error, whose reader no thread waits for. Both must stay
 * where they are. After an error lines are still queued. Errors: TDDP_SYSTEM, TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_console_open(tddp_launch_console *console,
                                                    tddp_launch_loop *loop);

/* Takes what was logged, writes what is taken without waiting, and closes; later lines of
 * tddp_log() are lost. */
void tddp_launch_console_close(tddp_launch_console *console);

/* Queues torchrun's own line, "torchrun: TEXT", for standard error; further lines of the text are
 * indented. Cut beyond 8 KiB; lost if memory is short, and counted if nobody reads. */
void tddp_launch_console_log(tddp_launch_console *console, const char *format, ...)
    TDDP_PRINTF(2, 3);

/* Queues a part of a report: `head`, which is torchrun's own, and a text, whose further lines are
 * indented as far. */
void tddp_launch_console_put(tddp_launch_console *console, const char *head, const char *text);

/* Writes as much as is taken without waiting. */
void tddp_launch_console_flush(tddp_launch_console *console);

/* Whether anything waits to be written that has to be. */
bool tddp_launch_console_pending(const tddp_launch_console *console);

/* Whether nobody reads one of the streams any more. */
bool tddp_launch_console_abandoned(const tddp_launch_console *console);

/* Makes a log file; takes over `path` in any case (NULL is short memory). Errors: TDDP_SYSTEM,
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_sink_create(tddp_launch_sink *sink, char *path);

/*
 * Queues a line, a piece of one, or (without a prefix) several of them, in the name of `writer`.
 * The prefix comes first where a line begins; an unfinished line of another writer is ended before.
 * Dropped if nobody reads. Errors: TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_sink_put(tddp_launch_sink *sink, const void *writer,
                                                const char *prefix, const char *data, size_t size);

/* Whether so much waits that its workers should wait too. */
bool tddp_launch_sink_full(const tddp_launch_sink *sink);

/*
 * Writes as much as is taken without waiting. Where that fails (a full disk) what is queued is
 * lost, which the console reports once a sink; later lines are tried again, whole ones.
 */
void tddp_launch_sink_flush(tddp_launch_sink *sink, tddp_launch_console *console);

/* Closes a log file. */
void tddp_launch_sink_close(tddp_launch_sink *sink);

#endif
