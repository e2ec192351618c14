/*
 * Barriers and lists of keys on every kind of store, with threads; and processes that meet by them,
 * and by queues where there are any.
 */
#include "kinds.h"

/* --- barriers -------------------------------------------------------------------------------- */

typedef struct participant {
    tddp_store *store;
    int rank;
    atomic_int *arrived;
} participant;

static void *come(void *data)
{
    const participant *c = data;
    for (int round = 0; round < 3; round++) {
        char key[16];
        snprintf(key, sizeof key, "b%d", round);
        usleep((useconds_t)(c->rank * 10000));
        atomic_fetch_add(c->arrived, 1);
        CHECK_OK(tddp_store_barrier(c->store, text(key), 4, NULL));
        CHECK(atomic_load(c->arrived) >= 4 * (round + 1));
    }
    return NULL;
}

TEST(a_barrier_lets_nobody_go_before_all_have_come)
{
    FOR_EACH_NEWER_KIND(f)
    {
        participant participants[4];
        pthread_t threads[4];
        atomic_int arrived = 0;
        for (int i = 0; i < 4; i++) {
            participants[i] = (participant){.rank = i, .arrived = &arrived};
            CHECK_OK(tddp_store_clone(f.store, NULL, &participants[i].store));
            CHECK_INT(pthread_create(&threads[i], NULL, come, &participants[i]), 0);
        }
        for (int i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
            tddp_store_release(participants[i].store);
        }
        CHECK_VALUE(f.store, "b0", "4");
        CHECK_OK(tddp_store_barrier(f.store, text("alone"), 1, NULL));
        CHECK_OK(tddp_store_barrier(f.store, text("b1"), 4, NULL)); /* complete before */
        CHECK_VALUE(f.store, "b1", "5");
    }
}

TEST(a_barrier_that_runs_out_of_time_tells_how_many_arrived)
{
    FOR_EACH_NEWER_KIND(f)
    {
        tddp_wait soon = within_ms(60);
        CHECK_STATUS(tddp_store_barrier(f.store, text("b"), 3, &soon), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "timed out after 60 ms at the barrier \"");
        CHECK_CONTAINS(tddp_error_message(), "b\": 1 of 3 arrived (");
        CHECK_STATUS(tddp_store_barrier(f.store, text("b"), 3, &soon), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "b\": 2 of 3 arrived (");
        CHECK_OK(tddp_store_barrier(f.store, text("b"), 3, &soon));
        CHECK_VALUE(f.store, "b", "3");
        CHECK_STATUS(tddp_store_barrier(f.store, text("b"), 0, &soon), TDDP_INVALID_ARGUMENT);
        CHECK_TEXT(tddp_error_message(), "barrier: world size 0, expected 1 or more");
    }
}

TEST(a_barrier_is_ended_by_its_cancel_token)
{
    FOR_EACH_NEWER_KIND(f)
    {
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_wait wait = {.timeout_ms = 20000, .cancel = cancel};
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
        CHECK_STATUS(tddp_store_barrier(f.store, text("b"), 3, &wait), TDDP_CANCELED);
        CHECK_CONTAINS(tddp_error_message(), "b\" of 3 (");
        pthread_join(thread, NULL);
        CHECK_VALUE(f.store, "b", "1");
        tddp_cancel_free(cancel);
    }
}

TEST(a_barrier_at_a_key_that_is_no_counter_fails)
{
    FOR_EACH_NEWER_KIND(f)
    {
        CHECK_OK(tddp_store_set(f.store, text("b"), text("word"), NULL));
        CHECK_STATUS(tddp_store_barrier(f.store, text("b"), 2, NULL),
                     f.server ? TDDP_NETWORK : TDDP_STORE);
        CHECK_CONTAINS(tddp_error_message(), "not a number");
    }
}

static void *come_and_delete(void *store)
{
    int deleted;
    CHECK_AWAIT_ASLEEP(getpid());
    CHECK_OK(tddp_store_barrier(store, text("b"), 2, NULL));
    CHECK_OK(tddp_store_delete_key(store, text("b"), NULL, &deleted));
    return NULL;
}

TEST(deleting_a_barriers_key_ends_all_waits)
{
    FOR_EACH_NEWER_KIND(f)
    {
        tddp_store *other;
        CHECK_OK(tddp_store_clone(f.store, NULL, &other));
        for (int round = 0; round < 3; round++) {
            pthread_t thread;
            CHECK_INT(pthread_create(&thread, NULL, come_and_delete, other), 0);
            CHECK_OK(tddp_store_barrier(f.store, text("b"), 2, NULL));
            pthread_join(thread, NULL);
            CHECK_INT(there(f.store, "b"), 0);
        }
        tddp_store_release(other);
    }
}

/* --- lists ----------------------------------------------------------------------------------- */

static void check_listed(tddp_store *store, const char *const *expected, size_t count)
{
    tddp_blob_list keys;
    CHECK_OK(tddp_store_list_keys(store, NULL, &keys));
    CHECK_INT(keys.count, count);
    for (size_t i = 0; i < count; i++) {
        int found = 0;
        for (size_t j = 0; j < keys.count; j++) {
            found += keys.blobs[j].size == strlen(expected[i]) &&
                     strcmp(keys.blobs[j].data, expected[i]) == 0;
        }
        CHECK_INT(found, 1);
    }
    tddp_blob_list_free(&keys);
    CHECK_INT(keys.count, 0);
    CHECK(!keys.blobs);
}

