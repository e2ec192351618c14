/*
 * The failure report for people: the root cause first, then the other workers that failed by
 * themselves, then how many were ended because of them. The fields are those of PyTorch's report.
 * Main thread, after all workers are gone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "launch/report/report.h"

enum { TIME_BYTES = 40 };

static const char line[] = "------------------------------------------------------------";

static void put(tddp_launch_console *console, const char *text)
{
    tddp_launch_console_put(console, "", text);
}

/* "  label     : text", further lines of the text in the same column; nothing without a text. */
static void put_field(tddp_launch_console *console, const char *label, const char *text)
{
    char head[32];
    (void)snprintf(head, sizeof head, "  %-10s: ", label);
    if (*text != '\0') {
        tddp_launch_console_put(console, head, text);
    }
}

static void put_ending(tddp_launch_console *console, const tddp_launch_worker *worker)
{
    char text[64];
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    int status = worker->wait_status;
    (void)snprintf(text, sizeof text, "%d (pid: %d)", tddp_launch_exit_code(worker),
                   (int)worker->pid);
    put_field(console, "exitcode", text);
    if (WIFSIGNALED(status)) {
        put_field(console, "signal", tddp_launch_ending(worker, ending));
    }
}

static void put_error(tddp_launch_console *console, const tddp_launch_worker *worker, bool kept)
{
    const char *missing = tddp_launch_error_missing(worker);
    if (missing || kept) {
        put_field(console, "error_file", missing ? missing : worker->error_file);
    }
    put_field(console, "message", worker->error.message ? worker->error.message : "");
    put_field(console, "traceback", worker->error.traceback ? worker->error.traceback : "");
}

static void put_logs(tddp_launch_console *console, const tddp_launch_attempt *attempt,
                     const tddp_launch_worker *worker)
{
    static const char *const labels[] = {"stdout", "stderr"};
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        char *path = tddp_launch_output_log_file(attempt->output, worker->local_rank, stream);
        put_field(console, labels[stream], path ? path : "");
        free(path);
    }
}

static void put_worker(tddp_launch_console *console, const tddp_launch_attempt *attempt,
                       const tddp_launch_worker *worker)
{
    char text[TIME_BYTES];
    char host[TDDP_HOST_NAME_BYTES];
    struct tm local;
    if (localtime_r(&worker->ended.tv_sec, &local) &&
        strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &local) > 0) {
        put_field(console, "time", text);
    }
    put_field(console, "host", tddp_host_name(host));
    (void)snprintf(text, sizeof text, "%d (local_rank: %d)", worker->rank, worker->local_rank);
    put_field(console, "rank", text);
    put_ending(console, worker);
    put_error(console, worker, attempt->output && tddp_launch_output_folder(attempt->output));
    if (attempt->output) {
        put_logs(console, attempt, worker);
    }
}

void tddp_launch_report(const tddp_launch_attempt *attempt, tddp_launch_console *console)
{
    char text[128];
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    int found = 0;
    const tddp_launch_worker **failures =
        tddp_launch_failures(attempt->workers, attempt->count, &found);
    if (failures && found > 0) {
        tddp_launch_console_say(console, "%s FAILED: rank %d, %s", attempt->program,
                                failures[0]->rank, tddp_launch_ending(failures[0], ending));
        put(console, line);
        for (int i = 0; i < found; i++) {
            put(console, i == 0 ? "Root cause (first failure):" : "Failed too:");
            put_worker(console, attempt, failures[i]);
        }
        int ended = tddp_launch_ended_by_us(attempt->workers, attempt->count);
        if (ended > 0) {
            (void)snprintf(text, sizeof text, "%d other worker%s then ended by torchrun.", ended,
                           ended == 1 ? " was" : "s were");
            put(console, text);
        }
        put(console, line);
    }
    free(failures);
}

void tddp_launch_report_elsewhere(const char *program, const char *text,
                                  tddp_launch_console *console)
{
    int length = (int)strcspn(text, "\n");
    tddp_launch_console_say(console, "%s FAILED elsewhere: %.*s", program, length, text);
    if (text[length] == '\n') {
        put(console, line);
        put(console, "Root cause, as that node told it:");
        put_field(console, "error", text + length + 1);
        put(console, line);
    }
}
