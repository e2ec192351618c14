/*
 * Which workers failed, how, and in which order: what the report, its JSON and the messages to
 * other nodes have in common. Workers that torchrun ended are no failures, however they ended. Main
 * thread, once the workers concerned have ended.
 */
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "base/host_name.h"
#include "launch/report/report.h"

int64_t tddp_launch_failure_second(const tddp_launch_worker *worker)
{
    return worker->error.timestamp > 0 ? worker->error.timestamp : (int64_t)worker->ended.tv_sec;
}

static bool comes_before(const tddp_launch_worker *a, const tddp_launch_worker *b)
{
    const int64_t keys[][2] = {
        {a->error.consequence, b->error.consequence},
        {tddp_launch_failure_second(a), tddp_launch_failure_second(b)},
        {a->ended.tv_sec, b->ended.tv_sec},
        {a->ended.tv_nsec, b->ended.tv_nsec},
        {a->local_rank, b->local_rank},
    };
    size_t at = 0;
    while (at + 1 < sizeof keys / sizeof keys[0] && keys[at][0] == keys[at][1]) {
        at++;
    }
    return keys[at][0] < keys[at][1];
}

const tddp_launch_worker *tddp_launch_failure(const tddp_launch_worker *workers, int count,
                                              const tddp_launch_worker *after)
{
    const tddp_launch_worker *first = NULL;
    for (int i = 0; i < count; i++) {
        const tddp_launch_worker *one = &workers[i];
        bool failed = one->pid > 0 && !one->ended_by_us && tddp_launch_worker_failed(one);
        if (failed && (!after || comes_before(after, one)) &&
            (!first || comes_before(one, first))) {
            first = one;
        }
    }
    return first;
}

int tddp_launch_exit_code(const tddp_launch_worker *worker)
{
    int status = worker->wait_status;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES])
{
    char name[32];
    int status = worker->wait_status;
    if (WIFSIGNALED(status)) {
        (void)snprintf(text, TDDP_LAUNCH_ENDING_BYTES, "killed by %s%s",
                       tddp_launch_signal_name(WTERMSIG(status), name),
                       worker->out_of_memory ? " (the kernel's out-of-memory killer)"
                       : WCOREDUMP(status)   ? " (core dumped)"
                                             : "");
    } else {
        (void)snprintf(text, TDDP_LAUNCH_ENDING_BYTES, "exit code %d", WEXITSTATUS(status));
    }
    return text;
}

/* The start of the character that stands at `at`, so that UTF-8 is not cut within one. */
static size_t character_start(const char *text, size_t at)
{
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) {
        at--;
    }
    return at;
}

/* Adds a line or more as far as there is room. Python's tracebacks have the cause at their end,
 * Ruby's at their start: both ends are kept. */
static void add_shortened(char *text, size_t size, const char *added)
{
    static const char gap[] = "\n[...]\n";
    size_t used = strlen(text) + 2; /* with a newline and its end */
    size_t room = size > used ? size - used : 0;
    size_t length = added ? strlen(added) : 0;
    if (length <= room) {
        tddp_add_text(text, size, length > 0 ? "\n%s" : "", added);
    } else if (room > 4 * sizeof gap) {
        size_t half = (room - sizeof gap) / 2;
        tddp_add_text(text, size, "\n%.*s%s%s", (int)character_start(added, half), added, gap,
                      added + character_start(added, length - half));
    }
}

const char *tddp_launch_report_summary(const tddp_launch_worker *workers, int count, int node_rank,
                                       char *text, size_t size)
{
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    char host[TDDP_HOST_NAME_BYTES];
    const tddp_launch_worker *root = tddp_launch_failure(workers, count, NULL);
    text[0] = '\0';
    if (root) {
        tddp_add_text(text, size, "rank %d on node %d: %s (pid %d on %s)", root->rank, node_rank,
                      tddp_launch_ending(root, ending), (int)root->pid, tddp_host_name(host));
        add_shortened(text, size - size / 2, root->error.message);
        add_shortened(text, size, root->error.traceback);
    }
    return text;
}
