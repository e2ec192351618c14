/* Sends and receives that are refused, fail, or end with their group; callbacks; several callers.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "events.h"
#include "group/group.h"
#include "pair.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int32_t memory[8];

static tddp_buffer ints(size_t count)
{
    return buffer_of(memory, count, TDDP_INT32);
}

TEST(arguments_of_messages_are_checked)
{
    pair self = make_pair(5000);
    tddp_group *group = self.groups[1];
    tddp_work *work = NULL;
    CHECK_STATUS(tddp_send(NULL, ints(1), 0, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "send: group is NULL");
    CHECK_STATUS(tddp_send(group, ints(1), 2, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "send: peer 2: expected 0 to 1");
    CHECK_STATUS(tddp_send(group, ints(1), TDDP_ANY_SOURCE, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_recv(group, ints(1), -2, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_send(group, ints(1), 1, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "peer 1 is this rank itself");
    CHECK_STATUS(tddp_recv(group, ints(1), 1, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_recv(group, buffer_of(NULL, 1, TDDP_INT32), 0, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "recv: buffer is NULL, but has 1 elements");
    CHECK(work == NULL);
    drop_pair(&self);
}

TEST(a_single_rank_cannot_receive)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group *group = make_group("fake", 0, 1, store, 5000);
    CHECK_STATUS(tddp_recv(group, ints(1), TDDP_ANY_SOURCE, 0, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "where there are other ranks");
    tddp_group_release(group);
    tddp_store_release(store);
}

TEST(a_message_of_another_size_fails_the_group)
{
    const tddp_buffer others[] = {ints(2), buffer_of(memory, 3, TDDP_FLOAT32)};
    for (int i = 0; i < 2; i++) {
        pair self = make_pair(5000);
        tddp_work *waiting;
        CHECK_OK(tddp_recv(self.groups[1], ints(1), 0, 9, &waiting));
        CHECK_OK(tddp_send(self.groups[0], ints(3), 1, 0, NULL));
        CHECK_STATUS(tddp_recv(self.groups[1], others[i], 0, 0, NULL), TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(),
                       "recv 2 from rank 0 of group \"default_pg\" on rank 1 of 2");
        CHECK_CONTAINS(tddp_error_message(), "rank 0 sends 3 elements of int32");
        /* What was under way ends, what comes is refused. */
        CHECK_STATUS(tddp_work_wait(waiting, NULL), TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), "rank 0 sends 3 elements");
        CHECK_STATUS(tddp_barrier(self.groups[1], NULL), TDDP_GROUP_FAILED);
        CHECK_CONTAINS(tddp_error_message(), "has failed: recv 2");
        CHECK_STATUS(tddp_send(self.groups[1], ints(1), 0, 0, NULL), TDDP_GROUP_FAILED);
        tddp_work_release(waiting);
        drop_pair(&self);
    }
}

TEST(a_messages_timeout_starts_when_it_is_posted)
{
    pair self = make_pair(300);
    tddp_work *works[3];
    double start = now();
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_recv(self.groups[1], buffer_of(&memory[i], 1, TDDP_INT32),
                           i == 1 ? TDDP_ANY_SOURCE : 0, (uint32_t)i, &works[i]));
    }
    int timeouts = 0;
    for (int i = 0; i < 3; i++) {
        tddp_status status = tddp_work_wait(works[i], NULL);
        CHECK(status == TDDP_TIMEOUT || status == TDDP_GROUP_FAILED);
        timeouts += status == TDDP_TIMEOUT;
        tddp_work_release(works[i]);
    }
    CHECK(timeouts >= 1);
    CHECK(now() - start >= 0.29);
    drop_pair(&self);
}

