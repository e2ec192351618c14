/* Groups with a backend for each kind of memory, with stand-ins for NCCL and CUDA. */
#include "nccl/staged_operations.h"

static void needs(const char *backend)
{
    const tddp_backend_v1 *found;
    if (tddp_backend_find(backend, &found)) {
        check_skip(tddp_error_message());
    }
}

/* One group with both kinds of memory, alternately. */
static void check_both(const char *backend, const char *carrier, int rank, int ranks, int port)
{
    tddp_store *store = open_store(rank, ranks, port);
    bench device = open_bench(backend, store, rank, ranks, TDDP_CUDA);
    bench host = device;
    host.type = TDDP_CPU;
    host.stream = NULL;
    CHECK_TEXT(tddp_group_backend(device.group), backend);
    CHECK_TEXT(tddp_group_carrier(device.group), carrier);
    for (size_t each = 1; each < 3000; each = 7 * each + 4) {
        check_operations(&host, each);
        check_operations(&device, each);
    }
    for (int i = 0; i < 20; i++) {
        check_one_buffer(&host, 33);
        check_one_buffer(&device, 35);
        check_messages(i % 2 ? &host : &device, 20);
    }
    standin_set_delay_ms(3);
    check_operations(&device, 101);
    check_operations(&host, 101);
    standin_set_delay_ms(0);
    close_bench(&device);
    tddp_store_release(store);
}

#define BOTH(ranks)                                                                     \
    MULTI_TEST(cpu_by_shm_and_cuda_by_nccl_##ranks, ranks, 60)                          \
    {                                                                                   \
        check_both("cpu:shm,cuda:nccl", "cpu:shm,cuda:nccl", rank, world_size, port);   \
    }                                                                                   \
    MULTI_TEST(cpu_by_gloo_and_cuda_by_nccl_##ranks, ranks, 60)                         \
    {                                                                                   \
        needs("gloo");                                                                  \
        CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);                                       \
        check_both("cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl", rank, world_size, port); \
    }

BOTH(1)
BOTH(2)
BOTH(3)
BOTH(4)

MULTI_TEST(the_part_for_the_cpu_has_shared_memory, 3, 60)
{
    needs("gloo");
    CHECK_INT(unsetenv("TDDP_SHM"), 0);
    check_both("cpu:gloo,cuda:nccl", "cpu:shm,cuda:nccl", rank, world_size, port);
}

/* The only part: the group copies a device's memory for one that takes the host's alone. */
static void check_alone(const char *backend, const char *carrier, int rank, int ranks, int port)
{
    tddp_store *store = open_store(rank, ranks, port);
    bench device = open_bench(backend, store, rank, ranks, TDDP_CUDA);
    bench host = device;
    host.type = TDDP_CPU;
    host.stream = NULL;
    CHECK_TEXT(tddp_group_backend(device.group), backend);
    CHECK_TEXT(tddp_group_carrier(device.group), carrier);
    if (tddp_group_takes(device.group, TDDP_CPU)) {
        check_operations(&host, 101);
    }
    check_operations(&device, 103);
    close_bench(&device);
    tddp_store_release(store);
}

#define ALONE(name, backend, carrier)                          \
    MULTI_TEST(name, 2, 30)                                    \
    {                                                          \
        check_alone(backend, carrier, rank, world_size, port); \
    }

ALONE(cpu_alone, "cpu:shm", "shm")
ALONE(cuda_alone, "cuda:nccl", "nccl")
ALONE(cuda_alone_by_a_host_backend, "cuda:shm", "shm")
ALONE(both_by_host_backends, "cuda:fake,cpu:shm", "shm")
ALONE(both_by_one, "cpu:shm,cuda:shm", "shm")

/* The group's shared memory is the CPU part's. */
MULTI_TEST(memory_of_the_group, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("cpu:shm,cuda:nccl", store, rank, world_size, TDDP_CUDA);
    tddp_group_memory *memory;
    CHECK_OK(tddp_group_memory_create(self.group, 4000, &memory));
    int32_t *data = tddp_group_memory_data(memory);
    bench host = self;
    host.type = TDDP_CPU;
    host.stream = NULL;
    CHECK_OK(tddp_all_reduce(self.group, filled(&host, data, 1000, 3), TDDP_REDUCE_SUM, 0, NULL));
    check_sums(&host, data, 1000, 3, 0);
    tddp_group_memory_release(memory);
    close_bench(&self);
    tddp_store_release(store);
}

/* One launch is of one kind of memory, although the group takes both. */
MULTI_TEST(batches_of_both_kinds_of_memory, 2, 30)
{
    tddp_work *works[2];
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("cpu:shm,cuda:nccl", store, rank, world_size, TDDP_CUDA);
    bench host = self;
    host.type = TDDP_CPU;
    host.stream = NULL;
    const tddp_op_args messages[2] = {
        message_to(buffer_on(&self, input_memory, 10), 1 - rank, 0),
        message_from(buffer_on(&host, output_memory, 10), 1 - rank, 0)};
    CHECK_STATUS(tddp_batch_send_recv(self.group, messages, 2, works), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(),
                   "a batch of 2 messages has 1 in a device's memory: expected all or none");
    check_one_buffer(&self, 5);
    close_bench(&self);
    tddp_store_release(store);
}

/* A failure in one part ends the group, also for the other part, with the same cause everywhere. */
MULTI_TEST(a_part_that_fails, 3, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    bench self = open_bench("cpu:shm,cuda:nccl", store, rank, world_size, TDDP_CUDA);
    bench host = self;
    host.type = TDDP_CPU;
    host.stream = NULL;
    check_one_buffer(&self, 5);
    if (rank == 1) {
        standin_fail_next("cudaStreamWaitEvent", 2);
    }
    tddp_buffer buffer = filled(&self, input_memory, 100, 1);
    CHECK(tddp_all_reduce(self.group, buffer, TDDP_REDUCE_SUM, 0, NULL) != TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), "cudaStreamWaitEvent: made to fail");
    buffer = filled(&host, output_memory, 100, 1);
    CHECK_STATUS(tddp_all_reduce(self.group, buffer, TDDP_REDUCE_SUM, 0, NULL), TDDP_GROUP_FAILED);
    close_bench(&self);
    tddp_store_release(store);
}

