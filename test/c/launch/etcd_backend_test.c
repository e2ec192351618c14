/*
 * The rendezvous backend etcd against a real server, without nodes: what is written while who
 * leads, what hangs on a lease, and what a link sees.
 */
#include "base/base.h"
#include "events.h"
#include "launch/etcd_server.h"
#include "launch/rendezvous/backend.h"

static const tddp_launch_backend *const backend = &tddp_launch_etcd;
static tddp_launch_options options;
static etcd_server server;
static etcd_client *client;

static void set_up(void)
{
    make_etcd(&server);
    options.endpoint_count = 1;
    options.endpoints[0] = server.endpoint;
    client = open_client(&server.endpoint, 1, "", "");
}

static void tear_down(void)
{
    close_client(client);
    remove_etcd(&server);
}

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

static tddp_launch_link connected(const char *id, int silence_s)
{
    tddp_launch_link link = {
        .backend = backend,
        .options = &options,
        .run_id = "job",
        .times = {.read_ms = patient.timeout_ms, .silence_ms = (int64_t)silence_s * 1000}};
    (void)snprintf(link.id, sizeof link.id, "%s", id);
    CHECK_OK(backend->connect(&link, patient.timeout_ms));
    return link;
}

/* A node that has written its entry. */
static tddp_launch_link joined(const char *id)
{
    tddp_launch_link link = connected(id, 600);
    CHECK_OK(backend->put_entry(&link, slice(id), false, false));
    return link;
}

/* The job's keys. */
static const char *there(char text[256])
{
    return list_keys(client, "/torchrun/job/", "/torchrun/job0", text);
}

TEST(only_who_leads_writes_the_document)
{
    char text[256];
    set_up();
    tddp_launch_link one = joined("one");
    tddp_launch_link two = joined("two");
    CHECK_STATUS(backend->put_state(&one, slice(""), slice("A")), TDDP_NOT_FOUND);
    tddp_launch_link bare = connected("bare", 600);
    CHECK_STATUS(backend->lead(&bare), TDDP_NOT_FOUND); /* with no lease it would lead for ever */
    backend->close(&bare);
    CHECK_OK(backend->lead(&one));
    CHECK_STATUS(backend->lead(&two), TDDP_NOT_FOUND);
    CHECK_OK(backend->lead(&one)); /* it does */
    CHECK_OK(backend->put_state(&one, slice(""), slice("A")));
    CHECK_OK(backend->put_entry(&one, slice("one"), true, false)); /* with the document's lease */
    CHECK_STATUS(backend->put_state(&two, slice("A"), slice("B")), TDDP_NOT_FOUND);
    CHECK_TEXT(there(text), "/torchrun/job/leader=one /torchrun/job/node/one=one "
                            "/torchrun/job/node/two=two /torchrun/job/state=A");

    /* As if its lease had run out. Nobody leads, then another does. */
    (void)delete_key(client, "/torchrun/job/leader");
    CHECK_STATUS(backend->put_state(&one, slice("A"), slice("C")), TDDP_NOT_FOUND);
    CHECK_OK(backend->lead(&two));
    CHECK_STATUS(backend->put_state(&one, slice("A"), slice("C")), TDDP_NOT_FOUND);
    CHECK_STATUS(backend->lead(&one), TDDP_NOT_FOUND);
    CHECK_OK(backend->put_state(&two, slice("A"), slice("D")));
    CHECK_OK(backend->remove_entry(&two, "one"));
    CHECK_TEXT(there(text), "/torchrun/job/leader=two /torchrun/job/node/two=two "
                            "/torchrun/job/state=D");
    (void)delete_key(client, "/torchrun/job/leader");
    CHECK_OK(backend->lead(&one));
    CHECK_STATUS(backend->put_state(&two, slice("D"), slice("E")), TDDP_NOT_FOUND);
    backend->close(&one); /* hands over at once */
    CHECK_OK(backend->lead(&two));
    backend->close(&two);
    CHECK_TEXT(there(text), "/torchrun/job/state=D");
    tear_down();
}

/* Another one has led since: what was meant for the term before must not be written. */
TEST(a_term_ends_although_the_same_node_leads_again)
{
    char text[256];
    set_up();
    tddp_launch_link one = joined("one");
    CHECK_OK(backend->lead(&one));
    CHECK_OK(backend->put_state(&one, slice(""), slice("A")));
    (void)delete_key(client, "/torchrun/job/leader");
    (void)put_key(client, "/torchrun/job/leader", "one");
    CHECK_STATUS(backend->put_state(&one, slice("A"), slice("B")), TDDP_NOT_FOUND);
    CHECK_TEXT(list_keys(client, "/torchrun/job/state", "/torchrun/job/statf", text),
               "/torchrun/job/state=A");
    backend->close(&one);
    tear_down();
}

/* etcd has executed the request to lead, and the answer never came. */
TEST(a_node_leads_although_the_answer_was_lost)
{
    char text[256];
    set_up();
    tddp_launch_link one = joined("one");
    tddp_launch_link two = joined("two");
    (void)put_key(client, "/torchrun/job/leader", "one");
    CHECK_STATUS(backend->lead(&two), TDDP_NOT_FOUND);
    CHECK_OK(backend->lead(&one));
    CHECK_OK(backend->put_state(&one, slice(""), slice("A")));
    (void)delete_key(client, "/torchrun/job/leader");
    CHECK_OK(backend->lead(&two));
    backend->close(&two);
    backend->close(&one);
    CHECK_TEXT(there(text), "/torchrun/job/state=A");
    tear_down();
}

