/*
 * Reads from the kernel's settings where core dumps go: a file named by a pattern, or a program.
 * A guess where the pattern holds what is known no more, such as the time; then the pattern itself
 * is shown. Main thread.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/report/core.h"

enum { SETTING_BYTES = 256 };

static bool read_setting(const char *path, char text[SETTING_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t got = read(fd, text, SETTING_BYTES - 1);
    tddp_close(fd);
    text[got > 0 ? got : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return got > 0;
}

/* The pattern with the process's number filled in; NULL if there is more to fill in. free(). */
static char *expand(const char *pattern, bool uses_pid, pid_t pid)
{
    tddp_bytes made = {0};
    bool known = true;
    bool has_pid = false;
    char *number = tddp_format("%d", (int)pid);
    for (const char *at = pattern; number && known && *at != '\0'; at++) {
        if (*at != '%') {
            known = tddp_bytes_append(&made, at, 1) == TDDP_OK;
        } else if (*++at == 'p' || *at == 'P') {
            has_pid = true;
            known = tddp_bytes_append(&made, number, strlen(number)) == TDDP_OK;
        } else {
            known = *at == '%' && tddp_bytes_append(&made, at, 1) == TDDP_OK;
            at -= *at == '\0';
        }
    }
    char *text = NULL;
    if (number && known) {
        text = tddp_format("%.*s%s%s", (int)made.size, made.data ? made.data : "",
                           uses_pid && !has_pid ? "." : "", uses_pid && !has_pid ? number : "");
    }
    tddp_bytes_free(&made);
    free(number);
    return text;
}

static char *handed_over(const char *program, pid_t pid)
{
    int length = (int)strcspn(program, " ");
    if (strstr(program, "systemd-coredump")) {
        return tddp_format("with systemd: coredumpctl info %d", (int)pid);
    }
    if (strstr(program, "apport")) {
        return tddp_format("with apport, in /var/crash or /var/lib/apport/coredump");
    }
    return tddp_format("handed to %.*s", length, program);
}

char *tddp_launch_core_place(const char *pattern, bool uses_pid, unsigned long long limit,
                             pid_t pid, bool dumped)
{
    if (!dumped) {
        return limit == 0 ? tddp_format("none: ulimit -c is 0") : tddp_format("none was written");
    }
    if (*pattern == '|') {
        return handed_over(pattern + 1 + strspn(pattern + 1, " "), pid);
    }
    char *name = expand(pattern, uses_pid, pid);
    char *text = NULL;
    if (!name) {
        text = tddp_format("%s (the kernel's core_pattern)%s", pattern,
                           *pattern == '/' ? "" : " in the worker's folder");
    } else if (*name == '/') {
        return name;
    } else {
        text = tddp_format("%s in the worker's folder", name);
    }
    free(name);
    return text;
}

char *tddp_launch_core_note(pid_t pid, int number, bool dumped)
{
    static const int dumping[] = {SIGQUIT, SIGILL,  SIGTRAP, SIGABRT, SIGBUS,
                                  SIGFPE,  SIGSEGV, SIGXCPU, SIGXFSZ, SIGSYS};
    char pattern[SETTING_BYTES];
    char uses_pid[SETTING_BYTES];
    struct rlimit limit;
    bool dumps = dumped;
    for (size_t i = 0; i < sizeof dumping / sizeof dumping[0]; i++) {
        dumps |= number == dumping[i];
    }
    if (!dumps || !read_setting("/proc/sys/kernel/core_pattern", pattern)) {
        return NULL;
    }
    bool with_pid = read_setting("/proc/sys/kernel/core_uses_pid", uses_pid) && *uses_pid == '1';
    if (getrlimit(RLIMIT_CORE, &limit) != 0) {
        limit.rlim_cur = RLIM_INFINITY;
    }
    return tddp_launch_core_place(pattern, with_pid, limit.rlim_cur, pid, dumped);
}
