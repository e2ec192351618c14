/* What the C benchmarks measure with. */
#ifndef TDDP_BENCH_TIMING_H
#define TDDP_BENCH_TIMING_H

#include <time.h>

/* Microseconds of a clock that only goes forward. */
static inline double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* For qsort(3) of doubles. */
static inline int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

#endif
