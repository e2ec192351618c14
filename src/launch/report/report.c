/*
 * The failure report: the root cause first, then the other workers that failed by themselves, then
 * how many were ended because of them. Main thread, after all workers are gone.
 */
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/report/report.h"

enum { TIME_BYTES = 40 };

static bool failed_by_itself(const tddp_launch_worker *worker)
{
    return worker->pid > 0 && !worker->ended_by_us && tddp_launch_worker_failed(worker);
}

static int64_t failure_second(const tddp_launch_worker *worker)
{
    return worker->error.timestamp > 0 ? worker->error.timestamp : (int64_t)worker->ended.tv_sec;
}

static bool comes_before(const tddp_launch_worker *a, const tddp_launch_worker *b)
{
    int64_t first = failure_second(a);
    int64_t second = failure_second(b);
    if (a->error.consequence != b->error.consequence) {
        return b->error.consequence;
    }
    if (first != second) {
        return first < second;
    }
    return a->ended.tv_sec != b->ended.tv_sec ? a->ended.tv_sec < b->ended.tv_sec
                                              : a->ended.tv_nsec < b->ended.tv_nsec;
}

const tddp_launch_worker *tddp_launch_root_cause(const tddp_launch_worker *workers, int count)
{
    const tddp_launch_worker *root = NULL;
    for (int i = 0; i < count; i++) {
        if (failed_by_itself(&workers[i]) && (!root || comes_before(&workers[i], root))) {
            root = &workers[i];
        }
    }
    return root;
}

const char *tddp_launch_ending(const tddp_launch_worker *worker,
                               char text[TDDP_LAUNCH_ENDING_BYTES])
{
    char name[32];
    int status = worker->wait_status;
    if (WIFSIGNALED(status)) {
        (void)snprintf(text, TDDP_LAUNCH_ENDING_BYTES, "killed by %s%s",
                       tddp_launch_signal_name(WTERMSIG(status), name),
                       WCOREDUMP(status) ? " (core dumped)" : "");
    } else {
        (void)snprintf(text, TDDP_LAUNCH_ENDING_BYTES, "exit code %d", WEXITSTATUS(status));
    }
    return text;
}

static void put(tddp_launch_console *console, const char *text)
{
    (void)!tddp_launch_console_write(console, TDDP_LAUNCH_ERR, text, strlen(text));
}

/* "  label     : text", further lines of the text indented to the same column. */
static void put_field(tddp_launch_console *console, const char *label, const char *text)
{
    char head[32];
    (void)snprintf(head, sizeof head, "  %-9s : ", label);
    for (const char *at = text; *at != '\0';) {
        size_t length = strcspn(at, "\n");
        put(console, head);
        (void)!tddp_launch_console_write(console, TDDP_LAUNCH_ERR, at, length);
        put(console, "\n");
        at += length + (at[length] == '\n');
        (void)snprintf(head, sizeof head, "%14s", "");
    }
}

static void put_worker(tddp_launch_console *console, const tddp_launch_worker *worker)
{
    char text[256];
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    char host[128] = "?";
    struct tm local;
    (void)gethostname(host, sizeof host - 1);
    if (localtime_r(&worker->ended.tv_sec, &local) &&
        strftime(text, TIME_BYTES, "%Y-%m-%d %H:%M:%S", &local) > 0) {
        put_field(console, "time", text);
    }
    put_field(console, "host", host);
    (void)snprintf(text, sizeof text, "%d (local_rank: %d)", worker->rank, worker->local_rank);
    put_field(console, "rank", text);
    int code = WIFSIGNALED(worker->wait_status) ? -WTERMSIG(worker->wait_status)
                                                : WEXITSTATUS(worker->wait_status);
    (void)snprintf(text, sizeof text, "%d (pid: %d)", code, (int)worker->pid);
    put_field(console, "exitcode", text);
    if (code < 0) {
        put_field(console, "signal", tddp_launch_ending(worker, ending));
    }
    if (worker->error.message) {
        put_field(console, "message", worker->error.message);
    }
    if (worker->error.traceback) {
        put_field(console, "traceback", worker->error.traceback);
    }
}

void tddp_launch_report(const char *program, const tddp_launch_worker *workers, int count,
                        tddp_launch_console *console)
{
    static const char line[] = "------------------------------------------------------------\n";
    const tddp_launch_worker *root = tddp_launch_root_cause(workers, count);
    char text[256];
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    int ended = 0;
    if (!root) {
        return;
    }
    tddp_launch_console_say(console, "%s FAILED: rank %d, %s", program, root->rank,
                            tddp_launch_ending(root, ending));
    put(console, line);
    put(console, "Root cause (first failure):\n");
    put_worker(console, root);
    for (int i = 0; i < count; i++) {
        if (&workers[i] != root && failed_by_itself(&workers[i])) {
            put(console, "Failed too:\n");
            put_worker(console, &workers[i]);
        }
        ended += workers[i].pid > 0 && workers[i].ended_by_us;
    }
    if (ended > 0) {
        (void)snprintf(text, sizeof text, "%d other worker%s then ended by torchrun.\n", ended,
                       ended == 1 ? " was" : "s were");
        put(console, text);
    }
    put(console, line);
}
