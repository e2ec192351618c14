/*
 * Watches of a prefix: what they return, when, and how they are ended; what a client that watches
 * may be sent.
 */
#include "ephemeral.h"

/* --- watches --------------------------------------------------------------------------------- */

TEST(a_watch_returns_at_once_and_then_when_something_has_changed)
{
    tddp_store_server *server = loopback_server();
    tddp_store *other = client_of(tddp_store_server_port(server));
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_slice keys[] = {text("p/a"), text("p/b")};
    tddp_slice values[] = {text("1"), text("2")};
    int64_t sum;
    int deleted;
    CHECK_OK(tddp_store_multi_set(other, keys, values, 2, NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum));
    CHECK_TEXT(seen(store, "p/"), "p/a=1 p/b=2");
    check_quiet(store, "p/");
    CHECK_OK(tddp_store_set(other, text("p/a"), text("1"), NULL)); /* as it is */
    own(other, "p/b", "2", 60000);                                 /* only renewed */
    CHECK_OK(tddp_store_append(other, text("p/b"), text(""), NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum)); /* another prefix */
    check_quiet(store, "p/");
    CHECK_OK(tddp_store_num_keys(store, NULL, &sum)); /* ends the request that is under way */
    CHECK_OK(tddp_store_set(other, text("p/a"), text("3"), NULL));
    CHECK_OK(tddp_store_set(other, text("p/a"), text("1"), NULL));
    CHECK_OK(tddp_store_add(other, text("q"), 1, NULL, &sum));
    CHECK_TEXT(seen(store, "p/"), "p/a=1 p/b=2"); /* it has changed, and back */
    CHECK_OK(tddp_store_delete_key(other, text("p/a"), NULL, &deleted));
    CHECK_TEXT(seen(store, "p/"), "p/b=2");
    CHECK_TEXT(seen(store, "q"), "q=3"); /* another prefix: at once */
    CHECK_TEXT(seen(store, "p/"), "p/b=2");
    CHECK_OK(tddp_store_set(store, text("p/mine"), text("4"), NULL)); /* one's own changes too */
    CHECK_TEXT(seen(store, "p/"), "p/b=2 p/mine=4");
    tddp_store_release(store);
    tddp_store_release(other);
    tddp_store_server_stop(server);
}

/* Whatever comes between two watches, and when. */
TEST(a_watch_that_was_ended_early_loses_no_change)
{
    tddp_store_server *server = loopback_server();
    tddp_store *other = client_of(tddp_store_server_port(server));
    tddp_store *store = client_of(tddp_store_server_port(server));
    tddp_cancel *cancel;
    tddp_store_entries got;
    int64_t number;
    char value[16];
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_wait wait = {.timeout_ms = 20000, .cancel = cancel};
    CHECK_TEXT(seen(store, "k"), "");
    for (int i = 0; i < 12; i++) {
        if (i % 2) {
            check_quiet(store, "k");
        } else {
            pthread_t thread;
            tddp_cancel_reset(cancel);
            CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
            CHECK_STATUS(tddp_store_watch(store, text("k"), &wait, &got), TDDP_CANCELED);
            CHECK_CONTAINS(tddp_error_message(), "interrupted while watching keys that begin with");
            pthread_join(thread, NULL);
        }
        if (i % 3 == 0) { /* ends the request that is under way */
            CHECK_OK(tddp_store_num_keys(store, NULL, &number));
        }
        snprintf(value, sizeof value, "%d", i);
        CHECK_OK(tddp_store_set(other, text("k"), text(value), NULL));
        CHECK_VALUE(other, "k", value);
        if (i % 3 == 1) { /* finds its answer, which the next watch gets all the same */
            CHECK_VALUE(store, "k", value);
        }
        char expected[32];
        snprintf(expected, sizeof expected, "k=%d", i);
        CHECK_TEXT(seen(store, "k"), expected);
    }
    check_quiet(store, "k");
    CHECK_CONTAINS(tddp_error_message(),
                   "timed out after 20 ms watching keys that begin with \"k\" (store 127.0.0.1:");
    tddp_cancel_free(cancel);
    tddp_store_release(store);
    tddp_store_release(other);
    tddp_store_server_stop(server);
}

TEST(on_the_wire_a_watch_is_ended_as_a_wait_is)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    int other = greet(tddp_store_server_port(server));
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [0]");
    raw_send(fd, "f3 [2]2f61 00 0c");
    CHECK_RAW(fd, "01");
    raw_send(other, "01 [2]2f61 [1]31 07");
    CHECK_RAW(other, "[1]");
    CHECK_SILENT(fd);
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    raw_send(fd, "f3 [2]2f61 01"); /* at once */
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    raw_send(fd, "f3 [2]2f61 00 06 [1] [2]2f62"); /* a wait takes its place */
    raw_send(other, "01 [2]2f61 [1]32 01 [2]2f62 [0] 07");
    CHECK_RAW(other, "[2]");
    CHECK_RAW(fd, "00");
    CHECK_SILENT(fd);
    raw_send(fd, "f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]32");
    tddp_net_close(fd);
    tddp_net_close(other);
    tddp_store_server_stop(server);
}

