/*
 * Signals as people name them on a command line.
 */
#ifndef TDDP_LAUNCH_SIGNAL_NAMES_H
#define TDDP_LAUNCH_SIGNAL_NAMES_H

#include <stdbool.h>

/* The number of "SIGTERM", "TERM", "term" or "15"; 0 if there is no such signal. */
int tddp_launch_signal_number(const char *text);

/* Whether a program can wait for it and pass it on. */
bool tddp_launch_signal_can_be_handled(int number);

#endif
