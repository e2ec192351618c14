/* A barrier through the store that names who is missing, on threads and on processes. */
#include <tddp/meeting.h>

#include "processes.h"

enum { GAVE_UP, STORE, RANK }; /* events; one for each rank from RANK on */

typedef struct setup {
    int late;      /* the rank that does not come in time */
    int late_too;  /* another one, or -1 */
    int all_ranks; /* wait_all_ranks */
    char texts[MAX_RANKS][1024];
} setup;

static int64_t keys_of(tddp_store *store)
{
    int64_t count;
    CHECK_OK(tddp_store_num_keys(store, NULL, &count));
    return count;
}

static void all_come(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    for (int i = 0; i < 20; i++) {
        CHECK_OK(tddp_monitored_barrier(group, i % 2 ? 15000 : 0, i % 3 == 0, NULL));
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
}

TEST(all_pass_when_all_come)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_ranks(ranks, all_come, NULL);
    }
}

/* Whether a rank has arrived at the group's first barrier. */
static int has_arrived(tddp_group *group, int rank)
{
    tddp_store *part = tddp_group_store(group);
    tddp_meeting *meeting;
    const tddp_meeting_opts opts = {.store = part,
                                    .name = "monitored/1",
                                    .rank = 0,
                                    .world_size = 4,
                                    .sender = TDDP_MEETING_ALL};
    CHECK_OK(tddp_meeting_open(&opts, &meeting));
    CHECK_OK(tddp_meeting_read(meeting, NULL));
    int has = tddp_meeting_records(meeting)[rank].data != NULL;
    tddp_meeting_close(meeting);
    tddp_store_release(part);
    return has;
}

/* The keys of all barriers of this group. */
static int keys_of_barriers(tddp_group *group)
{
    tddp_store *part = tddp_group_store(group);
    tddp_blob_list keys;
    int count = 0;
    CHECK_OK(tddp_store_list_keys(part, NULL, &keys));
    for (size_t i = 0; i < keys.count; i++) {
        count += strstr(keys.blobs[i].data, "monitored/") != NULL;
    }
    tddp_blob_list_free(&keys);
    tddp_store_release(part);
    return count;
}

/* Rank 0 is in a hurry, and arrives when those who are in time have. */
static void await_punctual(const setup *self, tddp_group *group, int world_size)
{
    for (int rank = 1; rank < world_size && self->late != 0; rank++) {
        if (rank != self->late && rank != self->late_too) {
            CHECK_UNTIL(has_arrived(group, rank));
            CHECK(keys_of_barriers(group) > 0);
        }
    }
}

static void some_late(int rank, int world_size, tddp_store *store, void *data)
{
    setup *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    int late = rank == self->late || rank == self->late_too;
    int in_time = world_size - (self->late_too < 0 ? 1 : 2);
    CHECK_AWAIT(GAVE_UP, late ? in_time : 0);
    if (rank == 0) {
        await_punctual(self, group, world_size);
    }
    int hurries = rank == 0 || self->late == 0;
    CHECK_STATUS(tddp_monitored_barrier(group, hurries ? 300 : 20000, self->all_ranks, NULL),
                 TDDP_TIMEOUT);
    snprintf(self->texts[rank], sizeof self->texts[rank], "%s", tddp_error_message());
    check_signal(GAVE_UP);
    /* The group is as it was. */
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_monitored_barrier(group, 20000, 0, NULL));
    int32_t x = rank;
    CHECK_OK(tddp_all_reduce(group, buffer_of(&x, 1, TDDP_INT32), TDDP_REDUCE_MAX, 0, NULL));
    CHECK_INT(x, world_size - 1);
    /* All keys of the barriers are gone. */
    if (rank == 0) {
        CHECK_UNTIL(keys_of_barriers(group) == 0);
        CHECK(keys_of(store) > 0);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
}

static void expect_named(setup *self, const char *one, const char *two)
{
    run_ranks(4, some_late, self);
    CHECK_CONTAINS(self->texts[0], "monitored_barrier 1 of group \"default_pg\": ");
    CHECK_CONTAINS(self->texts[0], one);
    CHECK_CONTAINS(self->texts[0], two);
    CHECK_CONTAINS(self->texts[0], "did not arrive within 300 ms");
    for (int rank = 1; rank < 4; rank++) {
        CHECK_TEXT(self->texts[rank], self->texts[0]);
    }
}

TEST(the_missing_rank_is_named_on_all)
{
    setup self = {.late = 2, .late_too = -1};
    char pid[32];
    snprintf(pid, sizeof pid, ", pid %d)", (int)getpid());
    expect_named(&self, "rank 2 (host ", pid);
}

TEST(all_missing_ranks_are_named_if_wanted)
{
    setup self = {.late = 1, .late_too = 3, .all_ranks = 1};
    expect_named(&self, "rank 1 (host ", "), rank 3 (host ");
}

TEST(only_the_first_is_named_otherwise)
{
    setup self = {.late = 1, .late_too = 3};
    expect_named(&self, "rank 1 (host ", ") and 1 more did not arrive");
    CHECK(strstr(self.texts[0], "rank 3") == NULL);
}

