/* Sends and receives: values, order, any source, many at once, and their end in all its ways. */
#include <time.h>
#include <unistd.h>

#include "ranks.h"
#include "values.h"

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static double value(int from, int to, size_t i)
{
    return (double)((size_t)(from + 2 * to) + i % 3);
}

/* Everyone sends to everyone, receives posted first. */
static void exchange(tddp_group *group, int rank, int world, tddp_dtype dtype, size_t count)
{
    tddp_work *works[2 * MAX_RANKS] = {0};
    void *sent[MAX_RANKS] = {0};
    void *received[MAX_RANKS] = {0};
    for (int peer = 0; peer < world; peer++) {
        if (peer != rank) {
            received[peer] = room_for(count);
            CHECK_OK(
                tddp_recv(group, buffer_of(received[peer], count, dtype), peer, 7, &works[peer]));
        }
    }
    for (int peer = 0; peer < world; peer++) {
        if (peer != rank) {
            sent[peer] = room_for(count);
            for (size_t i = 0; i < count; i++) {
                put(dtype, sent[peer], i, value(rank, peer, i));
            }
            CHECK_OK(tddp_send(group, buffer_of(sent[peer], count, dtype), peer, 7,
                               &works[MAX_RANKS + peer]));
        }
    }
    for (int peer = 0; peer < world; peer++) {
        if (peer == rank) {
            continue;
        }
        CHECK_OK(tddp_work_wait(works[peer], NULL));
        CHECK_OK(tddp_work_wait(works[MAX_RANKS + peer], NULL));
        CHECK_INT(tddp_work_source(works[peer]), peer);
        CHECK_INT(tddp_work_source(works[MAX_RANKS + peer]), TDDP_ANY_SOURCE);
        CHECK_INT(tddp_work_kind(works[peer]), TDDP_OP_RECV);
        for (size_t i = 0; i < count; i++) {
            CHECK_DOUBLE(get(dtype, received[peer], i), as_stored(dtype, value(peer, rank, i)), 0);
        }
        tddp_work_release(works[peer]);
        tddp_work_release(works[MAX_RANKS + peer]);
        free(sent[peer]);
        free(received[peer]);
    }
}

static void all_pairs(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        exchange(group, rank, world, (tddp_dtype)dtype, 0);
        exchange(group, rank, world, (tddp_dtype)dtype, 1);
        exchange(group, rank, world, (tddp_dtype)dtype, 129);
    }
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

TEST(every_dtype_between_all_pairs)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        run_ranks(ranks, all_pairs, NULL);
    }
}

/* Blocking calls around a ring, beside collectives that are under way. */
static void ring(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t token = 0;
    tddp_work *barrier = NULL;
    if (rank > 0) {
        CHECK_OK(tddp_barrier(group, &barrier));
        CHECK_OK(tddp_recv(group, buffer_of(&token, 1, TDDP_INT32), rank - 1, 0, NULL));
        CHECK_INT(token, rank);
        CHECK_INT(tddp_work_completed(barrier), 0);
    }
    token++;
    CHECK_OK(tddp_send(group, buffer_of(&token, 1, TDDP_INT32), (rank + 1) % world, 0, NULL));
    if (rank == 0) {
        CHECK_OK(tddp_recv(group, buffer_of(&token, 1, TDDP_INT32), world - 1, 0, NULL));
        CHECK_INT(token, world);
        CHECK_OK(tddp_barrier(group, &barrier));
    }
    CHECK_OK(tddp_work_wait(barrier, NULL));
    /* Collectives have numbers of their own. */
    CHECK_INT(tddp_work_sequence(barrier), 1);
    tddp_work_release(barrier);
    tddp_group_release(group);
}

TEST(a_token_goes_around_beside_a_barrier)
{
    run_ranks(4, ring, NULL);
}

/* Where the store has a connection, a barrier that waits there does not hold up the messages. */
MULTI_TEST(so_do_processes_over_tcp, 3, 20)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    opts.host = "127.0.0.1";
    opts.port = (uint16_t)port;
    opts.is_server = rank == 0;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    ring(rank, world_size, store, NULL);
    tddp_store_release(store);
}

enum { MANY = 60 };

/* Messages of one tag match in the order of the calls, those of others do not matter to them. */
static void in_order(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    tddp_work *works[MANY];
    int64_t numbers[MANY] = {0};
    int peer = 1 - rank;
    for (int i = 0; i < MANY; i++) {
        tddp_buffer buffer = buffer_of(&numbers[i], 1, TDDP_INT64);
        if (rank == 0) {
            numbers[i] = i;
            CHECK_OK(tddp_send(group, buffer, peer, (uint32_t)(i % 3), &works[i]));
        } else {
            /* The tags in another order than they were sent in. */
            CHECK_OK(tddp_recv(group, buffer, peer, (uint32_t)(2 - i / (MANY / 3)), &works[i]));
        }
        CHECK_INT(tddp_work_sequence(works[i]), i + 1);
    }
    for (int i = MANY - 1; i >= 0; i--) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    for (int i = 0; rank == 1 && i < MANY; i++) {
        CHECK_INT(numbers[i], 3 * (i % (MANY / 3)) + 2 - i / (MANY / 3));
    }
    tddp_group_release(group);
}

