/*
 * Starts a worker. The child does nothing between fork and exec but
 * system calls (other threads of ours may hold locks that the fork copied); it reports a failed
 * step through a pipe that a good exec closes. Main thread: the parent-death signal follows the
 * thread that forks.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/workers/processes.h"
#include "launch/workers/worker.h"
#include "net/net.h"

enum { START_MS = 30 * 1000 }; /* for the file systems that the program and its loader lie on */

enum { REPORT = TDDP_LAUNCH_STREAMS, PIPES };

/* For each stream, and for the child's trouble; -1: none, since the worker was given a descriptor.
 */
typedef int pipes[PIPES][2];

static void close_pipes(pipes made)
{
    for (int i = 0; i < PIPES; i++) {
        tddp_close(made[i][0]);
        tddp_close(made[i][1]);
    }
}

static tddp_status open_pipes(const tddp_launch_start *start, pipes made)
{
    memset(made, -1, sizeof(pipes));
    for (int i = 0; i < PIPES; i++) {
        if (i != REPORT && start->output_fds[i] >= 0) {
            continue;
        }
        if (pipe2(made[i], O_CLOEXEC) != 0) {
            return tddp_fail_errno("cannot make a worker's pipes");
        }
    }
    return TDDP_OK;
}

static bool use_descriptor(int given, int piped, int number)
{
    return dup2(given >= 0 ? given : piped, number) >= 0;
}

/* Reports errno if it cannot go on, negated for what comes before the exec. */
static _Noreturn void become_worker(pipes made, const tddp_launch_start *start, pid_t parent)
{
    bool ready = false;
    /* Neither can fail: a fresh child leads no group, and torchrun's group is there with it. */
    (void)(start->terminal_group > 0 ? setpgid(0, start->terminal_group) : setsid());
    if (tddp_launch_signal_at_end_of(parent, SIGKILL) &&
        use_descriptor(start->has_input ? STDIN_FILENO : open("/dev/null", O_RDONLY), -1,
                       STDIN_FILENO) &&
        use_descriptor(start->output_fds[0], made[0][1], STDOUT_FILENO) &&
        use_descriptor(start->output_fds[1], made[1][1], STDERR_FILENO) &&
        (!start->cpus || tddp_launch_cpus_bind(start->cpus))) {
        tddp_launch_close_on_exec_from(STDERR_FILENO + 1);
        (void)setrlimit(RLIMIT_NOFILE, start->files); /* cannot fail: it is not raised */
        tddp_launch_signals_restore(start->signals);
        execve(start->path, start->argv, start->envp);
        ready = true;
    }
    int error = ready ? errno : -errno;
    ssize_t ignored = write(made[REPORT][1], &error, sizeof error);
    (void)ignored;
    _exit(127);
}

static tddp_status explain(int error, const tddp_launch_start *start)
{
    const char *path = start->path;
    const char *why =
        error == ENOEXEC ? "not a program; a script needs a first line such as #!/bin/sh"
        : error == ENOENT && access(path, F_OK) == 0
            ? "what runs it is not there: the interpreter that a script's first line names, or a "
              "program's loader"
            : strerror(abs(error));
    return tddp_fail(TDDP_SYSTEM, "cannot run %s%s: %s", path,
                     error < 0 && start->cpus ? " on its CPUs (--numa-binding)" : "", why);
}

/* Waits for the exec, or for what stood in its way. */
static tddp_status await_exec(int report, pid_t pid, const tddp_launch_start *start)
{
    const int64_t limit_ms = start->limit_ms > 0 ? start->limit_ms : START_MS;
    int error;
    ssize_t got;
    tddp_status status = tddp_net_poll(report, POLLIN, tddp_deadline_after_ms(limit_ms), -1);
    if (status != TDDP_OK) {
        (void)kill(pid, SIGKILL);
        return status != TDDP_TIMEOUT
                   ? status
                   : tddp_fail(status,
                               "cannot run %s: it did not start within %g s; check that the file "
                               "system that it is on answers",
                               start->path, (double)limit_ms / 1000);
    }
    do {
        got = read(report, &error, sizeof error);
    } while (got < 0 && errno == EINTR);
    return got <= 0 ? TDDP_OK : explain(error, start);
}

