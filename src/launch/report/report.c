/*
 * The failure report: the root cause first, then the other workers that failed by themselves, then
 * how many were ended because of them. Main thread, after all workers are gone.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launch/report/report.h"

enum { TIME_BYTES = 40 };

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
    int code = tddp_launch_exit_code(worker);
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
        if (&workers[i] != root && tddp_launch_failed_by_itself(&workers[i])) {
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
