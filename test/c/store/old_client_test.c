/*
 * Our client at servers that are not like ours: of PyTorch 1.13, of a 2.x without queues, slow,
 * starting, or fickle ones.
 */
#include "kinds.h"
#include "script.h"

/* --- the dialect's bytes --------------------------------------------------------------------- */

/* "01 [10]tddp/hello [16]token [16]token": the token comes back. */
static void echo(int fd)
{
    char request[1 + 8 + 10 + 2 * 24];
    char head[64];
    size_t done = 0;
    CHECK_OK(tddp_net_recv(fd, request, sizeof request, &done, tddp_deadline_after_ms(10000), -1));
    size_t size = from_hex("01 [10]746464702f68656c6c6f [16]", head);
    CHECK_INT(memcmp(request, head, size), 0);
    CHECK_INT(memcmp(request + 19, request + 43, 24), 0);
    done = 0;
    CHECK_OK(tddp_net_send(fd, request + 19, 24, &done, tddp_deadline_after_ms(10000), -1));
}

static void refuse_newer(const script *s)
{
    int fd = script_accept(s);
    CHECK_RAW(fd, "00 cef7853c 0d");
    tddp_net_close(fd);
}

static void *play(void *data)
{
    script *s = data;
    refuse_newer(s);
    s->fd = script_accept(s);
    echo(s->fd);
    refuse_newer(s);
    for (size_t i = 0; i < s->count; i++) {
        CHECK_RAW(s->fd, s->steps[i].expect);
        if (s->steps[i].answer) {
            raw_send(s->fd, s->steps[i].answer);
        } else {
            CHECK_HUNG_UP(s->fd); /* the client has */
            tddp_net_close(s->fd);
            s->fd = script_accept(s);
            echo(s->fd);
        }
    }
    return NULL;
}

TEST(an_old_server_is_spoken_to_as_pytorch_1_13_does)
{
    static const step steps[] = {
        {"00 [2]2f6b [1]76", ""},
        {"05 [1] [2]2f6b", "00"},
        {"02 [2]2f6b", "[1]76"},
        {"03 [2]2f6e f9ffffffffffffff", "feffffffffffffff"},
        {"06", "[3]"},
        {"01 [2]2f63 [3]626164 [1]7a", "[1]79"},
        {"04 [2] [2]2f6b [5]2f6e6f7065", "01"},
        {"08 [3]2f6b32", "[1]"},
        {"00 [3]2f6d31 [1]31 00 [3]2f6d32 [2]3232", ""},
        {"05 [2] [3]2f6d31 [3]2f6d32", "00"},
        {"02 [3]2f6d31", "[1]31"},
        {"02 [3]2f6d32", "[2]3232"},
        {"05 [1] [5]2f6e6f7065", NULL},
        {"06", "[9]"},
    };
    script s;
    tddp_store *store = scripted(&s, play, steps, sizeof steps / sizeof *steps);
    tddp_blob blob;
    tddp_blob blobs[2];
    int64_t number;
    int flag;
    tddp_slice k_nope[] = {text("k"), text("nope")};
    tddp_slice m[] = {text("m1"), text("m2")};
    tddp_slice values[] = {text("1"), text("22")};
    CHECK_INT(tddp_store_has_extended_api(store), 0);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    CHECK_OK(tddp_store_add(store, text("n"), -7, NULL, &number));
    CHECK_INT(number, -2);
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 3);
    CHECK_OK(tddp_store_compare_set(store, text("c"), text("bad"), text("z"), NULL, &blob));
    CHECK_TEXT(blob.data, "y");
    tddp_blob_free(&blob);
    CHECK_OK(tddp_store_check(store, k_nope, 2, NULL, &flag));
    CHECK_INT(flag, 0);
    CHECK_OK(tddp_store_delete_key(store, text("k2"), NULL, &flag));
    CHECK_INT(flag, 1);
    CHECK_OK(tddp_store_multi_set(store, m, values, 2, NULL));
    CHECK_OK(tddp_store_multi_get(store, m, 2, NULL, blobs));
    CHECK_TEXT(blobs[1].data, "22");
    tddp_blob_free(&blobs[0]);
    tddp_blob_free(&blobs[1]);
    tddp_wait wait = within_ms(150);
    CHECK_STATUS(tddp_store_wait(store, &k_nope[1], 1, &wait), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "timed out after 150 ms waiting for the key \"nope\"");
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 9);
    script_end(&s, store);
}

