/*
 * Meetings: tddp/meeting.h says what they are. A rank arrives by two requests, waits by one, and
 * reads all records by one (two, if it can't know that there are any).
 *
 * Keys below the meeting's name: `list` grows by an entry when a rank arrives ("+RANK WORLD
 * SIZE\n" and its record), withdraws ("-") or fails ("!", and the reason), each with a NUL behind;
 * `arrived` counts those that have arrived and not withdrawn; `wake` is there once they were all,
 * or one has failed; `left` counts those that have left. A rank's last entry counts, but a failure
 * stays: whether all had arrived before one failed is decided by the order of the list, for all
 * that read it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "base/base.h"
#include "net/net.h"
#include "store/store_impl.h"

enum {
    NAME_BYTES = 64,
    KEY_BYTES = NAME_BYTES + 8,
    HEAD_BYTES = 48,
    SLICE_MS = 1000, /* of a wait, where there is no check */
    READ_MS = 1000,  /* for one read, also where the deadline is over */
    FIRST_READ_MS = 1000,
    MOST_UNREAD_MS = 16 * 1000,
    FAIL_MS = 1000,
    PAUSE_MS = 50, /* before the list is read again: a rank has withdrawn that had arrived */
    NAMES_SHOWN = 8,
    REASON_BYTES = 1024,
};

struct tddp_meeting {
    tddp_meeting_opts opts; /* its name is the copy below */
    char name[NAME_BYTES];
    tddp_blob list; /* as it was read last */
    tddp_slice *records;
    tddp_slice *failures;
    int missing;
    int first_failed; /* -1: none */
    bool complete;    /* all had arrived before the first failed */
    bool gave;        /* this rank's record is in the list, and counted */
};

static tddp_slice key_of(const char *name, const char *what, char text[KEY_BYTES])
{
    int length = snprintf(text, KEY_BYTES, "%s/%s", name, what);
    return (tddp_slice){text, (size_t)length};
}

/* Forgets what was read. */
static void clear(tddp_meeting *meeting)
{
    const size_t count = (size_t)meeting->opts.world_size;
    memset(meeting->records, 0, count * sizeof *meeting->records);
    memset(meeting->failures, 0, count * sizeof *meeting->failures);
    meeting->missing = meeting->opts.sender == TDDP_MEETING_ALL ? (int)count : 1;
    meeting->first_failed = -1;
    meeting->complete = false;
}

tddp_status tddp_meeting_open(const tddp_meeting_opts *opts, tddp_meeting **out)
{
    const size_t count = (size_t)opts->world_size;
    tddp_meeting *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->opts = *opts;
    made->opts.name = made->name;
    made->opts.check_ms = opts->check ? opts->check_ms : SLICE_MS;
    (void)snprintf(made->name, sizeof made->name, "%s", opts->name);
    made->records = tddp_alloc_array(count, sizeof *made->records);
    made->failures = tddp_alloc_array(count, sizeof *made->failures);
    if (!made->records || !made->failures) {
        tddp_meeting_close(made);
        return TDDP_OUT_OF_MEMORY;
    }
    clear(made);
    *out = made;
    return TDDP_OK;
}

void tddp_meeting_close(tddp_meeting *meeting)
{
    if (meeting) {
        tddp_blob_free(&meeting->list);
        free(meeting->records);
        free(meeting->failures);
        free(meeting);
    }
}

/* --- the list -------------------------------------------------------------------------------- */

/* Short ones need no memory: it may be the lack of it that is told. */
static tddp_status add_entry(const tddp_meeting_opts *opts, char kind, tddp_slice text,
                             const tddp_wait *wait)
{
    char key[KEY_BYTES];
    char small[HEAD_BYTES + REASON_BYTES];
    const size_t most = HEAD_BYTES + text.size + 1;
    char *entry = most <= sizeof small ? small : tddp_alloc(most);
    if (!entry) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t used = (size_t)snprintf(entry, HEAD_BYTES, "%c%d %d %zu\n", kind, opts->rank,
                                   opts->world_size, text.size);
    if (text.size > 0) {
        memcpy(entry + used, text.data, text.size);
    }
    used += text.size;
    entry[used++] = '\0';
    tddp_status status = tddp_store_append(opts->store, key_of(opts->name, "list", key),
                                           (tddp_slice){entry, used}, wait);
    if (entry != small) {
        free(entry);
    }
    return status;
}

