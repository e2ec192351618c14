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

enum {
    START_MS = 30 * 1000, /* for the file systems that the program and its loader lie on */
    KILLED_MS = 1000,     /* for a process that may be stuck in the kernel */
    LOOK_MS = 5
};

typedef enum step { STEP_PARENT_GONE, STEP_DESCRIPTORS, STEP_BINDING, STEP_EXEC } step;

/* What the child writes when it cannot go on. */
typedef struct trouble {
    step at;
    int error;
} trouble;

typedef struct pipes {
    int output[TDDP_LAUNCH_STREAMS][2]; /* -1: the worker was given a descriptor */
    int report[2];
} pipes;

static void close_pair(int pair[2])
{
    tddp_close(pair[0]);
    tddp_close(pair[1]);
    pair[0] = pair[1] = -1;
}

static void close_pipes(pipes *made)
{
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        close_pair(made->output[stream]);
    }
    close_pair(made->report);
}

static tddp_status open_pipes(const tddp_launch_start *start, pipes *made)
{
    *made = (pipes){{{-1, -1}, {-1, -1}}, {-1, -1}};
    bool fine = pipe2(made->report, O_CLOEXEC) == 0;
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS && fine; stream++) {
        if (start->output_fds[stream] >= 0) {
            continue;
        }
        fine = pipe2(made->output[stream], O_CLOEXEC) == 0;
        if (fine) {
            /* Only our end: the flag is of the pipe's end, and the worker expects its own to block.
             */
            (void)fcntl(made->output[stream][0], F_SETFL, O_NONBLOCK);
        }
    }
    if (!fine) {
        tddp_status status = tddp_fail_errno("cannot make a worker's pipes");
        close_pipes(made);
        return status;
    }
    return TDDP_OK;
}

/* What becomes the worker's stdout or stderr. */
static int end_of(const pipes *made, const tddp_launch_start *start, int stream)
{
    return start->output_fds[stream] >= 0 ? start->output_fds[stream] : made->output[stream][1];
}

static _Noreturn void give_up(const pipes *made, step at)
{
    trouble told = {at, errno};
    ssize_t ignored = write(made->report[1], &told, sizeof told);
    (void)ignored;
    _exit(127);
}

static _Noreturn void become_worker(const pipes *made, const tddp_launch_start *start,
                                    int local_rank, pid_t parent)
{
    /* Neither can fail: a fresh child leads no group, and the front's group is there with it. */
    (void)(start->terminal_group > 0 ? setpgid(0, start->terminal_group) : setsid());
    if (!tddp_launch_die_with(parent)) {
        give_up(made, STEP_PARENT_GONE);
    }
    if (dup2(start->stdin_fd, STDIN_FILENO) < 0 ||
        dup2(end_of(made, start, TDDP_LAUNCH_OUT), STDOUT_FILENO) < 0 ||
        dup2(end_of(made, start, TDDP_LAUNCH_ERR), STDERR_FILENO) < 0) {
        give_up(made, STEP_DESCRIPTORS);
    }
    tddp_launch_close_on_exec_from(STDERR_FILENO + 1);
    (void)setrlimit(RLIMIT_NOFILE, start->files); /* cannot fail: it is not raised */
    tddp_launch_signals_restore(start->signals);
    if (!tddp_launch_binding_apply(start->binding, local_rank)) {
        give_up(made, STEP_BINDING);
    }
    execve(start->path, start->argv, start->envp);
    give_up(made, STEP_EXEC);
}

/* Ends a child that does not get to its program. One that cannot be killed is reaped with the
 * workers, if ever. */
static void abandon(pid_t pid)
{
    int64_t deadline = tddp_deadline_after_ms(KILLED_MS);
    (void)kill(pid, SIGKILL);
    while (waitpid(pid, NULL, WNOHANG) == 0 && tddp_now_ns() < deadline) {
        (void)!tddp_net_sleep(tddp_deadline_after_ms(LOOK_MS), -1);
    }
}

