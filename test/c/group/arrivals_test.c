/* How ranks arrive in the store to make a group, and what becomes of those that do not stay. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/peers.h"
#include "ranks.h"

enum { WORLD = 3 };

static tddp_status try_create(tddp_store *store, int rank, int world_size, int64_t timeout_ms,
                              tddp_group **out)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "fake";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = timeout_ms;
    return tddp_group_create(&opts, NULL, out);
}

typedef struct member {
    pthread_t thread;
    tddp_store *store;
    int rank;
    int world_size;
    bool alone; /* the others only seem to be there */
} member;

static void *create_and_meet(void *data)
{
    const member *self = data;
    tddp_group *group;
    CHECK_OK(try_create(self->store, self->rank, self->world_size, 20000, &group));
    if (!self->alone) {
        CHECK_OK(tddp_barrier(group, NULL));
    }
    tddp_group_release(group);
    return NULL;
}

static void all_create(tddp_store *store)
{
    member members[WORLD];
    for (int rank = 0; rank < WORLD; rank++) {
        members[rank] = (member){.store = store, .rank = rank, .world_size = WORLD};
        CHECK_OK(
            tddp_thread_start(&members[rank].thread, "member", create_and_meet, &members[rank]));
    }
    for (int rank = 0; rank < WORLD; rank++) {
        pthread_join(members[rank].thread, NULL);
    }
}

static void expect_missing(tddp_store *store, const char *ranks)
{
    tddp_group *group;
    CHECK_STATUS(try_create(store, 1, WORLD, 150, &group), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), ranks);
}

/* The keys that PyTorch's processes set while they meet, of 1.13 and of later versions. */
TEST(a_rank_that_is_a_process_of_pytorch_is_named)
{
    static const char *const keys[] = {"default_pg/0/0/rank_2", "default_pg/0//cpu//0/2"};
    setenv("TDDP_FAKE", "", 1);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        tddp_store *store;
        tddp_group *group;
        CHECK_OK(tddp_hash_store_create(20000, &store));
        CHECK_OK(tddp_store_set(store, (tddp_slice){keys[i], strlen(keys[i])},
                                (tddp_slice){"vm", 2}, NULL));
        CHECK_STATUS(try_create(store, 1, WORLD, 60000, &group), TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(),
                       "rank 2 of group \"default_pg\" is a process of PyTorch, which has begun");
        tddp_store_release(store);
    }
}

/* Nor does a group that is complete mind what else is in the store. */
TEST(a_group_that_is_complete_may_share_its_store_with_pytorch)
{
    tddp_store *store;
    setenv("TDDP_FAKE", "", 1);
    CHECK_OK(tddp_hash_store_create(20000, &store));
    CHECK_OK(tddp_store_set(store, (tddp_slice){"default_pg/0/0/rank_2", 21}, (tddp_slice){"vm", 2},
                            NULL));
    all_create(store);
    tddp_store_release(store);
}

TEST(a_rank_that_gave_up_comes_again)
{
    tddp_store *store;
    setenv("TDDP_FAKE", "", 1);
    CHECK_OK(tddp_hash_store_create(20000, &store));
    for (int i = 0; i < 3; i++) {
        expect_missing(store, "in vain for rank(s) 0, 2 of 3");
    }
    all_create(store);
    all_create(store);
    tddp_store_release(store);
}

static tddp_slice slice(const char *text)
{
    return (tddp_slice){text, strlen(text)};
}

/* What an attempt of another size has left in the store is over. */
TEST(a_failed_start_with_another_world_size)
{
    tddp_store *store;
    tddp_group *group;
    CHECK_OK(tddp_hash_store_create(20000, &store));
    for (int each = 0; each < 2; each++) {
        CHECK_STATUS(try_create(store, each, WORLD + 1, 150, &group), TDDP_TIMEOUT);
    }
    all_create(store);
    tddp_store_release(store);
}

/* The list counts, not the key that says it is complete: a rank may have given up meanwhile. */
TEST(it_is_said_to_be_complete_too_early)
{
    tddp_store *store;
    setenv("TDDP_FAKE", "", 1);
    CHECK_OK(tddp_hash_store_create(20000, &store));
    CHECK_OK(tddp_store_append(store, slice("default_pg/1/arrivals/list"),
                               (tddp_slice){"+2 3 5\nearly\0-2 3 0\n\0", 21}, NULL));
    CHECK_OK(tddp_store_set(store, slice("default_pg/1/arrivals/wake"), slice(""), NULL));
    expect_missing(store, "in vain for rank(s) 0, 2 of 3");
    CHECK_OK(tddp_store_set(store, slice("default_pg/1/arrivals/wake"), slice(""), NULL));
    all_create(store);
    tddp_store_release(store);
}

/* As if the last rank to come had been killed before it could say that all are there. */
TEST(nobody_says_that_it_is_complete)
{
    char record[TDDP_PEER_RECORD_BYTES];
    char line[TDDP_PEER_RECORD_BYTES + 16];
    int64_t count;
    tddp_store *store;
    setenv("TDDP_FAKE", "", 1);
    CHECK_OK(tddp_hash_store_create(20000, &store));
    member first = {.store = store, .rank = 0, .world_size = 2, .alone = true};
    CHECK_OK(tddp_thread_start(&first.thread, "member", create_and_meet, &first));
    CHECK_OK(tddp_peers_describe_self(1, record));
    int length = snprintf(line, sizeof line, "+1 2 %zu\n%s", strlen(record), record);
    CHECK_OK(tddp_store_append(store, slice("default_pg/1/arrivals/list"),
                               (tddp_slice){line, (size_t)length + 1}, NULL));
    do {
        CHECK_OK(tddp_store_add(store, slice("default_pg/1/arrivals/arrived"), 0, NULL, &count));
    } while (count == 0);
    CHECK_OK(tddp_store_add(store, slice("default_pg/1/arrivals/arrived"), 1, NULL, &count));
    CHECK_INT(count, 2);
    pthread_join(first.thread, NULL);
    tddp_store_release(store);
}

TEST(a_record_that_is_none)
{
    tddp_store *store;
    tddp_group *group;
    int64_t count;
    CHECK_OK(tddp_hash_store_create(20000, &store));
    CHECK_OK(tddp_store_append(store, slice("default_pg/1/arrivals/list"),
                               (tddp_slice){"+0 2 3\nwho", 11}, NULL));
    CHECK_OK(tddp_store_add(store, slice("default_pg/1/arrivals/arrived"), 1, NULL, &count));
    CHECK_STATUS(try_create(store, 1, 2, 20000, &group), TDDP_PROTOCOL);
    CHECK_CONTAINS(tddp_error_message(), "rank 0 introduced itself as \"who\"");
    tddp_store_release(store);
}
