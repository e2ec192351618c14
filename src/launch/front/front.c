/*
 * The front process: waits for signals, forwards them to the agent, and cleans up if the agent is
 * killed. It has no threads, no descriptors of its own and no growing memory, so that it survives
 * whatever happens to the agent. Main thread.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/front/front.h"
#include "launch/workers/processes.h"

enum {
    MOST_SWEEPS = 60, /* then what is left cannot be killed */
    SWEEP_MS = 50,    /* the longest wait between two */
    REPORT_MS = 1000, /* for the reader of standard error */
    STOP_ROUNDS = 4   /* a process may be started while its parent is not stopped yet */
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
static bool sweep(const tddp_launch_unrelated *unrelated)
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
static int finish(pid_t agent, int status, const tddp_launch_unrelated *unrelated)
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
static void stop_and_continue(pid_t agent, const tddp_launch_unrelated *unrelated)
{
    const tddp_launch_exempt exempt = {.unrelated = unrelated, .process = agent};
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

/* Passes signals on until the agent has ended; returns its wait status. */
static int watch(pid_t agent, tddp_launch_signals *signals, const tddp_launch_unrelated *unrelated)
{
    sigset_t awaited = signals->ending;
    struct sigaction stop;
    siginfo_t info;
    int status;
    sigaddset(&awaited, SIGCHLD);
    if (sigaction(SIGTSTP, NULL, &stop) == 0 && stop.sa_handler == SIG_DFL) {
        sigaddset(&awaited, SIGTSTP);
        (void)sigprocmask(SIG_BLOCK, &awaited, NULL);
    }
    while ((status = reap(agent)) < 0) {
        int number = sigwaitinfo(&awaited, &info);
        if (number == SIGTSTP && !sigismember(&signals->ending, SIGTSTP)) {
            stop_and_continue(agent, unrelated);
        } else if (number > 0 && number != SIGCHLD && !tddp_launch_signals_echo(signals, &info)) {
            tddp_launch_signals_pass_on(agent, &info);
        }
    }
    return status;
}

static tddp_status become_agent(tddp_launch_signals *signals, pid_t front)
{
    (void)setpgid(0, 0); /* cannot fail: a fresh child leads no session */
    tddp_launch_name_process("torchrun-agent");
    tddp_status status = tddp_launch_signals_open(signals, front);
    return status != TDDP_OK || tddp_launch_hear_of_end(front, SIGTERM)
               ? status
               : tddp_fail(TDDP_SYSTEM, "killed while it started");
}

tddp_status tddp_launch_split(tddp_launch_signals *signals, int *status)
{
    tddp_launch_unrelated unrelated = {0};
    pid_t front = getpid();
    pid_t agent = -1;
    tddp_status result = tddp_launch_unrelated_find(&unrelated);
    if (result == TDDP_OK) {
        result = tddp_launch_adopt_orphans();
    }
    if (result == TDDP_OK && (agent = fork()) < 0) {
        result = tddp_fail_errno("cannot start torchrun's agent: fork");
    } else if (agent == 0) {
        *status = -1;
        result = become_agent(signals, front);
    } else if (agent > 0) {
        *status = finish(agent, watch(agent, signals, &unrelated), &unrelated);
    }
    tddp_launch_unrelated_free(&unrelated);
    return result;
}