/* Reads the head of an entry; NULL: it is none. Returns where its text begins. */
static const char *read_head(const char *at, const char *end, int *rank, int *world_size,
                             size_t *size)
{
    char head[HEAD_BYTES];
    int used = 0;
    const char *line_end = memchr(at, '\n', (size_t)(end - at));
    if (!line_end || (size_t)(line_end - at) >= sizeof head || !*at || !strchr("+-!", *at)) {
        return NULL;
    }
    (void)snprintf(head, sizeof head, "%.*s", (int)(line_end - at), at);
    const bool good = sscanf(head + 1, "%d %d %zu%n", rank, world_size, size, &used) == 3 &&
                      head[1 + used] == '\0' && *rank >= 0 &&
                      *size < (size_t)(end - line_end - 1) && line_end[1 + *size] == '\0';
    return good ? line_end + 1 : NULL;
}

static void take_entry(tddp_meeting *meeting, char kind, int rank, tddp_slice text)
{
    const bool needed = meeting->opts.sender == TDDP_MEETING_ALL || meeting->opts.sender == rank;
    if (kind == '!') {
        meeting->failures[rank] = text;
        meeting->first_failed = meeting->first_failed < 0 ? rank : meeting->first_failed;
        return;
    }
    const bool was_there = meeting->records[rank].data != NULL;
    meeting->records[rank] = (tddp_slice){kind == '+' ? text.data : NULL, text.size};
    meeting->missing += needed ? was_there - (kind == '+') : 0;
    meeting->complete = meeting->missing == 0 && (meeting->complete || meeting->first_failed < 0);
}

static int name_of(const tddp_meeting_opts *opts, int rank)
{
    return opts->names ? opts->names[rank] : rank;
}

/* Whether a rank has withdrawn in what follows in the list. */
static bool withdraws(const char *at, const char *end, int rank)
{
    int each;
    int world_size;
    size_t size;
    const char *text = NULL;
    for (; at < end && (text = read_head(at, end, &each, &world_size, &size));
         at = text + size + 1) {
        if (*at == '-' && each == rank) {
            return true;
        }
    }
    return false;
}

static tddp_status take_list(tddp_meeting *meeting)
{
    const tddp_meeting_opts *opts = &meeting->opts;
    const int count = opts->world_size;
    const char *at = meeting->list.data;
    const char *end = at + meeting->list.size;
    clear(meeting);
    while (at < end) {
        int rank;
        int world_size;
        size_t size;
        const char kind = *at;
        const char *text = read_head(at, end, &rank, &world_size, &size);
        if (!text) {
            return tddp_fail(TDDP_PROTOCOL,
                             "what ranks have put in the store at %s is malformed: expected one "
                             "version of libtddp on all ranks, and no other keys of that name",
                             meeting->name);
        }
        at = text + size + 1;
        if (world_size == count && rank < count) {
            take_entry(meeting, kind, rank, (tddp_slice){text, size});
        } else if (kind != '-' && !withdraws(at, end, rank)) { /* of an attempt that is over */
            return tddp_fail(TDDP_MISMATCH,
                             "rank %d has arrived with a world size of %d, rank %d with %d: "
                             "expected the same on all ranks",
                             rank < count ? name_of(opts, rank) : rank, world_size,
                             name_of(opts, opts->rank), count);
        }
    }
    return TDDP_OK;
}

/* Reads the list, which is there. */
static tddp_status read_list(tddp_meeting *meeting, const tddp_wait *wait)
{
    char text[KEY_BYTES];
    tddp_blob list = {0};
    tddp_status status =
        tddp_store_get(meeting->opts.store, key_of(meeting->name, "list", text), wait, &list);
    if (status) {
        return status;
    }
    tddp_blob_free(&meeting->list); /* what was read points there */
    meeting->list = list;
    return take_list(meeting);
}

tddp_status tddp_meeting_read(tddp_meeting *meeting, const tddp_wait *wait)
{
    char text[KEY_BYTES];
    const tddp_slice key = key_of(meeting->name, "list", text);
    int there = 0;
    tddp_status status = tddp_store_check(meeting->opts.store, &key, 1, wait, &there);
    return status || !there ? status : read_list(meeting, wait);
}

