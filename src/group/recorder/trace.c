/*
 * Formats the flight recorder's records as JSON, as documented in <tddp/recorder.h>. Any thread;
 * copies each recorder's ring buffer first, then formats without its lock. dump.c writes the files.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "group/recorder/recorder.h"

/* A growing text; the first failure is kept and returned at the end. */
typedef struct writer {
    tddp_bytes bytes;
    tddp_status status;
    int64_t epoch_ns; /* the clock's nanoseconds since 1970, less the monotonic clock's */
} writer;

static void put(writer *self, const char *format, ...) TDDP_PRINTF(2, 3);

static void put(writer *self, const char *format, ...)
{
    if (self->status) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    self->status = tddp_bytes_reserve(&self->bytes, (size_t)length + 1);
    if (self->status == TDDP_OK) {
        va_start(arguments, format);
        vsnprintf(self->bytes.data + self->bytes.size, (size_t)length + 1, format, arguments);
        va_end(arguments);
        self->bytes.size += (size_t)length;
    }
}

static void put_text(writer *self, const char *text)
{
    if (self->status == TDDP_OK) {
        self->status = tddp_bytes_append_json(&self->bytes, text);
    }
}

static void put_text_or_null(writer *self, const char *text)
{
    if (text[0]) {
        put_text(self, text);
    } else {
        put(self, "null");
    }
}

static void put_number_if(writer *self, const char *name, bool any, int64_t number)
{
    if (any) {
        put(self, "\"%s\": %" PRId64 ", ", name, number);
    } else {
        put(self, "\"%s\": null, ", name);
    }
}

static void put_time(writer *self, const char *name, int64_t at_ns)
{
    put_number_if(self, name, at_ns != 0, at_ns + self->epoch_ns);
}

/* --- entries --------------------------------------------------------------------------------- */

static void put_sizes(writer *self, const char *what, const tddp_record *record, bool any,
                      size_t count)
{
    if (any) {
        put(self, "\"%s_sizes\": [[%zu]], \"%s_dtypes\": [\"%s\"], ", what, count, what,
            tddp_dtype_name(record->dtype));
    } else {
        put(self, "\"%s_sizes\": [], \"%s_dtypes\": [], ", what, what);
    }
}

static void put_profiling_name(writer *self, const tddp_recorder *recorder,
                               const tddp_record *record)
{
    put(self, "\"profiling_name\": \"%s:%s", recorder->backend, tddp_op_name(record->kind));
    if (tddp_op_is_p2p(record->kind)) {
        put(self, " %d%s", recorder->rank, record->kind == TDDP_OP_SEND ? "->" : "<-");
        if (record->peer == TDDP_ANY_SOURCE) {
            put(self, "any");
        } else {
            put(self, "%d", record->peer);
        }
    }
    put(self, "\", ");
}

static void put_times(writer *self, const tddp_record *record)
{
    put_time(self, "time_created_ns", record->queued_ns);
    put_time(self, "time_discovered_started_ns", record->started_ns);
    put_time(self, "time_discovered_completed_ns", record->ended_ns);
    int64_t took = record->device_ns ? record->device_ns : record->ended_ns - record->started_ns;
    if (record->started_ns && record->ended_ns) {
        put(self, "\"duration_ms\": %.6f, ", (double)took / 1e6);
    } else {
        put(self, "\"duration_ms\": null, ");
    }
}

static void put_entry(writer *self, const tddp_recorder *recorder, size_t pg,
                      const tddp_record *record)
{
    static const char *const states[] = {
        [TDDP_RECORD_QUEUED] = "scheduled",
        [TDDP_RECORD_STARTED] = "started",
        [TDDP_RECORD_COMPLETED] = "completed",
        [TDDP_RECORD_FAILED] = "failed",
    };
    bool p2p = tddp_op_is_p2p(record->kind);
    put(self, "{\"record_id\": %" PRIu64 ", \"pg_id\": %zu, \"process_group\": [", record->id - 1,
        pg);
    put_text(self, recorder->name);
    put(self, ", ");
    put_text(self, recorder->name);
    put(self, "], \"collective_seq_id\": %" PRIu64 ", \"p2p_seq_id\": %" PRIu64 ", ",
        p2p ? 0 : record->sequence, p2p ? record->sequence : 0);
    put(self, "\"op_id\": %" PRIu64 ", ", record->sequence);
    put_profiling_name(self, recorder, record);
    put_times(self, record);
    bool data = record->kind != TDDP_OP_BARRIER;
    put_sizes(self, "input", record, data && record->kind != TDDP_OP_RECV, record->input_count);
    put_sizes(self, "output", record, data && record->kind != TDDP_OP_SEND, record->output_count);
    bool ended = record->state >= TDDP_RECORD_COMPLETED;
    put(self, "\"state\": \"%s\", \"retired\": %s, ", states[record->state],
        ended ? "true" : "false");
    put(self, "\"timeout_ms\": %" PRId64 ", \"is_p2p\": %s, \"thread_id\": \"%d\", ",
        record->timeout_ms, p2p ? "true" : "false", (int)record->thread);
    put_number_if(self, "root", tddp_op_has_root(record->kind), record->root);
    put_number_if(self, "peer", p2p && record->peer != TDDP_ANY_SOURCE, record->peer);
    put_number_if(self, "tag", p2p, record->tag);
    put(self, "\"reduce_op\": ");
    put_text_or_null(self,
                     tddp_op_reduces(record->kind) ? tddp_reduce_op_name(record->reduce) : "");
    put(self, ", \"status\": \"%s\", \"description\": ", tddp_status_name(record->status));
    put_text_or_null(self, record->text);
    put(self, ", \"fingerprint\": %" PRIu32 ", \"frames\": []}", record->fingerprint);
}

