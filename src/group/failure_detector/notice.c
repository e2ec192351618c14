/*
 * Failure notices and status reports in the store. The watcher thread calls these on its own
 * connection, so that other threads' calls that wait at the store don't delay them.
 *
 * Keys below the first group's own: `failure_detector/reports/GROUP` is the group's log, one line
 * a report; `failure_detector/notice/N` is the Nth notice: what it says, as one character, and the
 * name of the group that it is about.
 *
 * Who publishes offers its notice as the Nth, for the first N that no rank has taken, by one
 * compare_set. So a notice is there or not, each is there once, and their numbers have no holes,
 * whenever a rank dies. Every call may be repeated when it is not known whether the store received
 * it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "group/failure_detector/detector.h"

enum { CALL_MS = 300, KEY_BYTES = 320 };

#define ROOT "failure_detector/"

static const tddp_wait call_wait = {CALL_MS, NULL};

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
                             (tddp_slice){line->data, line->size}, &call_wait);
}

tddp_status tddp_notice_offer(tddp_store *store, int64_t number, const char *notice, char **out)
{
    char text[KEY_BYTES];
    tddp_blob there = {0};
    const tddp_slice key = notice_key(text, number);
    tddp_status status = tddp_store_compare_set(
        store, key, (tddp_slice){"", 0}, (tddp_slice){notice, strlen(notice)}, &call_wait, &there);
    if (status == TDDP_OK) {
        /* PyTorch's servers wake nobody at a compare_set: so the same value is set once more, by
         * each rank that passes, should the one that took the number have died before. */
        status = tddp_store_set(store, key, (tddp_slice){there.data, there.size}, &call_wait);
    }
    if (status) {
        tddp_blob_free(&there);
        return status;
    }
    *out = there.data; /* ends in a NUL */
    return TDDP_OK;
}

tddp_status tddp_notice_ask(tddp_store *store, const tddp_wait *wait)
{
    char text[KEY_BYTES];
    int exists;
    const tddp_slice slice = notice_key(text, 1);
    return tddp_store_check(store, &slice, 1, wait, &exists);
}

tddp_status tddp_notice_read_reports(tddp_store *store, const char *key, char **log)
{
    char text[KEY_BYTES];
    tddp_slice slice = key_of(text, "reports", key);
    tddp_blob blob = {0};
    int exists = 0;
    tddp_status status = tddp_store_check(store, &slice, 1, &call_wait, &exists);
    if (status == TDDP_OK && exists) {
        status = tddp_store_get(store, slice, &call_wait, &blob);
    }
    *log = blob.data; /* ends in a NUL */
    return status;
}

tddp_status tddp_notice_wait(tddp_store *store, int64_t number, const tddp_wait *wait, char **out)
{
    char text[KEY_BYTES];
    tddp_blob blob = {0};
    tddp_slice slice = notice_key(text, number);
    tddp_status status = tddp_store_wait(store, &slice, 1, wait);
    if (status == TDDP_OK) {
        status = tddp_store_get(store, slice, &call_wait, &blob);
        *out = blob.data;
    }
    return status;
}
