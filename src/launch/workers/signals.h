/*
 * Signals as readable events, and the state in which workers get them back.
 */
#ifndef TDDP_LAUNCH_SIGNALS_H
#define TDDP_LAUNCH_SIGNALS_H

#include <signal.h>
#include <stdbool.h>

#include <tddp/status.h>

typedef struct tddp_launch_signals {
    int fd;          /* readable when a signal waits */
    sigset_t before; /* the mask torchrun was started with: the workers' */
    bool pipe_ignored_before;
} tddp_launch_signals;

/*
 * Blocks SIGCHLD and the ending signals (SIGINT, SIGTERM, SIGHUP, SIGQUIT) and opens a descriptor
 * for them. One that was ignored when torchrun was started (nohup) stays ignored. SIGPIPE is
 * ignored from here on. Before any thread is started. Errors: TDDP_SYSTEM.
 */
TDDP_NODISCARD tddp_status tddp_launch_signals_open(tddp_launch_signals *signals);
void tddp_launch_signals_close(tddp_launch_signals *signals);

/* The next waiting signal, or 0. */
int tddp_launch_signals_next(const tddp_launch_signals *signals);

/* In a forked child: mask and dispositions as torchrun was started with, SIGCHLD's the default.
 * Async-signal-safe. */
void tddp_launch_signals_restore(const tddp_launch_signals *signals);

/* "SIGKILL"; "SIGRTMIN+3"; "signal 99". `text` holds at least 32 bytes; returns it. */
const char *tddp_launch_signal_name(int number, char text[32]);

#endif
