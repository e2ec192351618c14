/*
 * What ranks tell each other in the store while they join (join.c says what the words mean). On the
 * thread that joins.
 */
#include <stdio.h>
#include <string.h>

#include "backend/shm/control.h"

enum { KEY_BYTES = 48 };

int tddp_shm_words_name(const tddp_shm_words *self, int number)
{
    return self->opts->names ? self->opts->names[number] : number;
}

static tddp_slice key_of(char text[KEY_BYTES], int number, int round)
{
    int length = snprintf(text, KEY_BYTES, "shm/%d%s", number, round ? "/mapped" : "");
    return (tddp_slice){text, (size_t)length};
}

tddp_status tddp_shm_words_say(tddp_shm_words *self, int round, const char *text,
                               const tddp_wait *wait)
{
    char key[KEY_BYTES];
    tddp_status status = tddp_store_set(self->opts->store, key_of(key, self->opts->rank, round),
                                        (tddp_slice){text, strlen(text)}, wait);
    self->said[round] = self->said[round] || status == TDDP_OK;
    return status;
}

static tddp_wait time_left(const tddp_shm_words *self, int64_t most_ms)
{
    int64_t left = tddp_deadline_poll_ms(self->deadline);
    return (tddp_wait){left < most_ms ? left : most_ms, self->cancel};
}

tddp_status tddp_shm_words_say_in_time(tddp_shm_words *self, int round, const char *text)
{
    tddp_wait wait = time_left(self, INT64_MAX);
    return tddp_shm_words_say(self, round, text, &wait);
}

tddp_status tddp_shm_words_read(const tddp_shm_words *self, int number, int round, int64_t most_ms,
                                tddp_shm_word *out)
{
    char key[KEY_BYTES];
    tddp_blob blob = {0};
    tddp_wait wait = time_left(self, most_ms);
    tddp_status status =
        tddp_store_get(self->opts->store, key_of(key, number, round), &wait, &blob);
    if (status == TDDP_OK) {
        (void)snprintf(out->text, sizeof out->text, "%.*s", (int)blob.size, blob.data);
        tddp_blob_free(&blob);
    }
    return status;
}

bool tddp_shm_word_begins(const tddp_shm_word *word, const char *with)
{
    return strncmp(word->text, with, strlen(with)) == 0;
}

static tddp_status fail_no(const tddp_shm_words *self, int number, const tddp_shm_word *word)
{
    return tddp_fail(TDDP_UNAVAILABLE, "rank %d cannot share memory: %s",
                     tddp_shm_words_name(self, number), word->text + strlen("no "));
}

/* What another's word means if it is not "yes". */
tddp_status tddp_shm_words_judge(const tddp_shm_words *self, int number, const tddp_shm_word *word)
{
    if (tddp_shm_word_begins(word, "no ")) {
        return fail_no(self, number, word);
    }
    if (tddp_shm_word_begins(word, "lost ")) {
        return tddp_fail(TDDP_PEER_LOST, "rank %d gave up while shared memory was set up: %s",
                         tddp_shm_words_name(self, number), word->text + strlen("lost "));
    }
    return tddp_shm_word_begins(word, "yes") || tddp_shm_word_begins(word, "after")
               ? TDDP_OK
               : tddp_fail(TDDP_PROTOCOL,
                           "rank %d left \"%.100s\" in the store: expected one version of libtddp "
                           "on all ranks",
                           tddp_shm_words_name(self, number), word->text);
}
