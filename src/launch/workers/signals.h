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
#include <stdint.h>
#include <sys/types.h>

#include <tddp/status.h>

enum {
    TDDP_LAUNCH_SIGNAL_COUNT = 65,    /* Linux's highest number is 64 */
    TDDP_LAUNCH_EXIT_BY_SIGNAL = 128, /* the exit status after signal N is this + N */
};

typedef struct tddp_launch_signals {
    int fd;          /* readable when a signal waits; -1: not open */
    sigset_t ending; /* those that end the job */
    sigset_t before; /* the mask torchrun was started with: the workers' */
    bool pipe_ignored_before;
    pid_t front; /* the process that passes them on to this one */
    struct {
        int64_t at;   /* when it came to this process; 0: never */
        bool seen[2]; /* by the agent: sent to it directly, and passed on by the front */
    } known[TDDP_LAUNCH_SIGNAL_COUNT];
} tddp_launch_signals;

/* A signal as the agent takes it. */
typedef struct tddp_launch_signal {
    int number;         /* 0: none waits */
    bool again;         /* it is not the first with this number that was sent this way */
    bool from_terminal; /* the terminal sent it to its foreground processes, torchrun among them */
} tddp_launch_signal;

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
 * The next waiting signal. systemd and `pkill` signal both of torchrun's processes, so that one
 * event reaches the agent twice: directly, and from the front. Each way is therefore counted for
 * itself, and each number: SIGTERM and SIGHUP one after the other are no repetition.
 */
tddp_launch_signal tddp_launch_signals_next(tddp_launch_signals *signals);

/*
 * Whether a signal that was sent to this process repeats the last one of its number by itself:
 * `timeout` signals its child and then its group, the child among it, and a shell on a terminal
 * that is gone sends SIGHUP beside the kernel's. A key of the terminal always counts. Other
 * repetitions within half a second do not. In each of the two processes.
 */
bool tddp_launch_signals_echo(tddp_launch_signals *signals, const siginfo_t *info);

/* In the front: sends the agent what came, and continues it. */
void tddp_launch_signals_pass_on(pid_t agent, const siginfo_t *info);

/* Whether the front was killed, so that nobody sees this process's exit status. */
bool tddp_launch_signals_front_gone(const tddp_launch_signals *signals);

/* In a forked child: mask and dispositions as torchrun was started with, SIGCHLD's the default.
 * Async-signal-safe. */
void tddp_launch_signals_restore(const tddp_launch_signals *signals);

/* "SIGKILL"; "SIGRTMIN+3"; "signal 99". `text` holds at least 32 bytes; returns it. */
const char *tddp_launch_signal_name(int number, char text[32]);

#endif
