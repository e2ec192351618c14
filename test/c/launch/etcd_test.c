/*
 * The client of etcd against real servers: what it stores, what it sees, and what becomes of it
 * when a server dies, hangs, or wants a login.
 */
#include "base/base.h"
#include "events.h"
#include "launch/etcd_server.h"

static const tddp_wait moment = {20, NULL};
static const tddp_wait some_time = {12000, NULL}; /* of which a silent endpoint has its part */

/* Begins to watch, or goes on, from what is there in `revision`: what lies below "w/". */
static tddp_status watch(etcd_client *client, int64_t revision, const tddp_wait *wait)
{
    return tddp_etcd_watch(
        &client->etcd,
        tddp_format("{\"create_request\": {\"key\": \"%s\", \"range_end\": \"%s\", "
                    "\"start_revision\": \"%lld\"}}",
                    base64("w/"), base64("w0"), (long long)revision + 1),
        revision, wait);
}

/* Asks for a key, which is to have that value if there is an answer. */
static tddp_status look(etcd_client *client, const char *key, const tddp_wait *wait,
                        const char *value)
{
    tddp_etcd_answer answer = {0};
    char *body = tddp_format("{\"key\": \"%s\"}", base64(key));
    tddp_status status = tddp_etcd_call(&client->etcd, "/v3/kv/range", body, wait, &answer);
    if (status == TDDP_OK) {
        CHECK_INT(answer.count, 1);
        CHECK_TEXT(answer.pairs[0].value.data, value);
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

TEST(keys_and_values_are_any_bytes)
{
    etcd_server server;
    char value[300];
    static const char key[] = "k\0\n\"\xff z";
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    for (size_t i = 0; i < sizeof value; i++) {
        value[i] = (char)i;
    }
    for (size_t size = sizeof value - 3; size <= sizeof value; size++) { /* each kind of padding */
        tddp_etcd_answer answer = {0};
        int64_t revision = execute(client, "/v3/kv/put",
                                   tddp_format("{\"key\": \"%s\", \"value\": \"%s\"}",
                                               base64_bytes(key, 7), base64_bytes(value, size)));
        char *body = tddp_format("{\"key\": \"%s\"}", base64_bytes(key, 7));
        CHECK_OK(tddp_etcd_call(&client->etcd, "/v3/kv/range", body, &patient, &answer));
        CHECK_INT(answer.count, 1);
        CHECK_INT(answer.pairs[0].key.size, 7);
        CHECK(memcmp(answer.pairs[0].key.data, key, 7) == 0);
        CHECK_INT(answer.pairs[0].value.size, size);
        CHECK(memcmp(answer.pairs[0].value.data, value, size) == 0);
        CHECK_INT(answer.mod_revision, revision);
        CHECK_INT(answer.revision, revision);
        tddp_etcd_answer_free(&answer);
    }
    close_client(client);
    remove_etcd(&server);
}

TEST(a_lease_that_has_run_out_is_not_found)
{
    etcd_server server;
    tddp_etcd_answer answer = {0};
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    CHECK_OK(tddp_etcd_call(&client->etcd, "/v3/lease/grant", tddp_format("{\"TTL\": \"600\"}"),
                            &patient, &answer));
    CHECK(answer.id != 0);
    CHECK_INT(answer.ttl, 600);
    long long id = (long long)answer.id;
    CHECK_OK(tddp_etcd_call(&client->etcd, "/v3/lease/keepalive",
                            tddp_format("{\"ID\": \"%lld\"}", id), &patient, &answer));
    CHECK_INT(answer.id, id);
    CHECK_INT(answer.ttl, 600);
    (void)execute(client, "/v3/lease/revoke", tddp_format("{\"ID\": \"%lld\"}", id));
    CHECK_OK(tddp_etcd_call(&client->etcd, "/v3/lease/keepalive",
                            tddp_format("{\"ID\": \"%lld\"}", id), &patient, &answer));
    CHECK_INT(answer.ttl, 0);
    CHECK_STATUS(tddp_etcd_call(&client->etcd, "/v3/lease/revoke",
                                tddp_format("{\"ID\": \"%lld\"}", id), &patient, &answer),
                 TDDP_NOT_FOUND);
    tddp_etcd_answer_free(&answer);
    close_client(client);
    remove_etcd(&server);
}

TEST(a_watch_misses_nothing_although_its_server_is_killed)
{
    etcd_server server;
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    int64_t seen = put_key(client, "w/0", "before");
    int64_t first = put_key(client, "w/1", "first");
    (void)put_key(client, "other", "x");
    CHECK_OK(watch(client, seen, &patient)); /* of before it was opened */
    CHECK_STATUS(watch(client, first, &moment), TDDP_TIMEOUT);
    int64_t second = put_key(client, "w/1", "second");
    CHECK_OK(watch(client, first, &patient));
    (void)put_key(client, "other", "y");
    CHECK_STATUS(watch(client, second, &moment), TDDP_TIMEOUT);
    int64_t third = delete_key(client, "w/0");
    CHECK_OK(watch(client, second, &patient));
    CHECK_STATUS(watch(client, third, &moment), TDDP_TIMEOUT);

    kill_etcd(&server);
    CHECK_OK(watch(client, third, &patient)); /* it has ended: what is there may have changed */
    start_etcd(&server);
    int64_t fourth = put_key(client, "w/2", "");
    CHECK_OK(watch(client, third, &patient));
    CHECK_STATUS(watch(client, fourth, &moment), TDDP_TIMEOUT);
    close_client(client);
    remove_etcd(&server);
}

/* Two changes that nobody has waited for are one thing to look at. */
TEST(a_watch_tells_once_of_what_was_seen_together)
{
    etcd_server server;
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    etcd_client *other = open_client(&server.endpoint, 1, "", "");
    int64_t seen = put_key(client, "w/0", "before");
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT);
    (void)put_key(other, "w/1", "one");
    int64_t last = put_key(other, "w/2", "two");
    CHECK_OK(watch(client, seen, &patient));
    CHECK_STATUS(watch(client, last, &moment), TDDP_TIMEOUT);
    close_client(other);
    close_client(client);
    remove_etcd(&server);
}

TEST(a_watch_whose_revision_is_compacted_goes_on_from_a_later_one)
{
    etcd_server server;
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    int64_t first = put_key(client, "w/c", "1");
    (void)put_key(client, "w/c", "2");
    int64_t last = put_key(client, "w/c", "3");
    (void)execute(client, "/v3/kv/compaction",
                  tddp_format("{\"revision\": \"%lld\"}", (long long)last));
    CHECK_OK(watch(client, first, &patient)); /* it may have changed */
    CHECK_STATUS(watch(client, last, &moment), TDDP_TIMEOUT);
    (void)put_key(client, "w/c", "4");
    CHECK_OK(watch(client, last, &patient));
    close_client(client);
    remove_etcd(&server);
}

MULTI_TEST(another_endpoint_answers_for_one_that_is_dead_or_hangs, 1, 60)
{
    etcd_server first;
    etcd_server second;
    tddp_launch_endpoint endpoints[3];
    make_etcd(&first);
    make_etcd(&second);
    (void)snprintf(endpoints[0].host, sizeof endpoints[0].host, "127.0.0.1");
    endpoints[0].port = check_free_port(); /* nobody is there */
    endpoints[1] = first.endpoint;
    endpoints[2] = second.endpoint;
    etcd_client *one = open_client(&first.endpoint, 1, "", "");
    etcd_client *two = open_client(&second.endpoint, 1, "", "");
    (void)put_key(one, "who", "first");
    (void)put_key(two, "who", "second");
    etcd_client *client = open_client(endpoints, 3, "", "");
    stop_etcd(&first);
    CHECK_OK(look(client, "who", &some_time, "second"));
    kill_etcd(&second);
    const tddp_wait short_wait = {50, NULL};
    CHECK_STATUS(look(client, "who", &short_wait, NULL), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "etcd does not answer: http://127.0.0.1:");
    CHECK_INT(kill(first.pid, SIGCONT), 0);
    CHECK_OK(look(client, "who", &some_time, "first"));
    close_client(client);
    close_client(one);
    close_client(two);
    remove_etcd(&first);
    remove_etcd(&second);
}

/* The endpoint that a request has found silent is no longer watched. */
MULTI_TEST(a_watch_follows_to_the_endpoint_that_answers, 1, 60)
{
    etcd_server first;
    etcd_server second;
    tddp_launch_endpoint endpoints[2];
    make_etcd(&first);
    make_etcd(&second);
    endpoints[0] = first.endpoint;
    endpoints[1] = second.endpoint;
    etcd_client *two = open_client(&second.endpoint, 1, "", "");
    etcd_client *client = open_client(endpoints, 2, "", "");
    int64_t seen = put_key(client, "w/0", "first");
    while (put_key(two, "w/0", "second") < seen) { /* its own revisions: they are two clusters */
    }
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT);
    stop_etcd(&first);
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT); /* a watch cannot know */
    CHECK_OK(look(client, "w/0", &some_time, "second"));
    CHECK(put_key(two, "w/0", "again") > seen);
    CHECK_OK(watch(client, seen, &patient));
    CHECK_INT(client->etcd.watched, 1);
    close_client(client);
    close_client(two);
    remove_etcd(&first);
    remove_etcd(&second);
}

