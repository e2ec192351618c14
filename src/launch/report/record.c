/*
 * The JSON report. Attempts are written down as they fail, since their workers are forgotten before
 * the next; the whole becomes a file at the job's end. Main thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/report/record.h"

enum { MOST_BYTES = 4 << 20 }; /* of attempts; a job may be started again thousands of times */

static void put_time(tddp_launch_json *json, const struct timespec *moment)
{
    char text[64] = "";
    struct tm utc;
    if (gmtime_r(&moment->tv_sec, &utc)) {
        size_t length = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
        (void)snprintf(text + length, sizeof text - length, ".%06ldZ", moment->tv_nsec / 1000);
    }
    tddp_launch_json_text(json, "time", text);
}

static void put_ending(tddp_launch_json *json, const tddp_launch_worker *worker)
{
    char name[32];
    int status = worker->wait_status;
    bool signaled = WIFSIGNALED(status);
    tddp_launch_json_number(json, "exitcode", tddp_launch_exit_code(worker));
    tddp_launch_json_text(json, "signal",
                          signaled ? tddp_launch_signal_name(WTERMSIG(status), name) : NULL);
    tddp_launch_json_bool(json, "out_of_memory", worker->out_of_memory);
    tddp_launch_json_bool(json, "core_dumped", signaled && WCOREDUMP(status));
}

static void put_files(tddp_launch_json *json, const tddp_launch_attempt *attempt,
                      const tddp_launch_worker *worker)
{
    static const char *const keys[] = {"stdout", "stderr"};
    const char *missing = tddp_launch_error_missing(worker);
    bool kept = attempt->output && tddp_launch_output_folder(attempt->output);
    tddp_launch_json_text(json, "error_file", kept && !missing ? worker->error_file : NULL);
    tddp_launch_json_text(json, "error_file_missing", missing);
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        char *path = attempt->output
                         ? tddp_launch_output_log_file(attempt->output, worker->local_rank, stream)
                         : NULL;
        tddp_launch_json_text(json, keys[stream], path);
        free(path);
    }
}

static void put_failure(tddp_launch_json *json, const tddp_launch_attempt *attempt,
                        const tddp_launch_worker *worker, bool root)
{
    char host[TDDP_HOST_NAME_BYTES];
    tddp_launch_json_open(json, NULL, '{');
    tddp_launch_json_bool(json, "root_cause", root);
    put_time(json, &worker->ended);
    tddp_launch_json_number(json, "timestamp", tddp_launch_failure_second(worker));
    tddp_launch_json_text(json, "host", tddp_host_name(host));
    tddp_launch_json_number(json, "rank", worker->rank);
    tddp_launch_json_number(json, "local_rank", worker->local_rank);
    tddp_launch_json_number(json, "pid", worker->pid);
    put_ending(json, worker);
    tddp_launch_json_bool(json, "consequence", worker->error.consequence);
    tddp_launch_json_text(json, "message", worker->error.message);
    tddp_launch_json_text(json, "traceback", worker->error.traceback);
    put_files(json, attempt, worker);
    tddp_launch_json_close(json, '{');
}

static void put_failures(tddp_launch_json *json, const tddp_launch_attempt *attempt, bool elsewhere)
{
    int found = 0;
    const tddp_launch_worker **failures =
        tddp_launch_failures(attempt->workers, attempt->count, &found);
    tddp_launch_json_open(json, "failures", '[');
    for (int i = 0; failures && i < found; i++) {
        /* With the root cause elsewhere, none of these is it. */
        put_failure(json, attempt, failures[i], i == 0 && !elsewhere);
    }
    tddp_launch_json_close(json, '[');
    json->failed |= !failures;
    free(failures);
}

