/*
 * Traces: <tddp/trace.h>. Any thread adds spans, as text, to a buffer in memory; one thread of the
 * trace's own takes the buffer about once a second and writes it, so that neither training nor a
 * group's progress ever waits for the disk.
 *
 * Invariant: `life` is held to open and close, `mutex` for moments only; `life` is locked first.
 * `writing` and `file` belong to the writer while it runs. There is one trace a process: spans come
 * from places that know of no other. A forked child begins without one and never writes to its
 * parent's.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tddp/trace.h>
#include <tddp/version.h>

#include "base/host_name.h"
#include "base/trace_parts.h"

enum { ENOUGH_BYTES = 1 << 18, MOST_PENDING_BYTES = 1 << 25 };

static atomic_int enabled;
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static struct trace {
    bool open; /* guarded by `life`, as thread */
    pthread_t thread;
    tddp_trace_file file; /* after closing, what was closed */
    int rank;
    pthread_cond_t wake; /* for the writer: the buffer is not empty or full enough, or `ending` */
    tddp_status wakes;   /* of making `wake` */
    bool ending;
    tddp_trace_rows *rows;
    tddp_bytes pending;
    tddp_bytes writing;
    bool failed;   /* the file cannot be written any more */
    uint64_t lost; /* spans for which there was no memory */
} trace = {.file = {.fd = -1}};

/* --- forks ----------------------------------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&mutex);
    pthread_mutex_unlock(&life);
}

static void after_fork_in_child(void)
{
    atomic_store(&enabled, 0);
    tddp_trace_file_close(&trace.file);
    free(trace.file.path);
    free(trace.rows);
    tddp_bytes_free(&trace.pending);
    tddp_bytes_free(&trace.writing);
    trace = (struct trace){.file = {.fd = -1}};
    /* The parent's writer may wait on it. */
    trace.wakes = tddp_cond_init(&trace.wake);
    pthread_mutex_unlock(&mutex);
    pthread_mutex_unlock(&life);
}

static void prepare(void)
{
    trace.wakes = tddp_cond_init(&trace.wake);
    /* It fails only for want of memory; a child may then write to its parent's file. */
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* --- events, as text ------------------------------------------------------------------------- */

/* Names of processes and rows are events as well. */
static tddp_status append_row(tddp_bytes *to, const tddp_trace_place *place)
{
    char name[128];
    (void)snprintf(name, sizeof name, place->row > 0 ? "%s (%d)" : "%s", place->lane,
                   place->row + 1);
    tddp_status status = tddp_bytes_format(to,
                                           ",\n{\"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"name\": "
                                           "\"thread_name\", \"args\": {\"name\": ",
                                           trace.rank, place->thread);
    status = status ? status : tddp_bytes_append_json(to, name);
    return status ? status
                  : tddp_bytes_format(to,
                                      "}},\n{\"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"name\": "
                                      "\"thread_sort_index\", \"args\": {\"sort_index\": %d}}",
                                      trace.rank, place->thread, place->thread);
}

static tddp_status append_span(tddp_bytes *to, const tddp_trace_place *place, const char *name,
                               int64_t start_ns, int64_t end_ns, const char *args_json)
{
    int64_t lasted = end_ns - start_ns;
    tddp_status status =
        tddp_bytes_format(to,
                          ",\n{\"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"ts\": %" PRId64
                          ".%03d, \"dur\": %" PRId64 ".%03d, \"cat\": ",
                          trace.rank, place->thread, start_ns / 1000, (int)(start_ns % 1000),
                          lasted / 1000, (int)(lasted % 1000));
    status = status ? status : tddp_bytes_append_json(to, place->lane);
    status = status ? status : tddp_bytes_format(to, ", \"name\": ");
    status = status ? status : tddp_bytes_append_json(to, name);
    return status ? status : tddp_bytes_format(to, args_json ? ", \"args\": %s}" : "}", args_json);
}

/* The offset of the wall clock from the monotonic one. */
static int64_t wall_offset(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * TDDP_NS_PER_S + now.tv_nsec - tddp_now_ns();
}

/* The first events; to be freed. */
static char *heading(int rank)
{
    char host[TDDP_HOST_NAME_BYTES];
    tddp_bytes text = {0};
    tddp_status status = tddp_bytes_format(
        &text,
        "{\"ph\": \"M\", \"pid\": %d, \"tid\": 0, \"name\": \"tddp\", \"args\": {\"rank\": %d, "
        "\"version\": \"" TDDP_VERSION "\", \"wall_offset_ns\": %" PRId64
        ", \"pid\": %d, \"host\": ",
        rank, rank, wall_offset(), (int)getpid());
    status = status ? status : tddp_bytes_append_json(&text, tddp_host_name(host));
    status = status ? status
                    : tddp_bytes_format(&text,
                                        "}},\n{\"ph\": \"M\", \"pid\": %d, \"tid\": 0, \"name\": "
                                        "\"process_name\", \"args\": {\"name\": \"rank %d\"}},\n"
                                        "{\"ph\": \"M\", \"pid\": %d, \"tid\": 0, \"name\": "
                                        "\"process_sort_index\", \"args\": {\"sort_index\": %d}}",
                                        rank, rank, rank, rank);
    if (status) {
        tddp_bytes_free(&text);
    }
    return text.data;
}

/* --- the writer ------------------------------------------------------------------------------ */

/* Waits for something to write, then for more of it; false: the end, and nothing is left. With the
 * lock held. */
static bool await_batch(void)
{
    while (!trace.ending && trace.pending.size == 0) {
        pthread_cond_wait(&trace.wake, &mutex);
    }
    int64_t deadline = tddp_now_ns() + TDDP_NS_PER_S;
    while (!trace.ending && trace.pending.size < ENOUGH_BYTES &&
           tddp_cond_wait_until(&trace.wake, &mutex, deadline)) {
    }
    return trace.pending.size > 0;
}

static void *write_all(void *data)
{
    (void)data;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&mutex);
    while (status == TDDP_OK && await_batch()) {
        tddp_bytes batch = trace.pending;
        trace.pending = trace.writing;
        trace.writing = batch;
        pthread_mutex_unlock(&mutex);
        status = tddp_trace_file_append(&trace.file, &trace.writing);
        trace.writing.size = 0;
        pthread_mutex_lock(&mutex);
    }
    if (status) {
        trace.failed = true;
        atomic_store(&enabled, 0);
    }
    pthread_mutex_unlock(&mutex);
    if (status) {
        tddp_log(TDDP_LOG_WARN, "trace", "%s; tracing stops", tddp_error_message());
    }
    return NULL;
}