TEST(a_token_ends_a_request_and_a_watch)
{
    etcd_server server;
    tddp_cancel *cancel;
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    (void)put_key(client, "x", "1");
    stop_etcd(&server);
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait wait = {20000, cancel};
    CHECK_STATUS(look(client, "x", &wait, "1"), TDDP_CANCELED);
    CHECK_STATUS(watch(client, 1, &wait), TDDP_CANCELED);
    tddp_cancel_free(cancel);
    close_client(client);
    remove_etcd(&server);
}

TEST(a_server_with_users_wants_a_name_and_a_password)
{
    etcd_server server;
    make_etcd(&server);
    etcd_client *client = open_client(&server.endpoint, 1, "", "");
    (void)execute(client, "/v3/auth/user/add",
                  tddp_format("{\"name\": \"root\", \"password\": \"se\\\"cret\"}"));
    (void)execute(client, "/v3/auth/role/add", tddp_format("{\"name\": \"root\"}"));
    (void)execute(client, "/v3/auth/user/grant",
                  tddp_format("{\"user\": \"root\", \"role\": \"root\"}"));
    (void)execute(client, "/v3/auth/enable", tddp_format("{}"));
    CHECK_STATUS(look(client, "x", &patient, ""), TDDP_STORE);
    close_client(client);

    client = open_client(&server.endpoint, 1, "root", "wrong");
    CHECK_STATUS(look(client, "x", &patient, ""), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), "etcd refuses the user root: ");
    CHECK(!strstr(tddp_error_message(), "wrong"));
    close_client(client);

    client = open_client(&server.endpoint, 1, "root", "se\"cret");
    (void)put_key(client, "x", "1");
    CHECK_OK(look(client, "x", &patient, "1"));
    int64_t seen = put_key(client, "w/1", "1");
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT);
    char *first = tddp_copy_string(client->etcd.authorization);
    CHECK(first != NULL);
    kill_etcd(&server); /* a server that is started again may know no token of before */
    start_etcd(&server);
    CHECK_OK(look(client, "x", &patient, "1"));
    tddp_status status = watch(client, seen, &moment); /* it may be seen only now that it ended */
    CHECK(status == TDDP_OK || status == TDDP_TIMEOUT);
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT);
    /* And one knows none of before the password was changed. */
    (void)execute(client, "/v3/auth/user/changepw",
                  tddp_format("{\"name\": \"root\", \"password\": \"new\"}"));
    (void)snprintf(client->options.conf.etcd.password, TDDP_LAUNCH_HOST_BYTES, "new");
    CHECK_OK(look(client, "x", &patient, "1"));
    CHECK(strcmp(first, client->etcd.authorization) != 0);
    free(first);
    CHECK_STATUS(watch(client, seen, &moment), TDDP_TIMEOUT);
    (void)put_key(client, "w/1", "2");
    CHECK_OK(watch(client, seen, &patient));
    close_client(client);
    remove_etcd(&server);
}

