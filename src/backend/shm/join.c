/*
 * How the ranks of a group agree on sharing memory, and get it. On the thread that makes the group.
 *
 * Each rank leaves two words in the store that all others read: one before it asks for segments
 * ("shm/RANK"), one when it has them all ("shm/RANK/mapped"). Invariant: whatever happens to a rank
 * it leaves both, unless it is killed, so nobody waits for one that has given up; and who reads
 * that a rank cannot ("no") says the same as all others, for it is the lowest such rank that
 * counts.
 *
 *     yes ...       it can; before: with its socket's name, the room for its arena, its overrides
 *     no TEXT       it cannot, or will not: all do without
 *     after         another's "no" stands in its way
 *     lost TEXT     it has failed in another way: so do the others
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/control.h"

enum { WORD_BYTES = TDDP_SHM_WORD_BYTES, REASON_MS = 1000, TELL_MS = 1000, SLICE_MS = 200 };

typedef struct join {
    tddp_shm_words words;
    const tddp_backend_opts *opts;
    const char *refusal;
    int *locals; /* the ranks of this host, in order */
    int size;
    int rank; /* among them */
    int listen_fd;
    size_t arena;
    char address[TDDP_SHM_ADDRESS_BYTES];
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    tddp_shm *shm;
} join;

/* --- before ---------------------------------------------------------------------------------- */

static tddp_status find_locals(join *self)
{
    const tddp_backend_opts *opts = self->opts;
    self->locals = tddp_alloc_array((size_t)opts->world_size, sizeof *self->locals);
    self->addresses = tddp_alloc_array((size_t)opts->world_size, sizeof *self->addresses);
    if (!self->locals || !self->addresses) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int rank = 0; rank < opts->world_size; rank++) {
        bool here = opts->hosts ? opts->hosts[rank] == opts->hosts[opts->rank]
                                : opts->same_host || rank == opts->rank;
        if (rank == opts->rank) {
            self->rank = self->size;
        }
        if (here) {
            self->locals[self->size++] = rank;
        }
    }
    return TDDP_OK;
}

/* Whatever fails here is a reason to do without. */
static tddp_status prepare(join *self)
{
    if (self->refusal) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s", self->refusal);
    }
    if (self->size > TDDP_SHM_MOST_RANKS) {
        return tddp_fail(TDDP_UNAVAILABLE, "%d ranks on its host: expected at most %d", self->size,
                         TDDP_SHM_MOST_RANKS);
    }
    tddp_status status = tddp_shm_choices_read(&self->shm->choices);
    if (status == TDDP_OK) {
        tddp_shm_choices_text(&self->shm->choices, self->overrides, sizeof self->overrides);
        status = tddp_shm_arena_room(self->size, &self->arena);
    }
    if (status == TDDP_OK && self->size > 1) {
        status = tddp_shm_listen(self->size, &self->listen_fd, self->address);
    }
    return status;
}

static tddp_status tell_first(join *self)
{
    char text[WORD_BYTES];
    if (prepare(self)) {
        (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    } else {
        (void)snprintf(text, sizeof text, "yes %s %zu %s", self->size > 1 ? self->address : "-",
                       self->arena, self->overrides[0] ? self->overrides : "-");
    }
    return tddp_shm_words_say_in_time(&self->words, 0, text);
}

static int local_of(const join *self, int number)
{
    for (int i = 0; i < self->size; i++) {
        if (self->locals[i] == number) {
            return i;
        }
    }
    return -1;
}

static tddp_status take_first(join *self, int number, const tddp_shm_word *word)
{
    char address[TDDP_SHM_ADDRESS_BYTES];
    char overrides[TDDP_SHM_CHOICES_TEXT];
    size_t arena;
    int local = local_of(self, number);
    if (sscanf(word->text, "yes %63s %zu %255s", address, &arena, overrides) != 3) {
        return tddp_fail(TDDP_PROTOCOL,
                         "rank %d left \"%.100s\" in the store: expected one version of libtddp on "
                         "all ranks",
                         tddp_shm_words_name(&self->words, number), word->text);
    }
    if (number == 0) {
        (void)snprintf(self->overrides, sizeof self->overrides, "%s", overrides);
    } else if (strcmp(self->overrides, overrides) != 0) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "TDDP_SHM_ALGORITHM is \"%s\" on rank %d, \"%s\" on rank %d: expected the "
                         "same on all ranks",
                         self->overrides, tddp_shm_words_name(&self->words, 0), overrides,
                         tddp_shm_words_name(&self->words, number));
    }
    if (local >= 0) {
        memcpy(self->addresses[local], address, sizeof address);
        self->arena = arena < self->arena ? arena : self->arena;
    }
    return TDDP_OK;
}

