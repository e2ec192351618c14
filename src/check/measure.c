/*
 * Times operations of all ranks. The number of repetitions follows from the slowest rank's first
 * run, so that every rank does the same and the measurement takes a bounded time. Main thread.
 */
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "check/check.h"

enum { WARM_UP = 2, MOST = 200, LEAST = 3 };

static const double budget = 0.4;   /* seconds for each figure */
static const double too_long = 1.0; /* for one operation: then it is left out */

double tddp_check_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Each rank has its own figure; all ranks' are found by putting each in its own place of a sum. */
static tddp_check_ranks compare_ranks(tddp_group *group, double own)
{
    tddp_check_ranks made = {0};
    size_t count = (size_t)tddp_group_world_size(group);
    double *all = tddp_check_allocate(count, sizeof *all);
    tddp_buffer buffer = {all, count, TDDP_FLOAT64, TDDP_CPU, 0, NULL};
    all[tddp_group_rank(group)] = own;
    tddp_check_must(group, tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    for (size_t i = 0; i < count; i++) {
        if (all[i] > made.most) {
            made.most = all[i];
            made.rank = (int)i;
        }
    }
    made.median = tddp_check_median(all, count);
    free(all);
    return made;
}

/* On a store a set and a get; without one an all_reduce, or a barrier if there is nothing to
 * reduce. Returns the seconds that it took. */
static double once(tddp_group *group, tddp_store *store, tddp_buffer buffer)
{
    double started = tddp_check_now();
    if (store) {
        tddp_blob value;
        tddp_slice name = {"check", 5};
        tddp_check_must(group, tddp_store_set(store, name, name, NULL));
        tddp_check_must(group, tddp_store_get(store, name, NULL, &value));
        tddp_blob_free(&value);
    } else {
        bool barrier = buffer.count == 0;
        tddp_check_must(group, barrier ? tddp_barrier(group, NULL)
                                       : tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    }
    return tddp_check_now() - started;
}

static tddp_check_ranks repeat(tddp_group *group, tddp_store *store, tddp_buffer buffer)
{
    double times[MOST];
    for (int i = 0; i < WARM_UP; i++) {
        times[i] = once(group, store, buffer);
    }
    double slowest = compare_ranks(group, times[WARM_UP - 1]).most;
    size_t count = (size_t)tddp_check_clamp(budget / slowest, LEAST, MOST);
    for (size_t i = 0; i < count; i++) {
        times[i] = once(group, store, buffer);
    }
    return compare_ranks(group, tddp_check_median(times, count));
}

void tddp_check_measure(tddp_group *group, tddp_store *store, tddp_check_results *out)
{
    float *data = tddp_check_allocate(tddp_check_sizes[TDDP_CHECK_SIZES - 1], 1);
    tddp_buffer buffer = {data, 0, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    struct rusage usage = {0};
    double per_byte = 0;
    out->store = repeat(group, store, buffer);
    out->barrier = repeat(group, NULL, buffer).median;
    for (int i = 0; i < TDDP_CHECK_SIZES; i++) {
        double bytes = (double)tddp_check_sizes[i];
        if (per_byte * bytes <= too_long) {
            buffer.count = tddp_check_sizes[i] / sizeof *data;
            out->all_reduce[i] = repeat(group, NULL, buffer).median;
            per_byte = out->all_reduce[i] / bytes;
        }
    }
    free(data);
    out->links = tddp_check_pairs(group, per_byte);
    (void)getrusage(RUSAGE_SELF, &usage); /* fails only for wrong arguments */
    out->memory = compare_ranks(group, (double)usage.ru_maxrss * 1024);
}
