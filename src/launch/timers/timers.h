/*
 * Timers of workers: a worker that has not stopped one in time is ended. Workers send requests
 * through a named pipe, which TORCHELASTIC_TIMER_FILE names, in the format of PyTorch's
 * FileTimerClient: lines of JSON of at most PIPE_BUF bytes, so that each is written at once.
 *
 *     {"version": 1, "pid": 17, "scope_id": "load", "expiration_time": 1795276170.5, "signal": 9}
 *
 * The time is in seconds since 1970; a negative one stops the timer of this scope. What workers
 * write is not trusted: it is bounded, and requests that aren't understood are ignored. Main
 * thread.
 */
#ifndef TDDP_LAUNCH_TIMERS_H
#define TDDP_LAUNCH_TIMERS_H

#include <limits.h>

#include "base/base.h"

enum { TDDP_LAUNCH_SCOPE_BYTES = 256 }; /* longer ones are cut */

typedef struct tddp_launch_timer {
    pid_t pid;
    int signal;       /* that ends the process */
    int64_t deadline; /* INT64_MIN: the timer is to stop */
    char scope[TDDP_LAUNCH_SCOPE_BYTES];
} tddp_launch_timer;

typedef struct tddp_launch_timers {
    char *path;    /* of the pipe */
    int fd;        /* readable when requests have arrived */
    bool full;     /* there were too many timers, which was logged */
    bool skipping; /* the rest of a line that is too long */
    size_t size;   /* of the line that is not complete */
    char line[PIPE_BUF];
    int count;
    tddp_launch_timer *list; /* those that run */
} tddp_launch_timers;

/* Makes the pipe in this folder, whose owner removes both. Errors: TDDP_SYSTEM. */
TDDP_NODISCARD tddp_status tddp_launch_timers_open(const char *folder, tddp_launch_timers **out);

/* Executes requests that have arrived. Too many timers are logged once: further ones do not count.
 */
void tddp_launch_timers_read(tddp_launch_timers *timers);

/* When the next timer expires; INT64_MAX: none does. */
int64_t tddp_launch_timers_deadline(const tddp_launch_timers *timers);

/* Removes a timer that has expired; false if there is none. */
bool tddp_launch_timers_expired(tddp_launch_timers *timers, tddp_launch_timer *out);

/* NULL is fine. */
void tddp_launch_timers_close(tddp_launch_timers *timers);

/* Parses a request, any bytes, without its newline; false if it is none. */
bool tddp_launch_timer_parse(const char *line, size_t size, tddp_launch_timer *out);

#endif
