/*
 * Which workers failed, how, and in which order: what the report, its JSON and the messages to
 * other nodes have in common. Workers that torchrun ended are no failures, however they ended. Main
 * thread, once the workers concerned have ended.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "launch/report/report.h"

static bool failed_by_itself(const tddp_launch_worker *worker)
{
    return worker->pid > 0 && !worker->ended_by_us && tddp_launch_worker_failed(worker);
}

int64_t tddp_launch_failure_second(const tddp_launch_worker *worker)
{
    return worker->error.timestamp > 0 ? worker->error.timestamp : (int64_t)worker->ended.tv_sec;
}

static bool comes_before(const tddp_launch_worker *a, const tddp_launch_worker *b)
{
    int64_t first = tddp_launch_failure_second(a);
    int64_t second = tddp_launch_failure_second(b);
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

static int compare(const void *a, const void *b)
{
    const tddp_launch_worker *first = *(const tddp_launch_worker *const *)a;
    const tddp_launch_worker *second = *(const tddp_launch_worker *const *)b;
    return comes_before(first, second)   ? -1
           : comes_before(second, first) ? 1
                                         : first->local_rank - second->local_rank;
}

const tddp_launch_worker **tddp_launch_failures(const tddp_launch_worker *workers, int count,
                                                int *found)
{
    const tddp_launch_worker **list = tddp_alloc_array((size_t)count + 1, sizeof *list);
    int failed = 0;
    if (!list) {
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        if (failed_by_itself(&workers[i])) {
            list[failed++] = &workers[i];
        }
    }
    qsort(list, (size_t)failed, sizeof *list, compare);
    *found = failed;
    return list;
}

int tddp_launch_ended_by_us(const tddp_launch_worker *workers, int count)
{
    int ended = 0;
    for (int i = 0; i < count; i++) {
        ended += workers[i].pid > 0 && workers[i].ended_by_us;
    }
    return ended;
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

const char *tddp_launch_error_missing(const tddp_launch_worker *worker)
{
    switch (worker->error.state) {
    case TDDP_LAUNCH_ERROR_READ:
        return NULL;
    case TDDP_LAUNCH_ERROR_NOT_TO_BE_READ:
        return "not read: it is no ordinary file of at most 1 MiB that may be read";
    case TDDP_LAUNCH_ERROR_NOT_UNDERSTOOD:
        return "not understood: there is no message in it";
    case TDDP_LAUNCH_ERROR_TIMER:
        return "none: torchrun ended the worker, because its timer expired";
    case TDDP_LAUNCH_ERROR_NONE:
        break;
    }
    return !worker->error_file ? "none: there was no place for one"
           : WIFSIGNALED(worker->wait_status)
               ? "none: a signal leaves no time to write one"
               : "none: the worker wrote none to "
                 "$TORCHELASTIC_ERROR_FILE (Ruby does for exceptions; "
                 "in Python decorate main with @record)";
}

static size_t room_in(const char *text, size_t size)
{
    size_t used = strlen(text) + 1;
    return size > used ? size - used : 0;
}

/* Appends `added` to the text as far as it fits. */
static void append(char *text, size_t size, const char *added, size_t length)
{
    size_t room = room_in(text, size);
    char *end = text + strlen(text);
    length = length < room ? length : room;
    memcpy(end, added, length);
    end[length] = '\0';
}

/* The start of the character that stands at `at`, so that UTF-8 is not cut within one. */
static size_t character_start(const char *text, size_t at)
{
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) {
        at--;
    }
    return at;
}

/* Python's tracebacks have the cause at their end, Ruby's at their start: both ends are kept. */
static void append_shortened(char *text, size_t size, const char *added)
{
    static const char gap[] = "\n[...]\n";
    size_t length = strlen(added);
    size_t room = room_in(text, size);
    if (length <= room) {
        append(text, size, added, length);
    } else if (room > 4 * sizeof gap) {
        size_t half = (room - sizeof gap) / 2;
        size_t tail = character_start(added, length - half);
        append(text, size, added, character_start(added, half));
        append(text, size, gap, sizeof gap - 1);
        append(text, size, added + tail, character_start(added + tail, length - tail));
    }
}

const char *tddp_launch_report_summary(const tddp_launch_worker *workers, int count, int node_rank,
                                       char *text, size_t size)
{
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    char host[TDDP_HOST_NAME_BYTES];
    const tddp_launch_worker *root = tddp_launch_root_cause(workers, count);
    text[0] = '\0';
    if (!root) {
        return text;
    }
    (void)snprintf(text, size, "rank %d on node %d: %s (pid %d on %s)", root->rank, node_rank,
                   tddp_launch_ending(root, ending), (int)root->pid, tddp_host_name(host));
    if (root->error.message) {
        append(text, size, "\n", 1);
        append_shortened(text, size - size / 2, root->error.message);
    }
    if (root->error.traceback) {
        append(text, size, "\n", 1);
        append_shortened(text, size, root->error.traceback);
    }
    return text;
}
