/* Copies that fail, that never end, that nobody waits for: with stand-ins for NCCL and CUDA. */
#include <pthread.h>
#include <unistd.h>

#include "nccl/staged_operations.h"

enum { GO, WAITER = 2, SENT = 4, RECEIVING }; /* events; the first two for each of two ranks */

/* A delayed stream continues when it is released: no other thread may wait for that. */
static void await_go(void *rank)
{
    CHECK_AWAIT(GO + *(const int *)rank, 1);
}

/* After the waiters know the outcome. Shutdown waits for the copies then. */
static void *let_copies_run(void *work)
{
    CHECK_UNTIL(tddp_work_completed(work));
    check_signal(GO);
    return NULL;
}

static void end_group(tddp_group *group, tddp_work *work)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, let_copies_run, work), 0);
    tddp_group_shutdown(group, 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
}

static tddp_status sum(const bench *self, size_t count, tddp_work **work)
{
    return tddp_all_reduce(self->group, filled(self, input_memory, count, 1), TDDP_REDUCE_SUM, 0,
                           work);
}

static void check_failing(const char *backend, const char *name, int calls)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench(backend, store, 0, 1, TDDP_CUDA);
    if (calls > 0) {
        CHECK_OK(sum(&self, 100, NULL)); /* the call that fails isn't the first of its kind */
    }
    standin_set_delay_ms(5);
    /* Its caller makes the device current as well, and leaves a failure to the operation. */
    standin_fail_times(name, 2, strcmp(name, "cudaSetDevice") == 0 ? 2 : 1);
    CHECK_STATUS(sum(&self, 100000, NULL), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), name);
    CHECK_CONTAINS(tddp_error_message(), "made to fail (CUDA error 2)");
    CHECK_STATUS(sum(&self, 100, NULL), TDDP_GROUP_FAILED);
    standin_set_delay_ms(0);
    close_bench(&self);
    tddp_store_release(store);
}

TEST(calls_that_fail)
{
    static const char *const names[] = {"cudaHostAlloc", "cudaMemcpyAsync", "cudaEventRecord",
                                        "cudaEventQuery", "cudaSetDevice"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check_failing("fake", names[i], 0);
        check_failing("fake", names[i], 1);
        check_failing("shm", names[i], 1);
    }
    check_failing("fake", "cudaEventCreateWithFlags", 0);
}

/* Two input copies on two streams, one of which can't be made to wait for the other, whose copy is
 * in flight: its memory is freed when that is complete, or never, if that can't be found out. */
static void check_two_streams(int failures, int left)
{
    const int before = standin_alive();
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench("fake", store, 0, 1, TDDP_CUDA);
    bench other = self;
    CHECK_INT(self.cuda->cudaStreamCreateWithPriority(&other.stream, 1, 0), 0);
    tddp_buffer both[2] = {filled(&self, input_memory, 100, 4),
                           filled(&other, output_memory, 100, 5)};
    standin_set_delay_ms(100);
    standin_fail_times("cudaEventRecord", 2, failures);
    CHECK_STATUS(tddp_all_reduce_coalesced(self.group, both, 2, TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "cudaEventRecord: made to fail");
    standin_set_delay_ms(0);
    tddp_group_release(self.group);
    CHECK_INT(self.cuda->cudaStreamDestroy(other.stream), 0);
    CHECK_INT(self.cuda->cudaStreamDestroy(self.stream), 0);
    CHECK_INT(standin_alive() - before, left);
    tddp_store_release(store);
}

TEST(copies_that_fail_beside_others)
{
    check_two_streams(1, 0);
    check_two_streams(2, 2); /* memory, and its event */
}

static void check_messages_that_fail(int rank, int world_size, int port, bool sends)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    CHECK_OK(tddp_barrier(self.group, NULL));
    if ((rank == 0) == sends) {
        standin_fail_next("cudaMemcpyAsync", 2);
    }
    tddp_work *work;
    tddp_buffer buffer = filled(&self, input_memory, 100, 1);
    tddp_status status = rank == 0 ? tddp_send(self.group, buffer, 1, 0, &work)
                                   : tddp_recv(self.group, buffer, 0, 0, &work);
    bool fails = (rank == 0) == sends;
    bool is_queued = status == TDDP_OK; /* not if the other rank's failure is known by then */
    CHECK(is_queued || !fails);
    status = is_queued ? tddp_work_wait(work, NULL) : status;
    if (fails) {
        CHECK_STATUS(status, TDDP_SYSTEM);
        CHECK_CONTAINS(tddp_error_message(), "cudaMemcpyAsync: made to fail");
    } else if (rank == 1) {
        CHECK(status != TDDP_OK);
    }
    if (is_queued) {
        tddp_work_release(work);
    }
    close_bench(&self);
    tddp_store_release(store);
}

MULTI_TEST(sends_that_fail, 2, 30)
{
    check_messages_that_fail(rank, world_size, port, true);
}

MULTI_TEST(receives_that_fail, 2, 30)
{
    check_messages_that_fail(rank, world_size, port, false);
}

TEST(streams_that_time_out)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench("shm", store, 0, 1, TDDP_CUDA);
    CHECK_OK(tddp_group_set_timeout(self.group, 200));
    standin_put(self.stream, await_go, &self.rank);
    CHECK_STATUS(sum(&self, 1000, NULL), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "the copy to the host from cuda:0 has not ended within "
                                         "200 ms: what its stream was given before lasts longer");
    check_signal(GO);
    close_bench(&self);
    tddp_store_release(store);
}

