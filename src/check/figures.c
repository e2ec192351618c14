/*
 * Classifies measured links: compares each with the median of its kind, since links on a host and
 * links between hosts differ. Pure: no thread, no global.
 */
#include <stdlib.h>

#include "check/check.h"

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

double tddp_check_median(double *values, size_t count)
{
    if (count == 0) {
        return 0;
    }
    qsort(values, count, sizeof *values, ascending);
    return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double tddp_check_quick(double *values, size_t count)
{
    (void)tddp_check_median(values, count);
    return count > 0 ? values[count / 4] : 0;
}

bool tddp_check_is_slow(const tddp_check_link *link, const tddp_check_kind *kind)
{
    return link->bytes_per_second < kind->median / 2;
}

tddp_status tddp_check_judge(const tddp_check_link *links, size_t count, bool between_hosts,
                             tddp_check_kind *out)
{
    tddp_check_kind kind = {.slowest = -1, .times_slower = 1};
    double *speeds = calloc(count + 1, sizeof *speeds);
    double *latencies = calloc(count + 1, sizeof *latencies);
    if (!speeds || !latencies) {
        free(speeds);
        free(latencies);
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        if (links[i].between_hosts != between_hosts) {
            continue;
        }
        if (kind.slowest < 0 || links[i].bytes_per_second < links[kind.slowest].bytes_per_second) {
            kind.slowest = (int)i;
        }
        latencies[kind.count] = links[i].latency;
        speeds[kind.count++] = links[i].bytes_per_second;
    }
    kind.median = tddp_check_median(speeds, (size_t)kind.count);
    kind.latency = tddp_check_median(latencies, (size_t)kind.count);
    free(speeds);
    free(latencies);
    for (size_t i = 0; i < count; i++) {
        if (links[i].between_hosts == between_hosts && tddp_check_is_slow(&links[i], &kind)) {
            kind.slow++;
        }
    }
    if (kind.slowest >= 0 && links[kind.slowest].bytes_per_second > 0) {
        kind.times_slower = kind.median / links[kind.slowest].bytes_per_second;
    }
    *out = kind;
    return TDDP_OK;
}
