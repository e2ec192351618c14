/*
 * The failure detector, with ranks as processes over a TCP store: every rank names the root cause
 * soon, also where no operation waits. Where the backend must not see anything of other ranks its
 * operation is dropped: only the failure detector knows.
 */
#include <signal.h>
#include <sys/wait.h>

#include "args.h"
#include "processes.h"
#include "recorded.h"

enum { STARTED, LEFT, STORE, RANK }; /* events; one for each rank from RANK on */

static tddp_status sum(tddp_group *group, size_t count)
{
    static float x[64];
    return tddp_all_reduce(group, buffer_of(x, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
}

static tddp_work *begin_sum(tddp_group *group, size_t count)
{
    static float x[64];
    tddp_work *work;
    CHECK_OK(tddp_all_reduce(group, buffer_of(x, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    return work;
}

/* Signals that the work has started, and returns its outcome. */
static tddp_status signal_and_wait(tddp_group *group, tddp_work *work)
{
    await_started(group, (int)tddp_work_sequence(work));
    check_signal(STARTED);
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static void expect(tddp_status got, tddp_status status, const char *one, const char *two)
{
    CHECK_STATUS(got, status);
    CHECK_CONTAINS(tddp_error_message(), one);
    CHECK_CONTAINS(tddp_error_message(), two);
}

MULTI_TEST(peers_are_known, 3, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    char key[16];
    char pid[16];
    snprintf(key, sizeof key, "pid%d", rank);
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    CHECK_OK(tddp_store_set(store, (tddp_slice){key, strlen(key)}, (tddp_slice){pid, strlen(pid)},
                            NULL));
    char host[256];
    CHECK_INT(gethostname(host, sizeof host), 0);
    for (int i = 0; i < world_size; i++) {
        tddp_blob stored;
        tddp_peer peer;
        snprintf(key, sizeof key, "pid%d", i);
        CHECK_OK(tddp_store_get(store, (tddp_slice){key, strlen(key)}, NULL, &stored));
        CHECK_OK(tddp_group_peer(group, i, &peer));
        CHECK_INT(peer.pid, atoi(stored.data));
        CHECK_TEXT(peer.host, host);
        CHECK_INT(peer.global_rank, i);
        CHECK_INT(strlen(peer.host_id), 16);
        tddp_blob_free(&stored);
    }
    tddp_peer peer;
    CHECK_STATUS(tddp_group_peer(group, 3, &peer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "rank 3: expected 0 to 2");
    CHECK_STATUS(tddp_group_peer(NULL, 0, &peer), TDDP_INVALID_ARGUMENT);
    leave(group, store, world_size);
}

/* From this operation of a group on, one that waits sees nothing of other ranks. */
static void be_blind_at(int number)
{
    char text[32];
    snprintf(text, sizeof text, "drop_at=%d", number);
    setenv("TDDP_FAKE", text, 1);
}

/* Rank 0 times out and finds that the last rank is dead; rank 1 is notified within the same
 * operation, others before their next one. */
static void one_dies(int rank, int world_size, int port)
{
    be_blind_at(2);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    int dead = world_size - 1;
    char who[128];
    (void)name_of(group, dead, who);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == dead) {
        die();
    }
    if (rank == 0) {
        CHECK_AWAIT_END(dead);
        CHECK_AWAIT(STARTED, dead > 1); /* rank 1 */
        limit_to(group, 300);
        expect(sum(group, 3), TDDP_TIMEOUT, "all_reduce 2 of group \"default_pg\" on rank 0 of",
               "not done after 300 ms");
        char text[256];
        snprintf(text, sizeof text, "%s: its process has ended", who);
        CHECK_CONTAINS(tddp_error_message(), text);
    } else if (rank == 1) {
        expect(signal_and_wait(group, begin_sum(group, 3)), TDDP_PEER_LOST,
               "all_reduce 2 of group \"default_pg\" on rank 1 of", "lost rank ");
        CHECK_CONTAINS(tddp_error_message(), who);
        CHECK_CONTAINS(tddp_error_message(), "its process has ended");
    } else {
        CHECK_UNTIL(has_failed(group));
        expect(sum(group, 3), TDDP_PEER_LOST,
               "all_reduce: group \"default_pg\" has failed on another rank", who);
    }
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), who);
    leave(group, store, world_size - 1);
}

MULTI_TEST(a_dead_peer_is_named_on_two_ranks, 2, 20)
{
    one_dies(rank, world_size, port);
}

MULTI_TEST(a_dead_peer_is_named_on_three_ranks, 3, 20)
{
    one_dies(rank, world_size, port);
}

MULTI_TEST(a_dead_peer_is_named_on_four_ranks, 4, 20)
{
    one_dies(rank, world_size, port);
}

MULTI_TEST(the_first_failed_rank_is_named_by_the_others, 3, 20)
{
    setenv("TDDP_FAKE", "fail_at=2,rank=1", 1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    char who[128];
    char text[256];
    (void)name_of(group, 1, who);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        expect(tddp_barrier(group, NULL), TDDP_NETWORK,
               "barrier 2 of group \"default_pg\" on rank 1 of 3", "asked to fail by TDDP_FAKE");
    } else {
        snprintf(text, sizeof text,
                 "%s failed first, in barrier 2: asked to fail by TDDP_FAKE (TDDP_NETWORK)", who);
        /* A rank may submit it after the notice of the failure. */
        expect(tddp_barrier(group, NULL), TDDP_PEER_LOST, "group \"default_pg\"", text);
    }
    leave(group, store, world_size);
}

MULTI_TEST(a_lost_peer_that_is_alive_is_named_with_its_position, 3, 20)
{
    be_blind_at(2);
    if (rank == 0) {
        setenv("TDDP_FAKE", "lose_at=2", 1);
    }
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    char who[128];
    char text[256];
    snprintf(text, sizeof text, "%s failed first, in barrier 2: asked to lose a peer",
             name_of(group, 0, who));
    /* A rank may submit it after the notice of the failure. */
    expect(tddp_barrier(group, NULL), TDDP_PEER_LOST,
           rank == 0 ? "barrier 2 of group \"default_pg\"" : "group \"default_pg\"",
           rank == 0 ? "asked to lose a peer" : text);
    leave(group, store, world_size);
}

/* Rank 0 waits alone: 1 is behind, 2 is elsewhere, 3 has left. */
MULTI_TEST(a_timeout_names_the_positions_of_all_ranks, 4, 20)
{
    be_blind_at(3);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    char who[128];
    char text[256];
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        CHECK_AWAIT(STARTED, 1);
        CHECK_AWAIT(LEFT, 1);
        limit_to(group, 500);
        expect(sum(group, 3), TDDP_TIMEOUT, "all_reduce 3 of group", "arrived: rank(s) 0");
        snprintf(text, sizeof text, "not arrived: %s: in no operation, its last was barrier 2, ",
                 name_of(group, 1, who));
        CHECK_CONTAINS(tddp_error_message(), text);
        snprintf(text, sizeof text, "%s: in broadcast 3 (\"weights [4]\") for ",
                 name_of(group, 2, who));
        CHECK_CONTAINS(tddp_error_message(), text);
        (void)name_of(group, 3, who);
        CHECK_CONTAINS(tddp_error_message(), who);
        CHECK_CONTAINS(tddp_error_message(), "; it has destroyed the group");
    } else if (rank == 1) {
        CHECK_UNTIL(has_failed(group));
        snprintf(text, sizeof text, "%s failed first, in all_reduce 3: not done after 500 ms",
                 name_of(group, 0, who));
        expect(sum(group, 3), TDDP_PEER_LOST, "has failed on another rank", text);
    } else if (rank == 2) {
        float x[4];
        tddp_work *work;
        const tddp_op_args args = {.size = sizeof args,
                                   .kind = TDDP_OP_BROADCAST,
                                   .output = buffer_of(x, 4, TDDP_FLOAT32),
                                   .description = "weights [4]"};
        CHECK_OK(tddp_submit(group, &args, &work));
        expect(signal_and_wait(group, work), TDDP_PEER_LOST, "broadcast 3 of group",
               "failed first, in all_reduce 3");
    } else {
        tddp_group_shutdown(group, 0);
        check_signal(LEFT);
    }
    leave(group, store, world_size);
}

/* Rank 1 shuts the group down because of an error of its own, rank 2 as the program has it. */
MULTI_TEST(why_a_rank_has_left_is_read_by_the_others, 3, 20)
{
    be_blind_at(2);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    char who[128];
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        CHECK_AWAIT(LEFT, 2);
        limit_to(group, 300);
        expect(sum(group, 3), TDDP_TIMEOUT, name_of(group, 1, who),
               "; it has left the group because of an error: KeyError: no such sample");
        CHECK_CONTAINS(tddp_error_message(), "; it has destroyed the group");
    } else {
        CHECK_OK(tddp_group_set_leave_reason(group, rank == 1 ? "an earlier one" : ""));
        CHECK_OK(
            tddp_group_set_leave_reason(group, rank == 1 ? "KeyError: no\nsuch\tsample" : NULL));
        tddp_group_shutdown(group, 0);
        check_signal(LEFT);
    }
    leave(group, store, world_size);
}

MULTI_TEST(a_timeout_where_all_have_arrived_says_so, 2, 20)
{
    setenv("TDDP_FAKE", "drop_at=2,rank=0", 1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        CHECK_AWAIT(STARTED, 1);
        limit_to(group, 400);
        expect(tddp_barrier(group, NULL), TDDP_TIMEOUT, "dropped by TDDP_FAKE",
               "all have arrived: rank(s) 0, 1");
    } else {
        tddp_work *work;
        CHECK_OK(tddp_barrier(group, &work));
        CHECK_STATUS(signal_and_wait(group, work), TDDP_PEER_LOST);
    }
    leave(group, store, world_size);
}

MULTI_TEST(a_mismatch_is_raised_on_all_ranks, 4, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    for (int other = 0; rank == 3 && other < 3; other++) {
        CHECK_AWAIT_BLOCKED(RANK + other);
    }
    check_will_block(RANK + rank);
    expect(sum(group, rank == 1 ? 5 : 4), TDDP_MISMATCH, "5 elements of", "4 elements of");
    CHECK_CONTAINS(tddp_error_message(), "pid ");
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_MISMATCH");
    leave(group, store, world_size);
}

MULTI_TEST(both_descriptions_are_shown, 3, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    float x[4] = {0};
    tddp_status status = described_sum(group, buffer_of(x, 4, TDDP_FLOAT32),
                                       rank == 2 ? "bias [4]" : "weight [2, 2]");
    expect(status, TDDP_MISMATCH, "\"bias [4]\"", "\"weight [2, 2]\"");
    leave(group, store, world_size);
}

MULTI_TEST(a_stopped_process_is_distinguished_from_a_dead_one, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 1) {
        raise(SIGSTOP);
        CHECK_UNTIL(has_failed(group));
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_PEER_LOST);
    } else {
        tddp_peer peer;
        CHECK_OK(tddp_group_peer(group, 1, &peer));
        CHECK_AWAIT_STOPPED((pid_t)peer.pid);
        limit_to(group, 300);
        expect(tddp_barrier(group, NULL), TDDP_TIMEOUT, "not arrived: rank 1",
               "its process is stopped");
        CHECK_INT(kill((pid_t)peer.pid, SIGCONT), 0);
    }
    leave(group, store, world_size);
}

