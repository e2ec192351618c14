/*
 * Stores under hard conditions: every allocation failing once, and one to four processes that meet.
 */
#include "kinds.h"

#define TRY(call, undo)                                                \
    do {                                                               \
        tddp_fail_allocation(nth);                                     \
        tddp_status tried = call;                                      \
        tddp_fail_allocation(0);                                       \
        if (tried == TDDP_OK) {                                        \
            undo;                                                      \
        } else {                                                       \
            if (tried != TDDP_UNSUPPORTED) {                           \
                CHECK_STATUS(tried, TDDP_OUT_OF_MEMORY);               \
                failed = true;                                         \
            }                                                          \
        }                                                              \
        CHECK_OK(tddp_store_set(store, text("one"), text("1"), NULL)); \
        CHECK_OK(tddp_store_set(store, text("two"), text("2"), NULL)); \
    } while (0)

/* What an older server lacks. */
static bool survive_newer(tddp_store *store, long nth)
{
    tddp_blob blob;
    tddp_blob_list list;
    tddp_store_entries entries;
    int64_t number;
    int set;
    bool failed = false;
    for (int i = 0; i < 2; i++) { /* the second one joins a queue that is there */
        TRY(tddp_store_queue_push(store, text("queue"), text("12345"), NULL), (void)0);
    }
    TRY(tddp_store_queue_len(store, text("queue"), NULL, &number), CHECK(number <= 4));
    tddp_status status = tddp_store_queue_push(store, text("queue"), text("12345"), NULL);
    if (status != TDDP_UNSUPPORTED) {
        CHECK_OK(status);
        TRY(tddp_store_queue_pop(store, text("queue"), 1, NULL, &blob), {
            CHECK_TEXT(blob.data, "12345");
            tddp_blob_free(&blob);
        });
    }
    while (tddp_store_queue_pop(store, text("queue"), 0, NULL, &blob) == TDDP_OK) {
        tddp_blob_free(&blob);
    }
    TRY(tddp_store_list_keys(store, NULL, &list), tddp_blob_list_free(&list));
    TRY(tddp_store_set_ephemeral(store, text("mine"), text("1"), 0, 1, NULL, &set, &blob), {
        CHECK_TEXT(blob.data, "1");
        tddp_blob_free(&blob);
    });
    for (int i = 0; i < 2; i++) { /* another prefix is answered at once, and so is a new key */
        TRY(tddp_store_watch(store, text(i ? "on" : "tw"), NULL, &entries), {
            CHECK_INT(entries.keys.count, 1);
            tddp_store_entries_free(&entries);
        });
    }
    TRY(tddp_store_barrier(store, text("barrier"), 1, NULL), (void)0);
    return failed;
}

/* Runs every operation once with the nth allocation failing; false once none failed. */
static bool survive(tddp_store *store, long nth)
{
    tddp_slice keys[] = {text("one"), text("two")};
    tddp_slice values[] = {text("1"), text("2")};
    tddp_blob blobs[2];
    tddp_blob blob;
    int64_t number;
    int flag;
    bool failed = false;
    TRY(tddp_store_set(store, text("three"), text("3"), NULL), (void)0);
    TRY(tddp_store_get(store, text("one"), NULL, &blob), tddp_blob_free(&blob));
    TRY(tddp_store_add(store, text("four"), 1, NULL, &number), (void)0);
    TRY(tddp_store_compare_set(store, text("one"), text("1"), text("5"), NULL, &blob),
        tddp_blob_free(&blob));
    TRY(tddp_store_delete_key(store, text("three"), NULL, &flag), (void)0);
    TRY(tddp_store_num_keys(store, NULL, &number), (void)0);
    TRY(tddp_store_wait(store, keys, 2, NULL), (void)0);
    TRY(tddp_store_check(store, keys, 2, NULL, &flag), (void)0);
    TRY(tddp_store_append(store, text("two"), text("xxxxxxxxxxxxxxxxxxxxxxxx"), NULL), (void)0);
    TRY(tddp_store_multi_set(store, keys, values, 2, NULL), (void)0);
    TRY(tddp_store_multi_get(store, keys, 2, NULL, blobs), {
        tddp_blob_free(&blobs[0]);
        tddp_blob_free(&blobs[1]);
    });
    failed = survive_newer(store, nth) || failed;
    tddp_fail_allocation(nth);
    tddp_store *copy;
    tddp_status cloned = tddp_store_clone(store, NULL, &copy);
    tddp_fail_allocation(0);
    if (cloned == TDDP_OK) {
        tddp_store_release(copy);
    } else {
        CHECK_STATUS(cloned, TDDP_OUT_OF_MEMORY);
        failed = true;
    }
    return failed;
}

