/*
 * The front process: waits for signals, forwards them to the agent, and cleans up if the agent is
 * killed. It has no threads, no descriptors of its own and no growing memory, so that it survives
 * whatever happens to the agent. Main thread.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/front/front.h"

enum {
    MOST_SWEEPS = 60, /* then what is left cannot be killed */
    SWEEP_MS = 50,    /* the longest wait between two */
    SAY_MS = 1000,    /* for the reader of standard error */
    STOP_ROUNDS = 8,  /* a process may be started while its parent is not stopped yet */
    REPEATED_MS = 500 /* signals of one number within this time are one */
};

tddp_status tddp_launch_front_split(tddp_launch_signals *signals, pid_t *agent)
{
    pid_t front = getpid();
    tddp_status status = tddp_launch_adopt_orphans();
    if (status != TDDP_OK) {
        return status;
    }
    pid_t pid = fork();
    if (pid < 0) {
        return tddp_fail_errno("cannot start torchrun's agent: fork");
    }
    if (pid > 0) {
        *agent = pid;
        return TDDP_OK;
    }
    (void)setpgid(0, 0); /* cannot fail: a fresh child leads no session */
    (void)pthread_setname_np(pthread_self(), "torchrun-agent");
    status = tddp_launch_signals_open(signals, front);
    if (status == TDDP_OK && !tddp_launch_signal_at_end_of(front, SIGTERM)) {
        status = tddp_fail(TDDP_SYSTEM, "killed while it started");
    }
    *agent = 0;
    return status;
}

pid_t tddp_launch_torchrun_pid(void)
{
    return getppid();
}

/* Reaps processes that have ended; true once the agent is among them. */
static bool reap(pid_t agent, int *agent_status)
{
    int status;
    pid_t pid;
    bool over = false;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == agent) {
            *agent_status = status;
            over = true;
        }
    }
    return over;
}

/* Kills what the agent has left, until nothing of it is there; false if something stays. */
static bool sweep(const char *unrelated)
{
    const tddp_launch_exempt exempt = {.unrelated = unrelated};
    int pause_ms = 1;
    int ignored;
    for (int i = 0; i < MOST_SWEEPS; i++) {
        (void)reap(0, &ignored);
        if (!tddp_launch_has_children() || tddp_launch_signal_descendants(&exempt, SIGKILL) == 0) {
            return true;
        }
        (void)poll(NULL, 0, pause_ms);
        pause_ms = pause_ms * 2 < SWEEP_MS ? pause_ms * 2 : SWEEP_MS;
    }
    return false;
}

static void say(const char *text)
{
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    char *line = tddp_format("torchrun: %s\n", text);
    if (line && poll(&ready, 1, SAY_MS) == 1) {
        ssize_t ignored = write(STDERR_FILENO, line, strlen(line));
        (void)ignored;
    }
    free(line);
}

static int conclude(pid_t agent, int status, const char *unrelated)
{
    char name[32];
    char text[160];
    bool swept = sweep(unrelated);
    if (WIFSIGNALED(status)) {
        (void)snprintf(text, sizeof text,
                       "its agent (pid %d) was killed by %s; the workers were killed with it",
                       (int)agent, tddp_launch_signal_name(WTERMSIG(status), name));
        say(text);
    }
    if (!swept) {
        say("some processes of the workers cannot be killed");
    }
    return WIFSIGNALED(status) ? TDDP_LAUNCH_EXIT_BY_SIGNAL + WTERMSIG(status)
                               : WEXITSTATUS(status);
}

/* Ctrl-Z: first the workers, then this process, which returns from its own stop when it is
 * continued (or at once where nobody could continue it). */
static void stop_and_continue(pid_t agent, const char *unrelated)
{
    const tddp_launch_exempt exempt = {.unrelated = unrelated, .group = agent};
    sigset_t stop;
    size_t known = 0;
    for (int i = 0; i < STOP_ROUNDS; i++) {
        size_t found = tddp_launch_signal_descendants(&exempt, SIGSTOP);
        if (found == known) {
            break;
        }
        known = found;
    }
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    (void)raise(SIGTSTP);
    (void)sigprocmask(SIG_UNBLOCK, &stop, NULL);
    (void)sigprocmask(SIG_BLOCK, &stop, NULL);
    (void)tddp_launch_signal_descendants(&exempt, SIGCONT);
}

static bool is_default(int number)
{
    struct sigaction action;
    return sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_DFL;
}

/*
 * Whether a signal repeats the last one of its number by itself: `timeout` signals its child and
 * then its group, the child among it, and a shell on a terminal that is gone sends SIGHUP beside
 * the kernel's. A key of the terminal always counts. `came` has when each number came; 0: never.
 */
static bool is_repeated(int64_t came[NSIG], const siginfo_t *info)
{
    bool key = info->si_code == SI_KERNEL && info->si_signo != SIGHUP;
    int64_t *last = &came[info->si_signo];
    int64_t now = tddp_now_ns();
    bool repeated = !key && *last != 0 && now - *last < REPEATED_MS * TDDP_NS_PER_MS;
    *last = repeated ? *last : now;
    return repeated;
}

int tddp_launch_front_watch(pid_t agent, const tddp_launch_signals *signals, const char *unrelated)
{
    int64_t came[NSIG] = {0};
    sigset_t awaited = signals->ending;
    siginfo_t info;
    int status = 0;
    sigaddset(&awaited, SIGCHLD);
    if (is_default(SIGTSTP)) {
        sigaddset(&awaited, SIGTSTP);
        (void)sigprocmask(SIG_BLOCK, &awaited, NULL);
    }
    for (;;) {
        int number = sigwaitinfo(&awaited, &info);
        if (number == SIGCHLD) {
            if (reap(agent, &status)) {
                return conclude(agent, status, unrelated);
            }
        } else if (number == SIGTSTP && !sigismember(&signals->ending, SIGTSTP)) {
            stop_and_continue(agent, unrelated);
        } else if (number > 0 && !is_repeated(came, &info)) {
            tddp_launch_signals_pass_on(agent, &info);
        }
    }
}