TEST(messages_match_by_tag_in_order)
{
    run_ranks(2, in_order, NULL);
}

/* Rank 0 takes what comes; each rank's messages come in their order. */
static void any_source(int rank, int world, tddp_store *store, void *data)
{
    enum { EACH = 5 };
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t seen[MAX_RANKS] = {0};
    if (rank > 0) {
        for (int32_t i = 0; i < EACH; i++) {
            int32_t pair[2] = {rank, i};
            CHECK_OK(tddp_send(group, buffer_of(pair, 2, TDDP_INT32), 0, 4, NULL));
        }
        CHECK_OK(tddp_barrier(group, NULL));
        int32_t last = -rank;
        CHECK_OK(tddp_send(group, buffer_of(&last, 1, TDDP_INT32), 0, 4, NULL));
        tddp_group_shutdown(group, 10000);
        tddp_group_release(group);
        return;
    }
    int count = EACH * (world - 1);
    tddp_work *works[EACH * MAX_RANKS];
    int32_t pairs[EACH * MAX_RANKS][2];
    for (int i = 0; i < count; i++) {
        CHECK_OK(
            tddp_recv(group, buffer_of(pairs[i], 2, TDDP_INT32), TDDP_ANY_SOURCE, 4, &works[i]));
    }
    for (int i = 0; i < count; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        int source = tddp_work_source(works[i]);
        CHECK(source > 0 && source < world);
        CHECK_INT(pairs[i][0], source);
        CHECK_INT(pairs[i][1], seen[source]);
        seen[source]++;
        tddp_work_release(works[i]);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    for (int peer = 1; peer < world; peer++) {
        int32_t last = 0;
        CHECK_OK(tddp_recv(group, buffer_of(&last, 1, TDDP_INT32), peer, 4, NULL));
        CHECK_INT(last, -peer);
    }
    tddp_group_release(group);
}

TEST(any_source_says_whose_it_was)
{
    run_ranks(2, any_source, NULL);
    run_ranks(4, any_source, NULL);
}

/* A receive from one rank waits its turn behind those that may take that rank's messages. */
static void turns(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 20000);
    int32_t x[3] = {0};
    if (rank == 1) {
        for (int32_t i = 0; i < 3; i++) {
            CHECK_OK(tddp_send(group, buffer_of(&i, 1, TDDP_INT32), 0, 0, NULL));
        }
    } else {
        const int from[3] = {TDDP_ANY_SOURCE, 1, TDDP_ANY_SOURCE};
        tddp_work *works[3];
        for (int i = 0; i < 3; i++) {
            CHECK_OK(tddp_recv(group, buffer_of(&x[i], 1, TDDP_INT32), from[i], 0, &works[i]));
        }
        for (int i = 2; i >= 0; i--) {
            CHECK_OK(tddp_work_wait(works[i], NULL));
            CHECK_INT(x[i], i);
            tddp_work_release(works[i]);
        }
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
}

TEST(open_receives_keep_their_turn)
{
    run_ranks(2, turns, NULL);
}

/* --- two groups' ends in one thread ----------------------------------------------------------- */

typedef struct pair {
    tddp_store *store;
    tddp_group *groups[2];
    int64_t timeout_ms;
} pair;

static void *make_one(void *data)
{
    pair *self = data;
    self->groups[1] = make_group("fake", 1, 2, self->store, self->timeout_ms);
    return NULL;
}

static pair make_pair(int64_t timeout_ms)
{
    pair self = {.timeout_ms = timeout_ms};
    pthread_t thread;
    CHECK_OK(tddp_hash_store_create(20000, &self.store));
    CHECK_INT(pthread_create(&thread, NULL, make_one, &self), 0);
    self.groups[0] = make_group("fake", 0, 2, self.store, timeout_ms);
    CHECK_INT(pthread_join(thread, NULL), 0);
    return self;
}

static void drop_pair(pair *self)
{
    tddp_group_release(self->groups[0]);
    tddp_group_release(self->groups[1]);
    tddp_store_release(self->store);
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

TEST(alone_there_is_nobody_to_hear_from)
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

TEST(a_message_counts_its_time_from_the_posting)
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
    CHECK(now() - start >= 0.29 && now() - start < 5);
    drop_pair(&self);
}

TEST(the_end_of_a_group_ends_its_messages)
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
        CHECK(now() - start < 5);
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

static void *send_soon(void *data)
{
    usleep(100000);
    CHECK_OK(tddp_send(((pair *)data)->groups[0], ints(1), 1, 0, NULL));
    return NULL;
}

TEST(shutdown_waits_for_what_comes_in_time)
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

TEST(works_may_be_let_go_while_they_run)
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

TEST(a_callback_cannot_end_its_group)
{
    pair self = make_pair(20000);
    tddp_work *work;
    CHECK_OK(tddp_recv(self.groups[1], ints(1), 0, 0, &work));
    CHECK_OK(tddp_work_on_done(work, shut_down, self.groups[1]));
    CHECK_OK(tddp_send(self.groups[0], ints(1), 1, 0, NULL));
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    /* Its thread is through with it when it carries the next one. */
    CHECK_OK(tddp_send(self.groups[1], ints(1), 0, 0, NULL));
    CHECK_INT(tddp_group_closed(self.groups[1]), 0);
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

TEST(several_threads_talk_at_once)
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
