/*
 * NCCL's and CUDA's own rules, by stand-ins that keep them: a device that carries out one kernel at
 * a time, contexts that are made wherever a device is current.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include <tddp/cuda.h>
#include <tddp/meeting.h>

#include "nccl/rules.h"

enum { ROUNDS = 40 };

/* --- the order of launches ------------------------------------------------------------------- */

/* Two groups, sums and barriers and messages: each rank's device carries them out one by one. */
static void check_one_order(int rank, int world_size, int port)
{
    static float data[3][COUNT];
    tddp_work *works[3 * ROUNDS];
    int count = 0;
    standin_set_serial(1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *first = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    tddp_group *second = second_group(first, store, rank, world_size);
    const tddp_buffer message = on_device(data[2], COUNT, TDDP_FLOAT32);
    for (int i = 0; i < 2; i++) {
        fill(data[i], 1);
    }
    for (int round = 0; round < ROUNDS; round++) {
        works[count++] = begin_sum(round % 3 ? first : second, data[round % 3 ? 0 : 1]);
        if (round % 5 == 0) {
            CHECK_OK(tddp_barrier(round % 2 ? first : second, &works[count++]));
        }
        if (round % 7 == 0 && rank < 2) {
            CHECK_OK((rank == 0) == (round % 2 == 0)
                         ? tddp_send(first, message, 1 - rank, 0, &works[count++])
                         : tddp_recv(first, message, 1 - rank, 0, &works[count++]));
        }
        if (round == 0) { /* sums of ones, so that they stay below the largest number */
            for (int i = 0; i < count; i++) {
                end(works[i]);
            }
            count = 0;
        }
        if (round % 4 == 3) {
            for (int i = 0; i < count; i++) {
                end(works[i]);
            }
            count = 0;
            fill(data[0], 1);
            fill(data[1], 1);
            CHECK_OK(tddp_barrier(first, NULL));
        }
    }
    for (int i = 0; i < count; i++) {
        end(works[i]);
    }
    tddp_group_shutdown(second, 1000);
    tddp_group_release(second);
    leave(first, store);
}

MULTI_TEST(groups_share_an_order_2, 2, 60)
{
    check_one_order(rank, world_size, port);
}

MULTI_TEST(groups_share_an_order_3, 3, 60)
{
    check_one_order(rank, world_size, port);
}

/* In a ring, more than a buffer of NCCL's: first sent and first received make no difference. */
static void check_ring(int rank, int world_size, int port)
{
    static float data[2][COUNT];
    const int next = (rank + 1) % world_size;
    const int before = (rank + world_size - 1) % world_size;
    standin_set_serial(1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    for (int round = 0; round < 6; round++) {
        tddp_work *works[2];
        tddp_op_args messages[2];
        fill(data[0], (float)(10 * rank + round));
        messages[round % 2] = message_to(on_device(data[0], COUNT, TDDP_FLOAT32), next, 0);
        messages[1 - round % 2] = message_from(on_device(data[1], COUNT, TDDP_FLOAT32), before, 0);
        CHECK_OK(tddp_batch_send_recv(group, messages, 2, works));
        CHECK_INT(standin_launched_here(), 1);
        end(works[0]);
        end(works[1]);
        CHECK_DOUBLE((double)data[1][0], 10 * before + round, 0);
        CHECK_DOUBLE((double)data[1][COUNT - 1], 10 * before + round, 0);
    }
    CHECK_INT(standin_communicators(0) + standin_communicators(1), 1);
    leave(group, store);
}

MULTI_TEST(a_ring_of_messages_2, 2, 60)
{
    check_ring(rank, world_size, port);
}

MULTI_TEST(a_ring_of_messages_3, 3, 60)
{
    check_ring(rank, world_size, port);
}

MULTI_TEST(both_directions_have_one_communicator, 2, 60)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    const tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    for (int round = 0; round < 4; round++) {
        fill(data, (float)(round == rank ? 7 : 0));
        CHECK_OK(round % 2 == rank ? tddp_send(group, buffer, 1 - rank, 0, NULL)
                                   : tddp_recv(group, buffer, 1 - rank, 0, NULL));
        CHECK_DOUBLE((double)data[COUNT - 1], round < 2 ? 7 : 0, 0);
    }
    CHECK_INT(standin_communicators(0) + standin_communicators(1), 1);
    leave(group, store);
}

/* --- batches that cannot be ------------------------------------------------------------------ */

MULTI_TEST(batches_with_a_mistake, 2, 60)
{
    static float data[COUNT];
    tddp_work *works[2];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    const tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    const tddp_buffer on_host = {data, COUNT, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    tddp_op_args messages[2] = {message_to(buffer, 1 - rank, 0), message_from(buffer, rank, 0)};
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 2, works), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "this rank itself");
    messages[1] = sum_args(buffer);
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 2, works), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "message 1 of a batch is of kind 0");
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 0, works), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "a batch of 0 messages");
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 2, NULL), TDDP_INVALID_ARGUMENT);
    messages[1] = message_from(on_host, 1 - rank, 0);
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 2, works), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "backend nccl takes no cpu memory");
    /* Found when it is posted: none of them is launched, and the group goes on. */
    messages[1] = message_from(buffer, TDDP_ANY_SOURCE, 0);
    CHECK_STATUS(tddp_batch_send_recv(group, messages, 2, works), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "nccl cannot receive from any rank");
    end(begin_sum(group, data));
    leave(group, store);
}