/* The group ends; waits for a copy fail. */
static void check_ending(const char *backend)
{
    tddp_work *work;
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench(backend, store, 0, 1, TDDP_CUDA);
    check_events_clear();
    standin_put(self.stream, await_go, &self.rank);
    CHECK_OK(sum(&self, 1000, &work));
    end_group(self.group, work);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
    tddp_work_release(work);
    close_bench(&self);
    tddp_store_release(store);
}

TEST(groups_that_end_while_copies_run)
{
    check_ending("fake");
    check_ending("shm");
}

static void *send_blocking(void *data)
{
    const bench *self = data;
    tddp_buffer buffer = filled(self, input_memory, 1000, 1);
    check_will_block(WAITER + self->rank);
    CHECK(tddp_send(self->group, buffer, 1 - self->rank, 0, NULL) != TDDP_OK);
    check_signal(GO + self->rank);
    return NULL;
}

MULTI_TEST(groups_that_end_while_messages_are_copied, 2, 30)
{
    pthread_t thread;
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    CHECK_OK(tddp_barrier(self.group, NULL));
    standin_put(self.stream, await_go, &self.rank);
    CHECK_INT(pthread_create(&thread, NULL, send_blocking, &self), 0);
    CHECK_AWAIT_BLOCKED(WAITER + rank);
    tddp_group_shutdown(self.group, 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    close_bench(&self);
    tddp_store_release(store);
}

static void *send_copied(void *data)
{
    const bench *self = data;
    tddp_buffer buffer = filled(self, input_memory, 1000, 1);
    check_will_block(WAITER + self->rank);
    CHECK_OK(tddp_send(self->group, buffer, 1, 1, NULL));
    return NULL;
}

/* The second message is sent while the first one's memory can't be copied yet. */
MULTI_TEST(messages_do_not_wait_for_copies_of_others, 2, 30)
{
    pthread_t thread;
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    bench host = self;
    host.type = TDDP_CPU;
    host.stream = NULL;
    if (rank == 0) {
        standin_put(self.stream, await_go, &self.rank);
        CHECK_INT(pthread_create(&thread, NULL, send_copied, &self), 0);
        CHECK_AWAIT_BLOCKED(WAITER);
        CHECK_OK(tddp_send(self.group, filled(&host, output_memory, 100, 2), 1, 2, NULL));
        check_signal(GO);
        CHECK_INT(pthread_join(thread, NULL), 0);
    } else {
        CHECK_OK(tddp_recv(self.group, poisoned(&host, output_memory, 100), 0, 2, NULL));
        check_values(output_memory, 100, 0, 2);
        CHECK_OK(tddp_recv(self.group, poisoned(&self, input_memory, 1000), 0, 1, NULL));
        check_values(input_memory, 1000, 0, 1);
    }
    close_bench(&self);
    tddp_store_release(store);
}

/* A receive whose memory's stream is busy holds up neither its caller nor the engine. */
MULTI_TEST(receives_do_not_wait_for_streams_of_others, 2, 30)
{
    tddp_work *works[2];
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    bench host = self;
    host.type = TDDP_CPU;
    host.stream = NULL;
    CHECK_OK(tddp_barrier(self.group, NULL));
    if (rank == 0) {
        CHECK_OK(tddp_send(self.group, filled(&self, input_memory, 100, 1), 1, 1, NULL));
        check_signal(SENT);
        CHECK_AWAIT(RECEIVING, 1);
        for (int i = 0; i < 100; i++) {
            output_memory[i] = value_of(rank, 2, (size_t)i);
        }
        CHECK_OK(tddp_send(self.group, buffer_on(&host, output_memory, 100), 1, 2, NULL));
    } else {
        CHECK_AWAIT(SENT, 1);
        standin_put(self.stream, await_go, &self.rank);
        CHECK_OK(tddp_recv(self.group, buffer_on(&self, input_memory, 100), 0, 1, &works[0]));
        CHECK_OK(tddp_recv(self.group, buffer_on(&host, output_memory, 100), 0, 2, &works[1]));
        check_signal(RECEIVING);
        CHECK_UNTIL(tddp_work_completed(works[1]));
        CHECK_INT(tddp_work_completed(works[0]), 0);
        check_signal(GO + rank);
        CHECK_UNTIL(tddp_work_completed(works[0]));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tddp_work_wait(works[i], NULL));
            CHECK_INT(tddp_work_source(works[i]), 0);
            tddp_work_release(works[i]);
        }
        check_values(input_memory, 100, 0, 1);
        check_values(output_memory, 100, 0, 2);
    }
    close_bench(&self);
    tddp_store_release(store);
}

/* An unfinished work whose handle outlives its group. */
TEST(works_that_outlive_their_group)
{
    const tddp_wait moment = {20, NULL};
    tddp_work *work;
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench("shm", store, 0, 1, TDDP_CUDA);
    standin_put(self.stream, await_go, &self.rank);
    CHECK_OK(sum(&self, 1000, &work));
    CHECK_STATUS(tddp_work_wait(work, &moment), TDDP_TIMEOUT);
    end_group(self.group, work);
    tddp_group_release(self.group);
    CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
    tddp_work_release(work);
    CHECK_INT(self.cuda->cudaStreamDestroy(self.stream), 0);
    CHECK_INT(standin_alive(), 0);
    tddp_store_release(store);
}

/* One rank cannot copy: the others report why, before their timeout. */
MULTI_TEST(a_rank_that_cannot_copy, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    CHECK_OK(sum(&self, 100, NULL));
    if (rank == 1) {
        standin_fail_next("cudaHostAlloc", 2);
    }
    tddp_status status = sum(&self, 100000, NULL);
    CHECK(status != TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), "cudaHostAlloc: made to fail (CUDA error 2)");
    close_bench(&self);
    tddp_store_release(store);
}
