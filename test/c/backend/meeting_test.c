/* Ranks that meet in a store: every order of arriving, withdrawing, failing, and arriving too late.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "base/base.h"
#include "events.h"

enum { WORLD = 3 };

static const tddp_wait patient = {60000, NULL};
static const tddp_wait now = {0, NULL};

static tddp_store *store;

static tddp_meeting_opts opts_of(const char *name, int rank, int sender)
{
    return (tddp_meeting_opts){
        .store = store, .name = name, .rank = rank, .world_size = WORLD, .sender = sender};
}

static tddp_meeting *open_with(const tddp_meeting_opts *opts)
{
    tddp_meeting *made;
    CHECK_OK(tddp_meeting_open(opts, &made));
    return made;
}

static tddp_meeting *open_meeting(const char *name, int rank, int sender)
{
    const tddp_meeting_opts opts = opts_of(name, rank, sender);
    return open_with(&opts);
}

static tddp_slice text_of(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static void check_records(const tddp_meeting *meeting, const char *const texts[WORLD])
{
    for (int rank = 0; rank < WORLD; rank++) {
        const tddp_slice record = tddp_meeting_records(meeting)[rank];
        if (!texts[rank]) {
            CHECK(record.data == NULL);
        } else {
            CHECK_TEXT(record.data, texts[rank]);
            CHECK_INT(record.size, strlen(texts[rank]));
        }
    }
}

static void set_up(void)
{
    CHECK_OK(tddp_hash_store_create(20000, &store));
}

/* --- threads --------------------------------------------------------------------------------- */

typedef struct member {
    pthread_t thread;
    int rank;
    char record[64];
} member;

static void *meet(void *data)
{
    static const char *const all[] = {"rank 0", "rank 1", "rank 2"};
    member *self = data;
    tddp_meeting *meeting = open_meeting("all", self->rank, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(meeting, text_of(all[self->rank]), &patient));
    CHECK_OK(tddp_meeting_await(meeting, &patient));
    check_records(meeting, all);
    CHECK_OK(tddp_meeting_leave(meeting, &patient));
    tddp_meeting_close(meeting);
    return NULL;
}

static void all_meet(void)
{
    member members[WORLD];
    for (int rank = 0; rank < WORLD; rank++) {
        members[rank].rank = rank;
        CHECK_OK(tddp_thread_start(&members[rank].thread, "member", meet, &members[rank]));
    }
    for (int rank = 0; rank < WORLD; rank++) {
        pthread_join(members[rank].thread, NULL);
    }
}

/* The last one removes the keys, so the name serves again. */
TEST(all_get_the_records_of_all)
{
    int64_t before;
    int64_t after;
    set_up();
    CHECK_OK(tddp_store_num_keys(store, NULL, &before));
    for (int i = 0; i < 50; i++) {
        all_meet();
        CHECK_OK(tddp_store_num_keys(store, NULL, &after));
        CHECK_INT(after, before);
    }
    tddp_store_release(store);
}

/* --- orders ---------------------------------------------------------------------------------- */

static void fail(const char *name, int rank, const char *reason)
{
    const tddp_meeting_opts opts = opts_of(name, rank, TDDP_MEETING_ALL);
    tddp_meeting_fail(&opts, reason);
}

/* What a rank does in one step: a character of a text. */
typedef struct story {
    tddp_meeting *of[WORLD];
    const char *given[WORLD]; /* the record that counts; NULL: none */
    int failed;               /* the first rank that has; -1: none */
    bool complete;            /* before that */
} story;

static void step(story *self, int rank, char what)
{
    static const char *const records[] = {"a", "", "c c"};
    tddp_meeting *meeting = self->of[rank];
    switch (what) {
    case '+':
        CHECK_OK(tddp_meeting_give(meeting, text_of(records[rank]), &patient));
        self->given[rank] = records[rank];
        break;
    case '-':
        CHECK_OK(tddp_meeting_withdraw(meeting, &patient));
        self->given[rank] = NULL;
        break;
    case '!':
        fail("story", rank, "it broke");
        self->failed = self->failed < 0 ? rank : self->failed;
        break;
    }
    const bool all = self->given[0] && self->given[1] && self->given[2];
    self->complete = all && (self->complete || self->failed < 0);
}

