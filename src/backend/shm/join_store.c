/*
 * Publishes and reads the reports that ranks exchange through the store while they join; join.c
 * describes them. Runs on the thread that joins.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/control.h"

enum { KEY_BYTES = 48 };

int tddp_shm_join_rank_name(const tddp_shm_join_store *self, int group_rank)
{
    return self->opts->names ? self->opts->names[group_rank] : group_rank;
}

static tddp_slice key_of(char text[KEY_BYTES], int group_rank, int round)
{
    int length = snprintf(text, KEY_BYTES, "shm/%d%s", group_rank, round ? "/mapped" : "");
    return (tddp_slice){text, (size_t)length};
}

static tddp_wait time_left(const tddp_shm_join_store *self, int64_t max_ms)
{
    int64_t left = tddp_deadline_poll_ms(self->deadline);
    return (tddp_wait){left < max_ms ? left : max_ms, self->cancel};
}

tddp_status tddp_shm_join_publish(tddp_shm_join_store *self, int round, const char *text)
{
    char key[KEY_BYTES];
    tddp_wait wait = time_left(self, INT64_MAX);
    tddp_status status = tddp_store_set(self->opts->store, key_of(key, self->opts->rank, round),
                                        (tddp_slice){text, strlen(text)}, &wait);
    self->published[round] = self->published[round] || status == TDDP_OK;
    return status;
}

void tddp_shm_join_publish_failure(const tddp_shm_join_store *self, const char *reason)
{
    char key[KEY_BYTES];
    for (int round = 0; round < 2; round++) {
        if (!self->published[round]) {
            tddp_backend_publish_failure(self->opts->store, key_of(key, self->opts->rank, round),
                                         reason);
        }
    }
}

static void take_report(tddp_blob *blob, tddp_shm_join_report *out)
{
    (void)snprintf(out->text, sizeof out->text, "%.*s", (int)blob->size, blob->data);
    tddp_blob_free(blob);
}

tddp_status tddp_shm_join_read(const tddp_shm_join_store *self, int group_rank, int round,
                               int64_t max_ms, tddp_shm_join_report *out)
{
    char key[KEY_BYTES];
    tddp_blob blob = {0};
    tddp_wait wait = time_left(self, max_ms);
    tddp_status status =
        tddp_store_get(self->opts->store, key_of(key, group_rank, round), &wait, &blob);
    if (status == TDDP_OK) {
        take_report(&blob, out);
    }
    return status;
}

tddp_status tddp_shm_join_read_all(const tddp_shm_join_store *self, int round, const bool *without,
                                   int64_t max_ms, tddp_shm_join_report *out)
{
    const size_t size = (size_t)self->opts->world_size;
    char(*texts)[KEY_BYTES] = tddp_alloc_array(size, sizeof *texts);
    tddp_slice *keys = tddp_alloc_array(size, sizeof *keys);
    tddp_blob *blobs = tddp_alloc_array(size, sizeof *blobs);
    tddp_status status = texts && keys && blobs ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    size_t count = 0;
    for (size_t rank = 0; rank < size && status == TDDP_OK; rank++) {
        if (!without[rank]) {
            keys[count] = key_of(texts[count], (int)rank, round);
            count++;
        }
    }
    if (status == TDDP_OK && count > 0) {
        tddp_wait wait = time_left(self, max_ms);
        status = tddp_store_multi_get(self->opts->store, keys, count, &wait, blobs);
    }
    count = 0;
    for (size_t rank = 0; rank < size && status == TDDP_OK; rank++) {
        if (!without[rank]) {
            take_report(&blobs[count], &out[rank]);
            count++;
        }
    }
    free(texts);
    free(keys);
    free(blobs);
    return status;
}

bool tddp_shm_report_begins(const tddp_shm_join_report *report, const char *prefix)
{
    return strncmp(report->text, prefix, strlen(prefix)) == 0;
}

static tddp_status fail_declined(const tddp_shm_join_store *self, int group_rank,
                                 const tddp_shm_join_report *report)
{
    return tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                     tddp_shm_join_rank_name(self, group_rank), report->text + strlen("no "));
}

tddp_status tddp_shm_join_check(const tddp_shm_join_store *self, int group_rank,
                                const tddp_shm_join_report *report)
{
    if (tddp_shm_report_begins(report, "no ")) {
        return fail_declined(self, group_rank, report);
    }
    const char *reason =
        tddp_backend_published_failure((tddp_slice){report->text, strlen(report->text)});
    if (reason) {
        return tddp_fail(TDDP_PEER_LOST, "rank %d gave up while shared memory was set up: %s",
                         tddp_shm_join_rank_name(self, group_rank), reason);
    }
    return tddp_shm_report_begins(report, "yes") || tddp_shm_report_begins(report, "after")
               ? TDDP_OK
               : tddp_fail(
                     TDDP_PROTOCOL,
                     "rank %d published \"%.100s\" in the store: expected one version of libtddp "
                     "on all ranks",
                     tddp_shm_join_rank_name(self, group_rank), report->text);
}