/* --- groups ---------------------------------------------------------------------------------- */

static void put_config(writer *self, const tddp_recorder *recorder, size_t pg)
{
    const tddp_peers *peers = recorder->peers;
    put(self, "%s\"%zu\": {\"name\": ", pg ? ",\n  " : "\n  ", pg);
    put_text(self, recorder->name);
    put(self, ", \"desc\": ");
    put_text(self, recorder->name);
    put(self, ", \"backend\": \"%s\", \"rank\": %d, \"size\": %d, \"ranks\": \"[",
        recorder->backend, recorder->rank, recorder->world_size);
    for (int rank = 0; peers && rank < peers->count; rank++) {
        put(self, "%s%d", rank ? ", " : "", peers->entries[rank].root_rank);
    }
    put(self, "]\", \"members\": [");
    for (int rank = 0; peers && rank < peers->count; rank++) {
        const tddp_peer_entry *entry = &peers->entries[rank];
        put(self, "%s{\"rank\": %d, \"global_rank\": %d, \"host\": ", rank ? ", " : "", rank,
            entry->root_rank);
        put_text(self, entry->host);
        put(self, ", \"pid\": %" PRId64 "}", entry->pid);
    }
    put(self, "]}");
}

static void put_status(writer *self, tddp_recorder *recorder, size_t pg, const tddp_record *records,
                       size_t count)
{
    char failure[TDDP_RECORD_FAILURE_BYTES];
    int64_t enqueued = -1;
    int64_t started = -1;
    int64_t completed = -1;
    for (size_t i = 0; i < count; i++) {
        if (!tddp_op_is_p2p(records[i].kind)) {
            enqueued = (int64_t)records[i].sequence;
            started = records[i].started_ns ? enqueued : started;
            completed = records[i].state == TDDP_RECORD_COMPLETED ? enqueued : completed;
        }
    }
    pthread_mutex_lock(&recorder->mutex);
    memcpy(failure, recorder->failure_text, sizeof failure);
    size_t messages = recorder->position.messages;
    pthread_mutex_unlock(&recorder->mutex);
    put(self,
        "%s\"%zu\": {\"last_enqueued_collective\": %" PRId64
        ", \"last_started_collective\": %" PRId64 ", \"last_completed_collective\": %" PRId64
        ", \"dropped\": %" PRIu64 ", \"messages\": %zu, \"failure\": ",
        pg ? ",\n  " : "\n  ", pg, enqueued, started, completed, count ? records[0].id - 1 : 0,
        messages);
    put_text_or_null(self, failure);
    put(self, "}");
}

typedef struct copy {
    tddp_record *records;
    size_t count;
} copy;

static void put_document(writer *self, tddp_recorder *const *all, size_t count, const copy *copies)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t written = (int64_t)now.tv_sec * TDDP_NS_PER_S + now.tv_nsec;
    self->epoch_ns = written - tddp_now_ns();
    char host[TDDP_PEER_HOST_BYTES] = "";
    (void)gethostname(host, sizeof host - 1);
    int world = all[0]->world_size;
    for (size_t i = 0; i < count; i++) {
        world = all[i]->world_size > world ? all[i]->world_size : world;
    }
    put(self,
        "{\"version\": \"2.10\", \"rank\": %d, \"world_size\": %d, \"host\": ", all[0]->root_rank,
        world);
    put_text(self, host);
    put(self, ", \"pid\": %d, \"written_ns\": %" PRId64 ",\n \"pg_config\": {", (int)getpid(),
        written);
    for (size_t i = 0; i < count; i++) {
        put_config(self, all[i], i);
    }
    put(self, "},\n \"pg_status\": {");
    for (size_t i = 0; i < count; i++) {
        put_status(self, all[i], i, copies[i].records, copies[i].count);
    }
    put(self, "},\n \"entries\": [");
    const char *before = "\n  ";
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < copies[i].count; j++) {
            put(self, "%s", before);
            put_entry(self, all[i], i, &copies[i].records[j]);
            before = ",\n  ";
        }
    }
    put(self, "]}\n");
}

tddp_status tddp_recorder_to_json(tddp_recorder *const *all, size_t count, tddp_bytes *out)
{
    copy *copies = tddp_alloc_array(count, sizeof *copies);
    if (!copies) {
        return TDDP_OUT_OF_MEMORY;
    }
    writer self = {0};
    for (size_t i = 0; i < count && self.status == TDDP_OK; i++) {
        self.status = tddp_recorder_copy(all[i], &copies[i].records, &copies[i].count);
    }
    if (self.status == TDDP_OK) {
        put_document(&self, all, count, copies);
    }
    for (size_t i = 0; i < count; i++) {
        free(copies[i].records);
    }
    free(copies);
    if (self.status) {
        tddp_bytes_free(&self.bytes);
        return self.status;
    }
    *out = self.bytes;
    return TDDP_OK;
}
