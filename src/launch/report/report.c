/*
 * The failures of an attempt: the root cause first, then the other workers that failed by
 * themselves, then how many were ended because of them. What is known of each is written to both:
 * the console, for people, with the fields of PyTorch's report, and the record, for programs, which
 * becomes a file at the job's end. Main thread, after all workers have ended.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#include "base/host_name.h"
#include "launch/report/report.h"

enum {
    TEXT_BYTES = 64,
    MOST_BYTES = 4 << 20 /* of attempts; a job may be started again thousands of times */
};

static const char line[] = "------------------------------------------------------------";

/* "  label     : text", further lines of the text in the same column; nothing without a text, or
 * without a console. */
static void put_field(tddp_launch_console *console, const char *label, const char *text)
{
    char head[32];
    (void)snprintf(head, sizeof head, "  %-10s: ", label);
    if (console && text && *text != '\0') {
        tddp_launch_console_put(console, head, text);
    }
}

/* What is the same for both. */
static void put_text(tddp_launch_console *console, tddp_launch_json *json, const char *key,
                     const char *text)
{
    put_field(console, key, text);
    tddp_launch_json_text(json, key, text);
}

static void put_time(tddp_launch_console *console, tddp_launch_json *json,
                     const struct timespec *moment)
{
    char text[TEXT_BYTES] = "";
    struct tm time;
    if (localtime_r(&moment->tv_sec, &time) &&
        strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &time) > 0) {
        put_field(console, "time", text);
    }
    if (gmtime_r(&moment->tv_sec, &time) &&
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &time) > 0) {
        tddp_add_text(text, sizeof text, ".%06ldZ", moment->tv_nsec / 1000);
    }
    tddp_launch_json_text(json, "time", text);
}

static void put_ending(tddp_launch_console *console, tddp_launch_json *json,
                       const tddp_launch_worker *worker)
{
    char text[TDDP_LAUNCH_ENDING_BYTES];
    int status = worker->wait_status;
    int code = tddp_launch_exit_code(worker);
    bool signaled = WIFSIGNALED(status);
    (void)snprintf(text, sizeof text, "%d (pid: %d)", code, (int)worker->pid);
    put_field(console, "exitcode", text);
    put_field(console, "signal", signaled ? tddp_launch_ending(worker, text) : NULL);
    tddp_launch_json_number(json, "pid", worker->pid);
    tddp_launch_json_number(json, "exitcode", code);
    tddp_launch_json_text(json, "signal",
                          signaled ? tddp_launch_signal_name(WTERMSIG(status), text) : NULL);
    tddp_launch_json_bool(json, "out_of_memory", worker->out_of_memory);
    tddp_launch_json_bool(json, "core_dumped", signaled && WCOREDUMP(status));
}

static void put_files(tddp_launch_console *console, tddp_launch_json *json,
                      const tddp_launch_worker *worker, const tddp_launch_output *output)
{
    static const char *const keys[] = {"stdout", "stderr"};
    const char *missing = worker->error.missing;
    const char *kept = output && tddp_launch_output_folder(output) ? worker->error_file : NULL;
    put_field(console, "error_file", missing ? missing : kept);
    tddp_launch_json_text(json, "error_file", missing ? NULL : kept);
    tddp_launch_json_text(json, "error_file_missing", missing);
    put_text(console, json, "message", worker->error.message);
    put_text(console, json, "traceback", worker->error.traceback);
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        char *path =
            output ? tddp_launch_output_log_file(output, worker->local_rank, stream) : NULL;
        put_text(console, json, keys[stream], path);
        free(path);
    }
}

/* Without a console the root cause is elsewhere: none of these is it. */
static void put_failures(tddp_launch_console *console, tddp_launch_json *json,
                         const tddp_launch_attempt *attempt)
{
    char text[TEXT_BYTES];
    char host[TDDP_HOST_NAME_BYTES];
    const tddp_launch_worker *one = NULL;
    for (bool root = console; (one = tddp_launch_failure(attempt->workers, attempt->count, one));
         root = false) {
        if (console) {
            tddp_launch_console_put(console, "",
                                    root ? "Root cause (first failure):" : "Failed too:");
        }
        tddp_launch_json_open(json, NULL, '{');
        tddp_launch_json_bool(json, "root_cause", root);
        put_time(console, json, &one->ended);
        tddp_launch_json_number(json, "timestamp", tddp_launch_failure_second(one));
        put_text(console, json, "host", tddp_host_name(host));
        (void)snprintf(text, sizeof text, "%d (local_rank: %d)", one->rank, one->local_rank);
        put_field(console, "rank", text);
        tddp_launch_json_number(json, "rank", one->rank);
        tddp_launch_json_number(json, "local_rank", one->local_rank);
        put_ending(console, json, one);
        tddp_launch_json_bool(json, "consequence", one->error.consequence);
        put_files(console, json, one, attempt->output);
        tddp_launch_json_close(json, '{');
    }
}

/* Makes the head of an empty record: a list of attempts is open then. */
static void begin(tddp_launch_json *json)
{
    if (json->text.size == 0) {
        tddp_launch_json_open(json, NULL, '{');
        tddp_launch_json_open(json, "attempts", '[');
    }
}

static int count_ended_by_us(const tddp_launch_worker *workers, int count)
{
    int ended = 0;
    for (int i = 0; i < count; i++) {
        ended += workers[i].pid > 0 && workers[i].ended_by_us;
    }
    return ended;
}

void tddp_launch_report(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                        const char *elsewhere, tddp_launch_console *console)
{
    char text[2 * TDDP_LAUNCH_ENDING_BYTES];
    tddp_launch_json *json = &record->json;
    const tddp_launch_worker *root = tddp_launch_failure(attempt->workers, attempt->count, NULL);
    int ended = count_ended_by_us(attempt->workers, attempt->count);
    if (json->failed || json->text.size > MOST_BYTES) {
        tddp_bytes_free(&json->text);
        *json = (tddp_launch_json){0};
        record->omitted = record->count;
    }
    record->count++;
    begin(json);
    tddp_launch_json_open(json, NULL, '{');
    tddp_launch_json_number(json, "restart", attempt->world->restart);
    tddp_launch_json_number(json, "round", attempt->world->round);
    tddp_launch_json_number(json, "node_rank", attempt->world->node_rank);
    tddp_launch_json_number(json, "nodes", attempt->world->nodes);
    tddp_launch_json_number(json, "world_size", attempt->world->size);
    tddp_launch_json_text(json, "elsewhere", elsewhere);
    tddp_launch_json_number(json, "ended_by_torchrun", ended);
    tddp_launch_json_open(json, "failures", '[');
    if (elsewhere) {
        tddp_launch_console_say(console, "%s FAILED elsewhere: %s", attempt->program, elsewhere);
        put_failures(NULL, json, attempt);
    } else if (root) {
        tddp_launch_console_say(console, "%s FAILED: rank %d, %s", attempt->program, root->rank,
                                tddp_launch_ending(root, text));
        tddp_launch_console_put(console, "", line);
        put_failures(console, json, attempt);
        (void)snprintf(text, sizeof text, "%d other worker%s then ended by torchrun.\n%s", ended,
                       ended == 1 ? " was" : "s were", line);
        tddp_launch_console_put(console, "", ended > 0 ? text : line);
    }
    tddp_launch_json_close(json, '[');
    tddp_launch_json_close(json, '{');
}

/* --- the outcome of the job ------------------------------------------------------------------ */

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
