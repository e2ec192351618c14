/*
 * The thread that polls all groups of a rank: what callers leave unfinished ends without waiting
 * callers, in any order, beside callbacks that wait and groups that fail.
 */
#include <stdlib.h>

#include "ranks.h"

enum { GROUPS = 20, LARGE = 300007 };

static tddp_group *make_group(shm_rank *it, int number)
{
    char name[32];
    snprintf(name, sizeof name, "further %d", number);
    return shm_make_group(it, name, it->rank, it->size);
}

static void fill(float *data, size_t count, double factor)
{
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)(factor * (double)(i % 7));
    }
}

/* Each rank gave rank + 1. */
static void check_sum(const shm_rank *it, const float *data, size_t count)
{
    const double factor = it->size * (it->size + 1) / 2.0;
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE(data[i], factor * (double)(i % 7), 0);
    }
}

/* Leaves an all_reduce to the engine. */
static tddp_work *leave(tddp_group *group, float *data, size_t count)
{
    tddp_work *work;
    CHECK_OK(
        tddp_all_reduce(group, shm_buffer(data, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    return work;
}

static void end(tddp_work *work)
{
    CHECK_UNTIL(tddp_work_completed(work));
    CHECK_OK(tddp_work_status(work));
    tddp_work_release(work);
}

/* How many threads this process needs: one for each of its ranks, or for each group (`data`). */
static int threads_expected(const shm_rank *it)
{
    return it->data ? GROUPS : it->mode == SHM_PROCESSES ? 1 : it->size;
}

/* --- many groups ----------------------------------------------------------------------------- */

/* Ranks begin the groups' operations in different orders, and wait for none. */
static void in_any_order(shm_rank *it)
{
    enum { BEGUN, LEFT };
    tddp_group *groups[GROUPS];
    tddp_work *works[GROUPS];
    float *data = malloc((size_t)GROUPS * LARGE * sizeof *data);
    CHECK(data != NULL);
    for (int i = 0; i < GROUPS; i++) {
        groups[i] = make_group(it, i);
        fill(data + (size_t)i * LARGE, LARGE, it->rank + 1);
    }
    CHECK_INT(check_threads_named("tddp-progress"), 0);
    CHECK_MEET(BEGUN, it->size);
    for (int i = 0; i < GROUPS; i++) {
        const int place = it->rank % 2 ? GROUPS - 1 - i : (i + it->rank) % GROUPS;
        works[place] =
            leave(groups[place], data + (size_t)place * LARGE, place % 2 ? LARGE : (size_t)place);
    }
    CHECK_MEET(LEFT, it->size);
    CHECK_INT(check_threads_named("tddp-progress"), threads_expected(it));
    for (int i = 0; i < GROUPS; i++) {
        end(works[i]);
        check_sum(it, data + (size_t)i * LARGE, i % 2 ? LARGE : (size_t)i);
    }
    for (int i = 0; i < GROUPS; i++) {
        tddp_group_release(groups[i]);
    }
    free(data);
}

TEST(operations_of_many_groups_in_any_order)
{
    run_shm_groups(SHM_THREADS, 2, in_any_order, NULL);
    for (int size = 1; size <= 4; size++) {
        run_shm_groups(SHM_PROCESSES, size, in_any_order, NULL);
    }
}

/* A group that finds no space for a view has segments and a thread of its own. */
TEST(groups_with_segments_of_their_own)
{
    int by_group = 1;
    CHECK_INT(setenv("TDDP_SHM_ARENA", "0", 1), 0);
    run_shm_groups(SHM_PROCESSES, 2, in_any_order, &by_group);
    CHECK_INT(unsetenv("TDDP_SHM_ARENA"), 0);
}

/* The last group's end is the thread's; the next operation that is left starts another. */
static void again_and_again(shm_rank *it)
{
    for (int round = 0; round < 5; round++) {
        float data[100];
        fill(data, 100, it->rank + 1);
        end(leave(it->group, data, 100));
        check_sum(it, data, 100);
        if (round % 2) {
            tddp_group *group = make_group(it, round);
            fill(data, 100, it->rank + 1);
            end(leave(group, data, 100));
            check_sum(it, data, 100);
            tddp_group_release(group);
        }
    }
    if (it->mode == SHM_PROCESSES) {
        CHECK_OK(tddp_barrier(it->group, NULL));
        tddp_group_shutdown(it->group, 1000);
        CHECK_INT(check_threads_named("tddp-progress"), 0);
    }
}

TEST(the_thread_ends_with_the_last_group)
{
    run_shm_groups(SHM_THREADS, 3, again_and_again, NULL);
    run_shm_groups(SHM_PROCESSES, 3, again_and_again, NULL);
}

/* A group of one rank has no events, and outlives all others. */
static void alone(shm_rank *it)
{
    char name[32];
    snprintf(name, sizeof name, "rank %d alone", it->rank);
    tddp_group *own = shm_make_group(it, name, 0, 1);
    float data[100];
    float other[100];
    for (int round = 0; round < 20; round++) {
        fill(data, 100, 3);
        fill(other, 100, it->rank + 1);
        tddp_work *second = round == 10 || it->size == 1 ? NULL : leave(it->group, other, 100);
        end(leave(own, data, 100));
        CHECK_DOUBLE(data[99], 3.0 * (99 % 7), 0);
        if (second) {
            end(second);
            check_sum(it, other, 100);
        }
        if (it->mode == SHM_PROCESSES) {
            CHECK_INT(check_threads_named("tddp-progress"), 1);
        }
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_group_shutdown(it->group, 1000);
    for (int round = 0; round < 3; round++) {
        fill(data, 100, 2);
        end(leave(own, data, 100));
        CHECK_DOUBLE(data[99], 2.0 * (99 % 7), 0);
    }
    tddp_group_release(own);
}

TEST(groups_of_one_rank)
{
    run_shm_groups(SHM_THREADS, 2, alone, NULL);
    run_shm_groups(SHM_PROCESSES, 1, alone, NULL);
    run_shm_groups(SHM_PROCESSES, 3, alone, NULL);
}

/* Messages and collectives of several groups at once, most of which nobody waits for. */
static void mixed(shm_rank *it)
{
    enum { FEW = 4, MESSAGES = 50, BYTES = 70001 };
    const int next = (it->rank + 1) % it->size;
    const int before = (it->rank + it->size - 1) % it->size;
    tddp_group *groups[FEW];
    tddp_work *works[FEW * (2 * MESSAGES + 1)];
    int begun = 0;
    uint8_t *memory = calloc((size_t)FEW * MESSAGES * 2, BYTES);
    float *reduced = malloc((size_t)FEW * LARGE * sizeof *reduced);
    CHECK(memory && reduced);
    for (int i = 0; i < FEW; i++) {
        groups[i] = make_group(it, i);
    }
    for (int i = 0; i < FEW; i++) {
        fill(reduced + (size_t)i * LARGE, LARGE, it->rank + 1);
        works[begun++] = leave(groups[i], reduced + (size_t)i * LARGE, LARGE);
        for (int j = 0; j < MESSAGES; j++) {
            const size_t bytes = j % 3 == 0 ? BYTES : j % 3 == 1 ? 3000 : 8;
            uint8_t *out = memory + (size_t)(i * MESSAGES + j) * 2 * BYTES;
            memset(out, 1 + it->rank + j, bytes);
            CHECK_OK(tddp_recv(groups[i], shm_buffer(out + BYTES, bytes, TDDP_UINT8), before, 0,
                               &works[begun++]));
            CHECK_OK(
                tddp_send(groups[i], shm_buffer(out, bytes, TDDP_UINT8), next, 0, &works[begun++]));
        }
    }
    for (int i = begun - 1; i >= 0; i--) {
        end(works[i]);
    }
    for (int i = 0; i < FEW; i++) {
        check_sum(it, reduced + (size_t)i * LARGE, LARGE);
        for (int j = 0; j < MESSAGES; j++) {
            const uint8_t *in = memory + (size_t)(i * MESSAGES + j) * 2 * BYTES + BYTES;
            const size_t bytes = j % 3 == 0 ? BYTES : j % 3 == 1 ? 3000 : 8;
            CHECK_INT(in[0], (uint8_t)(1 + before + j));
            CHECK_INT(in[bytes - 1], (uint8_t)(1 + before + j));
        }
        CHECK_OK(tddp_barrier(groups[i], NULL));
        tddp_group_release(groups[i]);
    }
    free(reduced);
    free(memory);
}

TEST(messages_and_collectives_of_several_groups)
{
    run_shm_groups(SHM_THREADS, 2, mixed, NULL);
    run_shm_groups(SHM_PROCESSES, 3, mixed, NULL);
}

/* --- waiting threads ------------------------------------------------------------------------- */

/* A caller waits for what the engine polls at the same time, again and again interrupted. */
static void waited_for(shm_rank *it)
{
    tddp_group *group = make_group(it, 0);
    float *data = malloc(LARGE * sizeof *data);
    CHECK(data != NULL);
    for (int round = 0; round < 200; round++) {
        const size_t count = round % 4 ? 50 : LARGE;
        fill(data, count, it->rank + 1);
        tddp_work *work = leave(group, data, count);
        tddp_status status = TDDP_TIMEOUT;
        while (status == TDDP_TIMEOUT) {
            status = tddp_work_wait(work, &(tddp_wait){round % 3 ? -1 : 0, NULL});
        }
        CHECK_OK(status);
        tddp_work_release(work);
        check_sum(it, data, count);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_release(group);
    free(data);
}

TEST(a_waiting_thread_and_the_engine_take_turns)
{
    run_shm_groups(SHM_THREADS, 2, waited_for, NULL);
    run_shm_groups(SHM_PROCESSES, 3, waited_for, NULL);
}

/* --- callbacks ------------------------------------------------------------------------------- */

typedef struct follower {
    tddp_group *group;
    float *data;
    atomic_bool done;
} follower;

static void wait_in_another(void *data)
{
    follower *self = data;
    CHECK_OK(tddp_all_reduce(self->group, shm_buffer(self->data, 1000, TDDP_FLOAT32),
                             TDDP_REDUCE_SUM, 0, NULL));
    atomic_store(&self->done, true);
}

/* A callback on the engine's thread waits for another group, in which an operation is left too. */
static void waiting_callbacks(shm_rank *it)
{
    tddp_group *first = make_group(it, 0);
    tddp_group *second = make_group(it, 1);
    float early[1000];
    float data[1000];
    float last[1000];
    fill(early, 1000, it->rank + 1);
    fill(data, 1000, it->rank + 1);
    fill(last, 1000, it->rank + 1);
    follower self = {.group = second, .data = last};
    tddp_work *left = leave(second, early, 1000);
    tddp_work *work = leave(first, data, 1000);
    CHECK_OK(tddp_work_on_done(work, wait_in_another, &self));
    CHECK_UNTIL(atomic_load(&self.done));
    end(work);
    end(left);
    check_sum(it, early, 1000);
    check_sum(it, data, 1000);
    check_sum(it, last, 1000);
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_group_release(first);
    tddp_group_release(second);
}

TEST(a_callback_may_wait_for_another_group)
{
    run_shm_groups(SHM_THREADS, 2, waiting_callbacks, NULL);
    run_shm_groups(SHM_PROCESSES, 3, waiting_callbacks, NULL);
}

static void shut_another_down(void *data)
{
    follower *self = data;
    tddp_group_shutdown(self->group, SHM_TIMEOUT_MS);
    atomic_store(&self->done, true);
}

/* On rank 0 a callback on the engine's thread shuts another group down, whose last operation and
 * message it has to finish first: rank 1 does its part of them later. */
static void shutdown_callbacks(shm_rank *it)
{
    enum { LEFT };
    tddp_group *first = make_group(it, 0);
    tddp_group *second = make_group(it, 1);
    float data[100];
    float last[1000];
    uint8_t byte = 9;
    fill(data, 100, it->rank + 1);
    fill(last, 1000, it->rank + 1);
    follower self = {.group = second, .data = last};
    const tddp_buffer buffer = shm_buffer(&byte, 1, TDDP_UINT8);
    tddp_work *message = NULL;
    tddp_work *left = NULL;
    if (it->rank == 0) {
        byte = 0;
        CHECK_OK(tddp_recv(second, buffer, 1, 0, &message));
        left = leave(second, last, 1000);
    }
    CHECK_MEET(LEFT, it->size);
    tddp_work *work = leave(first, data, 100);
    CHECK_OK(tddp_work_on_done(work, it->rank == 0 ? shut_another_down : wait_in_another, &self));
    end(work);
    if (it->rank == 0) {
        CHECK_UNTIL(atomic_load(&self.done));
        end(left);
        end(message);
        CHECK_INT(byte, 9);
    } else {
        CHECK_UNTIL(atomic_load(&self.done));
        CHECK_OK(tddp_send(second, buffer, 0, 0, NULL));
    }
    check_sum(it, data, 100);
    check_sum(it, last, 1000);
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_group_release(first);
    tddp_group_release(second);
}

TEST(a_callback_may_shut_another_group_down)
{
    run_shm_groups(SHM_PROCESSES, 2, shutdown_callbacks, NULL);
}

typedef struct ender {
    tddp_group *group;
    pthread_t caller;
    atomic_int done; /* 1: on the caller's thread; 2: on the engine's, and has shut it down */
} ender;

static void shut_down_on_engine(void *data)
{
    ender *self = data;
    const bool on_caller = pthread_equal(pthread_self(), self->caller);
    if (!on_caller) {
        tddp_group_shutdown(self->group, SHM_TIMEOUT_MS);
    }
    atomic_store(&self->done, on_caller ? 1 : 2);
}

/* A callback of a group of one rank shuts the only group down that has events. */
static void last_events_end(shm_rank *it)
{
    char name[32];
    float data[100];
    snprintf(name, sizeof name, "rank %d alone", it->rank);
    tddp_group *own = shm_make_group(it, name, 0, 1);
    ender self = {.group = it->group, .caller = pthread_self()};
    fill(data, 100, it->rank + 1);
    end(leave(it->group, data, 100));
    CHECK_OK(tddp_barrier(it->group, NULL));
    while (atomic_load(&self.done) != 2) {
        atomic_store(&self.done, 0);
        tddp_work *work = leave(own, data, 100);
        CHECK_OK(tddp_work_on_done(work, shut_down_on_engine, &self));
        CHECK_UNTIL(atomic_load(&self.done) != 0);
        end(work);
    }
    for (int round = 0; round < 3; round++) {
        fill(data, 100, 2);
        end(leave(own, data, 100));
        CHECK_DOUBLE(data[99], 2.0 * (99 % 7), 0);
    }
    CHECK_INT(check_threads_named("tddp-progress"), 1);
    tddp_group_release(own);
    CHECK_INT(check_threads_named("tddp-progress"), 0);
}

TEST(a_callback_may_shut_down_the_last_group_with_events)
{
    run_shm_groups(SHM_PROCESSES, 2, last_events_end, NULL);
}

/* --- failures -------------------------------------------------------------------------------- */

/* One group's ranks disagree, in a collective or a message that nobody waits for; the others go
 * on. */
static void one_fails(shm_rank *it)
{
    enum { FEW = 4, BEGUN };
    const bool in_message = it->data;
    tddp_group *groups[FEW];
    tddp_work *works[FEW];
    tddp_work *failing;
    float data[FEW][1000];
    float wrong[1000];
    for (int i = 0; i < FEW; i++) {
        groups[i] = make_group(it, i);
        fill(data[i], 1000, it->rank + 1);
    }
    fill(wrong, 1000, 1);
    if (in_message) {
        tddp_op_args args = TDDP_OP_ARGS_INIT;
        args.kind = it->rank == 0 ? TDDP_OP_SEND : TDDP_OP_RECV;
        args.peer = 1 - it->rank;
        args.input = args.output = shm_buffer(wrong, it->rank ? 900 : 1000, TDDP_FLOAT32);
        CHECK_OK(tddp_submit(groups[1], &args, &failing));
    } else {
        failing = leave(groups[1], wrong, it->rank == 0 ? 1000 : 999);
    }
    for (int i = 0; i < FEW; i++) {
        works[i] = i == 1 ? NULL : leave(groups[i], data[i], 1000);
    }
    for (int i = 0; i < FEW; i++) {
        if (works[i]) {
            end(works[i]);
            check_sum(it, data[i], 1000);
        }
    }
    CHECK_UNTIL(tddp_work_completed(failing));
    if (!in_message || it->rank == 1) {
        CHECK_STATUS(tddp_work_status(failing), TDDP_MISMATCH);
    }
    tddp_work_release(failing);
    CHECK_UNTIL(tddp_barrier(groups[1], NULL) != TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), "further 1");
    fill(data[0], 1000, it->rank + 1);
    end(leave(groups[0], data[0], 1000));
    check_sum(it, data[0], 1000);
    CHECK_OK(tddp_barrier(it->group, NULL));
    for (int i = 0; i < FEW; i++) {
        tddp_group_release(groups[i]);
    }
}

TEST(the_failure_of_one_group_leaves_the_others_alone)
{
    int in_message = 1;
    run_shm_groups(SHM_THREADS, 2, one_fails, NULL);
    run_shm_groups(SHM_PROCESSES, 2, one_fails, NULL);
    run_shm_groups(SHM_THREADS, 2, one_fails, &in_message);
    run_shm_groups(SHM_PROCESSES, 2, one_fails, &in_message);
}

/* What nobody waits for ends by its timeout. */
static void times_out(shm_rank *it)
{
    tddp_group *group = make_group(it, 0);
    float data[10];
    fill(data, 10, 1);
    if (it->rank == 0) {
        tddp_work *work;
        tddp_op_args args = TDDP_OP_ARGS_INIT;
        args.kind = TDDP_OP_ALL_REDUCE;
        args.timeout_ms = 50;
        args.input = args.output = shm_buffer(data, 10, TDDP_FLOAT32);
        CHECK_OK(tddp_submit(group, &args, &work));
        CHECK_UNTIL(tddp_work_completed(work));
        CHECK_STATUS(tddp_work_status(work), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "not done after 50 ms; rank 1 has not done its part");
        tddp_work_release(work);
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_group_release(group);
}

TEST(an_operation_that_nobody_waits_for_has_its_timeout)
{
    run_shm_groups(SHM_PROCESSES, 2, times_out, NULL);
}
