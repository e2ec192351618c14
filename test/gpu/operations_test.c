/* Every operation on a device's memory: one rank, and two on one GPU. */
#include "gpu.h"

MULTI_TEST(one_rank, 1, 60)
{
    live_apart(rank);
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks, 2, 90)
{
    live_apart(rank);
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks_that_connect_late, 2, 90)
{
    live_apart(rank);
    check_all(rank, world_size, port, -1);
}

MULTI_TEST(messages, 2, 60)
{
    live_apart(rank);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    check_messages(group, rank, world_size);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store);
}

/* What the stream of a buffer does is done before the operation reads it. */
MULTI_TEST(data_that_another_stream_writes, 2, 60)
{
    enum { COUNT = 8 << 20, ROUNDS = 5 };
    tddp_cuda_stream stream;
    float *pinned;
    void *data;
    live_apart(rank);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    CHECK_CUDA(cudaStreamCreateWithPriority, &stream, TDDP_CUDA_NON_BLOCKING, 0);
    CHECK_CUDA(cudaHostAlloc, (void **)&pinned, COUNT * sizeof *pinned, TDDP_CUDA_PORTABLE);
    CHECK_CUDA(cudaMalloc, &data, COUNT * sizeof *pinned);
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < COUNT; i++) {
            pinned[i] = (float)(round + rank);
        }
        CHECK_CUDA(cudaMemcpyAsync, data, pinned, COUNT * sizeof *pinned, TDDP_CUDA_COPY_ANY,
                   stream);
        tddp_buffer buffer = {data, COUNT, TDDP_FLOAT32, TDDP_CUDA, 0, stream};
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        copy(pinned, data, COUNT * sizeof *pinned);
        for (size_t i = 0; i < COUNT; i += 1021) {
            CHECK_DOUBLE((double)pinned[i], 2 * round + 1, 0);
        }
        CHECK_DOUBLE((double)pinned[COUNT - 1], 2 * round + 1, 0);
    }
    CHECK_CUDA(cudaFree, data);
    CHECK_CUDA(cudaFreeHost, pinned);
    CHECK_CUDA(cudaStreamDestroy, stream);
    leave(group, store);
}

TEST(a_device_that_is_not_there)
{
    check_no_device(63, "device 63: expected a GPU's number, 0 to ");
}
