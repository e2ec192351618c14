/*
 * Publishes and reads the reports that ranks exchange through the store while they join; join.h
 * describes them. Runs on the thread that joins.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/join.h"

enum { KEY_BYTES = 48 };

int tddp_shm_join_rank_name(const tddp_shm_joining *self, int group_rank)
{
    return self->opts->names ? self->opts->names[group_rank] : group_rank;
}

static tddp_slice key_of(char text[KEY_BYTES], tddp_shm_join_scope scope, int round, int number)
{
    int length = snprintf(text, KEY_BYTES, "shm/%s%d%s", scope == TDDP_SHM_HOSTS ? "host/" : "",
                          number, round ? "/mapped" : "");
    return (tddp_slice){text, (size_t)length};
}

static tddp_wait time_left(const tddp_shm_joining *self, int64_t max_ms)
{
    int64_t left = tddp_deadline_poll_ms(self->deadline);
    return (tddp_wait){left < max_ms ? left : max_ms, self->cancel};
}

tddp_status tddp_shm_join_publish(tddp_shm_joining *self, tddp_shm_join_scope scope, int round,
                                  const char *text)
{
    char key[KEY_BYTES];
    const bool of_host = scope == TDDP_SHM_HOSTS;
    const int number = of_host ? tddp_shm_join_host(self) : self->opts->rank;
    tddp_wait wait = time_left(self, INT64_MAX);
    tddp_status status = tddp_store_set(self->opts->store, key_of(key, scope, round, number),
                                        (tddp_slice){text, strlen(text)}, &wait);
    if (!of_host) {
        self->published[round] = self->published[round] || status == TDDP_OK;
    }
    return status;
}

void tddp_shm_join_publish_failure(const tddp_shm_joining *self, const char *reason)
{
    char key[KEY_BYTES];
    char text[TDDP_SHM_REPORT_BYTES];
    (void)snprintf(text, sizeof text, "rank %d gave up while shared memory was set up: %.900s",
                   tddp_shm_join_rank_name(self, self->opts->rank), reason);
    for (int round = 0; round < 2; round++) {
        if (!self->published[round]) {
            tddp_backend_publish_failure(
                self->opts->store, key_of(key, TDDP_SHM_RANKS, round, self->opts->rank), text);
        }
        if (self->host_count > 1) {
            tddp_backend_publish_failure(
                self->opts->store, key_of(key, TDDP_SHM_HOSTS, round, tddp_shm_join_host(self)),
                text);
        }
    }
}

static void take_report(tddp_blob *blob, tddp_shm_join_report *out)
{
    (void)snprintf(out->text, sizeof out->text, "%.*s", (int)blob->size, blob->data);
    tddp_blob_free(blob);
}

tddp_status tddp_shm_join_read(const tddp_shm_joining *self, tddp_shm_join_scope scope, int round,
                               int number, int64_t max_ms, tddp_shm_join_report *out)
{
    char key[KEY_BYTES];
    tddp_blob blob = {0};
    tddp_wait wait = time_left(self, max_ms);
    tddp_status status =
        tddp_store_get(self->opts->store, key_of(key, scope, round, number), &wait, &blob);
    if (status == TDDP_OK) {
        take_report(&blob, out);
    }
    return status;
}

tddp_status tddp_shm_join_read_all(const tddp_shm_joining *self, tddp_shm_join_scope scope,
                                   int round, const int *numbers, size_t count, int64_t max_ms,
                                   tddp_shm_join_report *out)
{
    char(*texts)[KEY_BYTES] = tddp_alloc_array(count, sizeof *texts);
    tddp_slice *keys = tddp_alloc_array(count, sizeof *keys);
    tddp_blob *blobs = tddp_alloc_array(count, sizeof *blobs);
    tddp_status status = texts && keys && blobs ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        keys[i] = key_of(texts[i], scope, round, numbers[i]);
    }
    if (status == TDDP_OK) {
        tddp_wait wait = time_left(self, max_ms);
        status = tddp_store_multi_get(self->opts->store, keys, count, &wait, blobs);
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        take_report(&blobs[i], &out[i]);
    }
    free(texts);
    free(keys);
    free(blobs);
    return status;
}