TEST(a_shutdown_ends_messages)
{
    for (int drain = 0; drain <= 200; drain += 200) {
        pair self = make_pair(20000);
        tddp_work *works[40];
        double start = now();
        for (int i = 0; i < 40; i++) {
            CHECK_OK(tddp_recv(self.groups[1], buffer_of(&memory[i % 8], 1, TDDP_INT32),
                               i % 2 ? TDDP_ANY_SOURCE : 0, (uint32_t)i, &works[i]));
        }
        tddp_group_shutdown(self.groups[1], drain);
        CHECK(now() - start >= drain / 1000.0);
        for (int i = 0; i < 40; i++) {
            CHECK_INT(tddp_work_completed(works[i]), 1);
            CHECK_STATUS(tddp_work_status(works[i]), TDDP_GROUP_CLOSED);
            tddp_work_release(works[i]);
        }
        CHECK_STATUS(tddp_recv(self.groups[1], ints(1), 0, 0, NULL), TDDP_GROUP_CLOSED);
        drop_pair(&self);
    }
}

static int is_open(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    int open = group->state == TDDP_GROUP_OPEN;
    pthread_mutex_unlock(&group->mutex);
    return open;
}

static void *send_soon(void *data)
{
    CHECK_UNTIL(!is_open(((pair *)data)->groups[1]));
    CHECK_OK(tddp_send(((pair *)data)->groups[0], ints(1), 1, 0, NULL));
    return NULL;
}

TEST(a_shutdown_drains_messages_that_arrive_in_time)
{
    pair self = make_pair(20000);
    int32_t got = 0;
    tddp_work *work;
    pthread_t thread;
    memory[0] = 41;
    CHECK_OK(tddp_recv(self.groups[1], buffer_of(&got, 1, TDDP_INT32), 0, 0, &work));
    CHECK_INT(pthread_create(&thread, NULL, send_soon, &self), 0);
    tddp_group_shutdown(self.groups[1], 10000);
    CHECK_OK(tddp_work_status(work));
    CHECK_INT(got, 41);
    CHECK_INT(pthread_join(thread, NULL), 0);
    tddp_work_release(work);
    drop_pair(&self);
}

static void count_call(void *data)
{
    ++*(int *)data;
}

TEST(works_may_be_released_while_they_run)
{
    pair self = make_pair(20000);
    int calls[20] = {0};
    int32_t got[20] = {0};
    for (int i = 0; i < 20; i++) {
        tddp_work *work;
        CHECK_OK(tddp_recv(self.groups[1], buffer_of(&got[i], 1, TDDP_INT32), 0, 0, &work));
        CHECK_OK(tddp_work_on_done(work, count_call, &calls[i]));
        tddp_work_release(work);
    }
    for (int32_t i = 0; i < 20; i++) {
        CHECK_OK(tddp_send(self.groups[0], buffer_of(&i, 1, TDDP_INT32), 1, 0, NULL));
    }
    tddp_group_shutdown(self.groups[1], 10000);
    for (int i = 0; i < 20; i++) {
        CHECK_INT(got[i], i);
        CHECK_INT(calls[i], 1);
    }
    drop_pair(&self);
}

static void shut_down(void *group)
{
    tddp_group_shutdown(group, 0);
}

TEST(a_callback_cannot_shut_its_group_down)
{
    pair self = make_pair(20000);
    tddp_work *work;
    CHECK_OK(tddp_recv(self.groups[1], ints(1), 0, 0, &work));
    CHECK_OK(tddp_work_on_done(work, shut_down, self.groups[1]));
    CHECK_OK(tddp_send(self.groups[0], ints(1), 1, 0, NULL));
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    /* Once its thread finishes the next message, the callback has returned. */
    CHECK_OK(tddp_send(self.groups[1], ints(1), 0, 0, NULL));
    CHECK_INT(tddp_group_closed(self.groups[1]), 0);
    drop_pair(&self);
}

static atomic_int aborts;

static void count_abort(void *context)
{
    (void)context;
    atomic_fetch_add(&aborts, 1);
}

