/*
 * One worker: a process in a session of its own, and the pipes its output comes through, unless it
 * was given a file for it. A worker that has the terminal to itself stays in torchrun's session.
 */
#ifndef TDDP_LAUNCH_WORKER_H
#define TDDP_LAUNCH_WORKER_H

#include <sys/resource.h>
#include <sys/types.h>
#include <time.h>

#include "launch/output/output.h"
#include "launch/workers/error_file.h"
#include "launch/workers/binding.h"
#include "launch/workers/signals.h"

typedef struct tddp_launch_worker {
    pid_t pid; /* also its session and process group but with the terminal; 0: not started */
    int rank;
    int local_rank;
    bool alive;
    bool has_terminal;            /* it is in the process group of torchrun's front */
    bool ended_by_us;             /* it was told to end before it ended */
    bool out_of_memory;           /* the kernel killed it for want of memory */
    int wait_status;              /* once it is not alive */
    struct timespec ended;        /* wall clock */
    char *expired_timer;          /* the scope of the timer by which it was ended; owned; or NULL */
    char *error_file;             /* path; owned; may be NULL */
    tddp_launch_error error;      /* what it left there, once it is not alive */
    int fds[TDDP_LAUNCH_STREAMS]; /* the pipes' ends that are read, until somebody takes them; -1:
                                     none */
} tddp_launch_worker;

/* What to start it with; all borrowed for the call. */
typedef struct tddp_launch_start {
    const char *path;
    char **argv;
    char **envp;
    const tddp_launch_signals *signals;
    const struct rlimit *files; /* how many it may open */
    int stdin_fd;
    pid_t terminal_group;                /* the process group that has the terminal, which it joins;
                                            0: it gets a session of its own */
    const tddp_launch_binding *binding;  /* the CPUs it may use */
    int output_fds[TDDP_LAUNCH_STREAMS]; /* -1: a pipe */
    int64_t limit_ms;                    /* until it runs; 0: 30 s */
} tddp_launch_start;

/* Forks and executes; returns once the program runs. Errors: TDDP_SYSTEM (the text names the step
 * and the program), TDDP_TIMEOUT. Main thread only. */
TDDP_NODISCARD tddp_status tddp_launch_worker_start(tddp_launch_worker *worker,
                                                    const tddp_launch_start *start);

/* Sends a signal to the process group of a worker that lives and has one of its own. */
void tddp_launch_worker_signal(const tddp_launch_worker *worker, int number);

/* Takes down how it ended: the time is now. */
void tddp_launch_worker_note_end(tddp_launch_worker *worker, int wait_status);

/* Whether it ended with a status other than 0. */
bool tddp_launch_worker_failed(const tddp_launch_worker *worker);

/* Closes its pipes and forgets it; a process that lives goes on. */
void tddp_launch_worker_free(tddp_launch_worker *worker);

#endif
