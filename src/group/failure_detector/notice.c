/*
 * Failure notices and status reports in the store. The watcher thread calls these on its own
 * connection, so that other threads' calls that wait at the store don't delay them.
 *
 * Keys below the first group's own: `failure_detector/reports/GROUP` is the group's log, one line
 * a report; `failure_detector/publishers/GROUP` counts the ranks that publish its failure, and
 * `failure_detector/connectors/GROUP` those that ask its ranks to connect, of which the first
 * writes the notice; `failure_detector/notices` numbers the notices, and
 * `failure_detector/notice/N` is the kind of the Nth, as a code of one character, and the name of
 * the group that it is about.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "group/failure_detector/detector.h"

enum { CALL_MS = 300, KEY_BYTES = 320, POLL_MS = 200 };

#define ROOT "failure_detector/"

static const tddp_slice notice_count_key = {ROOT "notices", sizeof ROOT "notices" - 1};

static const tddp_wait brief = {CALL_MS, NULL};

static tddp_slice key_of(char text[KEY_BYTES], const char *what, const char *name)
{
    int length = snprintf(text, KEY_BYTES, ROOT "%s/%s", what, name);
    return (tddp_slice){text, length < KEY_BYTES ? (size_t)length : KEY_BYTES - 1};
}

static tddp_slice notice_key(char text[KEY_BYTES], int64_t number)
{
    int length = snprintf(text, KEY_BYTES, ROOT "notice/%" PRId64, number);
    return (tddp_slice){text, (size_t)length};
}

tddp_status tddp_notice_append_report(tddp_store *store, const char *key, const tddp_bytes *line)
{
    char text[KEY_BYTES];
    return tddp_store_append(store, key_of(text, "reports", key),
                             (tddp_slice){line->data, line->size}, &brief);
}

static const struct {
    const char *publishers;
    char code;
} kinds[TDDP_NOTICE_KINDS] = {
    [TDDP_NOTICE_FAILURE] = {"publishers", 'F'},
    [TDDP_NOTICE_CONNECT] = {"connectors", 'C'},
};

tddp_status tddp_notice_publish(tddp_store *store, tddp_notice_kind kind, const char *key)
{
    char text[KEY_BYTES];
    char value[KEY_BYTES];
    int64_t publishers;
    int64_t number;
    tddp_status status =
        tddp_store_add(store, key_of(text, kinds[kind].publishers, key), 1, &brief, &publishers);
    if (status || publishers > 1) {
        return status;
    }
    status = tddp_store_add(store, notice_count_key, 1, &brief, &number);
    if (status) {
        return status;
    }
    (void)snprintf(value, sizeof value, "%c%s", kinds[kind].code, key);
    return tddp_store_set(store, notice_key(text, number), (tddp_slice){value, strlen(value)},
                          &brief);
}

tddp_status tddp_notice_was_published(tddp_store *store, tddp_notice_kind kind, const char *key,
                                      bool *out)
{
    char text[KEY_BYTES];
    int exists = 0;
    const tddp_slice publishers = key_of(text, kinds[kind].publishers, key);
    tddp_status status = tddp_store_check(store, &publishers, 1, &brief, &exists);
    *out = exists != 0;
    return status;
}

tddp_status tddp_notice_read_reports(tddp_store *store, const char *key, char **log)
{
    char text[KEY_BYTES];
    tddp_slice slice = key_of(text, "reports", key);
    tddp_blob blob = {0};
    int exists;
    tddp_status status = tddp_store_check(store, &slice, 1, &brief, &exists);
    if (status == TDDP_OK && exists) {
        status = tddp_store_get(store, slice, &brief, &blob);
    } else if (status == TDDP_OK) {
        blob.data = tddp_copy_string("");
        status = blob.data ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    if (status == TDDP_OK) {
        *log = blob.data; /* ends in a NUL */
    }
    return status;
}

/* Polls a store without a server: its own wait would hold a lock, or poll without pause. */
static tddp_status wait_for(tddp_store *store, tddp_slice key, const tddp_wait *wait)
{
    if (wait->timeout_ms == 0 || tddp_tcp_store_port(store) >= 0) {
        return tddp_store_wait(store, &key, 1, wait);
    }
    int64_t deadline = tddp_wait_deadline(wait, 0);
    for (;;) {
        int exists;
        tddp_status status = tddp_store_check(store, &key, 1, wait, &exists);
        if (status || exists) {
            return status;
        }
        int64_t pause = tddp_deadline_after_ms(POLL_MS);
        status = tddp_net_sleep(pause < deadline ? pause : deadline, tddp_cancel_fd(wait->cancel));
        if (status == TDDP_OK && tddp_now_ns() >= deadline) {
            status = tddp_fail(TDDP_TIMEOUT, "no failure notice");
        }
        if (status) {
            return status;
        }
    }
}

/* Takes the code away, and returns its kind. */
static tddp_notice_kind take_kind(tddp_blob *notice)
{
    int kind = 0;
    while (kind < TDDP_NOTICE_KINDS && notice->data[0] != kinds[kind].code) {
        kind++;
    }
    if (notice->size > 0) {
        memmove(notice->data, notice->data + 1, notice->size); /* and its NUL */
    }
    return (tddp_notice_kind)kind;
}

tddp_status tddp_notice_wait(tddp_store *store, int64_t number, const tddp_wait *wait,
                             tddp_notice_kind *kind, char **key)
{
    char text[KEY_BYTES];
    tddp_blob blob;
    tddp_slice slice = notice_key(text, number);
    tddp_status status = wait_for(store, slice, wait);
    if (status == TDDP_OK) {
        status = tddp_store_get(store, slice, &brief, &blob);
    }
    if (status == TDDP_OK) {
        *kind = take_kind(&blob);
        *key = blob.data; /* ends in a NUL */
    }
    return status;
}