TEST(groups_whose_parts_cannot_be_opened)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "cpu:shm,cuda:nccl";
    opts.device_index = 0;
    opts.device_bound = 1;
    standin_fail_next("ncclGetUniqueId", TDDP_NCCL_SYSTEM_ERROR);
    CHECK(tddp_group_create(&opts, NULL, &group) != TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), "backend cpu:shm,cuda:nccl of group \"default_pg\"");
    CHECK_CONTAINS(tddp_error_message(), "nccl for cuda: ");
    CHECK_CONTAINS(tddp_error_message(), "ncclGetUniqueId: unhandled system error");
    CHECK_INT(standin_alive(), 0);
    tddp_store_release(opts.store);
}

/* A backend for the CPU with a single operation. */
static tddp_status create_few(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    (void)opts;
    (void)wait;
    *context = NULL;
    return TDDP_OK;
}

static void ignore(void *context)
{
    (void)context;
}

static tddp_status succeed(void *context, const tddp_op *op)
{
    (void)context;
    (void)op;
    return TDDP_OK;
}

TEST(operations_that_one_of_them_lacks)
{
    static tddp_backend_v1 few = {.abi = TDDP_BACKEND_ABI,
                                  .size = sizeof few,
                                  .name = "few",
                                  .device_types = 1u << TDDP_CPU,
                                  .create = create_few,
                                  .abort = ignore,
                                  .destroy = ignore,
                                  .op_count = TDDP_OP_COUNT};
    float value = 1;
    tddp_buffer buffer = {&value, 1, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    few.run[TDDP_OP_ALL_REDUCE] = succeed;
    CHECK_OK(tddp_backend_register(&few));
    CHECK_OK(tddp_hash_store_create(20000, &opts.store));
    opts.backend = "cpu:few,cuda:nccl";
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    CHECK_TEXT(tddp_group_carrier(group), "cpu:few,cuda:nccl");
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    CHECK_STATUS(tddp_broadcast(group, buffer, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_TEXT(tddp_error_message(), "backend few, which serves cpu memory here, has no broadcast");
    /* A barrier is the CPU's, whatever the other one has. */
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_UNSUPPORTED);
    CHECK_TEXT(tddp_error_message(), "backend cpu:few,cuda:nccl has no barrier");
    buffer.device_type = (tddp_device_type)TDDP_DEVICE_TYPES;
    CHECK_STATUS(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "backend cpu:few,cuda:nccl takes no ");
    tddp_group_release(group);
    tddp_store_release(opts.store);
}

/* Of a name, or those that it lists in any order; NULL: none. */
static void check_names(const char *name, const char *for_cpu, const char *for_cuda)
{
    const tddp_backend_v1 *found[TDDP_DEVICE_TYPES];
    const char *const expected[TDDP_DEVICE_TYPES] = {for_cpu, for_cuda};
    CHECK_OK(tddp_backends_find(name, found));
    for (int type = 0; type < TDDP_DEVICE_TYPES; type++) {
        const tddp_backend_v1 *named = NULL;
        if (expected[type]) {
            CHECK_OK(tddp_backend_find(expected[type], &named));
        }
        CHECK(found[type] == named);
    }
}

TEST(backends_by_name)
{
    check_names("shm", "shm", NULL);
    check_names("nccl", NULL, "nccl");
    check_names("cpu:shm", "shm", NULL);
    check_names("cuda:nccl", NULL, "nccl");
    check_names("cpu:shm,cuda:nccl", "shm", "nccl");
    check_names("cuda:nccl,cpu:shm", "shm", "nccl");
    check_names("cpu:shm,cuda:shm", "shm", NULL);
    /* What takes no CUDA memory gets copies. */
    check_names("cuda:shm", "shm", NULL);
    check_names("cuda:shm,cpu:fake", "fake", NULL);
}

TEST(invalid_names)
{
    static const struct {
        const char *name;
        tddp_status status;
        const char *text;
    } rows[] = {
        {NULL, TDDP_INVALID_ARGUMENT, "backend name is NULL"},
        {"nowhere", TDDP_UNAVAILABLE, "no backend \"nowhere\""},
        {"cpu:fake,cpu:shm", TDDP_INVALID_ARGUMENT, "fake and shm are both named for cpu"},
        {"tpu:fake", TDDP_INVALID_ARGUMENT, "device \"tpu\": expected one for cpu, for cuda"},
        {"CPU:fake", TDDP_INVALID_ARGUMENT, "device \"CPU\""},
        {"cuda:", TDDP_INVALID_ARGUMENT, "none is named for cuda"},
        {":fake", TDDP_INVALID_ARGUMENT, "device \"\""},
        {"cpu:fake,", TDDP_INVALID_ARGUMENT, "\"\" does not say for which device"},
        {"cpu:fake,shm", TDDP_INVALID_ARGUMENT, "\"shm\" does not say for which device"},
        {"fake,shm", TDDP_INVALID_ARGUMENT, "\"fake\" does not say for which device"},
        {",", TDDP_INVALID_ARGUMENT, "does not say for which device"},
        {"cpu:nowhere", TDDP_UNAVAILABLE, "no backend \"nowhere\" in this installation"},
        {"cpu:fake,cuda:nowhere", TDDP_UNAVAILABLE, "no backend \"nowhere\""},
        {"cpu:../x", TDDP_INVALID_ARGUMENT, "backend \"../x\": expected 1 to 32 letters"},
        {"cpu:a:b", TDDP_INVALID_ARGUMENT, "backend \"a:b\": expected 1 to 32 letters"},
        {"cpu:nccl", TDDP_INVALID_ARGUMENT, "backend \"cpu:nccl\": nccl takes no cpu memory"},
        {"cuda:nccl,cpu:nccl", TDDP_INVALID_ARGUMENT, "nccl takes no cpu memory"},
    };
    char name[1000];
    const tddp_backend_v1 *found[TDDP_DEVICE_TYPES];
    memset(name, 'x', sizeof name);
    memcpy(name, "cpu:", 4);
    name[sizeof name - 1] = '\0';
    CHECK_STATUS(tddp_backends_find(name, found), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "(999 characters)");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_STATUS(tddp_backends_find(rows[i].name, found), rows[i].status);
        CHECK_CONTAINS(tddp_error_message(), rows[i].text);
    }
}
