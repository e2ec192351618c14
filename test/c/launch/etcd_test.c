/*
 * The client of etcd against real servers: what it stores, what it sees, and what becomes of it
 * when a server dies, hangs, or wants a login.
 */
#include "base/base.h"
#include "events.h"
#include "launch/etcd_server.h"

static const tddp_wait patient = {20000, NULL};

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static tddp_etcd *open_client(const tddp_launch_endpoint *endpoints, int count)
{
    tddp_etcd *etcd;
    const tddp_etcd_opts opts = {.endpoints = endpoints, .endpoint_count = count};
    CHECK_OK(tddp_etcd_open(&opts, &etcd));
    return etcd;
}

static int64_t put(tddp_etcd *etcd, const char *key, const char *value, int64_t lease)
{
    int64_t revision;
    const tddp_etcd_write write = {.key = slice(key), .value = slice(value), .lease = lease};
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
    return revision;
}

/* The keys that begin so, in a row: "a/1=x a/2=y". */
static const char *list(tddp_etcd *etcd, const char *prefix, char text[256])
{
    tddp_etcd_answer answer = {0};
    CHECK_OK(tddp_etcd_range(etcd, slice(prefix), true, 0, &patient, &answer));
    text[0] = '\0';
    for (size_t i = 0; i < answer.count; i++) {
        tddp_add_text(text, 256, "%s%s=%s", i > 0 ? " " : "", answer.pairs[i].key.data,
                      answer.pairs[i].value.data);
    }
    tddp_etcd_answer_free(&answer);
    return text;
}

TEST(what_is_written_if_a_condition_holds)
{
    etcd_server server;
    char text[256];
    int64_t first;
    int64_t revision;
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    tddp_etcd_write write = {.key = slice("a/1"), .value = slice("one"), .guard = slice("a/1")};
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &first));
    CHECK(first > 0);

    write.key = slice("a/2"); /* the other is there by now */
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
    CHECK_INT(revision, 0);
    CHECK_TEXT(list(etcd, "a/", text), "a/1=one");

    write = (tddp_etcd_write){
        .key = slice("a/1"), .value = slice("uno"), .guard = slice("a/1"), .made_in = first};
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
    CHECK(revision > first);
    write.remove = true;
    write.made_in = revision; /* only written in that one */
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
    CHECK_INT(revision, 0);
    (void)put(etcd, "b", "other", 0);
    write.made_in = first;
    CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
    CHECK(revision > first);
    CHECK_TEXT(list(etcd, "a/", text), "");
    CHECK_TEXT(list(etcd, "b", text), "b=other");
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

