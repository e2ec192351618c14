/*
 * Operations on memory that the group's backend doesn't support, with stand-ins for NCCL and CUDA.
 */
#include "args.h"
#include "events.h"
#include "nccl/staged_operations.h"

static const size_t sizes[] = {0, 1, 3, 1000, MAX_EACH};

static void check_backend(const char *backend, tddp_device_type type, int rank, int ranks, int port)
{
    tddp_store *store = open_store(rank, ranks, port);
    bench self = open_bench(backend, store, rank, ranks, type);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_operations(&self, sizes[i]);
    }
    standin_set_delay_ms(3);
    check_operations(&self, 1001);
    standin_set_delay_ms(0);
    close_bench(&self);
    tddp_store_release(store);
}

static void needs(const char *backend)
{
    const tddp_backend_v1 *found;
    if (tddp_backend_find(backend, &found)) {
        check_skip(tddp_error_message());
    }
}

#define BY_RANKS(name, ranks, backend, type)                  \
    MULTI_TEST(name##_##ranks, ranks, 60)                     \
    {                                                         \
        needs(backend);                                       \
        check_backend(backend, type, rank, world_size, port); \
    }

BY_RANKS(cuda_over_shm, 1, "shm", TDDP_CUDA)
BY_RANKS(cuda_over_shm, 2, "shm", TDDP_CUDA)
BY_RANKS(cuda_over_shm, 3, "shm", TDDP_CUDA)
BY_RANKS(cuda_over_shm, 4, "shm", TDDP_CUDA)
BY_RANKS(cuda_over_fake, 2, "fake", TDDP_CUDA)

#define OVER_GLOO(ranks)                                          \
    MULTI_TEST(cuda_over_gloo_##ranks, ranks, 60)                 \
    {                                                             \
        needs("gloo");                                            \
        CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);                 \
        check_backend("gloo", TDDP_CUDA, rank, world_size, port); \
    }

OVER_GLOO(1)
OVER_GLOO(2)
OVER_GLOO(3)
OVER_GLOO(4)

/* Host memory on one rank, device memory on the other. */
MULTI_TEST(ranks_with_different_memory, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, rank == 0 ? TDDP_CPU : TDDP_CUDA);
    check_operations(&self, 1001);
    close_bench(&self);
    tddp_store_release(store);
}

/* Input and output have their own streams. */
MULTI_TEST(two_streams, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    bench other = self;
    CHECK_INT(self.cuda->cudaStreamCreateWithPriority(&other.stream, 1, 0), 0);
    standin_set_delay_ms(20);
    for (int i = 0; i < 3; i++) {
        tddp_buffer whole = poisoned(&other, output_memory, 2000);
        tddp_buffer own = filled(&self, input_memory, 1000, i);
        CHECK_OK(tddp_all_gather(self.group, own, whole, NULL));
        check_values(output_memory, 1000, 0, i);
        check_values(output_memory + 1000, 1000, 1, i);
        (void)poisoned(&other, output_memory, 100); /* the second stream is the later one */
        (void)poisoned(&other, output_memory, 100);
        tddp_buffer both[2] = {filled(&self, input_memory, 100, 4),
                               filled(&other, output_memory, 100, 5)};
        CHECK_OK(tddp_all_reduce_coalesced(self.group, both, 2, TDDP_REDUCE_SUM, 0, NULL));
        check_sums(&self, input_memory, 100, 4, 0);
        check_sums(&self, output_memory, 100, 5, 0);
    }
    standin_set_delay_ms(0);
    CHECK_INT(self.cuda->cudaStreamDestroy(other.stream), 0);
    close_bench(&self);
    tddp_store_release(store);
}

/* Many works in flight, waited for in any order, some of them repeatedly. */
MULTI_TEST(works_in_flight, 3, 30)
{
    enum { WORKS = 8, EACH = 501 };
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    standin_set_delay_ms(10);
    for (int round = 0; round < 3; round++) {
        tddp_work *works[WORKS];
        for (int i = 0; i < WORKS; i++) {
            tddp_buffer buffer = filled(&self, input_memory + i * EACH, EACH, i);
            CHECK_OK(inline_sum(self.group, buffer, round == 2 ? 500 : 0, NULL, &works[i]));
        }
        const tddp_wait moment = {1, NULL};
        while (round == 1 && tddp_work_wait(works[0], &moment)) {
            CHECK_CONTAINS(tddp_error_message(), "not done after waiting");
        }
        for (int i = WORKS - 1; i >= 0; i--) {
            CHECK_OK(tddp_work_wait(works[i], NULL));
            tddp_work_release(works[i]);
            check_sums(&self, input_memory + i * EACH, EACH, i, 0);
        }
    }
    standin_set_delay_ms(0);
    close_bench(&self);
    tddp_store_release(store);
}

