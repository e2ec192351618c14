/*
 * Signals by signalfd: no handler, so nothing runs at a bad moment, and the agent's one poll sees
 * them beside everything else. Opened by main() before any thread starts, so every thread inherits
 * the blocked mask; read by the main thread.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/signals.h"

static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

static bool is_ignored(int number)
{
    struct sigaction action;
    return sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

static tddp_status set_disposition(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler};
    return sigaction(number, &action, NULL) == 0 ? TDDP_OK : tddp_fail_errno("sigaction");
}

tddp_status tddp_launch_signals_open(tddp_launch_signals *signals)
{
    sigset_t taken;
    sigemptyset(&taken);
    sigaddset(&taken, SIGCHLD);
    for (size_t i = 0; i < sizeof ending / sizeof ending[0]; i++) {
        /* SIGTERM is the one way to end us that is always open; a blocked signal is queued even if
         * it is ignored, so those to be ignored must stay out of the set. */
        if (ending[i] == SIGTERM || !is_ignored(ending[i])) {
            sigaddset(&taken, ending[i]);
        }
    }
    signals->pipe_ignored_before = is_ignored(SIGPIPE);
    /* With SIGCHLD ignored, children would vanish without their exit status. */
    if (set_disposition(SIGCHLD, SIG_DFL) != TDDP_OK ||
        set_disposition(SIGPIPE, SIG_IGN) != TDDP_OK) {
        return TDDP_SYSTEM;
    }
    if (sigprocmask(SIG_BLOCK, &taken, &signals->before) != 0) {
        return tddp_fail_errno("sigprocmask");
    }
    signals->fd = signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
    return signals->fd >= 0 ? TDDP_OK : tddp_fail_errno("signalfd");
}

void tddp_launch_signals_close(tddp_launch_signals *signals)
{
    tddp_close(signals->fd);
    signals->fd = -1;
}

int tddp_launch_signals_next(const tddp_launch_signals *signals)
{
    struct signalfd_siginfo info;
    ssize_t got;
    do {
        got = read(signals->fd, &info, sizeof info);
    } while (got < 0 && errno == EINTR);
    return got == sizeof info ? (int)info.ssi_signo : 0;
}

void tddp_launch_signals_restore(const tddp_launch_signals *signals)
{
    if (!signals->pipe_ignored_before) {
        (void)set_disposition(SIGPIPE, SIG_DFL);
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