/* Two groups of two: 0 and 1, 2 and 3. */
MULTI_TEST(groups_of_some_ranks_share_a_detector, 4, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *all = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    const char *name = rank < 2 ? "low" : "high";
    tddp_group *half = open_group("fake", name, store, rank % 2, 2, 20000, all);
    CHECK_INT(check_threads_named("tddp-detector"), 1);
    tddp_peer peer;
    CHECK_OK(tddp_group_peer(half, 1, &peer));
    CHECK_INT(peer.global_rank, rank < 2 ? 1 : 3);
    CHECK_OK(tddp_barrier(half, NULL));
    tddp_work *other = NULL;
    if (rank == 2) {
        limit_to(half, 300);
        meet(store, "begin", 2);
        expect(tddp_barrier(half, NULL), TDDP_TIMEOUT, "barrier 2 of group \"high\" on rank 0 of 2",
               "in group \"default_pg\" in barrier 1 for ");
        CHECK_OK(tddp_barrier(all, NULL));
    } else {
        CHECK_OK(tddp_barrier(all, &other));
        if (rank == 3) {
            await_started(all, 1);
            /* The barrier may hold the connection of the group's store. */
            tddp_store *clone;
            CHECK_OK(tddp_store_clone(store, NULL, &clone));
            meet(clone, "begin", 2);
            tddp_store_release(clone);
        }
        CHECK_OK(tddp_work_wait(other, NULL));
        tddp_work_release(other);
    }
    /* The other groups work. */
    if (rank < 2) {
        CHECK_OK(tddp_barrier(half, NULL));
    } else if (rank == 3) {
        /* Rank 2 has arrived at this barrier: without the notice it would succeed. */
        CHECK_UNTIL(has_failed(half));
        CHECK_STATUS(tddp_barrier(half, NULL), TDDP_PEER_LOST);
    }
    CHECK_OK(tddp_barrier(all, NULL));
    /* The first group may end before the others. */
    meet(store, "end", world_size);
    tddp_group_release(all);
    CHECK_INT(check_threads_named("tddp-detector"), 1);
    leave(half, store, world_size);
    /* The system forgets a thread a moment after it was joined. */
    CHECK_UNTIL(check_threads_named("tddp-detector") == 0);
}

