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

enum { ECHO_MS = 500 };

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

static tddp_status add_ending(sigset_t *set, int number)
{
    char name[32];
    if (number == SIGKILL || number == SIGSTOP || number == SIGCHLD || number == SIGPIPE ||
        sigaddset(set, number) != 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--signals-to-handle: %s cannot be handled; leave it out",
                         tddp_launch_signal_name(number, name));
    }
    /* SIGTERM is the one way to end us that is always open; a blocked signal is queued even if it
     * is ignored, so those to be ignored must stay out of the set. */
    if (number != SIGTERM && is_ignored(number)) {
        (void)sigdelset(set, number);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_signals_block(const int *list, int count, tddp_launch_signals *out)
{
    tddp_launch_signals made = {.fd = -1};
    sigemptyset(&made.ending);
    for (int i = 0; i < count; i++) {
        tddp_status status = add_ending(&made.ending, list[i]);
        if (status != TDDP_OK) {
            return status;
        }
    }
    sigset_t taken = made.ending;
    sigaddset(&taken, SIGCHLD);
    made.pipe_ignored_before = is_ignored(SIGPIPE);
    /* With SIGCHLD ignored, children would vanish without their exit status. */
    if (set_disposition(SIGCHLD, SIG_DFL) != TDDP_OK ||
        set_disposition(SIGPIPE, SIG_IGN) != TDDP_OK) {
        return TDDP_SYSTEM;
    }
    if (sigprocmask(SIG_BLOCK, &taken, &made.before) != 0) {
        return tddp_fail_errno("sigprocmask");
    }
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_launch_signals_open(tddp_launch_signals *signals, pid_t front)
{
    sigset_t taken = signals->ending;
    sigaddset(&taken, SIGCHLD);
    sigaddset(&taken, SIGTERM);
    sigset_t blocked = taken;
    /* This process is in the background of the terminal, to which it may write all the same. */
    sigaddset(&blocked, SIGTTOU);
    /* A file that may not grow is a write that fails, and no end of the job. */
    sigaddset(&blocked, SIGXFSZ);
    if (sigprocmask(SIG_BLOCK, &blocked, NULL) != 0) {
        return tddp_fail_errno("sigprocmask");
    }
    int fd = signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) {
        return tddp_fail_errno("signalfd");
    }
    signals->fd = fd;
    signals->front = front;
    return TDDP_OK;
}

void tddp_launch_signals_close(tddp_launch_signals *signals)
{
    tddp_close(signals->fd);
    signals->fd = -1;
}

bool tddp_launch_signals_front_gone(const tddp_launch_signals *signals)
{
    return getppid() != signals->front;
}

static bool is_echo(tddp_launch_signals *signals, int number, bool from_terminal)
{
    bool key = from_terminal && number != SIGHUP; /* which is no key */
    int64_t now = tddp_now_ns();
    int64_t last = signals->known[number].at;
    if (!key && last != 0 && now - last < ECHO_MS * TDDP_NS_PER_MS) {
        return true;
    }
    signals->known[number].at = now;
    return false;
}

bool tddp_launch_signals_echo(tddp_launch_signals *signals, const siginfo_t *info)
{
    return is_echo(signals, info->si_signo, info->si_code == SI_KERNEL);
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
    for (;;) {
        ssize_t got = read(signals->fd, &info, sizeof info);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got != sizeof info) {
            return (tddp_launch_signal){0};
        }
        int number = (int)info.ssi_signo;
        /* What the front passes on has been looked at there. */
        bool by_front = (pid_t)info.ssi_pid == signals->front;
        if (number == SIGCHLD) {
            return (tddp_launch_signal){.number = number};
        }
        if (by_front || !is_echo(signals, number, info.ssi_code == SI_KERNEL)) {
            bool *seen = &signals->known[number].seen[by_front];
            tddp_launch_signal taken = {number, *seen, by_front && info.ssi_int == 1};
            *seen = true;
            return taken;
        }
    }
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
