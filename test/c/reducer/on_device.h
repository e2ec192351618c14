/* Devices for the reducer's tests: the stand-in for the CUDA runtime, where streams are threads and
 * devices are host memory. These tests check order and lifetimes, not the behavior of GPUs. */
#ifndef TDDP_TEST_REDUCER_ON_DEVICE_H
#define TDDP_TEST_REDUCER_ON_DEVICE_H

#include <stdatomic.h>
#include <stdio.h>

#include <tddp/cuda.h>

#include "nccl/world.h"
#include "hooks/hooks.h"
#include "reducer/reducer.h"
#include "standin/standin.h"

/* --- streams ---------------------------------------------------------------------------------- */

/* This thread's current stream. */
static _Thread_local tddp_cuda_stream current_stream;

static inline const tddp_cuda *cuda(void)
{
    const tddp_cuda *found = NULL;
    CHECK_OK(tddp_cuda_get(&found));
    return found;
}

static inline tddp_cuda_stream make_stream(void)
{
    tddp_cuda_stream stream = NULL;
    CHECK_INT(cuda()->cudaStreamCreateWithPriority(&stream, TDDP_CUDA_NON_BLOCKING, 0), 0);
    return stream;
}

/* Makes later work on `stream` wait for this thread's stream, as backward's streams wait for
 * forward's. */
static inline void wait_for_current(tddp_cuda_stream stream)
{
    tddp_cuda_event event = NULL;
    CHECK_INT(cuda()->cudaEventCreateWithFlags(&event, TDDP_CUDA_NO_TIMING), 0);
    CHECK_INT(cuda()->cudaEventRecord(event, current_stream), 0);
    CHECK_INT(cuda()->cudaStreamWaitEvent(stream, event, 0), 0);
    CHECK_INT(cuda()->cudaEventDestroy(event), 0);
}

static inline void set_flag(void *data)
{
    atomic_store((atomic_bool *)data, true);
}

/* Waits until this thread's stream has completed all its work. */
static inline void synchronize_stream(void)
{
    atomic_bool done = false;
    standin_put(current_stream, set_flag, &done);
    while (!atomic_load(&done)) {
        nanosleep(&(struct timespec){0, 200000}, NULL);
    }
}

/* --- memory ----------------------------------------------------------------------------------- */

static atomic_int allocations; /* not freed yet */
static atomic_int copies;      /* copies and zeroings so far */

/* As libtorch's allocator: memory is freed in the order of the stream that it was allocated on. */
typedef struct device_allocation {
    void *data;
    tddp_cuda_stream stream;
} device_allocation;

typedef struct zeroing {
    void *data;
    size_t bytes;
} zeroing;

static inline void zero_now(void *data)
{
    zeroing *task = data;
    memset(task->data, 0, task->bytes);
    free(task);
}

static inline tddp_status put_zeros(void *data, size_t bytes)
{
    zeroing *task = malloc(sizeof *task);
    CHECK(task != NULL);
    *task = (zeroing){data, bytes};
    standin_put(current_stream, zero_now, task);
    return TDDP_OK;
}

static inline tddp_status device_allocate(void *user, int32_t device, size_t bytes, void **handle,
                                          void **data)
{
    CHECK(user == &allocations);
    CHECK(device == 0 || device == 1);
    device_allocation *made = malloc(sizeof *made);
    CHECK(made != NULL);
    made->stream = current_stream;
    CHECK_INT(posix_memalign(&made->data, 64, bytes), 0);
    memset(made->data, 0xee, bytes);
    atomic_fetch_add(&allocations, 1);
    *handle = made;
    *data = made->data;
    return put_zeros(made->data, bytes);
}

static inline void free_allocation(void *data)
{
    device_allocation *task = data;
    free(task->data);
    free(task);
    atomic_fetch_sub(&allocations, 1);
}

static inline void device_release(void *user, void *handle)
{
    CHECK(user == &allocations);
    standin_put(((device_allocation *)handle)->stream, free_allocation, handle);
}

