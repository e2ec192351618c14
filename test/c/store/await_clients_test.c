/*
 * The process that hosts a store waits for its clients before it ends: until they have announced
 * that they leave by their keys, or have closed their connections, or died. A connection that is
 * opened by address counts as another process's, whichever thread opens it.
 */
#include <signal.h>
#include <sys/wait.h>

#include "kinds.h"

static tddp_store *hosted(void)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.is_server = 1;
    opts.timeout_ms = 20000;
    tddp_store *store;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    return store;
}

static tddp_status await_none(tddp_store *store, int64_t ms)
{
    tddp_wait wait = within_ms(ms);
    return tddp_store_await_clients(store, NULL, 0, &wait);
}

TEST(connections_of_the_host_itself_are_no_others)
{
    tddp_store *store = hosted();
    tddp_store *clone;
    tddp_store *view;
    CHECK_OK(await_none(store, 20000));
    CHECK_OK(tddp_store_clone(store, NULL, &clone));
    CHECK_OK(tddp_prefix_store_create("a", clone, &view));
    CHECK_OK(await_none(view, 20000));
    CHECK_OK(tddp_store_set(view, text("k"), text("v"), NULL));
    tddp_store_release(view);
    tddp_store_release(clone);
    CHECK_OK(await_none(store, 20000));
    CHECK_VALUE(store, "a/k", "v");
    tddp_store_release(store);
}

/* Whether the error says so: a server that has no processor for 20 ms has not counted yet. */
static bool times_out(tddp_store *store, const char *text)
{
    CHECK_STATUS(await_none(store, 20), TDDP_TIMEOUT);
    return strstr(tddp_error_message(), text);
}

TEST(others_are_waited_for_until_they_close)
{
    tddp_store *store = hosted();
    tddp_store *one = client_of(tddp_tcp_store_port(store));
    tddp_store *two = client_of(tddp_tcp_store_port(store));
    CHECK_UNTIL(times_out(store,
                          "timed out after 20 ms waiting for the store's clients to leave: 2 "
                          "connections are left"));
    tddp_store_release(one);
    CHECK_UNTIL(times_out(store, ": 1 connections are left"));
    CHECK_OK(tddp_store_set(two, text("k"), text("v"), NULL)); /* served meanwhile */
    CHECK_VALUE(store, "k", "v");
    tddp_store_release(two);
    CHECK_OK(await_none(store, 20000));
    tddp_store_release(store);
}

typedef struct waiting {
    tddp_store *store;
    tddp_wait wait;
    const char *key;
    tddp_status status;
} waiting;

static void *wait_there(void *data)
{
    waiting *w = data;
    tddp_slice key = text(w->key);
    w->status = tddp_store_await_clients(w->store, &key, 1, &w->wait);
    return NULL;
}

/* The wait has begun or begins soon; what ends it comes in any case. */
static void check_ends(waiting *w, void (*end)(void *), void *data, tddp_status expected)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, wait_there, w), 0);
    end(data);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_INT(w->status, expected);
}

static void announce_leaving(void *store)
{
    CHECK_OK(tddp_store_set(store, text("p/bye"), text("1"), NULL));
}

static void trigger(void *cancel)
{
    tddp_cancel_trigger(cancel);
}

static void release(void *store)
{
    tddp_store_release(store);
}

TEST(a_wait_ends_by_a_key_by_a_close_and_by_a_token)
{
    tddp_store *store = hosted();
    tddp_store *other = client_of(tddp_tcp_store_port(store));
    tddp_store *view;
    tddp_cancel *cancel;
    CHECK_OK(tddp_prefix_store_create("p", store, &view));
    CHECK_OK(tddp_cancel_create(&cancel));
    waiting w = {view, {20000, cancel}, "bye", TDDP_OK};
    check_ends(&w, trigger, cancel, TDDP_CANCELED);
    tddp_cancel_reset(cancel);
    check_ends(&w, announce_leaving, other, TDDP_OK);
    CHECK_STATUS(await_none(store, 20), TDDP_TIMEOUT); /* it is connected still */
    waiting again = {view, {20000, cancel}, "never", TDDP_OK};
    check_ends(&again, release, other, TDDP_OK);
    tddp_cancel_free(cancel);
    tddp_store_release(view);
    tddp_store_release(store);
}

TEST(a_client_that_dies_is_gone)
{
    tddp_store *store = hosted();
    pid_t child = fork();
    if (child == 0) {
        tddp_store *own = client_of(tddp_tcp_store_port(store));
        CHECK_OK(tddp_store_set(own, text("here"), text("1"), NULL));
        pause();
        _exit(0);
    }
    tddp_slice here = text("here");
    CHECK_OK(tddp_store_wait(store, &here, 1, NULL));
    CHECK_STATUS(await_none(store, 20), TDDP_TIMEOUT);
    kill(child, SIGKILL);
    CHECK_OK(await_none(store, 20000));
    CHECK_INT(waitpid(child, NULL, 0), child);
    tddp_store_release(store);
}

TEST(who_does_not_host_waits_for_nobody)
{
    FOR_EACH_KIND(f)
    {
        tddp_slice key = text("k");
        CHECK_OK(tddp_store_await_clients(f.store, &key, 1, NULL));
    }
    tddp_store *store = hosted();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        CHECK_STATUS(await_none(store, 20000), TDDP_FORKED);
        exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    tddp_store_release(store);
}
