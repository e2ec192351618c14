/*
 * libtddp's log lines for a logger in Ruby. Lines come on any thread, mostly without the GVL, and
 * must not block: each is written to a pipe at once, which a Ruby thread reads
 * (lib/torch/distributed/log.rb). A line for which the pipe has no room goes to standard error, and
 * so does every line of a forked child until it has a pipe and a thread of its own.
 */
#define _GNU_SOURCE /* dup3 */
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <tddp/log.h>
#include <unistd.h>

#include "torch_ddp.h"

/* The pipe's end for writing. It is never closed, since another thread may be about to write: a
 * child's pipe takes the same number. */
static atomic_int pipe_end = -1;
static _Atomic(pid_t) pipe_owner;

static void write_line(tddp_log_level level, const char *room, const char *text, void *nothing)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    char line[PIPE_BUF]; /* what is written in one piece */
    char fallback[PIPE_BUF + sizeof "[tddp] error \n"];
    (void)nothing;
    int length = snprintf(line, sizeof line, "%d%s: %s", (int)level, room, text);
    if (length >= (int)sizeof line)
        length = (int)sizeof line - 1;
    if (atomic_load(&pipe_owner) == getpid() &&
        write(atomic_load(&pipe_end), line, (size_t)length + 1) == length + 1)
        return;
    snprintf(fallback, sizeof fallback, "[tddp] %s %s\n", names[level], line + 1);
    tddp_log_to_stderr(fallback);
}

/* _log_to(the number of a pipe's descriptor, or nil for standard error) */
static VALUE log_to(VALUE self, VALUE descriptor)
{
    if (NIL_P(descriptor)) {
        tddp_log_set_sink(NULL, NULL);
        return self;
    }
    int end = atomic_load(&pipe_end);
    int given = NUM2INT(descriptor);
    int made = end < 0 ? fcntl(given, F_DUPFD_CLOEXEC, 0) : dup3(given, end, O_CLOEXEC);
    if (made < 0 || fcntl(made, F_SETFL, fcntl(made, F_GETFL) | O_NONBLOCK) < 0)
        rb_sys_fail("logger");
    atomic_store(&pipe_end, made);
    atomic_store(&pipe_owner, getpid());
    tddp_log_set_sink(write_line, NULL);
    return self;
}

void tddp_rb_init_log(void)
{
    TDDP_RB_PRIVATE("_log_to", log_to, 1);
}
