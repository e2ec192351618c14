/*
 * The names of signals, and which of them torchrun can handle. Pure: no thread, no
 * global.
 */
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "launch/command/signal_names.h"

int tddp_launch_signal_number(const char *text)
{
    const char *name = strncasecmp(text, "SIG", 3) == 0 ? text + 3 : text;
    int64_t number = 0;
    bool numeric = tddp_parse_int(text, 1, NSIG - 1, &number);
    for (int i = 1; i < NSIG; i++) {
        const char *known = sigabbrev_np(i);
        if (known && (numeric ? i == number : strcasecmp(known, name) == 0)) {
            return i;
        }
    }
    return 0;
}

bool tddp_launch_signal_can_be_handled(int number)
{
    switch (number) {
    case SIGKILL: /* the system handles these two */
    case SIGSTOP:
    case SIGCHLD: /* by these torchrun hears of its workers, */
    case SIGCONT: /* and goes on after a stop */
    case SIGILL:  /* a fault of torchrun's own would be taken for one */
    case SIGTRAP:
    case SIGABRT:
    case SIGBUS:
    case SIGFPE:
    case SIGSEGV:
    case SIGSYS:
        return false;
    default:
        return true;
    }
}
