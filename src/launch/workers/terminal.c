/*
 * A terminal with the means of POSIX. Main thread.
 */
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "launch/workers/worker.h"

void tddp_launch_terminal_look(tddp_launch_terminal *out)
{
    *out = (tddp_launch_terminal){.group = getpgid(getppid())};
    /* Only of the controlling terminal is the foreground group told. */
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
