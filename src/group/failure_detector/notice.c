/*
 * The watch's words in the store. Used by the watch's thread on its own connection, so that a call
 * of another thread that waits there does not hold them up.
 *
 * Keys below the first group's own: `watch/log/GROUP` grows by a line whenever a rank says
 * something of that group; `watch/raised/GROUP` counts who wants to wake the others, of whom the
 * first does; `watch/alarms` numbers the alarms, `watch/alarm/N` says for which group the Nth is.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "group/failure_detector/detector.h"

enum { CALL_MS = 300, KEY_BYTES = 320, POLL_MS = 200 };

static const tddp_wait brief = {CALL_MS, NULL};

static tddp_slice key_of(char text[KEY_BYTES], const char *what, const char *name)
{
    int length = snprintf(text, KEY_BYTES, "watch/%s/%s", what, name);
    return (tddp_slice){text, length < KEY_BYTES ? (size_t)length : KEY_BYTES - 1};
}

tddp_status tddp_notice_append_report(tddp_store *store, const char *key, const tddp_bytes *line)
{
    char text[KEY_BYTES];
    return tddp_store_append(store, key_of(text, "log", key), (tddp_slice){line->data, line->size},
                             &brief);
}

tddp_status tddp_notice_publish(tddp_store *store, const char *key)
{
    char text[KEY_BYTES];
    char digits[24];
    int64_t times;
    int64_t number;
    tddp_status status = tddp_store_add(store, key_of(text, "raised", key), 1, &brief, &times);
    if (status || times > 1) {
        return status;
    }
    status = tddp_store_add(store, (tddp_slice){"watch/alarms", 12}, 1, &brief, &number);
    if (status) {
        return status;
    }
    (void)snprintf(digits, sizeof digits, "%" PRId64, number);
    return tddp_store_set(store, key_of(text, "alarm", digits), (tddp_slice){key, strlen(key)},
                          &brief);
}

tddp_status tddp_notice_read_reports(tddp_store *store, const char *key, char **log)
{
    char text[KEY_BYTES];
    tddp_slice slice = key_of(text, "log", key);
    tddp_blob blob = {0};
    int there;
    tddp_status status = tddp_store_check(store, &slice, 1, &brief, &there);
    if (status == TDDP_OK && there) {
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

/* A store without a server is asked now and then: it would hold a lock, or ask all the time. */
static tddp_status wait_for(tddp_store *store, tddp_slice key, const tddp_wait *wait)
{
    if (wait->timeout_ms == 0 || tddp_tcp_store_port(store) >= 0) {
        return tddp_store_wait(store, &key, 1, wait);
    }
    int64_t deadline = tddp_wait_deadline(wait, 0);
    for (;;) {
        int there;
        tddp_status status = tddp_store_check(store, &key, 1, wait, &there);
        if (status || there) {
            return status;
        }
        int64_t pause = tddp_deadline_after_ms(POLL_MS);
        status = tddp_net_sleep(pause < deadline ? pause : deadline, tddp_cancel_fd(wait->cancel));
        if (status == TDDP_OK && tddp_now_ns() >= deadline) {
            status = tddp_fail(TDDP_TIMEOUT, "no alarm");
        }
        if (status) {
            return status;
        }
    }
}

tddp_status tddp_notice_wait(tddp_store *store, int64_t number, const tddp_wait *wait, char **key)
{
    char text[KEY_BYTES];
    char digits[24];
    tddp_blob blob;
    (void)snprintf(digits, sizeof digits, "%" PRId64, number);
    tddp_slice slice = key_of(text, "alarm", digits);
    tddp_status status = wait_for(store, slice, wait);
    if (status == TDDP_OK) {
        status = tddp_store_get(store, slice, &brief, &blob);
    }
    if (status == TDDP_OK) {
        *key = blob.data; /* ends in a NUL */
    }
    return status;
}