/* Each rank finds what was done, and none waits for what will not come. */
static void check_story(story *self)
{
    for (int rank = 0; rank < WORLD; rank++) {
        tddp_status status = tddp_meeting_await(self->of[rank], &now);
        if (self->complete) {
            CHECK_INT(status, TDDP_OK);
        } else if (self->failed >= 0) {
            char text[64];
            (void)snprintf(text, sizeof text, "rank %d failed: it broke", self->failed);
            CHECK_INT(status, TDDP_PEER_LOST);
            CHECK_TEXT(tddp_error_message(), text);
        } else {
            CHECK_INT(status, TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(), " of 3 did not arrive in time");
        }
        check_records(self->of[rank], self->given);
    }
}

/* Every order of `left[rank]` steps of each rank, of which a rank's first is to arrive. */
static void each_order(char *taken, int used, const char *const left[WORLD])
{
    bool any = false;
    for (int rank = 0; rank < WORLD; rank++) {
        if (left[rank][0]) {
            const char *rest[WORLD] = {left[0], left[1], left[2]};
            any = true;
            taken[used] = (char)('0' + rank);
            taken[used + 1] = left[rank][0];
            rest[rank]++;
            each_order(taken, used + 2, rest);
        }
    }
    if (any) {
        return;
    }
    story self = {.failed = -1};
    set_up();
    for (int rank = 0; rank < WORLD; rank++) {
        self.of[rank] = open_meeting("story", rank, TDDP_MEETING_ALL);
    }
    for (int i = 0; i < used; i += 2) {
        step(&self, taken[i] - '0', taken[i + 1]);
        check_story(&self);
    }
    for (int rank = 0; rank < WORLD; rank++) {
        tddp_meeting_close(self.of[rank]);
    }
    tddp_store_release(store);
}

TEST(no_order_completes_early_or_hides_a_record)
{
    static const char *const ways[] = {"+", "+-", "+-+", "+!", "!", ""};
    char taken[32];
    for (size_t a = 0; a < sizeof ways / sizeof *ways; a++) {
        for (size_t b = 0; b < sizeof ways / sizeof *ways; b++) {
            const char *const left[] = {ways[a], ways[b], "+"};
            each_order(taken, 0, left);
        }
    }
}

/* --- one for all ----------------------------------------------------------------------------- */

TEST(one_gives_for_all)
{
    static const char *const only[] = {NULL, "for all", NULL};
    set_up();
    tddp_meeting *sender = open_meeting("id", 1, 1);
    tddp_meeting *other = open_meeting("id", 2, 1);
    CHECK_STATUS(tddp_meeting_await(other, &now), TDDP_TIMEOUT);
    CHECK_TEXT(tddp_error_message(), "rank(s) 1 of 3 did not arrive in time");
    CHECK_OK(tddp_meeting_give(sender, text_of("for all"), &patient));
    CHECK_OK(tddp_meeting_await(other, &patient));
    check_records(other, only);
    tddp_meeting_close(sender);
    tddp_meeting_close(other);
    tddp_store_release(store);
}

TEST(bytes_of_any_kind)
{
    static const char bytes[] = "\0+1 3 2\n\n\xFF!0 3 1\nx\0failed: ";
    set_up();
    tddp_meeting *sender = open_meeting("id", 0, 0);
    tddp_meeting *other = open_meeting("id", 2, 0);
    CHECK_OK(tddp_meeting_give(sender, (tddp_slice){bytes, sizeof bytes}, &patient));
    CHECK_OK(tddp_meeting_await(other, &patient));
    CHECK_INT(tddp_meeting_records(other)[0].size, sizeof bytes);
    CHECK(memcmp(tddp_meeting_records(other)[0].data, bytes, sizeof bytes) == 0);
    tddp_meeting_close(sender);
    tddp_meeting_close(other);
    tddp_store_release(store);
}

/* --- who is missing -------------------------------------------------------------------------- */

static tddp_status stop_after_three(void *data)
{
    int *calls = data;
    return ++*calls < 3 ? TDDP_OK : tddp_fail(TDDP_PEER_LOST, "rank 1 has ended");
}

static void append(const char *name, const char *entry)
{
    char key[80];
    (void)snprintf(key, sizeof key, "%s/list", name);
    CHECK_OK(tddp_store_append(store, text_of(key), (tddp_slice){entry, strlen(entry) + 1}, &now));
}