/* Reads all, so that the lowest rank that cannot is the one that all name; what else stands against
 * it comes after. */
static tddp_status hear_first(join *self)
{
    const int count = self->opts->world_size;
    tddp_shm_word *words = tddp_alloc_array((size_t)count, sizeof *words);
    tddp_status status = words ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    for (int number = 0; number < count && status == TDDP_OK; number++) {
        status = tddp_shm_words_read(&self->words, number, 0, INT64_MAX, &words[number]);
        if (status == TDDP_OK) {
            status = tddp_shm_words_judge(&self->words, number, &words[number]);
        }
    }
    for (int number = 0; number < count && status == TDDP_OK; number++) {
        status = take_first(self, number, &words[number]);
    }
    free(words);
    return status;
}

/* --- segments -------------------------------------------------------------------------------- */

static tddp_status make_segment(join *self)
{
    tddp_shm *shm = self->shm;
    tddp_shm_segment *segment;
    shm->layout = tddp_shm_lay_out(self->size, self->arena);
    tddp_status status = tddp_shm_check_memory(self->size, shm->layout.mail);
    if (status == TDDP_OK) {
        status = tddp_shm_segment_create(shm->layout.bytes, shm->layout.mail, &segment);
    }
    if (status == TDDP_OK) {
        tddp_shm_attach(shm, shm->rank, segment);
        tddp_shm_tell_cores(tddp_shm_self(shm)->control);
    }
    return status;
}

/* Why one that is gone has gone, if it has left a word: it stands before its sockets are closed. */
static tddp_status ask_why(const join *self, int lost, tddp_status status)
{
    char before[WORD_BYTES];
    tddp_shm_word word;
    (void)snprintf(before, sizeof before, "%s", tddp_error_message());
    if (tddp_shm_words_read(&self->words, self->locals[lost], 1, REASON_MS, &word) == TDDP_OK) {
        tddp_status judged = tddp_shm_words_judge(&self->words, self->locals[lost], &word);
        if (judged) {
            return judged;
        }
        if (tddp_shm_word_begins(&word, "after")) {
            return TDDP_UNAVAILABLE;
        }
    }
    return tddp_fail(status, "%s", before);
}

/* Nobody need wait for this rank's segment any more; the word stands before that shows. */
static tddp_status give_up(join *self, const char *text)
{
    tddp_status status = tddp_shm_words_say_in_time(&self->words, 1, text);
    tddp_close(self->listen_fd);
    self->listen_fd = -1;
    return status;
}

static tddp_status get_segments(join *self)
{
    int lost = -1;
    tddp_shm_handover work = {self->shm, self->listen_fd, self->addresses, self->words.deadline,
                              tddp_cancel_fd(self->words.cancel)};
    tddp_status status = make_segment(self);
    if (status == TDDP_OK && self->size > 1) {
        status = tddp_shm_hand_over(&work, &lost);
    }
    if (status == TDDP_PEER_LOST && lost >= 0) {
        status = ask_why(self, lost, status);
        if (status == TDDP_UNAVAILABLE) {
            return give_up(self, "after");
        }
        return status;
    }
    if (status == TDDP_OK) {
        tddp_shm_count_cores(self->shm);
        status = tddp_shm_posts_create(self->shm, &self->shm->posts);
    }
    if (status == TDDP_OK) {
        return tddp_shm_words_say_in_time(&self->words, 1, "yes");
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED || status == TDDP_PEER_LOST) {
        return status;
    }
    char text[WORD_BYTES];
    (void)snprintf(text, sizeof text, "no %.900s", tddp_error_message());
    return give_up(self, text);
}

/* --- after ----------------------------------------------------------------------------------- */