/* The server of the TCP store runs in a process of its own: allocations of its thread would be
 * counted too. */
MULTI_TEST(every_allocation_may_fail, 2, 60)
{
    if (rank == 1) {
        tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
        opts.host = "127.0.0.1";
        opts.port = port;
        tddp_store_server *server;
        CHECK_OK(tddp_store_server_start(&opts, &server));
        tddp_store *watcher = client_of(port);
        CHECK_VALUE(watcher, "done", "1");
        tddp_store_release(watcher);
        tddp_store_server_stop(server);
        return;
    }
    char path[64];
    snprintf(path, sizeof path, "/tmp/tddp_store_test_%d", (int)getpid());
    tddp_store *stores[8];
    gate old;
    stores[0] = client_of(port);
    CHECK_OK(tddp_hash_store_create(20000, &stores[1]));
    CHECK_OK(tddp_file_store_open(path, 1, 20000, &stores[2]));
    stores[3] = client_of(gate_open(&old, port, -1, false));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(tddp_prefix_store_create("p", stores[i], &stores[i + 4]));
    }
    for (int i = 0; i < 8; i++) {
        long nth = 1;
        while (survive(stores[i], nth)) {
            nth++;
        }
        printf("store %d: %ld allocations at most\n", i, nth - 1);
        CHECK(nth > 2);
    }
    CHECK_OK(tddp_store_set(stores[0], text("done"), text("1"), NULL));
    for (int i = 7; i >= 0; i--) {
        tddp_store_release(stores[i]);
    }
    gate_close(&old);
    CHECK(access(path, F_OK) != 0);
}

static tddp_store *open_kind(const char *kind, int rank, int world_size, int port, char path[64])
{
    tddp_store *store;
    if (strcmp(kind, "tcp") == 0) {
        tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
        opts.host = "127.0.0.1";
        opts.port = port;
        opts.world_size = world_size;
        opts.is_server = rank == 0;
        opts.timeout_ms = 20000;
        CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    } else {
        snprintf(path, 64, "/tmp/tddp_store_test_port_%d", port);
        CHECK_OK(tddp_file_store_open(path, world_size, 20000, &store));
    }
    return store;
}

enum { LEFT }; /* an event */

/* Everyone sets, gets everyone's, adds, and leaves through a barrier of counters. */
static void meet(const char *kind, int rank, int world_size, int port)
{
    char path[64] = "";
    tddp_store *store = open_kind(kind, rank, world_size, port, path);
    char key[32];
    char value[32];
    usleep((useconds_t)(5000 * (world_size - rank)));
    snprintf(key, sizeof key, "rank%d", rank);
    snprintf(value, sizeof value, "value of %d", rank);
    CHECK_OK(tddp_store_set(store, text(key), text(value), NULL));
    for (int other = 0; other < world_size; other++) {
        snprintf(key, sizeof key, "rank%d", other);
        snprintf(value, sizeof value, "value of %d", other);
        CHECK_VALUE(store, key, value);
    }
    int64_t sum = 0;
    for (int i = 0; i < 25; i++) {
        CHECK_OK(tddp_store_add(store, text("sum"), rank + 1, NULL, &sum));
    }
    CHECK_OK(tddp_store_add(store, text("arrived"), 1, NULL, &sum));
    if (sum == world_size) {
        CHECK_OK(tddp_store_set(store, text("all"), text("here"), NULL));
    }
    CHECK_VALUE(store, "all", "here");
    snprintf(value, sizeof value, "%d", 25 * world_size * (world_size + 1) / 2);
    CHECK_VALUE(store, "sum", value);
    CHECK_MEET(LEFT, world_size); /* rank 0 may host it */
    tddp_store_release(store);
}

#define MEETING(kind, processes)                         \
    MULTI_TEST(kind##_serves_##processes, processes, 30) \
    {                                                    \
        meet(#kind, rank, world_size, port);             \
    }

MEETING(tcp, 1)
MEETING(tcp, 2)
MEETING(tcp, 3)
MEETING(tcp, 4)
MEETING(file, 1)
MEETING(file, 2)
MEETING(file, 3)
MEETING(file, 4)
