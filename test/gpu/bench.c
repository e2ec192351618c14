/*
 * Our side of bench.py: one rank that times operations on a device's memory.
 *
 * RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say who takes part, and on which
 * device. Each line on stdin is a round of calls: "OPERATION each BYTES CALLS" waits for every
 * call's result before the next; "OPERATION row BYTES CALLS" has all calls under way before it
 * waits. OPERATION is all_reduce; reduce_scatter or all_gather, where BYTES are those of all parts;
 * or message: each is one from rank 0 to rank 1 and one back, a row goes one way. Every rank
 * answers with microseconds a call, the median or the mean.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp.h>
#include <tddp/cuda.h>

#include "../bench/timing.h"

enum { MOST_CALLS = 1000, MOST_BYTES = 64 << 20 };

static void check(tddp_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

static int number(const char *name)
{
    const char *text = getenv(name);
    if (!text) {
        fprintf(stderr, "%s is not set\n", name);
        exit(2);
    }
    return atoi(text);
}

typedef struct bench {
    tddp_group *group;
    int rank;
    int world_size;
    int device;
    void *data; /* MOST_BYTES each */
    void *other;
} bench;

static tddp_buffer floats(const bench *self, void *data, size_t bytes)
{
    return (tddp_buffer){data, bytes / sizeof(float), TDDP_FLOAT32, TDDP_CUDA, self->device, NULL};
}

/* --- one call, which is waited for where `work` is NULL -------------------------------------- */

static void all_reduce(const bench *self, size_t bytes, tddp_work **work)
{
    check(tddp_all_reduce(self->group, floats(self, self->data, bytes), TDDP_REDUCE_SUM, 0, work));
}

static void reduce_scatter(const bench *self, size_t bytes, tddp_work **work)
{
    check(tddp_reduce_scatter(self->group, floats(self, self->data, bytes),
                              floats(self, self->other, bytes / (size_t)self->world_size),
                              TDDP_REDUCE_SUM, 0, work));
}

static void all_gather(const bench *self, size_t bytes, tddp_work **work)
{
    check(tddp_all_gather(self->group, floats(self, self->other, bytes / (size_t)self->world_size),
                          floats(self, self->data, bytes), work));
}

static void message(const bench *self, size_t bytes, tddp_work **work)
{
    if (self->rank == 0) {
        check(tddp_send(self->group, floats(self, self->data, bytes), 1, 0, work));
    } else {
        check(tddp_recv(self->group, floats(self, self->data, bytes), 0, 0, work));
    }
}

static void finish(tddp_work *work)
{
    check(tddp_work_wait(work, NULL));
    tddp_work_release(work);
}

/* As PyTorch's messages, the second one is behind the first on the device's stream. */
static void there_and_back(const bench *self, size_t bytes)
{
    tddp_buffer answer = floats(self, self->other, bytes);
    tddp_work *works[2];
    message(self, bytes, &works[0]);
    check(tddp_work_order(works[0], NULL, NULL));
    if (self->rank == 0) {
        check(tddp_recv(self->group, answer, 1, 0, &works[1]));
    } else {
        check(tddp_send(self->group, answer, 0, 0, &works[1]));
    }
    finish(works[0]);
    finish(works[1]);
}

static const struct operation {
    const char *name;
    void (*call)(const bench *self, size_t bytes, tddp_work **work);
} operations[] = {
    {"all_reduce", all_reduce},
    {"reduce_scatter", reduce_scatter},
    {"all_gather", all_gather},
    {"message", message},
};

/* --- rounds ---------------------------------------------------------------------------------- */

static void once(const bench *self, const struct operation *operation, size_t bytes)
{
    if (operation->call == message) {
        there_and_back(self, bytes);
    } else {
        operation->call(self, bytes, NULL);
    }
}

static double each(const bench *self, const struct operation *operation, size_t bytes, size_t calls)
{
    static double times[MOST_CALLS];
    for (size_t i = 0; i < calls; i++) {
        double start = now_us();
        once(self, operation, bytes);
        times[i] = now_us() - start;
    }
    qsort(times, calls, sizeof *times, ascending);
    return times[calls / 2];
}

static double row(const bench *self, const struct operation *operation, size_t bytes, size_t calls)
{
    static tddp_work *works[MOST_CALLS];
    double start = now_us();
    for (size_t i = 0; i < calls; i++) {
        operation->call(self, bytes, &works[i]);
    }
    for (size_t i = 0; i < calls; i++) {
        finish(works[i]);
    }
    return (now_us() - start) / (double)calls;
}

static const struct operation *operation_named(const char *name)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (strcmp(name, operations[i].name) == 0) {
            return &operations[i];
        }
    }
    fprintf(stderr, "%s: no operation\n", name);
    exit(2);
}

static void serve(const bench *self)
{
    char name[16];
    char way[8];
    size_t bytes;
    size_t calls;
    while (scanf("%15s %7s %zu %zu", name, way, &bytes, &calls) == 4) {
        const struct operation *operation = operation_named(name);
        if (bytes > MOST_BYTES || calls == 0 || calls > MOST_CALLS) {
            fprintf(stderr, "%zu bytes, %zu calls: too many\n", bytes, calls);
            exit(2);
        }
        once(self, operation, bytes);
        bool is_each = strcmp(way, "each") == 0;
        printf("%.3f\n", (is_each ? each : row)(self, operation, bytes, calls));
        fflush(stdout);
    }
}

/* Of the library that the backend has loaded; 0 if it does not tell. */
static int nccl_version(void)
{
    const char *path = getenv("TDDP_NCCL_LIBRARY");
    void *library = dlopen(path && *path ? path : "libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    int (*ask)(int *version) = NULL;
    int version = 0;
    if (library) {
        *(void **)&ask = dlsym(library, "ncclGetVersion");
    }
    return ask && ask(&version) == 0 ? version : 0;
}

int main(void)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    bench self = {NULL, number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), NULL, NULL};
    const tddp_cuda *cuda;
    opts.backend = "nccl";
    opts.rank = self.rank;
    opts.world_size = self.world_size;
    opts.timeout_ms = 60000;
    opts.device_index = self.device;
    opts.device_bound = 1;
    at.host = getenv("MASTER_ADDR");
    at.port = number("MASTER_PORT");
    at.is_server = opts.rank == 0;
    at.world_size = opts.world_size;
    at.timeout_ms = 60000;
    check(tddp_tcp_store_open(&at, NULL, &opts.store));
    check(tddp_cuda_get(&cuda));
    check(tddp_cuda_check(cuda, cuda->cudaSetDevice(self.device), "cudaSetDevice"));
    check(tddp_group_create(&opts, NULL, &self.group));
    check(tddp_cuda_check(cuda, cuda->cudaMalloc(&self.data, MOST_BYTES), "cudaMalloc"));
    check(tddp_cuda_check(cuda, cuda->cudaMalloc(&self.other, MOST_BYTES), "cudaMalloc"));
    const int nccl = nccl_version();
    printf("libtddp %s, CUDA runtime %d.%d, NCCL %d.%d.%d\n", TDDP_VERSION, cuda->version / 1000,
           cuda->version % 1000 / 10, nccl / 10000, nccl % 10000 / 100, nccl % 100);
    fflush(stdout);
    serve(&self);
    check(tddp_cuda_check(cuda, cuda->cudaFree(self.data), "cudaFree"));
    check(tddp_cuda_check(cuda, cuda->cudaFree(self.other), "cudaFree"));
    tddp_group_shutdown(self.group, 5000);
    tddp_group_release(self.group);
    tddp_store_release(opts.store);
    return 0;
}