TEST(keys_are_listed_as_the_user_knows_them)
{
    FOR_EACH_NEWER_KIND(f)
    {
        int deleted;
        static const char *const names[] = {"one", "two/three", "cl\xc3\xa9"};
        check_listed(f.store, NULL, 0);
        for (int i = 0; i < 3; i++) {
            CHECK_OK(tddp_store_set(f.store, text(names[i]), text("v"), NULL));
        }
        CHECK_OK(tddp_store_set(f.store, text("gone"), text("v"), NULL));
        CHECK_OK(tddp_store_delete_key(f.store, text("gone"), NULL, &deleted));
        if (!strstr(f.kind, "file")) {
            CHECK_OK(tddp_store_queue_push(f.store, text("queue"), text("v"), NULL));
        }
        check_listed(f.store, names, 3);
        CHECK_STATUS(tddp_store_list_keys(f.store, NULL, NULL), TDDP_INVALID_ARGUMENT);
    }
}

TEST(a_prefix_store_lists_its_own_keys_only)
{
    FOR_EACH_NEWER_KIND(f)
    {
        tddp_store *view;
        tddp_store *inner;
        CHECK_OK(tddp_prefix_store_create("p", f.store, &view));
        CHECK_OK(tddp_prefix_store_create("deeper", view, &inner));
        CHECK_OK(tddp_store_set(f.store, text("plain"), text("v"), NULL));
        CHECK_OK(tddp_store_set(f.store, text("p"), text("v"), NULL));
        CHECK_OK(tddp_store_set(f.store, text("pp/x"), text("v"), NULL));
        CHECK_OK(tddp_store_set(view, text("mine"), text("v"), NULL));
        CHECK_OK(tddp_store_set(inner, text("x"), text("v"), NULL));
        check_listed(f.store, (const char *[]){"plain", "p", "pp/x", "p/mine", "p/deeper/x"}, 5);
        check_listed(view, (const char *[]){"mine", "deeper/x"}, 2);
        check_listed(inner, (const char *[]){"x"}, 1);
        /* Queues and barriers are separate as well. */
        if (!strstr(f.kind, "file")) {
            CHECK_OK(tddp_store_queue_push(view, text("q"), text("v"), NULL));
            CHECK_INT(length(f.store, "q"), 0);
            CHECK_INT(length(f.store, "p/q"), 1);
        }
        CHECK_OK(tddp_store_barrier(inner, text("b"), 1, NULL));
        CHECK_VALUE(f.store, "p/deeper/b", "1");
        tddp_store_release(inner);
        tddp_store_release(view);
    }
}

TEST(many_keys_are_listed)
{
    enum { MANY = 1500 };
    FOR_EACH_NEWER_KIND(f)
    {
        static char names[MANY][16];
        static tddp_slice keys[MANY];
        for (int i = 0; i < MANY; i++) {
            snprintf(names[i], sizeof names[i], "key%d", i);
            keys[i] = text(names[i]);
        }
        CHECK_OK(tddp_store_multi_set(f.store, keys, keys, MANY, NULL));
        tddp_blob_list list;
        CHECK_OK(tddp_store_list_keys(f.store, NULL, &list));
        CHECK_INT(list.count, MANY);
        int64_t sum = 0;
        for (size_t i = 0; i < list.count; i++) {
            sum += atoi(list.blobs[i].data + 3);
        }
        CHECK_INT(sum, MANY * (MANY - 1) / 2);
        tddp_blob_list_free(&list);
    }
}

/* --- processes ------------------------------------------------------------------------------- */

/* Processes meet: each gives a number to the next one, by its queue or its key, and all pass a
 * barrier. */
static void play_in_a_ring(tddp_store *store, int rank, int world_size, bool by_queue)
{
    char own[24];
    char next[24];
    char number[24];
    for (int round = 0; round < 5; round++) {
        int part = by_queue ? 0 : round;
        snprintf(own, sizeof own, "q%d.%d", part, rank);
        snprintf(next, sizeof next, "q%d.%d", part, (rank + 1) % world_size);
        snprintf(number, sizeof number, "%d", 10 * round + rank);
        CHECK_OK(by_queue ? tddp_store_queue_push(store, text(next), text(number), NULL)
                          : tddp_store_set(store, text(next), text(number), NULL));
        snprintf(number, sizeof number, "%d", 10 * round + (rank + world_size - 1) % world_size);
        if (by_queue) {
            check_pop(store, own, number);
        } else {
            CHECK_VALUE(store, own, number);
        }
        snprintf(number, sizeof number, "round%d", round);
        CHECK_OK(tddp_store_barrier(store, text(number), world_size, NULL));
    }
}

MULTI_TEST(processes_meet_at_a_server, 4, 30)
{
    tddp_store *store;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = port;
    opts.world_size = world_size;
    opts.is_server = rank == 0;
    opts.timeout_ms = 20000;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    play_in_a_ring(store, rank, world_size, true);
    if (rank == 0) { /* the server stays until the others have said good bye */
        tddp_slice keys[] = {text("bye1"), text("bye2"), text("bye3")};
        CHECK_OK(tddp_store_wait(store, keys, 3, NULL));
    } else {
        char bye[16];
        snprintf(bye, sizeof bye, "bye%d", rank);
        CHECK_OK(tddp_store_set(store, text(bye), text(""), NULL));
    }
    tddp_store_release(store);
}

MULTI_TEST(processes_meet_in_a_file, 3, 30)
{
    char path[64];
    snprintf(path, sizeof path, "/tmp/tddp_queue_test_%d", port);
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, world_size, 20000, &store));
    play_in_a_ring(store, rank, world_size, false);
    tddp_store_release(store);
}