/* Whether a rank of this host whose segment is here has ended. */
static tddp_status look(const join *self, int number)
{
    int local = local_of(self, number);
    const tddp_shm_peer *peer = local >= 0 ? &self->shm->peers[local] : NULL;
    if (peer && local != self->rank && peer->segment && !peer->inside &&
        tddp_shm_segment_is_orphan(peer->segment)) {
        return tddp_fail(TDDP_PEER_LOST, "lost rank %d, which ended while shared memory was set up",
                         tddp_shm_words_name(&self->words, number));
    }
    return TDDP_OK;
}

static tddp_status hear_second_of(const join *self, int number, tddp_shm_word *word)
{
    for (;;) {
        tddp_status status = tddp_shm_words_read(&self->words, number, 1, SLICE_MS, word);
        if (status != TDDP_TIMEOUT || tddp_deadline_poll_ms(self->words.deadline) == 0) {
            return status ? status : tddp_shm_words_judge(&self->words, number, word);
        }
        status = look(self, number);
        if (status) {
            return status;
        }
    }
}

static tddp_status hear_second(const join *self)
{
    tddp_status status = TDDP_OK;
    bool follows = false;
    for (int number = 0; number < self->opts->world_size && status == TDDP_OK; number++) {
        tddp_shm_word word;
        status = hear_second_of(self, number, &word);
        follows = follows || (status == TDDP_OK && tddp_shm_word_begins(&word, "after"));
    }
    if (status == TDDP_OK && follows) {
        status = tddp_fail(TDDP_INTERNAL, "a rank does without shared memory, and nobody says why");
    }
    return status;
}

static tddp_status run(join *self)
{
    tddp_status status = tell_first(self);
    if (status == TDDP_OK) {
        status = hear_first(self);
    }
    if (status == TDDP_OK) {
        status = get_segments(self);
    }
    return status ? status : hear_second(self);
}

/* All wait for this rank's words. TDDP_UNAVAILABLE is everybody's own finding. */
static void tell_failure(join *self, tddp_status status)
{
    char text[WORD_BYTES];
    char kept[WORD_BYTES];
    tddp_wait brief = {TELL_MS, NULL};
    (void)snprintf(kept, sizeof kept, "%s", tddp_error_message());
    (void)snprintf(text, sizeof text, "lost %.900s", kept);
    for (int round = 0; round < 2 && status != TDDP_UNAVAILABLE; round++) {
        if (!self->words.said[round] && tddp_shm_words_say(&self->words, round, text, &brief)) {
            tddp_log(TDDP_LOG_DEBUG, "shm", "%s", tddp_error_message());
        }
    }
    if (self->shm && self->shm->peers && tddp_shm_self(self->shm)->control) {
        tddp_shm_farewell(self->shm, status, kept);
    }
    (void)tddp_fail(status, "%s", kept);
}

static tddp_status make_context(join *self)
{
    tddp_shm *shm = tddp_alloc(sizeof *shm);
    if (!shm) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->shm = shm;
    shm->rank = self->rank;
    shm->size = self->size;
    shm->pid = tddp_process_id();
    shm->peers = tddp_alloc_array((size_t)self->size, sizeof *shm->peers);
    for (int i = 0; shm->peers && i < self->size; i++) {
        shm->peers[i].number = self->locals[i];
        shm->peers[i].name = tddp_shm_words_name(&self->words, self->locals[i]);
    }
    return shm->peers ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_shm_join(const tddp_backend_opts *opts, const char *refusal, const tddp_wait *wait,
                          tddp_shm **out)
{
    join self = {.opts = opts, .refusal = refusal, .listen_fd = -1};
    self.words = (tddp_shm_words){.opts = opts,
                                  .deadline = tddp_wait_deadline(wait, opts->timeout_ms),
                                  .cancel = tddp_wait_cancel(wait)};
    tddp_status status = find_locals(&self);
    if (status == TDDP_OK) {
        status = make_context(&self);
    }
    if (status == TDDP_OK) {
        status = run(&self);
    }
    if (status) {
        tell_failure(&self, status);
        tddp_shm_destroy(self.shm);
    } else {
        tddp_log(TDDP_LOG_DEBUG, "shm",
                 "%d ranks on this host, %d to a core; %zu MiB for memory of each", self.size,
                 self.shm->ranks_per_core, (self.shm->layout.bytes - self.shm->layout.arena) >> 20);
        *out = self.shm;
    }
    tddp_close(self.listen_fd);
    free(self.locals);
    free(self.addresses);
    return status;
}
