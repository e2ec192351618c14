/*
 * The flight recorder: a ring buffer of a group's last operations, and the group's position in
 * them. Hooks are called by every thread that queues or executes operations; they hold one lock for
 * a short time and do not allocate. Dumps copy the ring buffer and write without the lock.
 *
 * Invariant: a work's `record` is its entry in the ring buffer as long as the entry's id is
 * `record_id`; another operation may have overwritten it. A forked child has an empty list and
 * never takes a recorder's lock, which a thread of the parent may have held.
 */
#include "group/recorder/recorder.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_RECORDS = 2000, MOST_RECORDS = 1 << 20 };

/* The recorders of existing groups, for dumps of the whole process, and the calling thread's id. A
 * forked child resets both. */
static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static tddp_recorder *registered;
static pthread_once_t fork_handled = PTHREAD_ONCE_INIT;
static _Thread_local pid_t thread_id;

static void before_fork(void)
{
    pthread_mutex_lock(&list_mutex);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&list_mutex);
}

static void after_fork_in_child(void)
{
    registered = NULL;
    thread_id = 0;
    pthread_mutex_unlock(&list_mutex);
}

static void handle_forks(void)
{
    /* It fails only without memory; a forked child then keeps the parent's list. */
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

const char *tddp_recorder_setting(const char *const names[TDDP_RECORDER_NAMES], const char **value)
{
    for (int i = 0; i < TDDP_RECORDER_NAMES; i++) {
        *value = getenv(names[i]);
        if (*value && **value) {
            return names[i];
        }
    }
    return NULL;
}

static size_t wanted_records(void)
{
    static const char *const names[] = {"TDDP_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE",
                                        "TORCH_NCCL_TRACE_BUFFER_SIZE"};
    const char *value;
    const char *name = tddp_recorder_setting(names, &value);
    int64_t count = DEFAULT_RECORDS;
    if (name && !tddp_parse_int(value, 0, MOST_RECORDS, &count)) {
        tddp_log(TDDP_LOG_WARN, "group", "%s=\"%s\": expected 0 to %d; using %d", name, value,
                 MOST_RECORDS, DEFAULT_RECORDS);
        count = DEFAULT_RECORDS;
    }
    return (size_t)count;
}

tddp_status tddp_recorder_create(tddp_group *group)
{
    (void)pthread_once(&fork_handled, handle_forks);
    tddp_recorder *recorder = tddp_alloc(sizeof *recorder);
    if (!recorder) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&recorder->references, 1);
    pthread_mutex_init(&recorder->mutex, NULL);
    recorder->rank = group->rank;
    recorder->world_size = group->world_size;
    recorder->root_rank = group->root_rank;
    recorder->peers = tddp_peers_retain(group->peers);
    recorder->capacity = wanted_records();
    recorder->name = tddp_copy_string(group->name);
    recorder->backend = tddp_copy_string(group->backend_name);
    if (recorder->capacity > 0) {
        recorder->ring = tddp_alloc_array(recorder->capacity, sizeof *recorder->ring);
    }
    if (!recorder->name || !recorder->backend || (recorder->capacity > 0 && !recorder->ring)) {
        tddp_recorder_release(recorder);
        return TDDP_OUT_OF_MEMORY;
    }
    group->recorder = recorder;
    return TDDP_OK;
}

void tddp_recorder_release(tddp_recorder *recorder)
{
    if (recorder && atomic_fetch_sub(&recorder->references, 1) == 1) {
        tddp_peers_release(recorder->peers);
        free(recorder->ring);
        free(recorder->name);
        free(recorder->backend);
        free(recorder);
    }
}

void tddp_recorder_register(tddp_recorder *recorder)
{
    pthread_mutex_lock(&list_mutex);
    recorder->next_registered = registered;
    registered = recorder;
    pthread_mutex_unlock(&list_mutex);
}

void tddp_recorder_close(tddp_recorder *recorder)
{
    if (!recorder) {
        return;
    }
    pthread_mutex_lock(&list_mutex);
    for (tddp_recorder **link = &registered; *link; link = &(*link)->next_registered) {
        if (*link == recorder) {
            *link = recorder->next_registered;
            break;
        }
    }
    pthread_mutex_unlock(&list_mutex);
    tddp_recorder_release(recorder);
}