/* The thread that completed the message may still run its callback: nothing is aborted. */
TEST(the_group_may_be_shut_down_once_the_message_is_there)
{
    pair self = make_pair(20000);
    tddp_work *work;
    CHECK_OK(tddp_recv(self.groups[1], ints(1), 0, 0, &work));
    CHECK_OK(tddp_work_on_done(work, await_ending, self.groups[1]));
    CHECK_OK(tddp_send(self.groups[0], ints(1), 1, 0, NULL));
    CHECK_UNTIL(tddp_work_completed(work));
    CHECK_OK(tddp_work_status(work));
    tddp_work_release(work);
    self.groups[1]->backends[TDDP_CPU].table.abort = count_abort;
    tddp_group_shutdown(self.groups[1], 0);
    CHECK_INT(atomic_load(&aborts), 0);
    drop_pair(&self);
}

static void send_answer(void *group)
{
    static int32_t answer = 99;
    tddp_work *work;
    CHECK_OK(tddp_send(group, buffer_of(&answer, 1, TDDP_INT32), 0, 5, &work));
    tddp_work_release(work);
}

TEST(a_callback_may_send)
{
    pair self = make_pair(20000);
    tddp_work *works[20];
    int32_t got[20] = {0};
    for (int i = 0; i < 20; i++) {
        CHECK_OK(
            tddp_recv(self.groups[1], buffer_of(&memory[i % 8], 1, TDDP_INT32), 0, 0, &works[i]));
        CHECK_OK(tddp_work_on_done(works[i], send_answer, self.groups[1]));
    }
    for (int i = 0; i < 20; i++) {
        CHECK_OK(tddp_send(self.groups[0], ints(1), 1, 0, NULL));
        CHECK_OK(tddp_recv(self.groups[0], buffer_of(&got[i], 1, TDDP_INT32), 1, 5, NULL));
        CHECK_INT(got[i], 99);
    }
    for (int i = 0; i < 20; i++) {
        tddp_work_release(works[i]);
    }
    drop_pair(&self);
}

TEST(faults_of_messages)
{
    setenv("TDDP_FAKE", "rank=1,p2p_fail_at=2", 1);
    pair self = make_pair(5000);
    CHECK_OK(tddp_send(self.groups[1], ints(1), 0, 0, NULL));
    CHECK_STATUS(tddp_send(self.groups[1], ints(1), 0, 0, NULL), TDDP_NETWORK);
    CHECK_CONTAINS(tddp_error_message(), "send 2 to rank 0 of group");
    CHECK_STATUS(tddp_barrier(self.groups[1], NULL), TDDP_GROUP_FAILED);
    drop_pair(&self);
    setenv("TDDP_FAKE", "rank=1,p2p_lose_at=1", 1);
    self = make_pair(5000);
    CHECK_STATUS(tddp_recv(self.groups[1], ints(1), 0, 0, NULL), TDDP_PEER_LOST);
    drop_pair(&self);
    setenv("TDDP_FAKE", "rank=1,p2p_drop_at=1", 1);
    self = make_pair(100);
    CHECK_STATUS(tddp_send(self.groups[1], ints(1), 0, 0, NULL), TDDP_TIMEOUT);
    drop_pair(&self);
    setenv("TDDP_FAKE", "rank=1,post_fail_at=2", 1);
    self = make_pair(5000);
    tddp_work *work;
    CHECK_OK(tddp_send(self.groups[1], ints(1), 0, 0, NULL));
    CHECK_OK(tddp_send(self.groups[1], ints(1), 0, 0, &work));
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_NETWORK);
    CHECK_STATUS(tddp_send(self.groups[1], ints(1), 0, 0, NULL), TDDP_GROUP_FAILED);
    tddp_work_release(work);
    drop_pair(&self);
}

/* A failed collective ends the messages under way. */
TEST(a_failed_collective_ends_messages)
{
    setenv("TDDP_FAKE", "rank=1,fail_at=1", 1);
    pair self = make_pair(20000);
    tddp_work *work;
    CHECK_OK(tddp_recv(self.groups[1], ints(1), 0, 0, &work));
    CHECK_STATUS(tddp_barrier(self.groups[1], NULL), TDDP_NETWORK);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_FAILED);
    tddp_work_release(work);
    drop_pair(&self);
}

/* Callers in several threads, on both ends. */
typedef struct caller {
    tddp_group *group;
    uint32_t tag;
} caller;