MULTI_TEST(a_group_of_one_has_no_detector, 1, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, 0, 1, 1000, NULL);
    CHECK_INT(check_threads_named("tddp-detector"), 0);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store, 1);
}

MULTI_TEST(a_forked_child_has_no_detector, 2, 20)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    pid_t child = CHECK_FORK();
    if (child == 0) {
        int files = -1;
        CHECK_STATUS(tddp_group_dump(group, "/nowhere"), TDDP_FORKED);
        CHECK_OK(tddp_recorder_dump_all("/nowhere/", &files));
        CHECK_INT(files, 0);
        tddp_group_release(group);
        tddp_store_release(store);
        _exit(0);
    }
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store, world_size);
}

/* The store's host is another process than any rank's. */
MULTI_TEST(the_end_of_the_store_is_no_failure, 3, 20)
{
    tddp_store *store = open_store_of_rank_0(rank, world_size, STORE);
    if (rank == 0) {
        CHECK_AWAIT(STARTED, 2);
        die();
    }
    tddp_store *local;
    char path[64];
    snprintf(path, sizeof path, "/tmp/tddp_detector_test_%d", port);
    CHECK_OK(tddp_file_store_open(path, 2, 20000, &local));
    tddp_group *group = open_group("fake", NULL, local, rank - 1, 2, 20000, NULL);
    tddp_group *other = open_group("fake", "other", store, rank - 1, 2, 20000, NULL);
    check_signal(STARTED);
    CHECK_AWAIT_END(0);
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_shutdown(other, 1000);
    tddp_group_release(other);
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
    tddp_store_release(local);
    tddp_store_release(store);
}

/* A file store has no server that notifies: it is polled. */
MULTI_TEST(a_file_store_works_too, 2, 20)
{
    tddp_store *store;
    char path[64];
    char who[128];
    snprintf(path, sizeof path, "/tmp/tddp_detector_test_%d", port);
    CHECK_OK(tddp_file_store_open(path, world_size, 20000, &store));
    tddp_group *group = open_group("fake", NULL, store, rank, world_size, 20000, NULL);
    CHECK_OK(tddp_barrier(group, NULL));
    if (rank == 0) {
        limit_to(group, 300);
        expect(tddp_barrier(group, NULL), TDDP_TIMEOUT, "not arrived: rank 1",
               "in no operation, its last was barrier 1, ");
    } else {
        CHECK_UNTIL(has_failed(group));
        expect(tddp_barrier(group, NULL), TDDP_PEER_LOST, name_of(group, 0, who),
               "failed first, in barrier 2");
    }
    tddp_group_release(group);
    tddp_store_release(store);
}
