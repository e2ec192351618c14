/*
 * What our client makes of the requests of PyTorch 1.13 where they lack something: waits that run
 * out, and appending.
 */
#include "kinds.h"
#include "store/tcp/tcp.h"

/* --- waits there ----------------------------------------------------------------------------- */

TEST(a_wait_that_ran_out_is_answered_to_nobody)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    tddp_store *other = client_of(s.port);
    tddp_slice late = text("late");
    for (int i = 0; i < 5; i++) {
        tddp_wait wait = within_ms(i % 2 ? 20 : 130);
        int64_t number;
        int deleted;
        int accepted = atomic_load(&s.gate.accepted);
        CHECK_STATUS(tddp_store_wait(store, &late, 1, &wait), TDDP_TIMEOUT);
        CHECK_OK(tddp_store_set(other, late, text("v"), NULL)); /* would answer it now */
        CHECK_OK(tddp_store_add(store, text("n"), 1, NULL, &number));
        CHECK_INT(number, i + 1);
        CHECK_VALUE(store, "late", "v");
        CHECK_INT(atomic_load(&s.gate.accepted), accepted + 1);
        CHECK_OK(tddp_store_delete_key(store, late, NULL, &deleted));
        CHECK_INT(deleted, 1);
    }
    CHECK_UNTIL(atomic_load(&s.gate.open) <= 2);
    CHECK_INT(atomic_load(&s.gate.open), 2); /* what was given up is closed */
    tddp_store_release(other);
    tddp_store_release(store);
    setting_close(&s);
}

TEST(a_connection_that_cannot_be_made_again_ends_the_store)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    tddp_slice key = text("nope");
    tddp_wait wait = within_ms(120);
    CHECK_STATUS(tddp_store_wait(store, &key, 1, &wait), TDDP_TIMEOUT);
    setting_close(&s);
    int64_t number;
    CHECK_STATUS(tddp_store_num_keys(store, NULL, &number), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "num_keys: the connection could not be made again: ");
    CHECK_STATUS(tddp_store_num_keys(store, NULL, &number), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "of no further use");
    tddp_store_release(store);
}

enum { WAITER }; /* an event */

/* --- append there ---------------------------------------------------------------------------- */

static void *append_much(void *store)
{
    for (int i = 0; i < 25; i++) {
        CHECK_OK(tddp_store_append(store, text("log"), text("x"), NULL));
    }
    return NULL;
}

/* Equal values: no answer of compare_set shows whose of two was stored. */
TEST(no_append_is_lost_among_many)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *stores[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        stores[i] = client_of(s.port);
        CHECK_INT(pthread_create(&threads[i], NULL, append_much, stores[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    tddp_blob got;
    CHECK_OK(tddp_store_get(stores[0], text("log"), NULL, &got));
    CHECK_INT(got.size, 100);
    CHECK_INT(strspn(got.data, "x"), 100);
    tddp_blob_free(&got);
    CHECK_OK(tddp_store_append(stores[0], text("empty"), text(""), NULL));
    CHECK_VALUE(stores[0], "empty", "");
    CHECK_OK(tddp_store_append(stores[0], text("empty"), text(""), NULL));
    CHECK_OK(tddp_store_append(stores[0], text("empty"), text("a"), NULL));
    CHECK_OK(tddp_store_append(stores[0], text("empty"), text(""), NULL));
    CHECK_VALUE(stores[0], "empty", "a");
    for (int i = 0; i < 4; i++) {
        tddp_store_release(stores[i]);
    }
    setting_close(&s);
}

static void *wait_for_log(void *store)
{
    check_will_block(WAITER);
    CHECK_VALUE(store, "log", "first");
    return NULL;
}

TEST(an_append_that_makes_a_key_wakes_who_waits_for_it)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    tddp_store *other = client_of(s.port);
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, wait_for_log, other), 0);
    CHECK_AWAIT_BLOCKED(WAITER);
    CHECK_OK(tddp_store_append(store, text("log"), text("first"), NULL));
    pthread_join(thread, NULL);
    tddp_store_release(other);
    tddp_store_release(store);
    setting_close(&s);
}

TEST(the_lock_of_a_client_that_was_killed_is_taken_over)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    int fd = raw_connect(s.port);
    /* SET tddp/append: the lock, by its owner's token. */
    raw_send(fd, "03 [5]696e69742f [0] 00 [11]746464702f617070656e64 [4]64656164");
    CHECK_RAW(fd, "[0]");
    CHECK_INT(tddp_tcp_stale_ms, 5000);
    tddp_wait soon = within_ms(1000); /* for the calls to be answered, on a busy machine */
    CHECK_STATUS(tddp_store_append(store, text("log"), text("x"), &soon), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(),
                   "timed out after 1000 ms waiting for another client's append (store 127.0.0.1:");
    tddp_tcp_stale_ms = 1000;
    int64_t start = tddp_now_ns();
    CHECK_OK(tddp_store_append(store, text("log"), text("x"), NULL));
    int64_t took_ms = (tddp_now_ns() - start) / TDDP_NS_PER_MS;
    CHECK(took_ms >= 1000);
    CHECK_OK(tddp_store_append(store, text("log"), text("y"), NULL));
    CHECK_VALUE(store, "log", "xy");
    tddp_net_close(fd);
    tddp_store_release(store);
    setting_close(&s);
}
