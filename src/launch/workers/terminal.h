/*
 * The terminal that torchrun was started on: whether one worker can have it to itself, and its
 * state, which a worker that was killed within a debugger leaves as it is.
 */
#ifndef TDDP_LAUNCH_TERMINAL_H
#define TDDP_LAUNCH_TERMINAL_H

#include <stdbool.h>
#include <sys/types.h>
#include <termios.h>

typedef struct tddp_launch_terminal {
    bool present;         /* standard input and output are the controlling terminal */
    pid_t group;          /* the front's process group: the job, as the user's shell knows it */
    bool foreground;      /* it was in the foreground when torchrun was started */
    struct termios state; /* at that time */
} tddp_launch_terminal;

/* Looks at the standard descriptors of this process. */
void tddp_launch_terminal_look(tddp_launch_terminal *out, pid_t front);

/* After a worker that had the terminal was killed: puts back the state, and the foreground group if
 * that is a dead one. Does nothing while the terminal is somebody else's. With SIGTTOU blocked. */
void tddp_launch_terminal_restore(const tddp_launch_terminal *terminal);

#endif
