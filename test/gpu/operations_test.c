/* Every operation on a device's memory: one rank, and two on one GPU. */
#include "gpu.h"

static void check_all(int rank, int ranks, int port, int device)
{
    live_apart(rank);
    tddp_store *store = open_store(rank, ranks, port);
    tddp_group *group = open_group(store, rank, ranks, device, TIMEOUT_MS);
    check_reductions(group, rank, ranks);
    check_moves(group, rank, ranks);
    check_uneven(group, rank, ranks);
    check_layouts(group, rank, ranks, 0, 0);
    check_layouts(group, rank, ranks, 333, 0);
    check_layouts(group, rank, ranks, 0, 3);
    check_layouts(group, rank, ranks, 333, 1);
    check_dtypes(group, rank, ranks);
    check_bytes(group, rank, ranks);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store, rank, ranks);
}

MULTI_TEST(one_rank, 1, 60)
{
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks, 2, 90)
{
    check_all(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks_that_connect_late, 2, 90)
{
    check_all(rank, world_size, port, -1);
}

MULTI_TEST(messages, 2, 60)
{
    live_apart(rank);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    check_messages(group, rank, world_size);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store, rank, world_size);
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
    leave(group, store, rank, world_size);
}

TEST(a_device_that_is_not_there)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "nccl";
    opts.device_index = 63;
    opts.device_bound = 1;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "device 63: expected a GPU's number, 0 to ");
    tddp_store_release(opts.store);
}
