/*
 * Times operations of all ranks. Rank 0 chooses the number of repetitions from a first run and
 * sends it to the others, so that every rank does the same and the measurement takes a bounded
 * time. Main thread.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "check/check.h"

enum { WARM_UP = 2, MOST = 200, LEAST = 3 };

static const double budget = 0.4;   /* seconds for each figure */
static const double too_long = 1.0; /* for one operation: then it is left out */
static const size_t sizes[TDDP_CHECK_SIZES] = {4 << 10, 1 << 20, 16 << 20};

double tddp_check_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static tddp_buffer doubles(double *values, size_t count)
{
    return (tddp_buffer){values, count, TDDP_FLOAT64, TDDP_CPU, 0, NULL};
}

/* Each rank has its own figure; all ranks' are found by putting each in its own place of a sum. */
static tddp_status compare_ranks(tddp_group *group, double own, tddp_check_ranks *out)
{
    tddp_check_ranks made = {0};
    size_t count = (size_t)tddp_group_world_size(group);
    double *all = calloc(count, sizeof *all);
    if (!all) {
        return TDDP_OUT_OF_MEMORY;
    }
    all[tddp_group_rank(group)] = own;
    tddp_status status = tddp_all_reduce(group, doubles(all, count), TDDP_REDUCE_SUM, 0, NULL);
    for (size_t i = 0; status == TDDP_OK && i < count; i++) {
        if (all[i] > made.most) {
            made.most = all[i];
            made.rank = (int)i;
        }
    }
    if (status == TDDP_OK) {
        made.median = tddp_check_median(all, count);
        *out = made;
    }
    free(all);
    return status;
}

/* --- the store ------------------------------------------------------------------------------- */

static tddp_status use_store(tddp_store *store, const char *key)
{
    tddp_slice name = {key, strlen(key)};
    tddp_blob value;
    tddp_status status = tddp_store_set(store, name, name, NULL);
    if (status == TDDP_OK) {
        status = tddp_store_get(store, name, NULL, &value);
    }
    if (status == TDDP_OK) {
        tddp_blob_free(&value);
    }
    return status;
}

static tddp_status time_store(tddp_group *group, double *out)
{
    double times[MOST];
    char key[32];
    tddp_store *store = tddp_group_store(group);
    if (!store) {
        return TDDP_GROUP_CLOSED;
    }
    (void)snprintf(key, sizeof key, "check/%d", tddp_group_rank(group));
    tddp_status status = TDDP_OK;
    size_t count = 0;
    for (double begin = tddp_check_now(), now = begin;
         status == TDDP_OK && count < MOST && (count < LEAST || now - begin < budget); count++) {
        double started = now;
        status = use_store(store, key);
        now = tddp_check_now();
        times[count] = now - started;
    }
    tddp_store_release(store);
    if (status == TDDP_OK) {
        *out = tddp_check_median(times, count);
    }
    return status;
}

/* --- memory ---------------------------------------------------------------------------------- */

tddp_status tddp_check_memory(tddp_group *group, tddp_check_ranks *out)
{
    struct rusage usage = {0};
    (void)getrusage(RUSAGE_SELF, &usage); /* fails only for wrong arguments */
    return compare_ranks(group, (double)usage.ru_maxrss * 1024, out);
}

/* --- the group ------------------------------------------------------------------------------- */

/* A barrier if there is nothing to reduce. */
static tddp_status once(tddp_group *group, tddp_buffer buffer)
{
    return buffer.count > 0 ? tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL)
                            : tddp_barrier(group, NULL);
}

static tddp_status agree_on_count(tddp_group *group, double first, size_t *out)
{
    double count = first > 0 ? budget / first : MOST;
    tddp_status status = tddp_broadcast(group, doubles(&count, 1), 0, NULL);
    *out = count > MOST ? MOST : count < LEAST ? LEAST : (size_t)count;
    return status;
}

static tddp_status time_group(tddp_group *group, tddp_buffer buffer, double *out)
{
    double times[MOST];
    double last = 0;
    tddp_status status = TDDP_OK;
    for (int i = 0; status == TDDP_OK && i < WARM_UP; i++) {
        double started = tddp_check_now();
        status = once(group, buffer);
        last = tddp_check_now() - started;
    }
    size_t count = 0;
    if (status == TDDP_OK) {
        status = agree_on_count(group, last, &count);
    }
    for (size_t i = 0; status == TDDP_OK && i < count; i++) {
        double started = tddp_check_now();
        status = once(group, buffer);
        times[i] = tddp_check_now() - started;
    }
    if (status == TDDP_OK) {
        double median = tddp_check_median(times, count);
        status = tddp_broadcast(group, doubles(&median, 1), 0, NULL);
        *out = median;
    }
    return status;
}

tddp_status tddp_check_measure(tddp_group *group, tddp_check_times *out)
{
    tddp_check_times made = {0};
    tddp_buffer nothing = {NULL, 0, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    double own = 0;
    float *data = calloc(sizes[TDDP_CHECK_SIZES - 1], 1);
    if (!data) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = time_store(group, &own);
    if (status == TDDP_OK) {
        status = compare_ranks(group, own, &made.store);
    }
    if (status == TDDP_OK) {
        status = time_group(group, nothing, &made.barrier);
    }
    for (int i = 0; status == TDDP_OK && i < TDDP_CHECK_SIZES; i++) {
        /* The figures are rank 0's on all ranks, so all decide the same. */
        double ratio = i > 0 ? (double)sizes[i] / (double)sizes[i - 1] : 1;
        if (i > 0 && (made.all_reduce[i - 1] == 0 || made.all_reduce[i - 1] * ratio > too_long)) {
            continue;
        }
        tddp_buffer part = {data, sizes[i] / sizeof *data, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
        made.sizes[i] = sizes[i];
        status = time_group(group, part, &made.all_reduce[i]);
    }
    free(data);
    if (status == TDDP_OK) {
        *out = made;
    }
    return status;
}
