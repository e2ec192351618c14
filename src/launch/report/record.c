/*
 * The outcome for programs. Attempts are written down as they fail, since their workers are
 * forgotten before the next; the whole becomes a file at the job's end. Main thread.
 */
#include <stdio.h>
#include <time.h>

#include "base/host_name.h"
#include "launch/report/report.h"

enum { MOST_BYTES = 4 << 20 }; /* of attempts; a job may be started again thousands of times */

static void begin(tddp_launch_json *json)
{
    if (json->text.size == 0) {
        tddp_launch_json_open(json, NULL, '{');
        tddp_launch_json_open(json, "attempts", '[');
    }
}

void tddp_launch_record_attempt(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                                const char *elsewhere)
{
    tddp_launch_json *json = &record->json;
    if (json->failed || json->text.size > MOST_BYTES) {
        tddp_bytes_free(&json->text);
        *json = (tddp_launch_json){0};
        record->omitted = record->count;
    }
    begin(json);
    tddp_launch_json_open(json, NULL, '{');
    tddp_launch_json_number(json, "restart", attempt->world->restart);
    tddp_launch_json_number(json, "round", attempt->world->round);
    tddp_launch_json_number(json, "node_rank", attempt->world->node_rank);
    tddp_launch_json_number(json, "nodes", attempt->world->nodes);
    tddp_launch_json_number(json, "world_size", attempt->world->size);
    tddp_launch_json_text(json, "elsewhere", elsewhere);
    tddp_launch_json_number(json, "ended_by_torchrun",
                            tddp_launch_ended_by_us(attempt->workers, attempt->count));
    tddp_launch_report_json(attempt, elsewhere != NULL, json);
    tddp_launch_json_close(json, '{');
    record->count++;
}

/* --- the job's end --------------------------------------------------------------------------- */

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
    begin(json);
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