/* Waits for the exec, or for what stood in its way. */
static tddp_status await_exec(const pipes *made, pid_t pid, const tddp_launch_start *start)
{
    const char *path = start->path;
    const int64_t limit_ms = start->limit_ms > 0 ? start->limit_ms : START_MS;
    trouble told;
    ssize_t got;
    tddp_status status =
        tddp_net_poll(made->report[0], POLLIN, tddp_deadline_after_ms(limit_ms), -1);
    if (status != TDDP_OK) {
        abandon(pid);
        return status != TDDP_TIMEOUT
                   ? status
                   : tddp_fail(status,
                               "cannot run %s: it did not start within %g s; check that the file "
                               "system that it is on answers",
                               path, (double)limit_ms / 1000);
    }
    do {
        got = read(made->report[0], &told, sizeof told);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        return TDDP_OK;
    }
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
    }
    if (told.at == STEP_EXEC && told.error == ENOEXEC) {
        return tddp_fail(TDDP_SYSTEM,
                         "cannot run %s: not a program; a script needs a first line such as "
                         "#!/bin/sh",
                         path);
    }
    if (told.at == STEP_EXEC && told.error == ENOENT && access(path, F_OK) == 0) {
        return tddp_fail(
            TDDP_SYSTEM,
            "cannot run %s: what runs it is not there: the interpreter that a script's "
            "first line names, or a program's loader; see file %s",
            path, path);
    }
    return tddp_fail(TDDP_SYSTEM, "cannot run %s%s: %s", path,
                     told.at == STEP_BINDING ? " on its CPUs (--numa-binding)" : "",
                     strerror(told.error));
}

tddp_status tddp_launch_worker_start(tddp_launch_worker *worker, const tddp_launch_start *start)
{
    pipes made;
    tddp_status status = open_pipes(start, &made);
    if (status != TDDP_OK) {
        return status;
    }
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        become_worker(&made, start, worker->local_rank, parent);
    }
    if (pid < 0) {
        status = tddp_fail(TDDP_SYSTEM, "cannot start the worker with local rank %d: fork: %s",
                           worker->local_rank, strerror(errno));
        close_pipes(&made);
        return status;
    }
    tddp_close(made.report[1]);
    made.report[1] = -1;
    status = await_exec(&made, pid, start);
    if (status != TDDP_OK) {
        close_pipes(&made);
        return status;
    }
    worker->pid = pid;
    worker->alive = true;
    worker->has_terminal = start->terminal_group > 0;
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        worker->fds[stream] = made.output[stream][0];
        made.output[stream][0] = -1;
    }
    close_pipes(&made);
    return TDDP_OK;
}

void tddp_launch_worker_signal(const tddp_launch_worker *worker, int number)
{
    /* Once it is reaped, its group's number may become a stranger's. */
    if (worker->alive && !worker->has_terminal) {
        (void)kill(-worker->pid, number);
        if (number != SIGKILL) {
            (void)kill(-worker->pid, SIGCONT); /* a stopped process takes no other signal */
        }
    }
}

static void note_timer(tddp_launch_worker *worker)
{
    tddp_launch_error *error = &worker->error;
    if (worker->expired_timer && !error->message) {
        error->message = tddp_format("the timer \"%s\" expired", worker->expired_timer);
        error->state =
            error->state == TDDP_LAUNCH_ERROR_NONE ? TDDP_LAUNCH_ERROR_TIMER : error->state;
    }
}

void tddp_launch_worker_note_end(tddp_launch_worker *worker, int wait_status)
{
    worker->alive = false;
    worker->wait_status = wait_status;
    (void)clock_gettime(CLOCK_REALTIME, &worker->ended);
    if (worker->error_file && tddp_launch_worker_failed(worker)) {
        tddp_launch_error_read(worker->error_file, &worker->error);
    }
    if (tddp_launch_worker_failed(worker)) {
        note_timer(worker);
    }
}

bool tddp_launch_worker_failed(const tddp_launch_worker *worker)
{
    return !worker->alive &&
           !(WIFEXITED(worker->wait_status) && WEXITSTATUS(worker->wait_status) == 0);
}

void tddp_launch_worker_free(tddp_launch_worker *worker)
{
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        tddp_close(worker->fds[stream]);
    }
    free(worker->error_file);
    free(worker->expired_timer);
    tddp_launch_error_free(&worker->error);
    *worker = (tddp_launch_worker){.fds = {-1, -1}};
}