TEST(keys_and_values_are_any_bytes)
{
    etcd_server server;
    int64_t revision;
    char value[300];
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    for (size_t i = 0; i < sizeof value; i++) {
        value[i] = (char)i;
    }
    for (size_t size = sizeof value - 3; size <= sizeof value; size++) { /* each kind of padding */
        tddp_etcd_answer answer = {0};
        tddp_slice key = {"k\0\n\"\xff z", 7};
        const tddp_etcd_write write = {.key = key, .value = {value, size}};
        CHECK_OK(tddp_etcd_put(etcd, &write, &patient, &revision));
        CHECK_OK(tddp_etcd_range(etcd, key, false, 0, &patient, &answer));
        CHECK_INT(answer.count, 1);
        CHECK_INT(answer.pairs[0].key.size, 7);
        CHECK(memcmp(answer.pairs[0].key.data, key.data, 7) == 0);
        CHECK_INT(answer.pairs[0].value.size, size);
        CHECK(memcmp(answer.pairs[0].value.data, value, size) == 0);
        CHECK_INT(answer.pairs[0].mod_revision, revision);
        tddp_etcd_answer_free(&answer);
    }
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

TEST(a_lease_holds_keys_while_it_is_renewed)
{
    etcd_server server;
    char text[256];
    int64_t id;
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    CHECK_OK(tddp_etcd_lease_grant(etcd, 600, &patient, &id));
    (void)put(etcd, "held", "x", id);
    CHECK_OK(tddp_etcd_lease_renew(etcd, id, &patient));
    CHECK_TEXT(list(etcd, "held", text), "held=x");
    CHECK_OK(tddp_etcd_lease_revoke(etcd, id, &patient));
    CHECK_TEXT(list(etcd, "held", text), "");
    CHECK_STATUS(tddp_etcd_lease_renew(etcd, id, &patient), TDDP_NOT_FOUND);
    CHECK_STATUS(tddp_etcd_lease_revoke(etcd, id, &patient), TDDP_NOT_FOUND);
    /* One that nobody renews runs out by itself, on a slow machine before the key is put. */
    CHECK_OK(tddp_etcd_lease_grant(etcd, 1, &patient, &id));
    int64_t revision;
    const tddp_etcd_write write = {.key = slice("held"), .value = slice("y"), .lease = id};
    tddp_status status = tddp_etcd_put(etcd, &write, &patient, &revision);
    CHECK(status == TDDP_OK || status == TDDP_NOT_FOUND);
    CHECK_UNTIL(list(etcd, "held", text)[0] == '\0');
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

static void expect_change(tddp_etcd_watch *watch, const char *key, const char *value, bool deleted)
{
    tddp_etcd_pair pair;
    CHECK_OK(tddp_etcd_watch_next(watch, &patient, &pair));
    CHECK_TEXT(pair.key.data, key);
    CHECK_TEXT(pair.value.data, value);
    CHECK_INT(pair.deleted, deleted);
    tddp_etcd_pair_free(&pair);
}

TEST(a_watch_misses_nothing_although_its_server_is_killed)
{
    etcd_server server;
    int64_t id;
    tddp_etcd_watch *watch;
    tddp_etcd_pair pair;
    const tddp_wait moment = {20, NULL};
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    CHECK_OK(tddp_etcd_lease_grant(etcd, 600, &patient, &id));
    int64_t begin = put(etcd, "w/0", "before", 0);
    CHECK_OK(tddp_etcd_watch_open(etcd, slice("w/"), true, begin + 1, &watch));
    (void)put(etcd, "w/1", "first", id);
    (void)put(etcd, "other", "x", 0);
    expect_change(watch, "w/1", "first", false);
    CHECK_STATUS(tddp_etcd_watch_next(watch, &moment, &pair), TDDP_TIMEOUT);

    kill_etcd(&server);
    CHECK_STATUS(tddp_etcd_watch_next(watch, &moment, &pair), TDDP_TIMEOUT);
    start_etcd(&server);
    (void)put(etcd, "w/2", "", 0);
    CHECK_OK(tddp_etcd_lease_revoke(etcd, id, &patient));
    expect_change(watch, "w/2", "", false);
    expect_change(watch, "w/1", "", true);
    tddp_etcd_watch_close(watch);
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

TEST(a_watch_says_that_its_revision_is_compacted)
{
    etcd_server server;
    tddp_etcd_watch *watch;
    tddp_etcd_pair pair;
    tddp_etcd_answer answer = {0};
    char text[64];
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    int64_t first = put(etcd, "c", "1", 0);
    int64_t last = put(etcd, "c", "2", 0);
    int size = snprintf(text, sizeof text, "{\"revision\": \"%lld\"}", (long long)last);
    const tddp_bytes body = {.data = text, .size = (size_t)size};
    CHECK_OK(tddp_etcd_call(etcd, "/v3/kv/compaction", &body, &patient, &answer));
    tddp_etcd_answer_free(&answer);
    CHECK_OK(tddp_etcd_watch_open(etcd, slice("c"), false, first, &watch));
    CHECK_STATUS(tddp_etcd_watch_next(watch, &patient, &pair), TDDP_NOT_FOUND);
    tddp_etcd_watch_close(watch);
    CHECK_OK(tddp_etcd_watch_open(etcd, slice("c"), false, last, &watch));
    expect_change(watch, "c", "2", false);
    (void)put(etcd, "c", "3", 0);
    expect_change(watch, "c", "3", false);
    tddp_etcd_watch_close(watch);
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

TEST(another_endpoint_answers_for_one_that_is_dead_or_hangs)
{
    etcd_server first;
    etcd_server second;
    tddp_launch_endpoint endpoints[3];
    char text[256];
    make_etcd(&first);
    make_etcd(&second);
    (void)snprintf(endpoints[0].host, sizeof endpoints[0].host, "127.0.0.1");
    endpoints[0].port = check_free_port(); /* nobody is there */
    endpoints[1] = first.endpoint;
    endpoints[2] = second.endpoint;
    tddp_etcd *one = open_client(&first.endpoint, 1);
    tddp_etcd *two = open_client(&second.endpoint, 1);
    (void)put(one, "who", "first", 0);
    (void)put(two, "who", "second", 0);
    tddp_etcd *etcd = open_client(endpoints, 3);
    stop_etcd(&first);
    CHECK_TEXT(list(etcd, "who", text), "who=second");
    kill_etcd(&second);
    tddp_etcd_answer answer = {0};
    const tddp_wait short_wait = {50, NULL};
    CHECK_STATUS(tddp_etcd_range(etcd, slice("who"), false, 0, &short_wait, &answer), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "etcd does not answer: http://127.0.0.1:");
    tddp_etcd_answer_free(&answer);
    CHECK_INT(kill(first.pid, SIGCONT), 0);
    CHECK_TEXT(list(etcd, "who", text), "who=first");
    tddp_etcd_close(etcd);
    tddp_etcd_close(one);
    tddp_etcd_close(two);
    remove_etcd(&first);
    remove_etcd(&second);
}

TEST(a_token_ends_a_request)
{
    etcd_server server;
    tddp_etcd_answer answer = {0};
    tddp_cancel *cancel;
    char text[256];
    make_etcd(&server);
    tddp_etcd *etcd = open_client(&server.endpoint, 1);
    CHECK_TEXT(list(etcd, "x", text), "");
    stop_etcd(&server);
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait wait = {20000, cancel};
    CHECK_STATUS(tddp_etcd_range(etcd, slice("x"), false, 0, &wait, &answer), TDDP_CANCELED);
    tddp_etcd_answer_free(&answer);
    tddp_cancel_free(cancel);
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

static void call(tddp_etcd *etcd, const char *path, const char *body)
{
    tddp_etcd_answer answer = {0};
    const tddp_bytes bytes = {.data = (char *)(uintptr_t)body, .size = strlen(body)};
    CHECK_OK(tddp_etcd_call(etcd, path, &bytes, &patient, &answer));
    tddp_etcd_answer_free(&answer);
}

TEST(a_server_with_users_wants_a_name_and_a_password)
{
    etcd_server server;
    char text[256];
    tddp_etcd *etcd;
    tddp_etcd_answer answer = {0};
    make_etcd(&server);
    etcd = open_client(&server.endpoint, 1);
    call(etcd, "/v3/auth/user/add", "{\"name\": \"root\", \"password\": \"se\\\"cret\"}");
    call(etcd, "/v3/auth/role/add", "{\"name\": \"root\"}");
    call(etcd, "/v3/auth/user/grant", "{\"user\": \"root\", \"role\": \"root\"}");
    call(etcd, "/v3/auth/enable", "{}");
    CHECK_STATUS(tddp_etcd_range(etcd, slice("x"), false, 0, &patient, &answer), TDDP_STORE);
    tddp_etcd_answer_free(&answer);
    tddp_etcd_close(etcd);

    tddp_etcd_opts opts = {.endpoints = &server.endpoint,
                           .endpoint_count = 1,
                           .username = "root",
                           .password = "wrong"};
    CHECK_OK(tddp_etcd_open(&opts, &etcd));
    CHECK_STATUS(tddp_etcd_range(etcd, slice("x"), false, 0, &patient, &answer), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), "etcd refuses the user root: ");
    tddp_etcd_answer_free(&answer);
    tddp_etcd_close(etcd);

    opts.password = "se\"cret";
    CHECK_OK(tddp_etcd_open(&opts, &etcd));
    (void)put(etcd, "x", "1", 0);
    CHECK_TEXT(list(etcd, "x", text), "x=1");
    kill_etcd(&server); /* a server that is started again knows no token of before */
    start_etcd(&server);
    CHECK_TEXT(list(etcd, "x", text), "x=1");
    tddp_etcd_close(etcd);
    remove_etcd(&server);
}

TEST(what_is_no_answer_of_etcds_is_shown)
{
    static const char *const texts[] = {"<html>", "", "{\"kvs\": [{\"key\": \"?\"}]}",
                                        "{\"header\": {\"revision\": \"3\"}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        tddp_etcd_answer answer = {0};
        CHECK_STATUS(tddp_etcd_answer_read(texts[i], strlen(texts[i]), &answer), TDDP_PROTOCOL);
        CHECK_CONTAINS(tddp_error_message(), texts[i]);
        tddp_etcd_answer_free(&answer);
    }
}