static void *ping(void *data)
{
    caller *self = data;
    int peer = 1 - tddp_group_rank(self->group);
    for (int32_t i = 0; i < 50; i++) {
        int32_t got = -1;
        tddp_work *works[2];
        CHECK_OK(tddp_send(self->group, buffer_of(&i, 1, TDDP_INT32), peer, self->tag, &works[0]));
        CHECK_OK(
            tddp_recv(self->group, buffer_of(&got, 1, TDDP_INT32), peer, self->tag, &works[1]));
        CHECK_OK(tddp_work_wait(works[1], NULL));
        CHECK_OK(tddp_work_wait(works[0], NULL));
        CHECK_INT(got, i);
        tddp_work_release(works[0]);
        tddp_work_release(works[1]);
    }
    return NULL;
}

TEST(several_threads_exchange_messages)
{
    pair self = make_pair(20000);
    caller callers[8];
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) {
        callers[i] = (caller){self.groups[i % 2], (uint32_t)(i / 2)};
        CHECK_INT(pthread_create(&threads[i], NULL, ping, &callers[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    drop_pair(&self);
}

TEST(a_forked_child_does_not_touch_messages)
{
    pair self = make_pair(20000);
    tddp_work *work;
    int32_t got = 0;
    CHECK_OK(tddp_recv(self.groups[1], buffer_of(&got, 1, TDDP_INT32), 0, 0, &work));
    pid_t child = CHECK_FORK();
    if (child == 0) {
        CHECK_STATUS(tddp_send(self.groups[1], ints(1), 0, 0, NULL), TDDP_FORKED);
        CHECK_CONTAINS(tddp_error_message(), "send: group \"default_pg\" was made by process");
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_FORKED);
        tddp_group_shutdown(self.groups[1], 1000);
        _exit(0);
    }
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    memory[0] = 12;
    CHECK_OK(tddp_send(self.groups[0], ints(1), 1, 0, NULL));
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_INT(got, 12);
    tddp_work_release(work);
    drop_pair(&self);
}

/* Messages of a group that is gone do not reach the next one of its name. */
static void leave_one_behind(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    for (int32_t round = 0; round < 3; round++) {
        tddp_group *group = make_group("fake", rank, world_size, store, 20000);
        int32_t x[2] = {round, -1};
        if (rank == 0) {
            CHECK_OK(tddp_send(group, buffer_of(&x[0], 1, TDDP_INT32), 1, 0, NULL));
            CHECK_OK(tddp_send(group, buffer_of(&x[1], 1, TDDP_INT32), 1, 0, NULL));
        } else {
            CHECK_OK(tddp_recv(group, buffer_of(&x[0], 1, TDDP_INT32), 0, 0, NULL));
        }
        CHECK_INT(x[0], round);
        CHECK_OK(tddp_barrier(group, NULL));
        tddp_group_release(group);
    }
}

TEST(a_reused_name_has_separate_messages)
{
    run_ranks(2, leave_one_behind, NULL);
}

TEST(threads_start_for_messages_and_end)
{
    go_over_blocking(); /* each has a thread */
    enum { MANY = 100 };
    static int32_t got[MANY];
    pair self = make_pair(20000);
    tddp_work *works[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        CHECK_OK(tddp_recv(self.groups[1], buffer_of(&got[i], 1, TDDP_INT32), 0, i, &works[i]));
    }
    CHECK_INT(check_threads_named("tddp-blocking"), MANY);
    for (int i = MANY - 1; i >= 0; i--) {
        int32_t number = i;
        CHECK_OK(
            tddp_send(self.groups[0], buffer_of(&number, 1, TDDP_INT32), 1, (uint32_t)i, NULL));
    }
    for (int i = 0; i < MANY; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        CHECK_INT(got[i], i);
        tddp_work_release(works[i]);
    }
    /* They end by themselves, also while the group goes on. */
    CHECK_UNTIL(check_threads_named("tddp-blocking") == 0);
    drop_pair(&self);
}