/* Two ranks are in the list, and ended before they did more. */
TEST(a_rank_ends_in_the_middle_of_arriving_or_of_failing)
{
    set_up();
    tddp_meeting *meeting = open_meeting("cut", 0, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(meeting, text_of("a"), &patient));
    append("cut", "+1 3 1\nb");
    append("cut", "+2 3 1\nc");
    CHECK_OK(tddp_meeting_await(meeting, &patient));
    check_records(meeting, (const char *const[]){"a", "b", "c"});
    tddp_meeting_close(meeting);
    meeting = open_meeting("failed", 0, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(meeting, text_of("a"), &patient));
    append("failed", "!1 3 3\nwhy");
    CHECK_STATUS(tddp_meeting_await(meeting, &patient), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "rank 1 failed: why");
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

TEST(the_check_ends_the_wait)
{
    int calls = 0;
    set_up();
    tddp_meeting_opts opts = opts_of("checked", 0, TDDP_MEETING_ALL);
    opts.check = stop_after_three;
    opts.data = &calls;
    opts.check_ms = 1;
    tddp_meeting *meeting = open_with(&opts);
    CHECK_OK(tddp_meeting_give(meeting, text_of("here"), &patient));
    CHECK_STATUS(tddp_meeting_await(meeting, &patient), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 1 has ended");
    CHECK_INT(calls, 3);
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

/* Texts have the names that the caller has for the ranks. */
TEST(ranks_have_names)
{
    static const int names[] = {4, 6, 9};
    char text[TDDP_MEETING_TEXT_BYTES];
    set_up();
    tddp_meeting_opts opts = opts_of("named", 0, TDDP_MEETING_ALL);
    opts.names = names;
    tddp_meeting *meeting = open_with(&opts);
    CHECK_OK(tddp_meeting_give(meeting, text_of("a"), &patient));
    CHECK_STATUS(tddp_meeting_await(meeting, &now), TDDP_TIMEOUT);
    CHECK_TEXT(tddp_error_message(), "rank(s) 6, 9 did not arrive in time");
    CHECK_INT(tddp_meeting_missing(meeting, text), 2);
    CHECK_TEXT(text, "6, 9");
    fail("named", 1, "why");
    CHECK_STATUS(tddp_meeting_await(meeting, &patient), TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 6 failed: why");
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

static void *trigger(void *data)
{
    CHECK_AWAIT_BLOCKED(0);
    tddp_cancel_trigger(data);
    return NULL;
}

TEST(a_wait_is_canceled)
{
    pthread_t thread;
    tddp_cancel *cancel;
    set_up();
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_meeting *meeting = open_meeting("canceled", 0, TDDP_MEETING_ALL);
    const tddp_wait wait = {60000, cancel};
    CHECK_OK(tddp_thread_start(&thread, "trigger", trigger, cancel));
    check_will_block(0);
    CHECK_STATUS(tddp_meeting_await(meeting, &wait), TDDP_CANCELED);
    pthread_join(thread, NULL);
    tddp_meeting_close(meeting);
    tddp_cancel_free(cancel);
    tddp_store_release(store);
}

static void *await_reason(void *data)
{
    tddp_meeting *meeting = open_meeting("reasons", 0, TDDP_MEETING_ALL);
    CHECK(tddp_meeting_await_failure(meeting, 1, 0) == NULL);
    check_will_block(0);
    CHECK_TEXT(tddp_meeting_await_failure(meeting, 1, 60000), "no memory");
    tddp_meeting_close(meeting);
    return data;
}

TEST(a_reason_that_comes_later)
{
    set_up();
    pthread_t thread;
    const tddp_meeting_opts opts = opts_of("reasons", 1, TDDP_MEETING_ALL);
    CHECK_INT(pthread_create(&thread, NULL, await_reason, NULL), 0);
    CHECK_AWAIT_BLOCKED(0);
    tddp_meeting_fail(&opts, "no memory");
    pthread_join(thread, NULL);
    tddp_store_release(store);
}

TEST(another_world_size)
{
    set_up();
    tddp_meeting_opts opts = opts_of("sizes", 1, TDDP_MEETING_ALL);
    opts.world_size = 4;
    tddp_meeting *larger = open_with(&opts);
    tddp_meeting *meeting = open_meeting("sizes", 0, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(larger, text_of("x"), &patient));
    CHECK_STATUS(tddp_meeting_read(meeting, &patient), TDDP_MISMATCH);
    CHECK_TEXT(tddp_error_message(), "rank 1 has arrived with a world size of 4, rank 0 with 3: "
                                     "expected the same on all ranks");
    tddp_meeting_close(larger);
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

/* As long as it has not withdrawn. */
TEST(another_world_size_that_has_withdrawn)
{
    set_up();
    tddp_meeting_opts opts = opts_of("withdrawn", 3, TDDP_MEETING_ALL);
    opts.world_size = 4;
    tddp_meeting *larger = open_with(&opts);
    tddp_meeting *meeting = open_meeting("withdrawn", 0, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(larger, text_of("x"), &patient));
    CHECK_STATUS(tddp_meeting_read(meeting, &patient), TDDP_MISMATCH);
    CHECK_OK(tddp_meeting_withdraw(larger, &patient));
    CHECK_OK(tddp_meeting_read(meeting, &patient));
    CHECK_OK(tddp_meeting_give(larger, text_of("x"), &patient));
    CHECK_STATUS(tddp_meeting_read(meeting, &patient), TDDP_MISMATCH);
    tddp_meeting_close(larger);
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

/* What was read stays where the next read fails. */
TEST(a_read_that_fails_changes_nothing)
{
    tddp_cancel *cancel;
    set_up();
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_meeting *meeting = open_meeting("kept", 0, TDDP_MEETING_ALL);
    CHECK_OK(tddp_meeting_give(meeting, text_of("a"), &patient));
    CHECK_OK(tddp_meeting_read(meeting, &patient));
    tddp_cancel_trigger(cancel);
    CHECK_STATUS(tddp_meeting_read(meeting, &(tddp_wait){1000, cancel}), TDDP_CANCELED);
    check_records(meeting, (const char *const[]){"a", NULL, NULL});
    tddp_meeting_close(meeting);
    tddp_cancel_free(cancel);
    tddp_store_release(store);
}

TEST(keys_are_removed_by_one_that_knows_the_others)
{
    int64_t before;
    int64_t after;
    set_up();
    CHECK_OK(tddp_store_num_keys(store, NULL, &before));
    const tddp_meeting_opts opts = opts_of("gone", 1, 1);
    tddp_meeting *meeting = open_with(&opts);
    CHECK_OK(tddp_meeting_give(meeting, text_of("x"), &patient));
    CHECK_OK(tddp_meeting_remove(&opts, &patient));
    CHECK_OK(tddp_store_num_keys(store, NULL, &after));
    CHECK_INT(after, before);
    tddp_meeting_close(meeting);
    tddp_store_release(store);
}

TEST(what_is_no_list)
{
    static const char zero[] = "\0 0 3 1\na";
    static const char *const lists[] = {"x",         "+",           "+0 3 1\n",
                                        "+0 3 1\na", "+0 3\na",     "+-1 3 1\na",
                                        "?0 3 1\na", "+0 3 1 2\na", "+0 3 9\nabc"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        set_up();
        CHECK_OK(tddp_store_set(store, text_of("bad/list"), text_of(lists[i]), NULL));
        tddp_meeting *meeting = open_meeting("bad", 0, TDDP_MEETING_ALL);
        CHECK_STATUS(tddp_meeting_read(meeting, &patient), TDDP_PROTOCOL);
        CHECK_CONTAINS(tddp_error_message(), "bad");
        CHECK_OK(tddp_store_set(store, text_of("bad/list"), (tddp_slice){zero, sizeof zero}, NULL));
        CHECK_STATUS(tddp_meeting_read(meeting, &patient), TDDP_PROTOCOL);
        tddp_meeting_close(meeting);
        tddp_store_release(store);
    }
}

/* --- many ------------------------------------------------------------------------------------ */

TEST(five_hundred_and_twelve_ranks)
{
    enum { MANY = 512 };
    static tddp_meeting *meetings[MANY];
    char text[TDDP_MEETING_TEXT_BYTES];
    set_up();
    for (int i = 0; i < MANY; i++) {
        tddp_meeting_opts opts = opts_of("many", i, TDDP_MEETING_ALL);
        opts.world_size = MANY;
        meetings[i] = open_with(&opts);
        if (i % 2 == 0) {
            CHECK_OK(tddp_meeting_give(meetings[i], text_of("even"), &patient));
        }
    }
    CHECK_OK(tddp_meeting_read(meetings[0], &patient));
    CHECK_INT(tddp_meeting_missing(meetings[0], text), MANY / 2);
    CHECK_TEXT(text, "1, 3, 5, 7, 9, 11, 13, 15, ... (256 in all)");
    for (int i = 1; i < MANY; i += 2) {
        CHECK_OK(tddp_meeting_give(meetings[i], text_of("odd"), &patient));
    }
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(tddp_meeting_await(meetings[i], &patient));
        CHECK_TEXT(tddp_meeting_records(meetings[i])[i].data, i % 2 ? "odd" : "even");
        tddp_meeting_close(meetings[i]);
    }
    tddp_store_release(store);
}