/* --- threads --------------------------------------------------------------------------------- */

enum { THREADS = 2, SUMS = 30, CONNECTS = 1 /* an event */ };

typedef struct caller {
    tddp_group *group;
    float data[COUNT];
    uint64_t numbers[SUMS];
} caller;

static void *sum_many(void *data)
{
    caller *self = data;
    for (int i = 0; i < SUMS; i++) {
        fill(self->data, 1);
        tddp_work *work = begin_sum(self->group, self->data);
        self->numbers[i] = tddp_work_sequence(work);
        end(work);
        CHECK_DOUBLE((double)self->data[COUNT - 1], 2, 0);
    }
    return NULL;
}

/* Sums of ones, so that it makes no difference which one meets which. */
MULTI_TEST(threads_share_a_group, 2, 60)
{
    static caller callers[THREADS];
    static bool seen[THREADS * SUMS];
    pthread_t threads[THREADS];
    standin_set_serial(1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    for (int i = 0; i < THREADS; i++) {
        callers[i].group = group;
        CHECK_INT(pthread_create(&threads[i], NULL, sum_many, &callers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        for (int sum = 0; sum < SUMS; sum++) {
            const uint64_t number = callers[i].numbers[sum];
            CHECK(number >= 1 && number <= THREADS * SUMS && !seen[number - 1]);
            seen[number - 1] = true;
        }
    }
    leave(group, store);
}

static void *send_first(void *data)
{
    caller *self = data;
    check_will_block(CONNECTS);
    CHECK_OK(tddp_send(self->group, on_device(self->data, COUNT / 2, TDDP_FLOAT32), 1, 0, NULL));
    return NULL;
}

/* Rank 1 connects once rank 0 has sent to rank 2. */
MULTI_TEST(a_message_does_not_wait_for_another_s_connection, 3, 60)
{
    static caller self;
    pthread_t thread;
    tddp_store *store = open_store(rank, world_size, port);
    self.group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    const tddp_buffer buffer = on_device(self.data, COUNT, TDDP_FLOAT32);
    if (rank == 0) {
        CHECK_INT(pthread_create(&thread, NULL, send_first, &self), 0);
        CHECK_AWAIT_BLOCKED(CONNECTS);
        CHECK_OK(tddp_send(self.group, buffer, 2, 0, NULL));
        check_signal(DONE);
        CHECK_INT(pthread_join(thread, NULL), 0);
    } else {
        if (rank == 1) {
            CHECK_AWAIT(DONE, 1);
        }
        CHECK_OK(tddp_recv(self.group,
                           on_device(self.data, rank == 1 ? COUNT / 2 : COUNT, TDDP_FLOAT32), 0, 0,
                           NULL));
    }
    leave(self.group, store);
}

/* --- devices --------------------------------------------------------------------------------- */

/* Each rank has a device of its own, and nothing on device 0, where all its threads begin. */
MULTI_TEST(no_context_on_another_device, 2, 60)
{
    static float data[COUNT];
    const int device = rank + 1;
    tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    buffer.device_index = device;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, device, TIMEOUT_MS);
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(rank == 0 ? tddp_send(group, buffer, 1, 0, NULL)
                       : tddp_recv(group, buffer, 0, 0, NULL));
    leave(group, store);
    CHECK_INT((int)standin_contexts(), 1 << device);
}

/* A program's own device stays current, if it has used it. */
TEST(a_device_in_use_is_switched_back_to)
{
    const tddp_cuda *cuda;
    tddp_cuda_place place;
    int current = -1;
    void *memory;
    CHECK_OK(tddp_cuda_get(&cuda));
    CHECK_OK(tddp_cuda_enter(cuda, 3, &place));
    tddp_cuda_leave(cuda, &place);
    CHECK_INT(cuda->cudaGetDevice(&current), 0);
    CHECK_INT(current, 3); /* 0 had no context */
    CHECK_INT(cuda->cudaMalloc(&memory, 1), 0);
    CHECK_OK(tddp_cuda_enter(cuda, 5, &place));
    tddp_cuda_leave(cuda, &place);
    CHECK_INT(cuda->cudaGetDevice(&current), 0);
    CHECK_INT(current, 3);
    CHECK_INT(cuda->cudaFree(memory), 0);
}

/* --- launches on the caller's thread --------------------------------------------------------- */

MULTI_TEST(a_call_launches_on_its_own_thread, 2, 60)
{
    static float data[COUNT];
    tddp_work *work;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    const tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    end(begin_sum(group, data)); /* the first of its kind waits within NCCL */
    CHECK_INT(standin_launched_here(), 1);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_INT(standin_launched_here(), 1);
    CHECK_OK(rank == 0 ? tddp_send(group, buffer, 1, 0, NULL)
                       : tddp_recv(group, buffer, 0, 0, NULL));
    for (int round = 0; round < 5; round++) {
        work = begin_sum(group, data);
        CHECK_INT(standin_launched_here(), 1);
        CHECK_OK(tddp_work_order(work, NULL, NULL));
        end(work);
        CHECK_OK(rank == 0 ? tddp_send(group, buffer, 1, 0, &work)
                           : tddp_recv(group, buffer, 0, 0, &work));
        CHECK_INT(standin_launched_here(), 1);
        end(work);
    }
    leave(group, store);
}

/* A launch on the caller's thread that fails is the group's failure like any other. */
MULTI_TEST(a_launch_on_the_callers_thread_that_fails, 2, 60)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    end(begin_sum(group, data));
    if (rank == 1) {
        standin_fail_next("ncclAllReduce", TDDP_NCCL_INTERNAL_ERROR);
    }
    CHECK(tddp_all_reduce(group, on_device(data, COUNT, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL) !=
          TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), "ncclAllReduce: internal error");
    CHECK_MEET(DONE, world_size);
    leave(group, store);
}

/* PyTorch's default, unless its variable says otherwise. */
MULTI_TEST(communicators_are_as_the_variable_says, 2, 60)
{
    const char *asked = getenv("TORCH_NCCL_USE_COMM_NONBLOCKING");
    const int blocking = !asked || strcmp(asked, "1") != 0;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_INT(standin_communicators(blocking), 1);
    CHECK_INT(standin_communicators(!blocking), 0);
    leave(group, store);
}

/* --- memory and the store -------------------------------------------------------------------- */

static _Atomic int allocated;
static _Atomic int released;

static tddp_status allocate(size_t bytes, tddp_cuda_stream stream, void **data)
{
    static char memory[1000];
    CHECK(stream != NULL);
    CHECK(bytes <= sizeof memory);
    *data = memory;
    atomic_fetch_add(&allocated, 1);
    return TDDP_OK;
}

static void release(void *data)
{
    CHECK(data != NULL);
    atomic_fetch_add(&released, 1);
}

MULTI_TEST(memory_for_scattered_parts_comes_from_the_allocator, 2, 60)
{
    static const tddp_cuda_allocator allocator = {allocate, release};
    static float input[10], output[2][20];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    const tddp_buffer outputs[] = {on_device(output[0], 10, TDDP_FLOAT32),
                                   on_device(output[1], 10, TDDP_FLOAT32)};
    input[9] = (float)(rank + 5);
    tddp_cuda_set_allocator(&allocator);
    standin_fail_next("cudaMallocAsync", 2);
    CHECK_OK(tddp_all_gather_list(group, on_device(input, 10, TDDP_FLOAT32), outputs, 2, NULL));
    CHECK_DOUBLE((double)output[0][9], 5, 0);
    CHECK_DOUBLE((double)output[1][9], 6, 0);
    CHECK_INT(atomic_load(&allocated), 1);
    CHECK_INT(atomic_load(&released), 1);
    tddp_cuda_set_allocator(NULL);
    standin_fail_next(NULL, 0);
    CHECK_OK(tddp_all_gather_list(group, on_device(input, 10, TDDP_FLOAT32), outputs, 2, NULL));
    CHECK_INT(atomic_load(&allocated), 1);
    leave(group, store);
}

static _Atomic int checks, waits;

/* In place of libtddp's. */
tddp_status tddp_store_check(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_wait *wait, int *all)
{
    static tddp_status (*next)(tddp_store *, const tddp_slice *, size_t, const tddp_wait *, int *);
    if (!next) {
        *(void **)&next = dlsym(RTLD_NEXT, "tddp_store_check");
    }
    atomic_fetch_add(&checks, 1);
    return next(store, keys, count, wait, all);
}

tddp_status tddp_store_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                            const tddp_wait *wait)
{
    static tddp_status (*next)(tddp_store *, const tddp_slice *, size_t, const tddp_wait *);
    if (!next) {
        *(void **)&next = dlsym(RTLD_NEXT, "tddp_store_wait");
    }
    atomic_fetch_add(&waits, 1);
    return next(store, keys, count, wait);
}

