/* What the runner and events.c share. */
#ifndef TDDP_CHECK_RUNNER_H
#define TDDP_CHECK_RUNNER_H

/* Seconds on the monotonic clock. */
double check_now(void);

/* Starts a test's table of events; waits fail after so many seconds. */
void check_events_begin(double seconds);

#endif