static inline tddp_status device_copy(void *user, int32_t device, void *into, const void *from,
                                      size_t bytes)
{
    CHECK(user == &allocations && device >= 0);
    atomic_fetch_add(&copies, 1);
    return tddp_cuda_check(
        cuda(), cuda()->cudaMemcpyAsync(into, from, bytes, TDDP_CUDA_COPY_ANY, current_stream),
        "cudaMemcpyAsync");
}

static inline tddp_status device_zero(void *user, int32_t device, void *data, size_t bytes)
{
    CHECK(user == &allocations && device >= 0);
    atomic_fetch_add(&copies, 1);
    return put_zeros(data, bytes);
}

typedef struct casting {
    tddp_buffer from;
    tddp_buffer into;
    double divisor;
} casting;

static inline void cast_now(void *data)
{
    casting *task = data;
    tddp_hooks_cast(task->from, task->into, task->divisor);
    free(task);
}

static inline tddp_status device_cast(void *user, int32_t device, void *into, tddp_dtype into_dtype,
                                      const void *from, tddp_dtype from_dtype, size_t count,
                                      double divisor)
{
    CHECK(user == &allocations && device >= 0);
    casting *task = malloc(sizeof *task);
    CHECK(task != NULL);
    *task = (casting){.from = {(void *)(uintptr_t)from, count, from_dtype, TDDP_CPU, 0, NULL},
                      .into = {into, count, into_dtype, TDDP_CPU, 0, NULL},
                      .divisor = divisor};
    standin_put(current_stream, cast_now, task);
    return TDDP_OK;
}

static inline void *device_stream(void *user, int32_t device)
{
    CHECK(user == &allocations && device >= 0);
    return current_stream;
}

static const tddp_device_memory_ops device_ops = {sizeof device_ops, &allocations, device_allocate,
                                                  device_release,    device_copy,  device_zero,
                                                  device_cast,       device_stream};

static inline void wait_for_release(void)
{
    CHECK_UNTIL(atomic_load(&allocations) <= 0);
    CHECK_INT(atomic_load(&allocations), 0);
}

/* --- a model ---------------------------------------------------------------------------------- */

enum { PARAMS = 11, THREADS = 3 };

static const int64_t model_sizes[] = {1, 7, 33, 129, 1021};
static const char *const model_names[PARAMS] = {"a", "b", "c", "d", "e", "f",
                                                "g", "h", "i", "j", "k"};

/* Two dtypes, two devices, and some on the host if `mixed`. */
static inline void describe_model(tddp_param *params, bool mixed)
{
    for (size_t i = 0; i < PARAMS; i++) {
        const int64_t *size = &model_sizes[i % 5];
        params[i] = (tddp_param){model_names[i],
                                 (size_t)*size,
                                 i % 4 == 1 ? TDDP_FLOAT64 : TDDP_FLOAT32,
                                 TDDP_CUDA,
                                 i % 4 == 2,
                                 size,
                                 1,
                                 0};
        if (mixed && i % 4 == 3) {
            params[i].device_type = TDDP_CPU;
            params[i].device_index = 0;
        }
    }
}

static inline double gradient_of(int rank, int step, size_t param, size_t k)
{
    return rank + 2 * step + (double)((param + k) % 5);
}

typedef struct writing {
    const tddp_param *param;
    size_t index;
    void *data;
    int rank; /* -1: zeros */
    int step;
} writing;

static inline void write_now(void *data)
{
    writing *task = data;
    for (size_t k = 0; k < task->param->count; k++) {
        double value = task->rank < 0 ? 0 : gradient_of(task->rank, task->step, task->index, k);
        if (task->param->dtype == TDDP_FLOAT64) {
            ((double *)task->data)[k] = value;
        } else {
            ((float *)task->data)[k] = (float)value;
        }
    }
    free(task);
}

/* Writes on this thread's stream, or at once on the host. `params` must outlive the streams. */
static inline void write_gradient(tddp_reducer *reducer, const tddp_param *params, size_t i,
                                  int rank, int step)
{
    writing *task = malloc(sizeof *task);
    CHECK(task != NULL);
    *task = (writing){&params[i], i, tddp_reducer_gradient(reducer, i), rank, step};
    standin_put(params[i].device_type == TDDP_CPU ? NULL : current_stream, write_now, task);
}

