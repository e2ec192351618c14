/* Failures under difficult conditions: without memory, during a shutdown, in several groups at
 * once; and the log lines while ranks are missing at creation. */
#include "group/group.h"
#include "processes.h"

/* From base's private header: the nth allocation from now fails. */
bool tddp_fail_allocation(long nth);

enum { BEGUN, OVER }; /* an event */

enum { LINES = 2 };

typedef struct lines {
    int count;
    char text[LINES][512];
    tddp_cancel *cancel;
} lines;

/* Ends the wait by its last line. On the thread that waits. */
static void store_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    lines *self = data;
    if (level != TDDP_LOG_WARN || strcmp(room, "group") != 0) {
        return;
    }
    if (self->count < LINES) {
        snprintf(self->text[self->count], sizeof self->text[0], "%s", text);
    }
    if (++self->count == LINES) {
        tddp_cancel_trigger(self->cancel);
    }
}

/* After one second here and after another, ten outside tests. */
MULTI_TEST(missing_ranks_are_logged_after_a_while, 1, 30)
{
    CHECK_INT(tddp_group_missing_log_interval_ms, 10000);
    tddp_group_missing_log_interval_ms = 1000;
    lines seen = {0};
    CHECK_OK(tddp_cancel_create(&seen.cancel));
    tddp_log_set_sink(store_line, &seen);
    tddp_store *store = open_store(0, 1, port);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "fake";
    opts.store = store;
    opts.rank = 1;
    opts.world_size = 4;
    opts.timeout_ms = 20000;
    CHECK_STATUS(tddp_group_create(&opts, &(tddp_wait){-1, seen.cancel}, &group), TDDP_CANCELED);
    CHECK_INT(seen.count, LINES);
    char expected[256];
    snprintf(expected, sizeof expected, " s in the store at 127.0.0.1:%d for rank(s) 0, 2, 3 of 4",
             port);
    for (int i = 0; i < LINES; i++) {
        int waited = 0;
        CHECK_INT(sscanf(seen.text[i], "rank 1 of \"default_pg\" has waited %d s", &waited), 1);
        CHECK(waited >= i + 1);
        CHECK_CONTAINS(seen.text[i], expected);
    }
    tddp_group_missing_log_interval_ms = 10000;
    opts.timeout_ms = 100;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_TIMEOUT);
    snprintf(expected, sizeof expected,
             "s in vain for rank(s) 0, 2, 3 of 4: start them with the same store at "
             "127.0.0.1:%d, name and world size",
             port);
    CHECK_CONTAINS(tddp_error_message(), expected);
    CHECK_INT(seen.count, LINES);
    tddp_log_set_sink(NULL, NULL);
    tddp_cancel_free(seen.cancel);
    tddp_store_release(store);
}

typedef struct short_memory {
    long nth;
    pthread_barrier_t ready;
    tddp_status got[2];
    char texts[2][2048];
} short_memory;

static void fail_without_memory(int rank, int world_size, tddp_store *store, void *data)
{
    short_memory *self = data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    limit_to(group, 300);
    pthread_barrier_wait(&self->ready);
    if (rank == 0) {
        tddp_fail_allocation(self->nth);
    }
    pthread_barrier_wait(&self->ready);
    self->got[rank] = tddp_barrier(group, NULL);
    snprintf(self->texts[rank], sizeof self->texts[rank], "%s", tddp_error_message());
    pthread_barrier_wait(&self->ready);
    tddp_fail_allocation(0);
    CHECK(self->got[rank] != TDDP_OK);
    /* A call without memory was not queued: then the next one raises the other's timeout. */
    tddp_status next = tddp_barrier(group, NULL);
    CHECK(next == TDDP_GROUP_FAILED ||
          (self->got[rank] == TDDP_OUT_OF_MEMORY && next == TDDP_PEER_LOST));
    tddp_group_release(group);
}

/* Whichever allocation fails, both ranks return a failure with a text. */
MULTI_TEST(failures_are_reported_without_memory, 1, 60)
{
    setenv("TDDP_FAKE", "fail_at=2,rank=1", 1);
    setenv("TDDP_FR_BUFFER_SIZE", "10", 1);
    for (long nth = 1; nth < 40; nth++) {
        short_memory self = {.nth = nth};
        CHECK_INT(pthread_barrier_init(&self.ready, NULL, 2), 0);
        run_ranks(2, fail_without_memory, &self);
        CHECK(self.texts[0][0] && self.texts[1][0]);
        pthread_barrier_destroy(&self.ready);
    }
}

/* Every group of a job fails at the same moment, on different ranks first. */
static void many_at_once(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    enum { GROUPS = 6 };
    tddp_group *groups[GROUPS];
    tddp_work *works[GROUPS];
    for (int i = 0; i < GROUPS; i++) {
        char name[16];
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        snprintf(name, sizeof name, "g%d", i);
        opts.backend = "fake";
        opts.name = name;
        opts.store = store;
        opts.rank = rank;
        opts.world_size = world_size;
        opts.parent = i ? groups[0] : NULL;
        opts.timeout_ms = 20000;
        CHECK_OK(tddp_group_create(&opts, NULL, &groups[i]));
        works[i] = NULL;
    }
    /* In each one rank is missing, and another times out after the third has started. */
    for (int i = 0; i < GROUPS; i++) {
        if ((i + 2) % world_size == rank) {
            CHECK_OK(tddp_barrier(groups[i], &works[i]));
        }
    }
    CHECK_MEET(BEGUN, world_size);
    for (int i = 0; i < GROUPS; i++) {
        if (i % world_size == rank) {
            limit_to(groups[i], 400);
            CHECK_OK(tddp_barrier(groups[i], &works[i]));
        }
    }
    for (int i = 0; i < GROUPS; i++) {
        if (works[i]) {
            char late[64];
            tddp_status status = tddp_work_wait(works[i], NULL);
            CHECK_STATUS(status, i % world_size == rank ? TDDP_TIMEOUT : TDDP_PEER_LOST);
            snprintf(late, sizeof late, "not arrived: rank %d (", (i + 1) % world_size);
            if (status == TDDP_TIMEOUT) {
                CHECK_CONTAINS(tddp_error_message(), late);
                CHECK_CONTAINS(tddp_error_message(), "in no operation yet");
            } else {
                CHECK_CONTAINS(tddp_error_message(), "failed first, in barrier 1");
            }
            tddp_work_release(works[i]);
        }
    }
    CHECK_MEET(OVER, world_size); /* who leaves is lost to those that wait */
    for (int i = 0; i < GROUPS; i++) {
        tddp_group_release(groups[i]);
    }
}

TEST(many_groups_fail_at_once)
{
    run_ranks(3, many_at_once, NULL);
}

/* One rank shuts down while another's operation fails. */
static void end_meanwhile(int rank, int world_size, tddp_store *store, void *data)
{
    int pause = *(int *)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    CHECK_OK(tddp_barrier(group, NULL));
    limit_to(group, 100);
    if (rank == 0) {
        tddp_status status = tddp_barrier(group, NULL);
        CHECK(status == TDDP_TIMEOUT || status == TDDP_PEER_LOST);
    } else {
        usleep((unsigned)pause); /* any moment will do */
    }
    tddp_group_shutdown(group, 0);
    tddp_group_release(group);
}

TEST(a_group_may_be_shut_down_while_another_rank_fails)
{
    for (int pause = 90000; pause < 130000; pause += 4000) {
        run_ranks(3, end_meanwhile, &pause);
    }
}
