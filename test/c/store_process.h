/* A TCP store whose server is a process beside the ranks, so that any of them may die. */
#ifndef TDDP_TEST_STORE_PROCESS_H
#define TDDP_TEST_STORE_PROCESS_H

#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tddp.h>

#include "events.h"

static inline pid_t start_store_process(int *port)
{
    int ready[2];
    CHECK_INT(pipe(ready), 0);
    /* Threads that were lent to a call end a moment later; ThreadSanitizer has no fork beside them.
     */
    CHECK_UNTIL(check_threads_named("tddp-blocking") == 0);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        tddp_store_server_opts opts = {.size = sizeof opts, .host = "127.0.0.1", .listen_fd = -1};
        tddp_store_server *server;
        CHECK_OK(tddp_store_server_start(&opts, &server));
        int bound = tddp_store_server_port(server);
        CHECK_INT(write(ready[1], &bound, sizeof bound), sizeof bound);
        for (;;) {
            pause(); /* until it is killed */
        }
    }
    close(ready[1]);
    CHECK_INT(read(ready[0], port, sizeof *port), sizeof *port);
    close(ready[0]);
    return pid;
}

static inline void end_store_process(pid_t pid)
{
    int status;
    CHECK_INT(kill(pid, SIGKILL), 0);
    CHECK_INT(waitpid(pid, &status, 0), pid);
}

#endif
