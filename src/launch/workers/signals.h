/*
 * Signals as readable events, and the state in which workers get them back.
 *
 * main() blocks them before anything else; then torchrun becomes two processes (guard/guard.h), of
 * which the agent opens a descriptor for them.
 */
#ifndef TDDP_LAUNCH_SIGNALS_H
#define TDDP_LAUNCH_SIGNALS_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <tddp/status.h>

typedef struct tddp_launch_signals {
    int fd;          /* readable when a signal waits; -1: not open */
    sigset_t ending; /* those that end the job */
    sigset_t before; /* the mask torchrun was started with: the workers' */
    bool pipe_ignored_before;
    pid_t front; /* the process that passes them on to this one */
    struct {     /* the last that ended the job, so that one event is not counted twice */
        int number;
        bool by_front;
        int64_t at;
    } last;
} tddp_launch_signals;

/*
 * Blocks SIGCHLD and the signals of `list` (--signals-to-handle). One that was ignored when
 * torchrun was started (nohup) stays ignored, but SIGTERM. SIGPIPE is ignored from here on. Before
 * any thread is started. Errors: TDDP_INVALID_ARGUMENT for a signal that cannot be taken,
 * TDDP_SYSTEM.
 */
TDDP_NODISCARD tddp_status tddp_launch_signals_block(const int *list, int count,
                                                     tddp_launch_signals *out);

/* In the agent: opens the descriptor. SIGTERM comes through it even if it is not of the list: so
 * the agent hears that its front is gone. Errors: TDDP_SYSTEM. */
TDDP_NODISCARD tddp_status tddp_launch_signals_open(tddp_launch_signals *signals, pid_t front);
void tddp_launch_signals_close(tddp_launch_signals *signals);

/*
 * The next waiting signal, or 0. Who signals all of torchrun's processes at once, as systemd,
 * `pkill` and `timeout` do, means one event, which comes twice: directly and from the front.
 * Repeats of such a kind are left out.
 */
int tddp_launch_signals_next(tddp_launch_signals *signals);

/* Whether the front was killed, so that nobody sees this process's exit status. */
bool tddp_launch_signals_front_gone(const tddp_launch_signals *signals);

/* In a forked child: mask and dispositions as torchrun was started with, SIGCHLD's the default.
 * Async-signal-safe. */
void tddp_launch_signals_restore(const tddp_launch_signals *signals);

/* "SIGKILL"; "SIGRTMIN+3"; "signal 99". `text` holds at least 32 bytes; returns it. */
const char *tddp_launch_signal_name(int number, char text[32]);

#endif