TEST(several_changes_at_a_time_make_one_answer)
{
    tddp_store_server *server = loopback_server();
    int fd = greet(tddp_store_server_port(server));
    int other = greet(tddp_store_server_port(server));
    raw_send(other, "f2 [2]2f61 [1]31 [0] 00 f2 [2]2f62 [1]32 [0] 00");
    CHECK_RAW(other, "01 [1]31 01 [1]32");
    raw_send(fd, "f3 [2]2f61 00 f3 [2]2f61 00");
    CHECK_RAW(fd, "00 [1] [2]2f61 [1]31");
    tddp_net_close(other);
    CHECK_RAW(fd, "00 [0]");
    raw_send(fd, "f3 [2]2f61 00 07");
    CHECK_RAW(fd, "[0]"); /* no second answer, and no second key */
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

/* --- limits ----------------------------------------------------------------------------------- */

/* What a client may be sent, and what it may store. */
TEST(limits_of_clients_hold)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_request_bytes = 1000;
    opts.max_total_bytes = 5000;
    tddp_store_server *server = start(&opts);
    int port_used = tddp_store_server_port(server);
    tddp_store *good = client_of(port_used);
    char kilobyte[901];
    memset(kilobyte, 'x', 900);
    kilobyte[900] = '\0';
    int watcher = greet(port_used);
    raw_send(watcher, "f3 [2]2f62 00");
    CHECK_RAW(watcher, "00 [0]");
    raw_send(watcher, "f3 [2]2f62 00"); /* waits */
    CHECK_SILENT(watcher);
    for (int i = 0; i < 3; i++) {
        char key[16];
        snprintf(key, sizeof key, "a%d", i);
        CHECK_OK(tddp_store_set(good, text(key), text(kilobyte), NULL));
    }
    int greedy = greet(port_used);
    raw_send(greedy, "f3 [2]2f61 00");
    CHECK_HUNG_UP(greedy);
    CHECK_LOG("more than 2000 bytes of answers wait for it (TDDP_STORE_MAX_REQUEST_BYTES)");
    tddp_net_close(greedy);
    int lavish = greet(port_used);
    char all[4096] = "";
    for (int i = 0; i < 40; i++) { /* each takes more than its bytes */
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "f2 [3]2f63%02x [1]31 [0] 00", i);
    }
    raw_send(lavish, all);
    CHECK_LOG("of at most 5000 are stored already (TDDP_STORE_MAX_TOTAL_BYTES)");
    tddp_net_close(lavish);
    CHECK_TEXT(seen(good, "c"), ""); /* they went with their client */
    own(good, "b", "1", 0);
    CHECK_RAW(watcher, "00 [1] [2]2f62 [1]31");
    tddp_net_close(watcher);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}

static void skip_bytes(int fd, size_t size)
{
    char bytes[512];
    size_t done = 0;
    CHECK(size <= sizeof bytes);
    CHECK_OK(tddp_net_recv(fd, bytes, size, &done, tddp_deadline_after_ms(10000), -1));
}

TEST(a_watcher_whose_answer_would_be_too_long_is_dropped_with_its_keys)
{
    tddp_store_server_opts opts = loopback_opts();
    opts.max_request_bytes = 200;
    tddp_store_server *server = start(&opts);
    tddp_store *good = client_of(tddp_store_server_port(server));
    int watcher = greet(tddp_store_server_port(server));
    char value[151];
    memset(value, 'x', 150);
    value[150] = '\0';
    raw_send(watcher, "f2 [2]2f6d [1]31 [0] 00 f3 [2]2f61 00");
    CHECK_RAW(watcher, "01 [1]31 00 [0]");
    CHECK_TEXT(seen(good, "m"), "m=1");
    static const char *const keys[] = {"a1", "a2", "a3"};
    for (size_t i = 0; i < 3; i++) {
        raw_send(watcher, "f3 [2]2f61 00"); /* waits, and is answered by what comes now */
        CHECK_SILENT(watcher);
        CHECK_OK(tddp_store_set(good, text(keys[i]), text(value), NULL));
        if (i < 2) {
            skip_bytes(watcher, 1 + 8 + (i + 1) * (8 + 3 + 8 + 150));
        }
    }
    CHECK_HUNG_UP(watcher);
    CHECK_LOG("more than 400 bytes of answers wait for it");
    CHECK_TEXT(seen(good, "m"), "");
    tddp_net_close(watcher);
    tddp_store_release(good);
    tddp_store_server_stop(server);
}
