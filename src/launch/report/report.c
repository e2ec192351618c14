/*
 * The failures of an attempt: the root cause first, then the other workers that failed by
 * themselves, then how many were ended because of them. What is known of one is listed once, for
 * people, with the fields of PyTorch's report, and for programs. Main thread, after all workers
 * are gone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "base/host_name.h"
#include "launch/report/report.h"

enum { TEXT_BYTES = 64 };

static const char line[] = "------------------------------------------------------------";

/* Where a fact goes. */
enum { PEOPLE = 1, PROGRAMS = 2, BOTH = 3 };

/* One thing that is known of a failed worker. */
typedef struct fact {
    const char *key; /* for people a label, for programs the member of an object */
    int for_whom;
    enum { TEXT, NUMBER, BOOL } kind;
    int64_t number;
    const char *text; /* NULL: none */
} fact;

/* "  label     : text", further lines of the text in the same column; nothing without a text. */
static void put_field(tddp_launch_console *console, const char *label, const char *text)
{
    char head[32];
    (void)snprintf(head, sizeof head, "  %-10s: ", label);
    if (text && *text != '\0') {
        tddp_launch_console_put(console, head, text);
    }
}

static void put_member(tddp_launch_json *json, const fact *one)
{
    if (one->kind == TEXT) {
        tddp_launch_json_text(json, one->key, one->text);
    } else if (one->kind == NUMBER) {
        tddp_launch_json_number(json, one->key, one->number);
    } else {
        tddp_launch_json_bool(json, one->key, one->number != 0);
    }
}

static void format_time(char text[TEXT_BYTES], const char *format, const struct tm *time)
{
    if (!time || strftime(text, TEXT_BYTES, format, time) == 0) {
        text[0] = '\0';
    }
}

/* Writes what is known of a failed worker to one of the two. */
static void put_failure(const tddp_launch_attempt *attempt, const tddp_launch_worker *worker,
                        bool root, tddp_launch_console *console, tddp_launch_json *json)
{
    char local[TEXT_BYTES], utc[TEXT_BYTES], rank[TEXT_BYTES], code[TEXT_BYTES], name[32];
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    char host[TDDP_HOST_NAME_BYTES];
    char *logs[TDDP_LAUNCH_STREAMS] = {NULL};
    const tddp_launch_output *output = attempt->output;
    const tddp_launch_error *error = &worker->error;
    const int status = worker->wait_status;
    const bool signaled = WIFSIGNALED(status);
    const char *kept = output && tddp_launch_output_folder(output) ? worker->error_file : NULL;
    struct tm time;
    format_time(local, "%Y-%m-%d %H:%M:%S", localtime_r(&worker->ended.tv_sec, &time));
    format_time(utc, "%Y-%m-%dT%H:%M:%S", gmtime_r(&worker->ended.tv_sec, &time));
    tddp_add_text(utc, sizeof utc, ".%06ldZ", worker->ended.tv_nsec / 1000);
    (void)snprintf(rank, sizeof rank, "%d (local_rank: %d)", worker->rank, worker->local_rank);
    (void)snprintf(code, sizeof code, "%d (pid: %d)", tddp_launch_exit_code(worker), worker->pid);
    for (int i = 0; output && i < TDDP_LAUNCH_STREAMS; i++) {
        logs[i] = tddp_launch_output_log_file(output, worker->local_rank, i);
    }
    const fact facts[] = {
        {"root_cause", PROGRAMS, BOOL, root, NULL},
        {"time", PEOPLE, TEXT, 0, local},
        {"time", PROGRAMS, TEXT, 0, utc},
        {"timestamp", PROGRAMS, NUMBER, tddp_launch_failure_second(worker), NULL},
        {"host", BOTH, TEXT, 0, tddp_host_name(host)},
        {"rank", PEOPLE, TEXT, 0, rank},
        {"rank", PROGRAMS, NUMBER, worker->rank, NULL},
        {"local_rank", PROGRAMS, NUMBER, worker->local_rank, NULL},
        {"pid", PROGRAMS, NUMBER, worker->pid, NULL},
        {"exitcode", PEOPLE, TEXT, 0, code},
        {"exitcode", PROGRAMS, NUMBER, tddp_launch_exit_code(worker), NULL},
        {"signal", PEOPLE, TEXT, 0, signaled ? tddp_launch_ending(worker, ending) : NULL},
        {"signal", PROGRAMS, TEXT, 0,
         signaled ? tddp_launch_signal_name(WTERMSIG(status), name) : NULL},
        {"out_of_memory", PROGRAMS, BOOL, worker->out_of_memory, NULL},
        {"core_dumped", PROGRAMS, BOOL, signaled && WCOREDUMP(status), NULL},
        {"consequence", PROGRAMS, BOOL, error->consequence, NULL},
        {"error_file", PEOPLE, TEXT, 0, error->missing ? error->missing : kept},
        {"error_file", PROGRAMS, TEXT, 0, error->missing ? NULL : kept},
        {"error_file_missing", PROGRAMS, TEXT, 0, error->missing},
        {"message", BOTH, TEXT, 0, error->message},
        {"traceback", BOTH, TEXT, 0, error->traceback},
        {"stdout", BOTH, TEXT, 0, logs[TDDP_LAUNCH_OUT]},
        {"stderr", BOTH, TEXT, 0, logs[TDDP_LAUNCH_ERR]},
    };
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        if (console && facts[i].for_whom & PEOPLE) {
            put_field(console, facts[i].key, facts[i].text);
        } else if (json && facts[i].for_whom & PROGRAMS) {
            put_member(json, &facts[i]);
        }
    }
    free(logs[TDDP_LAUNCH_OUT]);
    free(logs[TDDP_LAUNCH_ERR]);
}