const tddp_slice *tddp_meeting_records(const tddp_meeting *meeting)
{
    return meeting->records;
}

int tddp_meeting_missing(const tddp_meeting *meeting, char text[TDDP_MEETING_TEXT_BYTES])
{
    size_t used = 0;
    int shown = 0;
    text[0] = '\0';
    for (int rank = 0; rank < meeting->opts.world_size && shown < NAMES_SHOWN; rank++) {
        const bool needed = meeting->opts.sender < 0 || meeting->opts.sender == rank;
        if (needed && !meeting->records[rank].data) {
            used += (size_t)snprintf(text + used, TDDP_MEETING_TEXT_BYTES - used, "%s%d",
                                     used ? ", " : "", name_of(&meeting->opts, rank));
            shown++;
        }
    }
    if (meeting->missing > shown) {
        (void)snprintf(text + used, TDDP_MEETING_TEXT_BYTES - used, ", ... (%d in all)",
                       meeting->missing);
    }
    return meeting->missing;
}

const char *tddp_meeting_failure(const tddp_meeting *meeting, int *rank)
{
    *rank = *rank < 0 ? meeting->first_failed : *rank;
    return *rank < 0 ? NULL : meeting->failures[*rank].data;
}

const char *tddp_meeting_await_failure(tddp_meeting *meeting, int rank, int64_t ms)
{
    const int64_t until = tddp_deadline_after_ms(ms);
    for (;;) {
        const tddp_wait wait = {tddp_deadline_poll_ms(until), NULL};
        const char *reason = tddp_meeting_read(meeting, &wait) == TDDP_OK
                                 ? tddp_meeting_failure(meeting, &rank)
                                 : NULL;
        if (reason || tddp_now_ns() >= until) {
            return reason;
        }
        (void)!tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS), -1);
    }
}

/* --- arriving -------------------------------------------------------------------------------- */

static tddp_status wake(tddp_store *store, const char *name, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    return tddp_store_set(store, key_of(name, "wake", key), (tddp_slice){"", 0}, wait);
}

tddp_status tddp_meeting_give(tddp_meeting *meeting, tddp_slice record, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    const tddp_meeting_opts *opts = &meeting->opts;
    int64_t arrived = opts->world_size;
    tddp_status status = add_entry(opts, '+', record, wait);
    if (status == TDDP_OK && opts->sender == TDDP_MEETING_ALL) {
        status =
            tddp_store_add(opts->store, key_of(meeting->name, "arrived", key), 1, wait, &arrived);
    }
    meeting->gave = status == TDDP_OK;
    return status == TDDP_OK && arrived >= opts->world_size ? wake(opts->store, meeting->name, wait)
                                                            : status;
}

tddp_status tddp_meeting_withdraw(tddp_meeting *meeting, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    int64_t arrived;
    int deleted;
    tddp_status status = add_entry(&meeting->opts, '-', (tddp_slice){"", 0}, wait);
    if (status == TDDP_OK && meeting->gave && meeting->opts.sender == TDDP_MEETING_ALL) {
        status = tddp_store_add(meeting->opts.store, key_of(meeting->name, "arrived", key), -1,
                                wait, &arrived);
        meeting->gave = false;
    }
    return status ? status
                  : tddp_store_delete_key(meeting->opts.store, key_of(meeting->name, "wake", key),
                                          wait, &deleted);
}

void tddp_meeting_fail(const tddp_meeting_opts *opts, const char *reason)
{
    const tddp_wait wait = {FAIL_MS, NULL};
    const tddp_slice text = {reason, strnlen(reason, REASON_BYTES - 1)};
    if (add_entry(opts, '!', text, &wait) || wake(opts->store, opts->name, &wait)) {
        tddp_log(TDDP_LOG_DEBUG, "backend", "the other ranks are not told of a failure: %s",
                 tddp_error_message());
    }
}

static tddp_status remove_keys(tddp_store *store, const char *name, const tddp_wait *wait)
{
    static const char *const keys[] = {"list", "arrived", "wake", "left"};
    char key[KEY_BYTES];
    int deleted;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; status == TDDP_OK && i < sizeof keys / sizeof *keys; i++) {
        status = tddp_store_delete_key(store, key_of(name, keys[i], key), wait, &deleted);
    }
    return status;
}

