/*
 * The route of one worker's stream: to a log file, the console and the filtered log.
 */
#ifndef TDDP_LAUNCH_ROUTE_H
#define TDDP_LAUNCH_ROUTE_H

#include "launch/command/options.h"
#include "launch/output/console.h"
#include "launch/output/lines.h"
#include "launch/output/log_file.h"

typedef struct tddp_launch_route {
    tddp_launch_console *console;
    int stream;
    bool shown;                         /* on the console */
    bool raw;                           /* there byte for byte: no other worker's lines are there */
    bool own;                           /* the worker itself writes to `file`, or nobody wants it */
    bool inherited;                     /* the worker writes to torchrun's own descriptor */
    bool live;                          /* a terminal: lines that are written over show at once */
    bool drawn;                         /* such a line stands there, unfinished */
    const char *prefix;                 /* before each line on the console; NULL: none */
    tddp_launch_log_file file;          /* .fd -1: none */
    const tddp_launch_filters *filters; /* NULL: nothing goes to the filtered log */
    tddp_launch_log_file *filtered;
    const char *mark; /* before each line of the filtered log */
    tddp_launch_lines lines;
} tddp_launch_route;

/* Passes on what came; with `at_end` also a line without an end. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_route_take(tddp_launch_route *route, const char *data,
                                                  size_t size, bool at_end);

/* Closes the file. */
void tddp_launch_route_free(tddp_launch_route *route);

#endif