TEST(a_missing_rank_0_is_named)
{
    setup self = {.late = 0, .late_too = -1};
    expect_named(&self, "rank 0 (host ", ") ");
}

static void interrupted(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    if (rank == 0) {
        tddp_cancel_trigger(cancel);
        CHECK_STATUS(tddp_monitored_barrier(group, 5000, 0, &(tddp_wait){-1, cancel}),
                     TDDP_CANCELED);
    } else {
        CHECK_STATUS(tddp_monitored_barrier(group, 300, 0, NULL), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "rank 0 (host ");
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_cancel_free(cancel);
    tddp_group_release(group);
}

TEST(it_can_be_interrupted)
{
    run_ranks(2, interrupted, NULL);
}

static void *interrupt_once_blocked(void *cancel)
{
    CHECK_AWAIT_BLOCKED(RANK);
    tddp_cancel_trigger(cancel);
    return NULL;
}

/* A rank that has arrived, and is interrupted then, keeps the others waiting no longer. */
static void interrupted_within(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    if (rank == 0) {
        pthread_t thread;
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        CHECK_INT(pthread_create(&thread, NULL, interrupt_once_blocked, cancel), 0);
        check_will_block(RANK);
        CHECK_STATUS(tddp_monitored_barrier(group, 60000, 0, &(tddp_wait){-1, cancel}),
                     TDDP_CANCELED);
        CHECK_CONTAINS(tddp_error_message(), "monitored_barrier 1 of group \"default_pg\": ");
        pthread_join(thread, NULL);
        tddp_cancel_free(cancel);
        check_signal(GAVE_UP);
    } else {
        CHECK_AWAIT(GAVE_UP, 1);
        CHECK_OK(tddp_monitored_barrier(group, 60000, 0, NULL));
    }
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_monitored_barrier(group, 20000, 0, NULL));
    tddp_group_release(group);
}

TEST(a_rank_that_is_interrupted_within_has_arrived)
{
    run_ranks(2, interrupted_within, NULL);
}

TEST(it_is_refused_where_operations_are)
{
    CHECK_STATUS(tddp_monitored_barrier(NULL, 0, 0, NULL), TDDP_INVALID_ARGUMENT);
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    setenv("TDDP_FAKE", "fail_at=1", 1);
    tddp_group *group = make_group("fake", 0, 1, store, 5000);
    CHECK_OK(tddp_monitored_barrier(group, 0, 0, NULL));
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_NETWORK);
    CHECK_STATUS(tddp_monitored_barrier(group, 0, 0, NULL), TDDP_GROUP_FAILED);
    tddp_group_release(group);
    group = make_group("fake", 0, 1, store, 5000);
    tddp_group_shutdown(group, 0);
    CHECK_STATUS(tddp_monitored_barrier(group, 0, 0, NULL), TDDP_GROUP_CLOSED);
    tddp_group_release(group);
    tddp_store_release(store);
}

/* The waits leave the connection to others: here to the backend, beside the barrier, which rank 1
 * comes to when the backend's first one is done. */
MULTI_TEST(other_threads_get_through, 2, 60)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 60000, NULL);
    tddp_work *works[10];
    for (int i = 0; i < 10; i++) {
        CHECK_OK(tddp_barrier(group, &works[i]));
    }
    if (rank == 0) {
        check_will_block(RANK);
        CHECK_OK(tddp_monitored_barrier(group, 60000, 0, NULL));
    } else {
        CHECK_AWAIT_BLOCKED(RANK);
        CHECK_OK(tddp_work_wait(works[0], NULL));
        CHECK_OK(tddp_monitored_barrier(group, 60000, 0, NULL));
    }
    for (int i = 0; i < 10; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    leave(group, store, world_size);
}

/* Whoever waits for it learns so at once, however long it would wait. */
static void lose(int rank, int world_size, int port, int victim, const char *how)
{
    tddp_store *store = victim == 0 ? open_store_of_rank_0(rank, world_size, STORE)
                                    : open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    char who[192];
    CHECK_OK(tddp_barrier(group, NULL));
    (void)name_of(group, victim, who);
    strcat(who, how);
    if (rank == victim) {
        for (int other = 0; other < world_size; other++) {
            if (other != victim) {
                CHECK_AWAIT_BLOCKED(RANK + other);
            }
        }
        die();
    }
    check_will_block(RANK + rank);
    CHECK_STATUS(tddp_monitored_barrier(group, 60000, rank % 2, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "monitored_barrier 1 of group \"default_pg\"");
    CHECK_CONTAINS(tddp_error_message(), who);
    if (victim != 0) {
        /* Those who are left need not wait either. */
        CHECK_STATUS(tddp_monitored_barrier(group, 60000, 0, NULL), TDDP_PEER_LOST);
        meet(store, "leave", world_size - 1);
    }
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(a_dead_rank_is_named, 3, 20)
{
    lose(rank, world_size, port, 2, ": its process has ended");
}

MULTI_TEST(a_dead_leader_that_hosts_the_store_is_named, 3, 20)
{
    lose(rank, world_size, port, 0, ": its process has ended; seen here: ");
}