/* --- which dialect it is --------------------------------------------------------------------- */

TEST(a_server_that_refused_the_newer_hello_once_is_not_taken_for_an_old_one)
{
    for (int refusals = 0; refusals < 2; refusals++) {
        setting s;
        setting_open(&s, refusals, false);
        tddp_store *store = client_of(s.port);
        CHECK_INT(tddp_store_has_extended_api(store), 1);
        CHECK_OK(tddp_store_queue_push(store, text("q"), text("v"), NULL));
        tddp_store_release(store);
        setting_close(&s);
    }
}

TEST(clones_know_that_the_server_is_an_old_one)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    CHECK_INT(atomic_load(&s.gate.refused), 2);
    CHECK_INT(atomic_load(&s.gate.accepted), 1);
    tddp_store *clone;
    CHECK_OK(tddp_store_clone(store, NULL, &clone));
    CHECK_INT(atomic_load(&s.gate.refused), 2);
    CHECK_INT(atomic_load(&s.gate.accepted), 2);
    CHECK_INT(tddp_store_has_extended_api(clone), 0);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(clone, "k", "v");
    tddp_store_release(clone);
    tddp_store_release(store);
    setting_close(&s);
}

/* Supports 2.x only: hangs up on the first `starting` connections, and is slow to answer others. */
typedef struct newer {
    int listen_fd;
    int starting;
    int slow_ms;
    atomic_int old_hellos;
    atomic_int stop;
} newer;

static void *be_newer(void *data)
{
    newer *n = data;
    int kept = -1;
    while (!atomic_load(&n->stop)) {
        int fd;
        tddp_net_address from;
        unsigned char hello[10];
        size_t done = 0;
        if (tddp_net_poll(n->listen_fd, POLLIN, tddp_deadline_after_ms(20), -1) ||
            !tddp_net_accept(n->listen_fd, &fd, &from)) {
            continue;
        }
        CHECK_OK(tddp_net_recv(fd, hello, 1, &done, tddp_deadline_after_ms(5000), -1));
        if (hello[0] != 0 || n->starting-- > 0) {
            atomic_fetch_add(&n->old_hellos, hello[0] != 0);
            tddp_net_close(fd);
            continue;
        }
        CHECK_OK(tddp_net_recv(fd, hello, sizeof hello, &done, tddp_deadline_after_ms(5000), -1));
        usleep((useconds_t)n->slow_ms * 1000);
        done = 0;
        CHECK_OK(tddp_net_send(fd, hello + 6, 4, &done, tddp_deadline_after_ms(5000), -1));
        CHECK_INT(kept, -1);
        kept = fd;
    }
    tddp_net_close(kept);
    return NULL;
}

static void meet_newer(int starting, int slow_ms, int old_hellos)
{
    newer n = {.starting = starting, .slow_ms = slow_ms};
    tddp_net_address local;
    pthread_t thread;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &n.listen_fd));
    CHECK_OK(tddp_net_local(n.listen_fd, &local));
    CHECK_INT(pthread_create(&thread, NULL, be_newer, &n), 0);
    tddp_store *store = client_of(tddp_net_port(&local));
    CHECK_INT(tddp_store_has_extended_api(store), 1);
    CHECK_INT(atomic_load(&n.old_hellos), old_hellos);
    atomic_store(&n.stop, 1);
    pthread_join(thread, NULL);
    tddp_store_release(store);
    tddp_net_close(n.listen_fd);
}