tddp_status tddp_launch_worker_start(tddp_launch_worker *worker, const tddp_launch_start *start,
                                     int read_ends[TDDP_LAUNCH_STREAMS])
{
    pipes made;
    tddp_status status = open_pipes(start, made);
    if (status != TDDP_OK) {
        close_pipes(made);
        return status;
    }
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        become_worker(made, start, parent);
    }
    if (pid < 0) {
        status = tddp_fail(TDDP_SYSTEM, "cannot start the worker with local rank %d: fork: %s",
                           worker->local_rank, strerror(errno));
    } else {
        tddp_close(made[REPORT][1]);
        made[REPORT][1] = -1;
        status = await_exec(made[REPORT][0], pid, start);
    }
    if (status == TDDP_OK) {
        worker->pid = pid;
        worker->alive = true;
        worker->has_terminal = start->terminal_group > 0;
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            read_ends[stream] = made[stream][0];
            made[stream][0] = -1;
        }
    }
    close_pipes(made);
    return status;
}

void tddp_launch_worker_note_end(tddp_launch_worker *worker, int wait_status)
{
    tddp_launch_error *error = &worker->error;
    worker->alive = false;
    worker->wait_status = wait_status;
    (void)clock_gettime(CLOCK_REALTIME, &worker->ended);
    if (!tddp_launch_worker_failed(worker)) {
        return;
    }
    error->missing =
        worker->expired_timer      ? "none: torchrun ended the worker, because its timer expired"
        : !worker->error_file      ? "none: there was no place for one"
        : WIFSIGNALED(wait_status) ? "none: a signal leaves no time to write one"
                                   : "none: the worker wrote none to $TORCHELASTIC_ERROR_FILE "
                                     "(Ruby does for exceptions; in Python decorate main with "
                                     "@record)";
    if (worker->error_file) {
        tddp_launch_error_read(worker->error_file, error);
    }
    if (worker->expired_timer && !error->message) {
        error->message = tddp_format("the timer \"%s\" expired", worker->expired_timer);
    }
}

bool tddp_launch_worker_failed(const tddp_launch_worker *worker)
{
    return !worker->alive &&
           !(WIFEXITED(worker->wait_status) && WEXITSTATUS(worker->wait_status) == 0);
}

void tddp_launch_worker_free(tddp_launch_worker *worker)
{
    free(worker->error_file);
    free(worker->expired_timer);
    tddp_launch_error_free(&worker->error);
    *worker = (tddp_launch_worker){0};
}

/* --- the terminal ---------------------------------------------------------------------------- */

void tddp_launch_terminal_look(tddp_launch_terminal *out)
{
    *out = (tddp_launch_terminal){.group = getpgid(getppid())};
    /* It is known of the controlling terminal alone. */
    pid_t foreground = tcgetpgrp(STDIN_FILENO);
    out->foreground = foreground == out->group;
    out->present = out->group > 0 && foreground > 0 && tcgetpgrp(STDOUT_FILENO) == foreground &&
                   tcgetattr(STDIN_FILENO, &out->state) == 0;
}

void tddp_launch_terminal_restore(const tddp_launch_terminal *terminal)
{
    pid_t foreground = terminal->foreground ? tcgetpgrp(STDIN_FILENO) : -1;
    if (foreground > 0 && kill(-foreground, 0) != 0 && errno == ESRCH) {
        (void)tcsetpgrp(STDIN_FILENO, terminal->group);
        foreground = terminal->group;
    }
    if (foreground == terminal->group) {
        (void)tcsetattr(STDIN_FILENO, TCSANOW, &terminal->state);
    }
}
