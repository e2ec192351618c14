/*
 * Our side of test/gpu/bench.py: one rank that times all_reduces of a device's memory.
 *
 * RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who takes part. Each line on stdin is a round:
 * "each BYTES CALLS" waits for every call's result before the next; "row BYTES CALLS" has all calls
 * under way before it waits. Every rank answers with microseconds a call, the median or the mean.
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

static double each(tddp_group *group, tddp_buffer buffer, size_t calls)
{
    static double times[MOST_CALLS];
    for (size_t i = 0; i < calls; i++) {
        double start = now_us();
        check(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        times[i] = now_us() - start;
    }
    qsort(times, calls, sizeof *times, ascending);
    return times[calls / 2];
}

static double row(tddp_group *group, tddp_buffer buffer, size_t calls)
{
    static tddp_work *works[MOST_CALLS];
    double start = now_us();
    for (size_t i = 0; i < calls; i++) {
        check(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, &works[i]));
    }
    for (size_t i = 0; i < calls; i++) {
        check(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    return (now_us() - start) / (double)calls;
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

static void serve(tddp_group *group, void *data)
{
    char way[8];
    size_t bytes;
    size_t calls;
    while (scanf("%7s %zu %zu", way, &bytes, &calls) == 3) {
        if (bytes > MOST_BYTES || calls == 0 || calls > MOST_CALLS) {
            fprintf(stderr, "%zu bytes, %zu calls: too many\n", bytes, calls);
            exit(2);
        }
        tddp_buffer buffer = {data, bytes / sizeof(float), TDDP_FLOAT32, TDDP_CUDA, 0, NULL};
        check(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
        bool is_each = strcmp(way, "each") == 0;
        printf("%.3f\n", is_each ? each(group, buffer, calls) : row(group, buffer, calls));
        fflush(stdout);
    }
}

int main(void)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    const tddp_cuda *cuda;
    tddp_group *group;
    void *data;
    opts.backend = "nccl";
    opts.rank = number("RANK");
    opts.world_size = number("WORLD_SIZE");
    opts.timeout_ms = 60000;
    opts.device_index = 0;
    opts.device_bound = 1;
    at.host = getenv("MASTER_ADDR");
    at.port = number("MASTER_PORT");
    at.is_server = opts.rank == 0;
    at.world_size = opts.world_size;
    at.timeout_ms = 60000;
    check(tddp_tcp_store_open(&at, NULL, &opts.store));
    check(tddp_cuda_get(&cuda));
    check(tddp_group_create(&opts, NULL, &group));
    check(tddp_cuda_check(cuda, cuda->cudaMalloc(&data, MOST_BYTES), "cudaMalloc"));
    const int nccl = nccl_version();
    printf("libtddp %s, CUDA runtime %d.%d, NCCL %d.%d.%d\n", TDDP_VERSION, cuda->version / 1000,
           cuda->version % 1000 / 10, nccl / 10000, nccl % 10000 / 100, nccl % 100);
    fflush(stdout);
    serve(group, data);
    check(tddp_cuda_check(cuda, cuda->cudaFree(data), "cudaFree"));
    tddp_group_shutdown(group, 5000);
    tddp_group_release(group);
    tddp_store_release(opts.store);
    return 0;
}