tddp_status tddp_meeting_leave(tddp_meeting *meeting, const tddp_wait *wait)
{
    char key[KEY_BYTES];
    int64_t left;
    tddp_store *store = meeting->opts.store;
    tddp_status status = tddp_store_add(store, key_of(meeting->name, "left", key), 1, wait, &left);
    return status || left < meeting->opts.world_size ? status
                                                     : remove_keys(store, meeting->name, wait);
}

tddp_status tddp_meeting_remove(const tddp_meeting_opts *opts, const tddp_wait *wait)
{
    return remove_keys(opts->store, opts->name, wait);
}

/* --- waiting --------------------------------------------------------------------------------- */

static tddp_status fail_missing(const tddp_meeting *meeting)
{
    char missing[TDDP_MEETING_TEXT_BYTES];
    (void)tddp_meeting_missing(meeting, missing);
    return meeting->opts.names
               ? tddp_fail(TDDP_TIMEOUT, "rank(s) %s did not arrive in time", missing)
               : tddp_fail(TDDP_TIMEOUT, "rank(s) %s of %d did not arrive in time", missing,
                           meeting->opts.world_size);
}

/* Whether the meeting is over, as the list says now, which is there if `woken`; else TDDP_TIMEOUT.
 */
static tddp_status evaluate(tddp_meeting *meeting, bool woken, tddp_cancel *cancel)
{
    int rank = -1;
    const tddp_wait wait = {READ_MS, cancel};
    tddp_status status = woken ? read_list(meeting, &wait) : tddp_meeting_read(meeting, &wait);
    const char *reason = status ? NULL : tddp_meeting_failure(meeting, &rank);
    if (status || meeting->complete) {
        return status;
    }
    return reason ? tddp_fail(TDDP_PEER_LOST, "rank %d failed: %s", name_of(&meeting->opts, rank),
                              reason)
                  : TDDP_TIMEOUT;
}

/* Waits for `wake`, or for the check to fail; TDDP_TIMEOUT: it is time to read the list. */
static tddp_status await_wake(tddp_meeting *meeting, int64_t until_ns, tddp_cancel *cancel)
{
    char text[KEY_BYTES];
    const tddp_meeting_opts *opts = &meeting->opts;
    const tddp_slice key = key_of(meeting->name, "wake", text);
    tddp_status status = TDDP_TIMEOUT;
    while (status == TDDP_TIMEOUT && tddp_now_ns() < until_ns) {
        const int64_t slice_ns = tddp_deadline_after_ms(opts->check_ms);
        const tddp_wait slice = {tddp_deadline_poll_ms(slice_ns < until_ns ? slice_ns : until_ns),
                                 cancel};
        status = tddp_store_wait(opts->store, &key, 1, &slice);
        if (status == TDDP_TIMEOUT && opts->check) {
            status = opts->check(opts->data);
            status = status ? status : TDDP_TIMEOUT;
        }
    }
    return status;
}

/* The rank that arrives last, or fails, may end before `wake` is set: the list is read without it
 * too, ever more seldom, since all ranks do. */
tddp_status tddp_meeting_await(tddp_meeting *meeting, const tddp_wait *wait)
{
    const int64_t deadline_ns = tddp_wait_deadline(wait, INT64_MAX);
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    int64_t unread_ms = FIRST_READ_MS;
    for (;;) {
        const int64_t read_ns = tddp_deadline_after_ms(unread_ms);
        tddp_status status =
            await_wake(meeting, read_ns < deadline_ns ? read_ns : deadline_ns, cancel);
        const bool woken = status == TDDP_OK;
        const bool over = tddp_now_ns() >= deadline_ns;
        if (woken || status == TDDP_TIMEOUT) {
            status = evaluate(meeting, woken, cancel);
        }
        if (status != TDDP_TIMEOUT) {
            return status;
        }
        unread_ms = unread_ms < MOST_UNREAD_MS ? 2 * unread_ms : MOST_UNREAD_MS;
        status = over    ? fail_missing(meeting)
                 : woken ? tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS), tddp_cancel_fd(cancel))
                         : TDDP_OK;
        if (status) {
            return status;
        }
    }
}