TEST(a_slow_server_is_not_taken_for_an_old_one)
{
    meet_newer(0, 1500, 0);
}

TEST(a_server_that_is_starting_is_not_taken_for_an_old_one)
{
    meet_newer(3, 0, 3);
}

TEST(a_server_that_hangs_up_on_both_hellos_is_tried_until_the_time_is_up)
{
    newer n = {.starting = 1 << 30};
    tddp_net_address local;
    pthread_t thread;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &n.listen_fd));
    CHECK_OK(tddp_net_local(n.listen_fd, &local));
    CHECK_INT(pthread_create(&thread, NULL, be_newer, &n), 0);
    tddp_store *store;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = tddp_net_port(&local);
    opts.timeout_ms = 400;
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "the hello was not answered");
    CHECK(atomic_load(&n.old_hellos) > 1);
    atomic_store(&n.stop, 1);
    pthread_join(thread, NULL);
    tddp_net_close(n.listen_fd);
}

/* --- what an old server lacks ---------------------------------------------------------------- */

static void check_lacking(tddp_store *store, const char *why)
{
    tddp_blob blob;
    tddp_blob_list list;
    tddp_store_entries entries;
    int64_t number;
    int set;
    CHECK_STATUS(tddp_store_queue_push(store, text("q"), text("v"), NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "queue_push");
    CHECK_CONTAINS(tddp_error_message(), why);
    CHECK_STATUS(tddp_store_queue_pop(store, text("q"), 1, NULL, &blob), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "queue_pop");
    CHECK_STATUS(tddp_store_queue_len(store, text("q"), NULL, &number), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "queue_len");
    CHECK_STATUS(tddp_store_list_keys(store, NULL, &list), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "list_keys");
    CHECK_STATUS(tddp_store_set_ephemeral(store, text("e"), text("v"), 0, 0, NULL, &set, NULL),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "set_ephemeral");
    CHECK_STATUS(tddp_store_watch(store, text("e"), NULL, &entries), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "watch");
    CHECK_STATUS(tddp_store_barrier(store, text("b"), 1, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "barrier");
    CHECK_CONTAINS(tddp_error_message(), why);
    /* The store is as good as before. */
    CHECK_VALUE(store, "k", "v");
}

TEST(what_an_old_server_lacks_is_named)
{
    setting s;
    setting_open(&s, -1, false);
    tddp_store *store = client_of(s.port);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    check_lacking(store, "its server is of PyTorch 1.13, which has no ");
    CHECK_INT(atomic_load(&s.gate.accepted), 1);
    tddp_store_release(store);
    setting_close(&s);
}

TEST(what_a_newer_server_lacks_is_found_out_once_and_named)
{
    setting s;
    setting_open(&s, 0, true);
    tddp_store *store = client_of(s.port);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v"); /* the gate looks at the first byte of what comes together */
    check_lacking(store, "its server hangs up at a request for ");
    CHECK_INT(atomic_load(&s.gate.accepted), 5); /* the first, and one after each of four */
    check_lacking(store, "its server hangs up at a request for ");
    CHECK_INT(atomic_load(&s.gate.accepted), 5);
    tddp_store *clone;
    CHECK_OK(tddp_store_clone(store, NULL, &clone));
    check_lacking(clone, "its server hangs up at a request for ");
    CHECK_INT(atomic_load(&s.gate.accepted), 6);
    tddp_store_release(clone);
    tddp_store_release(store);
    setting_close(&s);
}

TEST(a_server_that_ends_is_not_taken_for_one_that_lacks_something)
{
    setting s;
    setting_open(&s, 0, false);
    tddp_store *store = client_of(s.port);
    setting_close(&s);
    int64_t number;
    CHECK_STATUS(tddp_store_queue_len(store, text("q"), NULL, &number), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "queue_len: connection to ");
    tddp_store_release(store);
}