int tddp_recorder_next_rank(int from)
{
    int found = -1;
    pthread_mutex_lock(&list_mutex);
    for (const tddp_recorder *each = registered; each; each = each->next_registered) {
        if (each->root_rank >= from && (found < 0 || each->root_rank < found)) {
            found = each->root_rank;
        }
    }
    pthread_mutex_unlock(&list_mutex);
    return found;
}

/* A registered recorder has its group's reference, which is dropped after it leaves the list. */
tddp_status tddp_recorder_all(int rank, tddp_recorder ***out, size_t *count)
{
    size_t left = 0;
    pthread_mutex_lock(&list_mutex);
    for (const tddp_recorder *each = registered; each; each = each->next_registered) {
        left += each->root_rank == rank;
    }
    *count = left;
    *out = tddp_alloc_array(left, sizeof(tddp_recorder *));
    for (tddp_recorder *each = registered; *out && each; each = each->next_registered) {
        if (each->root_rank == rank) {
            atomic_fetch_add(&each->references, 1);
            (*out)[--left] = each;
        }
    }
    pthread_mutex_unlock(&list_mutex);
    return *out ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* --- the hooks ------------------------------------------------------------------------------- */

static pid_t this_thread(void)
{
    if (thread_id == 0) {
        thread_id = gettid();
    }
    return thread_id;
}

static void copy_text(char *to, size_t bytes, const char *text)
{
    size_t length = text ? strnlen(text, bytes - 1) : 0;
    if (length > 0) {
        memcpy(to, text, length);
    }
    to[length] = '\0';
}

/* The work's entry; NULL if it has none, or no longer. With the lock held. */
static tddp_record *entry_of(const tddp_work *work)
{
    return work->record && work->record->id == work->record_id ? work->record : NULL;
}

/* Makes the work's entry. With the lock held. */
static void record(tddp_recorder *recorder, tddp_work *work, int64_t now)
{
    const tddp_op *op = &work->op;
    uint64_t id = ++recorder->count;
    tddp_record *entry = &recorder->ring[recorder->next];
    if (++recorder->next == recorder->capacity) {
        recorder->next = 0;
    }
    entry->id = id;
    entry->sequence = op->sequence;
    entry->input_count = op->input.count;
    entry->output_count = op->output.count;
    entry->queued_ns = now;
    entry->started_ns = 0;
    entry->ended_ns = 0;
    entry->device_ns = 0;
    entry->timeout_ms = op->timeout_ms;
    entry->kind = op->kind;
    entry->dtype = op->kind == TDDP_OP_RECV ? op->output.dtype : op->input.dtype;
    entry->reduce = op->reduce;
    entry->state = TDDP_RECORD_QUEUED;
    entry->status = TDDP_OK;
    entry->root = op->root;
    entry->peer = op->peer;
    entry->tag = op->tag;
    entry->fingerprint = op->fingerprint;
    entry->thread = this_thread();
    copy_text(entry->text, sizeof entry->text, work->description);
    work->record = entry;
    work->record_id = id;
}

void tddp_recorder_queued(tddp_group *group, tddp_work *work)
{
    tddp_recorder *recorder = group->recorder;
    if (recorder->capacity > 0) {
        int64_t now = tddp_now_ns();
        pthread_mutex_lock(&recorder->mutex);
        record(recorder, work, now);
        pthread_mutex_unlock(&recorder->mutex);
    }
}

static void set_summary(tddp_recorder_op_summary *summary, const tddp_work *work, int64_t now)
{
    summary->any = true;
    summary->kind = work->op.kind;
    summary->sequence = work->op.sequence;
    summary->peer = work->op.peer;
    summary->at_ns = now;
    copy_text(summary->text, sizeof summary->text, work->description);
}

void tddp_recorder_started(tddp_group *group, tddp_work *work, int64_t now)
{
    tddp_recorder *recorder = group->recorder;
    pthread_mutex_lock(&recorder->mutex);
    if (recorder->capacity > 0 && work->record_id == 0) {
        record(recorder, work, now);
    }
    if (tddp_op_is_p2p(work->op.kind)) {
        recorder->position.messages++;
    } else {
        set_summary(&recorder->position.current, work, now);
    }
    work->started = true;
    tddp_record *entry = entry_of(work);
    if (entry) {
        entry->started_ns = now;
        entry->state = TDDP_RECORD_STARTED;
    }
    pthread_mutex_unlock(&recorder->mutex);
}

/* An operation that was not started leaves the position alone. With the lock held. */
static void leave_operation(tddp_recorder_position *position, const tddp_work *work, int64_t now)
{
    if (!work->started) {
        return;
    }
    if (tddp_op_is_p2p(work->op.kind)) {
        position->messages--;
    } else {
        /* On a device several may be under way: the one that started last is the position. */
        position->current.any =
            position->current.any && position->current.sequence != work->op.sequence;
        set_summary(&position->last, work, now);
    }
}

void tddp_recorder_finished(tddp_group *group, tddp_work *work, tddp_status status,
                            const char *text)
{
    tddp_recorder *recorder = group->recorder;
    int64_t now = tddp_now_ns();
    pthread_mutex_lock(&recorder->mutex);
    leave_operation(&recorder->position, work, now);
    tddp_record *entry = entry_of(work);
    if (entry) {
        entry->ended_ns = now;
        entry->device_ns = work->device_ns;
        entry->state = status ? TDDP_RECORD_FAILED : TDDP_RECORD_COMPLETED;
        entry->status = status;
    }
    if (status) {
        copy_text(recorder->failure_text, sizeof recorder->failure_text, text);
    }
    pthread_mutex_unlock(&recorder->mutex);
}

void tddp_recorder_set_failure(tddp_recorder *recorder, const char *text)
{
    pthread_mutex_lock(&recorder->mutex);
    copy_text(recorder->failure_text, sizeof recorder->failure_text, text);
    pthread_mutex_unlock(&recorder->mutex);
}

/* --- queries --------------------------------------------------------------------------------- */

/* How many records there are, and the nth of them, from the oldest. With the lock held. */
static size_t held(const tddp_recorder *recorder)
{
    return recorder->count < recorder->capacity ? (size_t)recorder->count : recorder->capacity;
}

static const tddp_record *nth(const tddp_recorder *recorder, size_t number)
{
    return &recorder->ring[(recorder->count - held(recorder) + number) % recorder->capacity];
}

/* With the lock held. */
static void find_message(const tddp_recorder *recorder, tddp_recorder_op_summary *out)
{
    for (size_t i = 0; i < held(recorder) && !out->any; i++) {
        const tddp_record *entry = nth(recorder, i);
        if (tddp_op_is_p2p(entry->kind) && entry->state == TDDP_RECORD_STARTED) {
            *out = (tddp_recorder_op_summary){.any = true,
                                              .kind = entry->kind,
                                              .sequence = entry->sequence,
                                              .peer = entry->peer,
                                              .at_ns = entry->started_ns};
            copy_text(out->text, sizeof out->text, entry->text);
        }
    }
}

tddp_recorder_position tddp_recorder_read_position(tddp_recorder *recorder)
{
    pthread_mutex_lock(&recorder->mutex);
    tddp_recorder_position position = recorder->position;
    if (position.messages > 0) {
        find_message(recorder, &position.message);
    }
    pthread_mutex_unlock(&recorder->mutex);
    return position;
}

tddp_status tddp_recorder_copy(tddp_recorder *recorder, tddp_record **out, size_t *count)
{
    tddp_record *copy = tddp_alloc_array(recorder->capacity, sizeof *copy);
    if (!copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&recorder->mutex);
    *count = held(recorder);
    for (size_t i = 0; i < *count; i++) {
        copy[i] = *nth(recorder, i);
    }
    pthread_mutex_unlock(&recorder->mutex);
    *out = copy;
    return TDDP_OK;
}
