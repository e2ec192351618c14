/*
 * One worker: a process in a session of its own, with torchrun's environment and what PyTorch's
 * workers expect; the pipes its output comes through, unless it was given a file for it; and the
 * file in which it reports its error, in PyTorch's format. A worker that has the terminal to itself
 * stays in torchrun's session.
 */
#ifndef TDDP_LAUNCH_WORKER_H
#define TDDP_LAUNCH_WORKER_H

#include <sys/resource.h>
#include <sys/types.h>
#include <termios.h>
#include <time.h>

#include "launch/output/output.h"
#include "launch/workers/machine.h"
#include "launch/workers/signals.h"
#include "launch/world.h"

/* --- environment.c --------------------------------------------------------------------------- */

/* What is the same for all workers beside the world. */
typedef struct tddp_launch_job {
    const tddp_launch_options *options; /* borrowed */
    const char *run_id;                 /* borrowed; set by the caller */
    const char *timer_file;             /* borrowed; NULL: workers can have no timers */
    const tddp_launch_devices *devices; /* borrowed; tddp_launch_count_processes() found them */
    tddp_launch_cpus *cpus;             /* of each worker, free(); NULL: none is bound */
    int threads;                        /* a worker's share of the cores; at least 1 */
} tddp_launch_job;

/* Looks at the machine for `local_size` workers. Errors: TDDP_INVALID_ARGUMENT (a binding that is
 * not possible), TDDP_UNAVAILABLE (hwloc), TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_job_prepare(const tddp_launch_options *options,
                                                   const tddp_launch_devices *devices,
                                                   int local_size, tddp_launch_job *out);

/* envp for one worker: free(), which frees its texts too. `error_file` may be NULL. NULL if memory
 * is short. */
char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file);

/* --- error_file.c ---------------------------------------------------------------------------- */

/* What a worker left in its error file. */
typedef struct tddp_launch_error {
    char *message;       /* "ArgumentError: boom"; NULL: none */
    char *traceback;     /* several lines; NULL: none */
    int64_t timestamp;   /* seconds since 1970; 0: none */
    bool consequence;    /* it failed because another rank had: extraInfo's "consequence" is "1" */
    const char *missing; /* why nothing is known, for people; NULL: something is */
} tddp_launch_error;

/*
 * Reads {"message": {"message": M, "extraInfo": {"py_callstack": T, "timestamp": S}}} or
 * {"message": M, "timestamp": S}. Whatever is absent or malformed stays empty. Caller:
 * tddp_launch_error_free().
 */
void tddp_launch_error_parse(const char *text, size_t size, tddp_launch_error *out);

/* The same from a file; nothing is changed if there is none. Never waits, whatever stands there. */
void tddp_launch_error_read(const char *path, tddp_launch_error *out);

void tddp_launch_error_free(tddp_launch_error *error);

/* --- worker.c -------------------------------------------------------------------------------- */

/* The terminal that torchrun was started on. */
typedef struct tddp_launch_terminal {
    bool present;         /* standard input and output are the controlling terminal */
    pid_t group;          /* torchrun's process group: the job, as the user's shell knows it */
    bool foreground;      /* it was in the foreground when torchrun was started */
    struct termios state; /* at that time */
} tddp_launch_terminal;

/* Looks at the standard descriptors of this process, whose parent the user's shell knows. */
void tddp_launch_terminal_look(tddp_launch_terminal *out);

/* After a worker that had the terminal was killed, as within a debugger: puts back the state, and
 * the foreground group if that is a dead one. Does nothing while the terminal is somebody else's.
 * With SIGTTOU blocked. */
void tddp_launch_terminal_restore(const tddp_launch_terminal *terminal);

typedef struct tddp_launch_worker {
    pid_t pid; /* also its session and process group but with the terminal; 0: not started */
    int rank;
    int local_rank;
    bool alive;
    bool has_terminal;       /* it is in torchrun's process group */
    bool ended_by_us;        /* it was sent a signal to end before it ended */
    bool out_of_memory;      /* the kernel killed it for want of memory */
    int wait_status;         /* once it is not alive */
    struct timespec ended;   /* wall clock */
    char *expired_timer;     /* the scope of the timer by which it was ended; owned; or NULL */
    char *error_file;        /* path; owned; may be NULL */
    tddp_launch_error error; /* what it left there, once it has failed */
} tddp_launch_worker;

/* What to start it with; all borrowed for the call. */
typedef struct tddp_launch_start {
    const char *path;
    char **argv;
    char **envp;
    const tddp_launch_signals *signals;
    const struct rlimit *files;          /* how many it may open */
    bool has_input;                      /* it reads torchrun's standard input; else none */
    pid_t terminal_group;                /* the process group that has the terminal, which it joins;
                                            0: it gets a session of its own */
    const tddp_launch_cpus *cpus;        /* that it may use; NULL: all of torchrun's */
    int output_fds[TDDP_LAUNCH_STREAMS]; /* -1: a pipe */
    int64_t limit_ms;                    /* until it runs; 0: 30 s */
} tddp_launch_start;

/* Forks and executes; returns once the program runs. `read_ends` are those of its pipes, now the
 * caller's; -1: none. A child that does not get there is reaped with the others. Errors:
 * TDDP_SYSTEM (the text names the step and the program), TDDP_TIMEOUT. Main thread only. */
TDDP_NODISCARD tddp_status tddp_launch_worker_start(tddp_launch_worker *worker,
                                                    const tddp_launch_start *start,
                                                    int read_ends[TDDP_LAUNCH_STREAMS]);

/* Takes down how it ended: the time is now. */
void tddp_launch_worker_note_end(tddp_launch_worker *worker, int wait_status);

/* Whether it ended with a status other than 0. */
bool tddp_launch_worker_failed(const tddp_launch_worker *worker);

/* Forgets it; a process that lives goes on. */
void tddp_launch_worker_free(tddp_launch_worker *worker);

#endif