/* --- what is public -------------------------------------------------------------------------- */

/* With `life` held. */
static tddp_status open_trace(const char *dir, int rank)
{
    tddp_trace_file known = trace.file;
    char *first = heading(rank);
    trace.rows = tddp_trace_rows_create();
    tddp_status status = first && trace.rows ? trace.wakes : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK) {
        status = tddp_trace_file_open(dir, rank, first, &known, &trace.file);
    }
    free(first);
    if (status == TDDP_OK) {
        free(known.path);
        trace.rank = rank;
        trace.ending = trace.failed = false;
        trace.lost = 0;
        status = tddp_thread_start(&trace.thread, "tddp-trace", write_all, NULL);
    }
    if (status) {
        tddp_trace_file_close(&trace.file);
        free(trace.rows);
        trace.rows = NULL;
        return status;
    }
    trace.open = true;
    atomic_store(&enabled, 1);
    return TDDP_OK;
}

tddp_status tddp_trace_open(const char *dir, int rank)
{
    if (!dir || !dir[0]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "trace: the folder is %s", dir ? "empty" : "NULL");
    }
    if (rank < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "trace: rank %d: expected 0 or more", rank);
    }
    (void)pthread_once(&prepared, prepare);
    pthread_mutex_lock(&life);
    tddp_status status =
        trace.open ? tddp_fail(TDDP_INVALID_ARGUMENT,
                               "trace: this process traces to %s already: close that first",
                               trace.file.path)
                   : open_trace(dir, rank);
    pthread_mutex_unlock(&life);
    return status;
}

__attribute__((destructor)) void tddp_trace_close(void)
{
    pthread_mutex_lock(&life);
    if (trace.open) {
        atomic_store(&enabled, 0);
        pthread_mutex_lock(&mutex);
        trace.ending = true;
        pthread_cond_signal(&trace.wake);
        pthread_mutex_unlock(&mutex);
        pthread_join(trace.thread, NULL);
        tddp_trace_file_close(&trace.file);
        if (trace.lost > 0) {
            tddp_log(TDDP_LOG_WARN, "trace",
                     "%" PRIu64 " spans are missing from %s: they came "
                     "faster than they could be written",
                     trace.lost, trace.file.path);
        }
        free(trace.rows);
        trace.rows = NULL;
        tddp_bytes_free(&trace.pending);
        tddp_bytes_free(&trace.writing);
        trace.open = false;
    }
    pthread_mutex_unlock(&life);
}

void tddp_trace_pause(int paused)
{
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&mutex);
    if (trace.open && !trace.failed) {
        atomic_store(&enabled, !paused);
    }
    pthread_mutex_unlock(&mutex);
    pthread_mutex_unlock(&life);
}

int tddp_trace_enabled(void)
{
    return atomic_load_explicit(&enabled, memory_order_relaxed);
}

int64_t tddp_trace_now(void)
{
    return tddp_now_ns();
}

/* With the lock held. */
static void add_span(const char *lane, const char *name, int64_t start_ns, int64_t end_ns,
                     const char *args_json)
{
    size_t before = trace.pending.size;
    tddp_trace_place place = tddp_trace_rows_place(trace.rows, lane, start_ns, end_ns);
    tddp_status status = before < MOST_PENDING_BYTES ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && place.fresh) {
        status = append_row(&trace.pending, &place);
    }
    if (status == TDDP_OK) {
        status = append_span(&trace.pending, &place, name, start_ns, end_ns, args_json);
    }
    if (status) {
        trace.pending.size = before;
        trace.lost++;
    } else if (before == 0 || (before < ENOUGH_BYTES && trace.pending.size >= ENOUGH_BYTES)) {
        pthread_cond_signal(&trace.wake);
    }
}

void tddp_trace_span(const char *lane, const char *name, int64_t start_ns, int64_t end_ns,
                     const char *args_json)
{
    if (!tddp_trace_enabled() || !lane || !name) {
        return;
    }
    if (end_ns < start_ns) {
        end_ns = start_ns;
    }
    pthread_mutex_lock(&mutex);
    /* It may have been closed meanwhile. */
    if (tddp_trace_enabled()) {
        add_span(lane, name, start_ns, end_ns, args_json);
    }
    pthread_mutex_unlock(&mutex);
}
