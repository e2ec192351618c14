/*
 * Signals as readable events, and the state in which workers get them back.
 *
 * main() blocks them before anything else; then torchrun becomes two processes (front/front.h), of
 * which the agent opens a descriptor for them.
 */
#ifndef TDDP_LAUNCH_SIGNALS_H
#define TDDP_LAUNCH_SIGNALS_H

#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

#include <tddp/status.h>

enum { TDDP_LAUNCH_EXIT_BY_SIGNAL = 128 }; /* the exit status after signal N is this + N */

typedef struct tddp_launch_signals {
    int fd;          /* readable when a signal waits; -1: not open */
    sigset_t ending; /* those that end the job */
    sigset_t before; /* the mask torchrun was started with: the workers' */
    bool pipe_ignored_before;
    pid_t parent;       /* of the agent: the process that passes them on to it */
    sigset_t passed_on; /* those that it has passed on already */
} tddp_launch_signals;

/* A signal as the agent takes it. */
typedef struct tddp_launch_signal {
    int number;         /* 0: none waits */
    bool again;         /* it was passed on before */
    bool from_terminal; /* the terminal sent it to its foreground processes, torchrun among them */
} tddp_launch_signal;

/*
 * Blocks SIGCHLD, SIGTSTP (which the parent waits for: it stops the workers first) and the signals
 * of `list` (--signals-to-handle). One that was ignored when torchrun was started (nohup) stays
 * ignored, but SIGTERM. SIGPIPE is ignored from here on. Before any thread or process is started.
 * Errors: TDDP_SYSTEM.
 */
TDDP_NODISCARD tddp_status tddp_launch_signals_block(const int *list, int count,
                                                     tddp_launch_signals *out);

/* In the agent: opens the descriptor. SIGTERM comes through it even if it is not of the list: so
 * the agent learns that its parent has ended. Errors: TDDP_SYSTEM. */
TDDP_NODISCARD tddp_status tddp_launch_signals_open(tddp_launch_signals *signals, pid_t parent);

/*
 * The next waiting signal. systemd and `pkill` signal both of torchrun's processes, so that one
 * event reaches the agent twice: directly, and passed on. So only what is passed on is a
 * repetition, and of its own number: SIGTERM and SIGHUP one after the other are none.
 */
tddp_launch_signal tddp_launch_signals_next(tddp_launch_signals *signals);

/* In the parent: sends the agent what came, and continues it. */
void tddp_launch_signals_pass_on(pid_t agent, const siginfo_t *info);

/* In a forked child: mask and dispositions as torchrun was started with, SIGCHLD's the default.
 * Async-signal-safe. */
void tddp_launch_signals_restore(const tddp_launch_signals *signals);

/* "SIGKILL"; "SIGRTMIN+3"; "signal 99". `text` holds at least 32 bytes; returns it. */
const char *tddp_launch_signal_name(int number, char text[32]);

#endif
