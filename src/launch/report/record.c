/*
 * The outcome of the job for programs: what is on record of its attempts becomes a file at its end,
 * and the root cause one for the launcher above. Main thread.
 */
#include <stdio.h>
#include <time.h>

#include "base/host_name.h"
#include "launch/report/report.h"

void tddp_launch_record_begin(tddp_launch_record *record)
{
    if (record->json.text.size == 0) {
        tddp_launch_json_open(&record->json, NULL, '{');
        tddp_launch_json_open(&record->json, "attempts", '[');
    }
}

/* Of this node's workers in the last round; none if they were to start again. */
static void put_ranks(tddp_launch_json *json, const tddp_launch_attempt *attempt)
{
    tddp_launch_json_open(json, "ranks", '[');
    for (int i = 0; i < attempt->count; i++) {
        if (attempt->workers[i].pid > 0) {
            tddp_launch_json_number(json, NULL, attempt->workers[i].rank);
        }
    }
    tddp_launch_json_close(json, '[');
}

/* Ends the text with a newline, and makes it a file. */
static void write_json(tddp_launch_json *json, const char *path, tddp_launch_console *console)
{
    json->failed |= tddp_bytes_append(&json->text, "\n", 1) != TDDP_OK;
    if (json->failed || tddp_launch_write_file(path, json->text.data, json->text.size) != TDDP_OK) {
        tddp_launch_console_say(console, "no report: %s", tddp_error_message());
    }
}

static void write_report(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                         const tddp_launch_outcome *outcome, tddp_launch_console *console)
{
    char host[TDDP_HOST_NAME_BYTES];
    char name[32];
    tddp_launch_json *json = &record->json;
    tddp_launch_record_begin(record);
    tddp_launch_json_close(json, '[');
    tddp_launch_json_number(json, "attempts_omitted", record->omitted);
    tddp_launch_json_text(json, "state",
                          outcome->signal             ? "stopped"
                          : outcome->exit_status == 0 ? "succeeded"
                                                      : "failed");
    tddp_launch_json_number(json, "exitcode", outcome->exit_status);
    tddp_launch_json_text(json, "signal",
                          outcome->signal ? tddp_launch_signal_name(outcome->signal, name) : NULL);
    tddp_launch_json_text(json, "cause", outcome->cause);
    tddp_launch_json_text(json, "program", attempt->program);
    tddp_launch_json_text(json, "run_id", attempt->job->run_id);
    const tddp_launch_options *options = attempt->job->options;
    tddp_launch_json_text(json, "role", options ? options->role : NULL);
    tddp_launch_json_text(json, "host", tddp_host_name(host));
    tddp_launch_json_text(json, "log_folder",
                          attempt->output ? tddp_launch_output_folder(attempt->output) : NULL);
    tddp_launch_json_number(json, "restarts", attempt->world->restart);
    tddp_launch_json_number(json, "max_restarts", attempt->world->max_restarts);
    put_ranks(json, attempt);
    tddp_launch_json_close(json, '{');
    write_json(json, outcome->report_file, console);
}

/* In PyTorch's form, with the exit code that it adds for the launcher above. */
static void write_error_file(const tddp_launch_attempt *attempt, const tddp_launch_outcome *outcome,
                             tddp_launch_console *console)
{
    const tddp_launch_worker *root =
        outcome->cause ? NULL : tddp_launch_failure(attempt->workers, attempt->count, NULL);
    const char *message = root ? root->error.message : outcome->cause;
    const char *traceback = root && root->error.traceback ? root->error.traceback : "";
    char summary[512];
    char timestamp[32];
    int64_t second = root ? tddp_launch_failure_second(root) : (int64_t)time(NULL);
    (void)snprintf(timestamp, sizeof timestamp, "%lld", (long long)second);
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    tddp_launch_json_open(&json, "message", '{');
    tddp_launch_json_text(&json, "message",
                          message ? message
                                  : tddp_launch_report_summary(attempt->workers, attempt->count,
                                                               attempt->world->node_rank, summary,
                                                               sizeof summary));
    tddp_launch_json_open(&json, "extraInfo", '{');
    tddp_launch_json_text(&json, "py_callstack", traceback);
    tddp_launch_json_text(&json, "timestamp", timestamp);
    if (root && root->error.consequence) {
        tddp_launch_json_text(&json, "consequence", "1");
    }
    tddp_launch_json_close(&json, '{');
    tddp_launch_json_number(&json, "errorCode",
                            root ? tddp_launch_exit_code(root) : outcome->exit_status);
    tddp_launch_json_close(&json, '{');
    tddp_launch_json_close(&json, '{');
    write_json(&json, outcome->error_file, console);
    tddp_bytes_free(&json.text);
}

void tddp_launch_record_write(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                              const tddp_launch_outcome *outcome, tddp_launch_console *console)
{
    if (outcome->report_file) {
        write_report(record, attempt, outcome, console);
    }
    if (outcome->error_file && outcome->exit_status != 0 && outcome->signal == 0) {
        write_error_file(attempt, outcome, console);
    }
}
