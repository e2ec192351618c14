/*
 * The names of signals, and which of them torchrun can be told to handle. Pure: no thread, no
 * global.
 */
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <strings.h>

#include "base/base.h"
#include "launch/command/signal_names.h"

static const struct {
    const char *name;
    int number;
} names[] = {
    {"HUP", SIGHUP},     {"INT", SIGINT},   {"QUIT", SIGQUIT}, {"ILL", SIGILL},
    {"TRAP", SIGTRAP},   {"ABRT", SIGABRT}, {"BUS", SIGBUS},   {"FPE", SIGFPE},
    {"KILL", SIGKILL},   {"USR1", SIGUSR1}, {"SEGV", SIGSEGV}, {"USR2", SIGUSR2},
    {"PIPE", SIGPIPE},   {"ALRM", SIGALRM}, {"TERM", SIGTERM}, {"CHLD", SIGCHLD},
    {"CONT", SIGCONT},   {"STOP", SIGSTOP}, {"TSTP", SIGTSTP}, {"TTIN", SIGTTIN},
    {"TTOU", SIGTTOU},   {"URG", SIGURG},   {"XCPU", SIGXCPU}, {"XFSZ", SIGXFSZ},
    {"PROF", SIGPROF},   {"SYS", SIGSYS},   {"IO", SIGIO},     {"VTALRM", SIGVTALRM},
#ifdef SIGPWR
    {"PWR", SIGPWR},
#endif
#ifdef SIGWINCH
    {"WINCH", SIGWINCH},
#endif
};

enum { COUNT = sizeof names / sizeof names[0] };

int tddp_launch_signal_number(const char *text)
{
    const char *name = strncasecmp(text, "SIG", 3) == 0 ? text + 3 : text;
    int64_t number = 0;
    bool numeric = tddp_parse_int(text, 1, INT32_MAX, &number);
    for (size_t i = 0; i < COUNT; i++) {
        if (numeric ? names[i].number == number : strcasecmp(names[i].name, name) == 0) {
            return names[i].number;
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
