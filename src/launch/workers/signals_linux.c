/*
 * Signals by signalfd: no handler, so nothing runs at a bad moment, and the agent's one poll sees
 * them beside everything else. Blocked by main() before any thread starts, so every thread inherits
 * the blocked mask; read by the main thread.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/signals.h"

static bool is_ignored(int number)
{
    struct sigaction action;
    return sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

tddp_status tddp_launch_signals_block(const int *list, int count, tddp_launch_signals *out)
{
    tddp_launch_signals made = {.fd = -1, .pipe_ignored_before = is_ignored(SIGPIPE)};
    sigemptyset(&made.ending);
    sigemptyset(&made.passed_on);
    for (int i = 0; i < count; i++) {
        /* SIGTERM is the one way to end us that is always open; a blocked signal is queued even if
         * it is ignored, so those to be ignored must stay out of the set. */
        if (list[i] == SIGTERM || !is_ignored(list[i])) {
            sigaddset(&made.ending, list[i]);
        }
    }
    sigset_t taken = made.ending;
    sigaddset(&taken, SIGCHLD);
    if (!is_ignored(SIGTSTP)) {
        sigaddset(&taken, SIGTSTP);
    }
    /* With SIGCHLD ignored, children would vanish without their exit status. */
    if (signal(SIGCHLD, SIG_DFL) == SIG_ERR || signal(SIGPIPE, SIG_IGN) == SIG_ERR ||
        sigprocmask(SIG_BLOCK, &taken, &made.before) != 0) {
        return tddp_fail_errno("cannot block signals");
    }
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_launch_signals_open(tddp_launch_signals *signals, pid_t parent)
{
    sigset_t taken = signals->ending;
    sigaddset(&taken, SIGCHLD);
    sigaddset(&taken, SIGTERM);
    sigset_t blocked = taken;
    /* This process is in the background of the terminal, to which it may write all the same. */
    sigaddset(&blocked, SIGTTOU);
    /* A file that may not grow is a write that fails, and no end of the job. */
    sigaddset(&blocked, SIGXFSZ);
    signals->parent = parent;
    signals->fd = sigprocmask(SIG_BLOCK, &blocked, NULL) == 0
                      ? signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK)
                      : -1;
    return signals->fd >= 0 ? TDDP_OK : tddp_fail_errno("signalfd");
}

void tddp_launch_signals_pass_on(pid_t agent, const siginfo_t *info)
{
    /* With the signal goes whether the terminal sent it. */
    const union sigval origin = {.sival_int = info->si_code == SI_KERNEL};
    if (sigqueue(agent, info->si_signo, origin) != 0) {
        (void)kill(agent, info->si_signo); /* too many are queued already */
    }
    (void)kill(agent, SIGCONT); /* one that was stopped takes no other signal */
}

tddp_launch_signal tddp_launch_signals_next(tddp_launch_signals *signals)
{
    struct signalfd_siginfo info;
    ssize_t got;
    do {
        got = read(signals->fd, &info, sizeof info);
    } while (got < 0 && errno == EINTR);
    if (got != sizeof info) {
        return (tddp_launch_signal){0};
    }
    tddp_launch_signal taken = {.number = (int)info.ssi_signo};
    if ((pid_t)info.ssi_pid == signals->parent && taken.number != SIGCHLD) {
        taken.again = sigismember(&signals->passed_on, taken.number) == 1;
        taken.from_terminal = info.ssi_int == 1;
        sigaddset(&signals->passed_on, taken.number);
    }
    return taken;
}

void tddp_launch_signals_restore(const tddp_launch_signals *signals)
{
    if (!signals->pipe_ignored_before) {
        (void)signal(SIGPIPE, SIG_DFL);
    }
    (void)sigprocmask(SIG_SETMASK, &signals->before, NULL);
}

const char *tddp_launch_signal_name(int number, char text[32])
{
    const char *name = sigabbrev_np(number);
    if (name) {
        (void)snprintf(text, 32, "SIG%s", name);
    } else if (number >= SIGRTMIN && number <= SIGRTMAX) {
        (void)snprintf(text, 32, "SIGRTMIN+%d", number - SIGRTMIN);
    } else {
        (void)snprintf(text, 32, "signal %d", number);
    }
    return text;
}