TEST(what_is_no_answer_of_etcds_is_shown)
{
    static const char *const texts[] = {"<html>",
                                        "",
                                        "{}",
                                        "[]",
                                        "{\"error\": \"Forbidden\"}",
                                        "{\"header\": {}, \"kvs\": [{\"key\": \"?\"}]}",
                                        "{\"header\": {\"revision\": \"3\"}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        tddp_etcd_answer answer = {0};
        CHECK_STATUS(tddp_etcd_answer_read(texts[i], strlen(texts[i]), &answer), TDDP_PROTOCOL);
        CHECK_CONTAINS(tddp_error_message(), texts[i]);
        tddp_etcd_answer_free(&answer);
    }
}

TEST(only_base64_is_a_key)
{
    static const char *const damaged[] = {
        "Zg", "Zg=", "Zg===", "Z===", "Zm=v", "Zm9v=", "Zm 9", "="};
    static const char *const sound[][2] = {{"", ""},
                                           {"Zg==", "f"},
                                           {"Zm8=", "fo"},
                                           {"Zm9v", "foo"},
                                           {"+/+/Zg==", "\xfb\xff\xbf"
                                                        "f"}};
    char text[128];
    for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
        tddp_etcd_answer answer = {0};
        (void)snprintf(text, sizeof text, "{\"header\": {}, \"kvs\": [{\"key\": \"%s\"}]}",
                       damaged[i]);
        CHECK_STATUS(tddp_etcd_answer_read(text, strlen(text), &answer), TDDP_PROTOCOL);
        tddp_etcd_answer_free(&answer);
    }
    for (size_t i = 0; i < sizeof sound / sizeof sound[0]; i++) {
        tddp_etcd_answer answer = {0};
        (void)snprintf(text, sizeof text, "{\"header\": {}, \"kvs\": [{\"key\": \"%s\"}]}",
                       sound[i][0]);
        CHECK_OK(tddp_etcd_answer_read(text, strlen(text), &answer));
        CHECK_TEXT(answer.pairs[0].key.data, sound[i][1]);
        CHECK_INT(answer.pairs[0].key.size, strlen(sound[i][1]));
        CHECK_TEXT(base64(sound[i][1]), sound[i][0]);
        tddp_etcd_answer_free(&answer);
    }
}