/* Reads the gradient on this thread's stream. */
static inline void read_gradient(tddp_reducer *reducer, const tddp_param *param, size_t i,
                                 double *out)
{
    double bytes[1021];
    const size_t size = param->count * tddp_dtype_size(param->dtype);
    if (param->device_type == TDDP_CPU) {
        memcpy(bytes, tddp_reducer_gradient(reducer, i), size);
    } else {
        CHECK_INT(cuda()->cudaMemcpyAsync(bytes, tddp_reducer_gradient(reducer, i), size,
                                          TDDP_CUDA_COPY_ANY, current_stream),
                  0);
        synchronize_stream();
    }
    for (size_t k = 0; k < param->count; k++) {
        out[k] = param->dtype == TDDP_FLOAT64 ? bytes[k] : (double)((float *)bytes)[k];
    }
}

/* Each element is `scale` times that of rank `rank`, which may be a fraction. */
static inline void check_gradient(tddp_reducer *reducer, const tddp_param *params, size_t i,
                                  double rank, int step, double scale)
{
    double values[1021];
    read_gradient(reducer, &params[i], i, values);
    for (size_t k = 0; k < params[i].count; k++) {
        CHECK_DOUBLE(values[k], scale * (rank + gradient_of(0, step, i, k)), 1e-4);
    }
}

/* --- autograd's threads ----------------------------------------------------------------------- */

typedef struct marking_thread {
    tddp_reducer *reducer;
    const tddp_param *params;
    tddp_cuda_stream stream;
    size_t first; /* it marks every third parameter from this one on ready */
    size_t skipped;
    int rank;
    int step;
    int times; /* how often it marks each one */
} marking_thread;

static inline void *mark_ready_on_thread(void *data)
{
    const marking_thread *mine = data;
    current_stream = mine->stream;
    for (size_t i = mine->first; i < PARAMS; i += THREADS) {
        for (int n = 0; n < mine->times && i != mine->skipped; n++) {
            int all = 0;
            write_gradient(mine->reducer, mine->params, i, mine->rank, mine->step);
            CHECK_OK(tddp_reducer_mark_ready(mine->reducer, i, &all));
        }
    }
    return NULL;
}

/* A backward, with a stream per thread. */
static inline void backward(tddp_reducer *reducer, const tddp_param *params,
                            const tddp_cuda_stream *streams, int rank, int step, size_t skipped,
                            int times)
{
    pthread_t threads[THREADS];
    marking_thread reporters[THREADS];
    for (size_t t = 0; t < THREADS; t++) {
        wait_for_current(streams[t]);
        reporters[t] = (marking_thread){reducer, params, streams[t], t, skipped, rank, step, times};
        CHECK_OK(tddp_thread_start(&threads[t], "test", mark_ready_on_thread, &reporters[t]));
    }
    for (size_t t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
}

/* --- set-up and tear-down --------------------------------------------------------------------- */

typedef struct device_test {
    tddp_store *store;
    tddp_group *group;
    tddp_cuda_stream streams[THREADS];
    tddp_param params[PARAMS];
    tddp_reducer *reducer;
} device_test;

static inline void begin_with(device_test *test, int rank, int world_size, int port, bool mixed,
                              tddp_reducer_opts opts, int64_t timeout_ms)
{
    static const size_t limits[] = {64, 2000};
    test->store = open_store(rank, world_size, port);
    test->group = open_group(test->store, rank, world_size, -1, timeout_ms);
    current_stream = make_stream();
    for (size_t t = 0; t < THREADS; t++) {
        test->streams[t] = make_stream();
    }
    describe_model(test->params, mixed);
    opts.device = &device_ops;
    opts.limits = limits;
    opts.limit_count = 2;
    CHECK_OK(tddp_reducer_create(test->group, test->params, PARAMS, &opts, NULL, &test->reducer));
}

static inline void end(device_test *test)
{
    standin_set_delay_ms(0);
    tddp_reducer_free(test->reducer);
    wait_for_release();
    synchronize_stream();
    for (size_t t = 0; t < THREADS; t++) {
        CHECK_INT(cuda()->cudaStreamDestroy(test->streams[t]), 0);
    }
    CHECK_INT(cuda()->cudaStreamDestroy(current_stream), 0);
    leave(test->group, test->store);
}

#endif