void tddp_launch_record_attempt(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                                const char *elsewhere)
{
    tddp_launch_json *json = &record->attempts;
    if (json->failed || json->text.size > MOST_BYTES) {
        tddp_bytes_free(&json->text);
        *json = (tddp_launch_json){0};
        record->omitted = record->count;
    }
    tddp_launch_json_open(json, NULL, '{');
    tddp_launch_json_number(json, "restart", attempt->world->restart);
    tddp_launch_json_number(json, "round", attempt->world->round);
    tddp_launch_json_number(json, "node_rank", attempt->world->node_rank);
    tddp_launch_json_number(json, "nodes", attempt->world->nodes);
    tddp_launch_json_number(json, "world_size", attempt->world->size);
    tddp_launch_json_text(json, "elsewhere", elsewhere);
    tddp_launch_json_number(json, "ended_by_torchrun",
                            tddp_launch_ended_by_us(attempt->workers, attempt->count));
    put_failures(json, attempt, elsewhere != NULL);
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

static void put_job(tddp_launch_json *json, const tddp_launch_attempt *attempt,
                    const tddp_launch_outcome *outcome)
{
    char host[TDDP_HOST_NAME_BYTES];
    char name[32];
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
}

static void write_json(const tddp_launch_json *json, const char *path, tddp_launch_console *console)
{
    if (json->failed || tddp_launch_write_file(path, json->text.data, json->text.size) != TDDP_OK) {
        tddp_launch_console_say(console, "no report: %s", tddp_error_message());
    }
}

static void write_report(const tddp_launch_record *record, const tddp_launch_attempt *attempt,
                         const tddp_launch_outcome *outcome, tddp_launch_console *console)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    put_job(&json, attempt, outcome);
    tddp_launch_json_number(&json, "attempts_omitted", record->omitted);
    tddp_launch_json_open(&json, "attempts", '[');
    if (record->attempts.text.size > 0) {
        json.failed |= record->attempts.failed;
        tddp_launch_json_raw(&json, NULL, record->attempts.text.data, record->attempts.text.size);
    }
    tddp_launch_json_close(&json, '[');
    tddp_launch_json_close(&json, '{');
    json.failed |= tddp_bytes_append(&json.text, "\n", 1) != TDDP_OK;
    write_json(&json, outcome->report_file, console);
    tddp_bytes_free(&json.text);
}

/* In PyTorch's form, with the exit code that it adds for the launcher above. */
static void write_error_file(const tddp_launch_attempt *attempt, const tddp_launch_outcome *outcome,
                             tddp_launch_console *console)
{
    const tddp_launch_worker *root =
        outcome->cause ? NULL : tddp_launch_root_cause(attempt->workers, attempt->count);
    const char *message = root ? root->error.message : outcome->cause;
    char summary[512];
    char timestamp[32];
    if (!message) {
        message = tddp_launch_report_summary(attempt->workers, attempt->count,
                                             attempt->world->node_rank, summary, sizeof summary);
    }
    int64_t second = root ? tddp_launch_failure_second(root) : (int64_t)time(NULL);
    (void)snprintf(timestamp, sizeof timestamp, "%lld", (long long)second);
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    tddp_launch_json_open(&json, "message", '{');
    tddp_launch_json_text(&json, "message", message);
    tddp_launch_json_open(&json, "extraInfo", '{');
    const char *traceback = root ? root->error.traceback : NULL;
    tddp_launch_json_text(&json, "py_callstack", traceback ? traceback : "");
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

void tddp_launch_record_write(const tddp_launch_record *record, const tddp_launch_attempt *attempt,
                              const tddp_launch_outcome *outcome, tddp_launch_console *console)
{
    if (outcome->report_file) {
        write_report(record, attempt, outcome, console);
    }
    if (outcome->error_file && outcome->exit_status != 0 && outcome->signal == 0) {
        write_error_file(attempt, outcome, console);
    }
}

void tddp_launch_record_free(tddp_launch_record *record)
{
    tddp_bytes_free(&record->attempts.text);
    *record = (tddp_launch_record){0};
}
