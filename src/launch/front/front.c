/*
 * The front process: waits for signals, forwards them to the agent, and cleans up if the agent is
 * killed. It has no threads, no descriptors of its own and no growing memory, so that it survives
 * whatever happens to the agent. Main thread.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/front/front.h"
#include "launch/workers/processes.h"

enum {
    MOST_SWEEPS = 60, /* then what is left cannot be killed */
    SWEEP_MS = 50,    /* the longest wait between two */
    REPORT_MS = 1000, /* for the reader of standard error */
    STOP_ROUNDS = 4,  /* a process may be started while its parent is not stopped yet */
    REPEATED_MS = 500 /* signals of one number within this time are one */
};

/* Reaps processes that have ended; returns the agent's wait status, -1 if it is not among them. */
static int reap(pid_t agent)
{
    int status;
    int found = -1;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        found = pid == agent ? status : found;
    }
    return found;
}

/* Kills what the agent has left, until nothing of it is there; false if something stays. */
static bool sweep(const char *unrelated)
{
    const tddp_launch_exempt exempt = {.unrelated = unrelated};
    for (int i = 0; i < MOST_SWEEPS; i++) {
        (void)reap(0);
        if (!tddp_launch_has_children() || tddp_launch_signal_descendants(&exempt, SIGKILL) == 0) {
            return true;
        }
        (void)poll(NULL, 0, i < 5 ? 1 << i : SWEEP_MS);
    }
    return false;
}

/* After the agent's end: cleans up, and returns torchrun's exit status. */
static int finish(pid_t agent, int status, const char *unrelated)
{
    char name[32];
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    bool swept = sweep(unrelated);
    if (!WIFSIGNALED(status)) {
        return WEXITSTATUS(status);
    }
    if (poll(&ready, 1, REPORT_MS) == 1) {
        (void)dprintf(STDERR_FILENO, "torchrun: its agent (pid %d) was killed by %s; %s\n",
                      (int)agent, tddp_launch_signal_name(WTERMSIG(status), name),
                      swept ? "the workers were killed with it"
                            : "some processes of the workers cannot be killed");
    }
    return TDDP_LAUNCH_EXIT_BY_SIGNAL + WTERMSIG(status);
}

/* Ctrl-Z: first the workers, then this process, which returns from its own stop when it is
 * continued (or at once where nobody could continue it). */
static void stop_and_continue(pid_t agent, const char *unrelated)
{
    const tddp_launch_exempt exempt = {.unrelated = unrelated, .group = agent};
    sigset_t stop;
    for (int i = 0; i < STOP_ROUNDS; i++) {
        (void)tddp_launch_signal_descendants(&exempt, SIGSTOP);
    }
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    (void)raise(SIGTSTP);
    (void)sigprocmask(SIG_UNBLOCK, &stop, NULL);
    (void)sigprocmask(SIG_BLOCK, &stop, NULL);
    (void)tddp_launch_signal_descendants(&exempt, SIGCONT);
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

/* Passes signals on until the agent has ended; returns its wait status. */
static int watch(pid_t agent, const tddp_launch_signals *signals, const char *unrelated)
{
    int64_t came[NSIG] = {0};
    sigset_t awaited = signals->ending;
    siginfo_t info;
    int status;
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTSTP);
    while ((status = reap(agent)) < 0) {
        int number = sigwaitinfo(&awaited, &info);
        if (number == SIGTSTP && !sigismember(&signals->ending, SIGTSTP)) {
            stop_and_continue(agent, unrelated);
        } else if (number > 0 && number != SIGCHLD && !is_repeated(came, &info)) {
            tddp_launch_signals_pass_on(agent, &info);
        }
    }
    return status;
}

static tddp_status become_agent(tddp_launch_signals *signals, pid_t front)
{
    (void)setpgid(0, 0); /* cannot fail: a fresh child leads no session */
    (void)pthread_setname_np(pthread_self(), "torchrun-agent");
    tddp_status status = tddp_launch_signals_open(signals, front);
    return status != TDDP_OK || tddp_launch_signal_at_end_of(front, SIGTERM)
               ? status
               : tddp_fail(TDDP_SYSTEM, "killed while it started");
}

tddp_status tddp_launch_split(tddp_launch_signals *signals, int *status)
{
    char *unrelated = tddp_launch_list_children();
    pid_t front = getpid();
    pid_t agent = -1;
    tddp_status result = tddp_launch_adopt_orphans();
    if (result == TDDP_OK && (agent = fork()) < 0) {
        result = tddp_fail_errno("cannot start torchrun's agent: fork");
    } else if (agent == 0) {
        *status = -1;
        result = become_agent(signals, front);
    } else if (agent > 0) {
        *status = finish(agent, watch(agent, signals, unrelated), unrelated);
    }
    free(unrelated);
    return result;
}