static void revoke_lease_of(const char *key)
{
    int64_t lease = key_number(&server, key, "lease");
    CHECK(lease != 0);
    (void)execute(client, "/v3/lease/revoke", tddp_format("{\"ID\": \"%lld\"}", (long long)lease));
}

TEST(what_has_gone_with_a_lease_is_put_again)
{
    char text[256];
    set_up();
    tddp_launch_link one = joined("one");
    CHECK_OK(backend->lead(&one));
    int64_t lease = key_number(&server, "/torchrun/job/leader", "lease");
    int64_t made = key_number(&server, "/torchrun/job/node/one", "mod_revision");
    CHECK_INT(key_number(&server, "/torchrun/job/node/one", "lease"), lease);
    CHECK_OK(backend->put_entry(&one, slice("one"), true, false)); /* which writes nothing */
    CHECK_INT(key_number(&server, "/torchrun/job/node/one", "mod_revision"), made);
    revoke_lease_of("/torchrun/job/leader");
    CHECK_TEXT(there(text), "");
    CHECK_OK(backend->put_entry(&one, slice("one"), true, false));
    CHECK(key_number(&server, "/torchrun/job/node/one", "lease") != lease);
    CHECK_STATUS(backend->put_state(&one, slice(""), slice("A")), TDDP_NOT_FOUND);
    CHECK_OK(backend->lead(&one));
    CHECK_OK(backend->put_state(&one, slice(""), slice("A")));

    /* A document's lease that has run out is another thing than another leader. */
    revoke_lease_of("/torchrun/job/state");
    CHECK_STATUS(backend->put_state(&one, slice("A"), slice("B")), TDDP_NOT_FOUND);
    CHECK_OK(backend->put_state(&one, slice("A"), slice("B")));
    CHECK_TEXT(there(text),
               "/torchrun/job/leader=one /torchrun/job/node/one=one /torchrun/job/state=B");

    CHECK_OK(backend->put_entry(&one, slice("left"), false, true));
    backend->close(&one);
    CHECK_TEXT(there(text), "/torchrun/job/node/one=left /torchrun/job/state=B");
    CHECK(key_number(&server, "/torchrun/job/node/one", "lease") != 0);
    tear_down();
}

TEST(an_entry_goes_when_nobody_renews_its_lease)
{
    char text[256];
    set_up();
    tddp_launch_link one = connected("one", 1);
    tddp_status status = backend->put_entry(&one, slice("one"), false, false);
    CHECK(status == TDDP_OK || status == TDDP_NOT_FOUND); /* on a slow machine it had run out */
    CHECK_UNTIL(there(text)[0] == '\0');
    backend->close(&one);
    tear_down();
}

static void expect_view(tddp_launch_link *link, tddp_launch_view *view, const char *leader,
                        const char *state)
{
    CHECK_OK(backend->watch(link, patient.timeout_ms, view));
    CHECK_TEXT(view->leader, leader);
    CHECK_TEXT(view->state.data ? view->state.data : "none", state);
    CHECK_STATUS(backend->watch(link, 20, view), TDDP_TIMEOUT);
}

TEST(what_a_link_sees)
{
    set_up();
    tddp_launch_view view = {0};
    tddp_launch_link one = connected("one", 600);
    tddp_launch_link two = joined("two");
    expect_view(&one, &view, "", "none");
    CHECK_OK(backend->lead(&two));
    expect_view(&one, &view, "two", "none");
    CHECK_OK(backend->put_state(&two, slice(""), slice("A")));
    expect_view(&one, &view, "two", "A");
    (void)put_key(client, "/torchrun/job1/state", "of another job");
    (void)put_key(client, "/torchrun/jo/state", "of another job");
    CHECK_STATUS(backend->watch(&one, 20, &view), TDDP_TIMEOUT);
    backend->close(&two);
    expect_view(&one, &view, "", "A");
    CHECK_OK(backend->connect(&one, patient.timeout_ms));
    expect_view(&one, &view, "", "A"); /* at once */

    kill_etcd(&server);
    start_etcd(&server);
    (void)put_key(client, "/torchrun/job/state", "B");
    do { /* what is there may have been listed before, too */
        CHECK_OK(backend->watch(&one, patient.timeout_ms, &view));
    } while (strcmp(view.state.data, "B") != 0);
    CHECK_STATUS(backend->watch(&one, 20, &view), TDDP_TIMEOUT);
    tddp_launch_view_free(&view);
    backend->close(&one);
    tear_down();
}

/* A request of the agent's ends what the link waits for, at any moment: also after a change was
 * seen, before it is read. */
TEST(a_change_is_seen_although_reading_it_was_canceled)
{
    tddp_cancel *cancel;
    char text[16];
    set_up();
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_launch_view view = {0};
    tddp_launch_link one = joined("one");
    one.cancel = cancel;
    expect_view(&one, &view, "", "none");
    for (int i = 0; i < 10; i++) {
        tddp_status status;
        (void)snprintf(text, sizeof text, "%d", i);
        (void)put_key(client, "/torchrun/job/state", text);
        tddp_cancel_trigger(cancel);
        do {
            status = backend->watch(&one, patient.timeout_ms, &view);
        } while (status == TDDP_OK);
        CHECK_STATUS(status, TDDP_CANCELED);
        tddp_cancel_reset(cancel);
        if (!view.state.data || strcmp(view.state.data, text) != 0) {
            expect_view(&one, &view, "", text);
        }
    }
    tddp_cancel_free(cancel);
    tddp_launch_view_free(&view);
    backend->close(&one);
    tear_down();
}