static _Atomic int comparisons;
static _Atomic bool holds;

/* In place of libtddp's. A rank that holds has compared its call, and does not connect yet. */
tddp_status tddp_meeting_await(tddp_meeting *meeting, const tddp_wait *wait)
{
    static tddp_status (*next)(tddp_meeting *, const tddp_wait *);
    if (!next) {
        *(void **)&next = dlsym(RTLD_NEXT, "tddp_meeting_await");
    }
    atomic_fetch_add(&comparisons, 1);
    tddp_status status = next(meeting, wait);
    if (atomic_load(&holds)) {
        CHECK_AWAIT(DONE, 1);
    }
    return status;
}

static void *interrupt_connecting(void *token)
{
    CHECK_UNTIL(standin_communicators(0) + standin_communicators(1) == 1);
    tddp_cancel_trigger(token);
    return NULL;
}

/* The thread that continues the launch does not compare again what all ranks have compared. */
MULTI_TEST(a_launch_interrupted_once_calls_are_compared, 2, 60)
{
    static float data[COUNT];
    pthread_t thread;
    tddp_work *work;
    tddp_op_args args = sum_args(on_device(data, COUNT, TDDP_FLOAT32));
    args.description = "float32 [100000]";
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    fill(data, 1);
    atomic_store(&comparisons, 0);
    atomic_store(&holds, rank == 1);
    if (rank == 0) {
        CHECK_OK(tddp_cancel_create(&args.cancel));
        CHECK_INT(pthread_create(&thread, NULL, interrupt_connecting, args.cancel), 0);
    }
    CHECK_OK(tddp_submit(group, &args, &work));
    if (rank == 0) {
        CHECK_INT(pthread_join(thread, NULL), 0);
        check_signal(DONE);
    }
    end(work);
    CHECK_INT(atomic_load(&comparisons), 1);
    CHECK_DOUBLE((double)data[COUNT - 1], 2, 0);
    CHECK_OK(described_sum(group, args.output, args.description)); /* the next one is compared */
    CHECK_INT(atomic_load(&comparisons), 2);
    tddp_cancel_free(args.cancel);
    leave(group, store);
}

/* The first rank begins to connect once the other one waits for that. */
MULTI_TEST(the_unique_id_is_waited_for_in_the_server, 2, 60)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, -1, TIMEOUT_MS);
    const tddp_buffer buffer = on_device(data, COUNT, TDDP_FLOAT32);
    atomic_store(&checks, 0);
    atomic_store(&waits, 0);
    if (rank == 0) {
        CHECK_AWAIT_BLOCKED(DONE);
        CHECK_OK(tddp_send(group, buffer, 1, 0, NULL));
    } else {
        check_will_block(DONE);
        CHECK_OK(tddp_recv(group, buffer, 0, 0, NULL));
    }
    /* The one check is that of the read after the wait. */
    CHECK(atomic_load(&checks) <= 1);
    CHECK(rank == 0 || atomic_load(&waits) > 0);
    leave(group, store);
}
