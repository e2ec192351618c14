/*
 * What the tests on a GPU share. NCCL takes two ranks on one GPU only for ranks of different hosts,
 * and then moves everything through sockets: each rank says that it is on a host of its own.
 */
#ifndef TDDP_TEST_GPU_GPU_H
#define TDDP_TEST_GPU_GPU_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nccl/operations.h"

/* Before the first call of CUDA's or NCCL's in the rank's process. */
static inline void live_apart(int rank)
{
    char name[32];
    (void)snprintf(name, sizeof name, "rank-%d", rank);
    CHECK_INT(setenv("NCCL_HOSTID", name, 1), 0);
    CHECK_INT(setenv("NCCL_SOCKET_IFNAME", "lo", 1), 0);
    CHECK_INT(setenv("NCCL_IB_DISABLE", "1", 1), 0);
}

static inline double seconds_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A line for the report: test/gpu/run gathers them from the file that TDDP_GPU_NOTES names. */
__attribute__((format(printf, 1, 2))) static inline void note(const char *format, ...)
{
    const char *path = getenv("TDDP_GPU_NOTES");
    FILE *file = path ? fopen(path, "a") : NULL;
    va_list arguments;
    if (file) {
        va_start(arguments, format);
        (void)vfprintf(file, format, arguments);
        va_end(arguments);
        (void)fputc('\n', file);
        (void)fclose(file);
    }
}

#endif
