/*
 * Units that are offloaded, over stand-ins for CUDA and NCCL, where streams are threads: what is
 * copied on streams of its own is in order with what is computed on another, however long each
 * takes. These tests check order, not the behavior of GPUs.
 */
#include <stdatomic.h>
#include <time.h>

#include <tddp/cuda.h>

#include "nccl/device_memory.h"
#include "nccl/world.h"
#include "sharder/sharder.h"
#include "standin/standin.h"

enum { UNITS = 4, COUNT = 80, STEPS = 3, SHARD = 96 };

typedef struct model {
    tddp_sharder *sharder;
    size_t shard_count;
    float shards[UNITS][SHARD];
    float gradients[UNITS][SHARD]; /* reduced ones, copied */
    float *placed[UNITS];
    tddp_cuda_stream compute;
    tddp_cuda_stream inward;
    tddp_cuda_stream outward;
} model;

static atomic_int wrong; /* elements that a kernel found */

static float value_of(size_t unit, size_t at, int step)
{
    return 1000.0f * (float)unit + (float)at + 0.5f * (float)step;
}

static void order(tddp_cuda_stream stream, tddp_cuda_stream earlier)
{
    tddp_cuda_event event;
    CHECK_CUDA(cudaEventCreateWithFlags, &event, TDDP_CUDA_NO_TIMING);
    CHECK_CUDA(cudaEventRecord, event, earlier);
    CHECK_CUDA(cudaStreamWaitEvent, stream, event, 0);
    CHECK_CUDA(cudaEventDestroy, event);
}

/* --- kernels --------------------------------------------------------------------------------- */

typedef struct kernel {
    float *data;
    size_t count;
    size_t unit;
    int step;
} kernel;

static void put(const model *mine, void (*call)(void *data), kernel values)
{
    kernel *made = malloc(sizeof *made);
    CHECK(made != NULL);
    *made = values;
    standin_put(mine->compute, call, made);
}

/* The unit's parameters are those of the step. Padding is zero. */
static void use_parameters(void *data)
{
    kernel *self = data;
    for (size_t i = 0; i < self->count; i++) {
        atomic_fetch_add(&wrong, self->data[i] != value_of(self->unit, i, self->step));
    }
    free(self);
}

static void write_gradient(void *data)
{
    kernel *self = data;
    for (size_t i = 0; i < self->count; i++) {
        self->data[i] = value_of(self->unit, i, 2 * self->step);
    }
    free(self);
}

static void write_zeros(void *data)
{
    kernel *self = data;
    memset(self->data, 0, self->count);
    free(self);
}

static void free_memory(void *data)
{
    kernel *self = data;
    free(self->data);
    free(self);
}

/* The way to the CPU is slow. */
static void take_time(void *data)
{
    (void)data;
    nanosleep(&(struct timespec){0, 8000000}, NULL);
}

/* --- callbacks ------------------------------------------------------------------------------- */

static tddp_status allocate(void *user, int32_t device, size_t bytes, void **handle, void **data)
{
    (void)device;
    CHECK_INT(posix_memalign(data, 64, bytes), 0);
    *handle = *data;
    put(user, write_zeros, (kernel){.data = *data, .count = bytes});
    return TDDP_OK;
}

static void release(void *user, void *handle)
{
    put(user, free_memory, (kernel){.data = handle});
}

static void *stream(void *user, int32_t device)
{
    (void)device;
    return ((model *)user)->compute;
}

static void place(void *user, size_t unit, void *data)
{
    ((model *)user)->placed[unit] = data;
}

static tddp_status cast_shard(void *user, size_t unit, void *into, size_t count)
{
    (void)user, (void)unit, (void)into, (void)count;
    return tddp_fail(TDDP_INTERNAL, "the shard is not on the device");
}

static tddp_status load_shard(void *user, size_t unit, void *into, size_t count, void **stream)
{
    model *mine = user;
    CHECK_INT(count, mine->shard_count);
    CHECK(*stream == mine->compute);
    order(mine->inward, mine->compute);
    CHECK_CUDA(cudaMemcpyAsync, into, mine->shards[unit], count * sizeof(float), TDDP_CUDA_COPY_ANY,
               mine->inward);
    *stream = mine->inward;
    return TDDP_OK;
}

static tddp_status follow_copies(void *user, int32_t device)
{
    model *mine = user;
    CHECK_INT(device, 0);
    order(mine->compute, mine->inward);
    order(mine->compute, mine->outward);
    return TDDP_OK;
}

static tddp_status reduced(void *user, size_t unit, void *from, size_t count)
{
    model *mine = user;
    CHECK_INT(count, mine->shard_count);
    order(mine->outward, mine->compute);
    standin_put(mine->outward, take_time, NULL);
    CHECK_CUDA(cudaMemcpyAsync, mine->gradients[unit], from, count * sizeof(float),
               TDDP_CUDA_COPY_ANY, mine->outward);
    return TDDP_OK;
}

/* --- training -------------------------------------------------------------------------------- */