/* Works that no thread waits for end, though their memory is written later. */
static void leave_to_the_engine(int rank, int world_size, int port)
{
    enum { WORKS = 3, EACH = 501 };
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("shm", store, rank, world_size, TDDP_CUDA);
    standin_set_delay_ms(10);
    tddp_work *works[WORKS];
    for (int i = 0; i < WORKS; i++) {
        tddp_buffer buffer = filled(&self, input_memory + i * EACH, EACH, i);
        CHECK_OK(inline_sum(self.group, buffer, 0, NULL, &works[i]));
    }
    for (int i = 0; i < WORKS; i++) {
        CHECK_UNTIL(tddp_work_completed(works[i]));
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
        check_sums(&self, input_memory + i * EACH, EACH, i, 0);
    }
    standin_set_delay_ms(0);
    close_bench(&self);
    tddp_store_release(store);
}

MULTI_TEST(left_to_the_engine_of_one_rank, 1, 30)
{
    leave_to_the_engine(rank, world_size, port);
}

MULTI_TEST(left_to_the_engines_of_two_ranks, 2, 30)
{
    leave_to_the_engine(rank, world_size, port);
}

/* Memory for copies is reused by the next operation, and grows with the operations. */
MULTI_TEST(memory_for_copies_is_reused, 1, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("fake", store, rank, world_size, TDDP_CUDA);
    check_one_buffer(&self, 1000);
    const int before = standin_alive();
    for (size_t count = 1; count <= MAX_EACH; count = 3 * count + 1) {
        check_one_buffer(&self, count);
        CHECK_INT(standin_alive(), before);
    }
    close_bench(&self);
    tddp_store_release(store);
}

/* The group goes on. */
TEST(host_memory_with_nccl_alone_is_refused)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_on("nccl", store, 0, 1);
    tddp_buffer buffer = {input_memory, 8, TDDP_INT32, TDDP_CPU, 0, NULL};
    CHECK_STATUS(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce: backend nccl takes no cpu memory");
    CHECK_CONTAINS(tddp_error_message(), "\"cpu:gloo,cuda:nccl\"");
    CHECK_INT(tddp_group_takes(group, TDDP_CPU), 0);
    CHECK_INT(tddp_group_takes(group, TDDP_CUDA), 1);
    buffer = on_device(input_memory, 8, TDDP_INT32);
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    tddp_group_release(group);
    tddp_store_release(store);
}

TEST(buffers_on_different_devices_are_refused)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_on("shm", store, 0, 1);
    tddp_buffer host = {input_memory, 8, TDDP_INT32, TDDP_CPU, 0, NULL};
    tddp_buffer device = {output_memory, 8, TDDP_INT32, TDDP_CUDA, 1, NULL};
    CHECK_STATUS(tddp_all_gather(group, host, device, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(),
               "all_gather: input is on cpu:0, output on cuda:1: expected the same");
    device.device_type = (tddp_device_type)7;
    CHECK_STATUS(tddp_all_gather(group, device, device, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "all_gather: backend shm takes no");
    CHECK_OK(tddp_all_reduce(group, host, TDDP_REDUCE_SUM, 0, NULL));
    tddp_group_release(group);
    tddp_store_release(store);
}

TEST(without_cuda_its_memory_is_refused)
{
    tddp_store *store;
    CHECK_INT(setenv("TDDP_CUDART_LIBRARY", "/nonexistent/libcudart.so", 1), 0);
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_on("shm", store, 0, 1);
    CHECK_STATUS(
        tddp_all_reduce(group, on_device(input_memory, 8, TDDP_INT32), TDDP_REDUCE_SUM, 0, NULL),
        TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce: backend shm takes no cuda memory");
    CHECK_CONTAINS(tddp_error_message(), "the CUDA runtime was not found");
    CHECK_CONTAINS(tddp_error_message(), "/nonexistent/libcudart.so");
    tddp_group_release(group);
    tddp_store_release(store);
}

/* The caller's current device doesn't change. */
TEST(callers_keep_their_device)
{
    tddp_store *store;
    int device = -1;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    bench self = open_bench("shm", store, 0, 1, TDDP_CUDA);
    CHECK_INT(self.cuda->cudaSetDevice(1), 0);
    check_operations(&self, 100);
    CHECK_INT(self.cuda->cudaGetDevice(&device), 0);
    CHECK_INT(device, 1);
    close_bench(&self);
    tddp_store_release(store);
}

/* Each rank has a device of its own, and nothing on device 0, where all its threads begin. */
MULTI_TEST(no_context_on_another_device_by_copies, 2, 60)
{
    const int device = rank + 1;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_on("shm", store, rank, world_size);
    tddp_buffer buffer = on_device(input_memory, 8, TDDP_INT32);
    buffer.device_index = device;
    input_memory[7] = rank + 1;
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    CHECK_INT(input_memory[7], 3);
    CHECK_INT((int)standin_contexts(), 1 << device);
    tddp_group_release(group);
    tddp_store_release(store);
}

TEST(graphs_cannot_capture_copies)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_on("shm", store, 0, 1);
    tddp_buffer buffer = on_device(input_memory, 8, TDDP_INT32);
    standin_set_capture(1);
    CHECK_STATUS(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce: a CUDA graph is being captured");
    standin_set_capture(0);
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    tddp_group_release(group);
    tddp_store_release(store);
    CHECK_INT(standin_alive(), 0);
}
