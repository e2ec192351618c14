/* Workers that never get to run their program. */
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "launch/workers/processes.h"
#include "launch/workers/worker.h"

static char path[64];
static tddp_launch_signals signals;
static struct rlimit files;

static tddp_launch_start start_of(char **argv, char **envp)
{
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &files), 0);
    CHECK_OK(tddp_launch_signals_block(NULL, 0, &signals));
    return (tddp_launch_start){
        .path = path,
        .argv = argv,
        .envp = envp,
        .signals = &signals,
        .files = &files,
        .has_input = true,
        .output_fds = {-1, -1},
    };
}

static void write_program(const char *text)
{
    (void)snprintf(path, sizeof path, "/tmp/worker-XXXXXX");
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_INT(write(fd, text, strlen(text)), (int64_t)strlen(text));
    CHECK_INT(fchmod(fd, 0755), 0);
    close(fd);
}

/* The child that did not get there is the only one, and ends. */
static void check_reaped(int expected)
{
    int status = -1;
    CHECK(waitpid(-1, &status, 0) > 0);
    CHECK_INT(status, expected);
    CHECK(!tddp_launch_has_children());
}

/* A lease has the kernel hold back whoever opens the file, as a file system that does not answer
 * does. */
TEST(a_program_that_does_not_start_is_given_up)
{
    char *argv[] = {path, NULL};
    char *envp[] = {NULL};
    tddp_launch_worker worker = {0};
    int pipes[TDDP_LAUNCH_STREAMS];
    write_program("#!/bin/sh\nexit 0\n");
    tddp_launch_start start = start_of(argv, envp);
    start.limit_ms = 50;
    (void)signal(SIGIO, SIG_IGN);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    if (fcntl(fd, F_SETLEASE, F_WRLCK) != 0) {
        unlink(path);
        check_skip("this file system has no leases");
    }
    CHECK_STATUS(tddp_launch_worker_start(&worker, &start, pipes), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), path);
    CHECK_CONTAINS(tddp_error_message(), "it did not start within 0.05 s");
    CHECK(!worker.alive);
    check_reaped(9);
    close(fd);
    unlink(path);
}

TEST(what_is_no_program_is_named)
{
    char *argv[] = {path, NULL};
    char *envp[] = {NULL};
    tddp_launch_worker worker = {0};
    int pipes[TDDP_LAUNCH_STREAMS];
    write_program("\x7f"
                  "ELF no");
    tddp_launch_start start = start_of(argv, envp);
    CHECK_STATUS(tddp_launch_worker_start(&worker, &start, pipes), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "not a program");
    check_reaped(127 << 8);
    unlink(path);
}
