/*
 * The route of one worker's stream: to a log file, the console and the filtered log.
 */
#ifndef TDDP_LAUNCH_ROUTE_H
#define TDDP_LAUNCH_ROUTE_H

#include "launch/command/options.h"
#include "launch/output/console.h"

/* A line longer than this goes out in pieces: memory is bounded, whatever a worker writes. */
#define TDDP_LAUNCH_LONGEST_LINE ((size_t)16 << 20)

typedef struct tddp_launch_route {
    tddp_launch_console *console;
    tddp_launch_sink *shown;            /* NULL: not on the console */
    bool raw;                           /* there byte for byte: no other worker's lines are there */
    int fd;                             /* the worker writes there itself; -1: through a pipe */
    bool marked;                        /* the prefix is there before each line */
    char *prefix;                       /* before each line of the filtered log */
    tddp_launch_sink file;              /* .fd -1: none */
    const tddp_launch_filters *filters; /* NULL: nothing goes to the filtered log */
    tddp_launch_sink *filtered;
    tddp_bytes pending; /* a line that is not complete */
    size_t scanned;     /* the first so many bytes of `pending` have no newline */
    tddp_launch_loop *loop;
    tddp_launch_source source; /* the pipe's end that is read; .fd -1: none, or at its end */
} tddp_launch_route;

/* Has the loop pass on what comes through a pipe, which is taken over; -1: there is none. Errors:
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_route_watch(tddp_launch_route *route, tddp_launch_loop *loop,
                                                   int fd);

/* Passes on what is left in the pipe, and closes it. */
void tddp_launch_route_drain(tddp_launch_route *route);

/* Passes on what came; with `at_end` also a line without an end. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_route_take(tddp_launch_route *route, const char *data,
                                                  size_t size, bool at_end);

/* Closes the pipe and the file. */
void tddp_launch_route_free(tddp_launch_route *route);

/* What a worker's macros stand for. */
typedef struct tddp_launch_macro {
    const char *name;
    const char *value;
} tddp_launch_macro;

/*
 * Fills in a template as Python's string.Template does: macros, up to one without a name, are
 * written ${name} or $name, $$ is one $, and what is none of these stays. free(); NULL if memory is
 * short.
 */
char *tddp_launch_fill(const char *template, const tddp_launch_macro *macros);

#endif