static void open_model(model *mine, tddp_group *group, bool divided)
{
    const tddp_device_memory_ops device = {sizeof device, mine, allocate, release,
                                           NULL,          NULL, NULL,     stream};
    const tddp_sharder_ops ops = {sizeof ops, mine,    place,      cast_shard,
                                  reduced,    &device, load_shard, follow_copies};
    const int64_t dim = COUNT;
    const tddp_param param = {"weight", COUNT, TDDP_FLOAT32, TDDP_CUDA, 0, &dim, 1, 0};
    CHECK_OK(tddp_sharder_create(&ops, &mine->sharder));
    for (size_t u = 0; u < UNITS; u++) {
        tddp_unit_opts opts = TDDP_UNIT_OPTS_INIT;
        opts.name = "unit";
        opts.shard_group = divided ? group : NULL;
        opts.replica_group = divided ? NULL : group;
        opts.params = &param;
        opts.param_count = 1;
        opts.offload = 1;
        CHECK_OK(tddp_sharder_add(mine->sharder, &opts, NULL));
        size_t offset;
        const tddp_buffer shard = tddp_sharder_shard(mine->sharder, u, &offset, NULL);
        CHECK(shard.data == NULL);
        mine->shard_count = shard.count;
    }
}

/* The optimizer's step, on the CPU: checks the gradients, and writes the next step's values. */
static void step_optimizer(model *mine, int step)
{
    size_t offset;
    for (size_t u = 0; u < UNITS; u++) {
        (void)tddp_sharder_shard(mine->sharder, u, &offset, NULL);
        for (size_t i = 0; i < mine->shard_count; i++) {
            const bool used = offset + i < COUNT;
            if (step >= 0 && used) {
                CHECK_DOUBLE(mine->gradients[u][i], value_of(u, offset + i, 2 * step), 1e-3);
            }
            mine->gradients[u][i] = -1;
            mine->shards[u][i] = used ? value_of(u, offset + i, step + 1) : 0;
        }
    }
}

static void run_unit(model *mine, size_t unit, int step)
{
    CHECK(mine->placed[unit] != NULL);
    put(mine, use_parameters, (kernel){mine->placed[unit], COUNT, unit, step});
}

static void train(model *mine, int step)
{
    tddp_sharder_begin_forward(mine->sharder);
    for (size_t u = 0; u < UNITS; u++) {
        CHECK_OK(tddp_sharder_before_forward(mine->sharder, u, NULL));
        run_unit(mine, u, step);
        tddp_sharder_after_forward(mine->sharder, u, 1);
    }
    tddp_sharder_end_forward(mine->sharder);
    tddp_sharder_begin_backward(mine->sharder);
    for (size_t u = UNITS; u-- > 0;) {
        void *data = NULL;
        int fresh = 0;
        CHECK_OK(tddp_sharder_before_backward(mine->sharder, u, NULL));
        run_unit(mine, u, step);
        CHECK_OK(tddp_sharder_gradient(mine->sharder, u, &data, &fresh));
        put(mine, write_gradient, (kernel){data, COUNT, u, step});
        tddp_sharder_after_backward(mine->sharder, u);
        CHECK_OK(tddp_sharder_reduce(mine->sharder, u, NULL));
    }
    CHECK_OK(tddp_sharder_finish(mine->sharder, NULL));
    synchronize(mine->inward);
    synchronize(mine->outward);
}

static void follow_steps(int rank, int world_size, int port, bool divided)
{
    static model mine;
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, TIMEOUT_MS);
    for (tddp_cuda_stream *each = &mine.compute; each <= &mine.outward; each++) {
        CHECK_CUDA(cudaStreamCreateWithPriority, each, TDDP_CUDA_NON_BLOCKING, 0);
    }
    open_model(&mine, group, divided);
    step_optimizer(&mine, -1);
    for (int step = 0; step < STEPS; step++) {
        standin_set_delay_ms(step);
        train(&mine, step);
        step_optimizer(&mine, step);
    }
    standin_set_delay_ms(0);
    CHECK_INT(atomic_load(&wrong), 0);
    tddp_sharder_free(mine.sharder);
    for (tddp_cuda_stream *each = &mine.compute; each <= &mine.outward; each++) {
        synchronize(*each);
        CHECK_CUDA(cudaStreamDestroy, *each);
    }
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store);
}

/* --- waits that are over too early ----------------------------------------------------------- */

static bool is_late; /* works complete when the wait for them has just timed out */

tddp_status __real_tddp_work_order(tddp_work *work, void *stream, const tddp_wait *wait);
tddp_status __wrap_tddp_work_order(tddp_work *work, void *stream, const tddp_wait *wait);

tddp_status __wrap_tddp_work_order(tddp_work *work, void *stream, const tddp_wait *wait)
{
    if (!is_late) {
        return __real_tddp_work_order(work, stream, wait);
    }
    CHECK_OK(tddp_work_wait(work, NULL));
    return tddp_fail(TDDP_TIMEOUT, "a moment before");
}

/* Gathered once: a second time on one rank alone would be another operation than the others'. */
MULTI_TEST(what_completes_after_the_wait_for_it, 2, 60)
{
    is_late = rank == 0;
    follow_steps(rank, world_size, port, true);
}

MULTI_TEST(one_rank, 1, 60)
{
    follow_steps(rank, world_size, port, true);
}
MULTI_TEST(two_ranks, 2, 60)
{
    follow_steps(rank, world_size, port, true);
}
MULTI_TEST(three_ranks, 3, 60)
{
    follow_steps(rank, world_size, port, true);
}
MULTI_TEST(replicas, 2, 60)
{
    follow_steps(rank, world_size, port, false);
}