void tddp_launch_report(const tddp_launch_attempt *attempt, tddp_launch_console *console)
{
    char text[TDDP_LAUNCH_ENDING_BYTES];
    const tddp_launch_worker *root = tddp_launch_failure(attempt->workers, attempt->count, NULL);
    int ended = tddp_launch_ended_by_us(attempt->workers, attempt->count);
    if (!root) {
        return;
    }
    tddp_launch_console_say(console, "%s FAILED: rank %d, %s", attempt->program, root->rank,
                            tddp_launch_ending(root, text));
    tddp_launch_console_put(console, "", line);
    for (const tddp_launch_worker *one = root; one;
         one = tddp_launch_failure(attempt->workers, attempt->count, one)) {
        tddp_launch_console_put(console, "",
                                one == root ? "Root cause (first failure):" : "Failed too:");
        put_failure(attempt, one, one == root, console, NULL);
    }
    if (ended > 0) {
        (void)snprintf(text, sizeof text, "%d other worker%s then ended by torchrun.", ended,
                       ended == 1 ? " was" : "s were");
        tddp_launch_console_put(console, "", text);
    }
    tddp_launch_console_put(console, "", line);
}

void tddp_launch_report_elsewhere(const char *program, const char *text,
                                  tddp_launch_console *console)
{
    int length = (int)strcspn(text, "\n");
    tddp_launch_console_say(console, "%s FAILED elsewhere: %.*s", program, length, text);
    if (text[length] == '\n') {
        tddp_launch_console_put(console, "", line);
        tddp_launch_console_put(console, "", "Root cause, as that node told it:");
        put_field(console, "error", text + length + 1);
        tddp_launch_console_put(console, "", line);
    }
}

void tddp_launch_report_json(const tddp_launch_attempt *attempt, bool elsewhere,
                             tddp_launch_json *json)
{
    const tddp_launch_worker *one = NULL;
    tddp_launch_json_open(json, "failures", '[');
    for (bool root = !elsewhere; (one = tddp_launch_failure(attempt->workers, attempt->count, one));
         root = false) {
        tddp_launch_json_open(json, NULL, '{');
        put_failure(attempt, one, root, NULL, json);
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}
