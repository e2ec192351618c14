/*
 * Classifies measured links: compares each with the median of its kind, since links on a host and
 * links between hosts differ. Pure: no thread, no global.
 */
#include <stdlib.h>
#include <string.h>

#include "check/check.h"

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

double tddp_check_median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, ascending);
    return count == 0 ? 0 : (values[(count - 1) / 2] + values[count / 2]) / 2;
}

double tddp_check_lower_quartile(double *values, size_t count)
{
    (void)tddp_check_median(values, count);
    return count > 0 ? values[count / 4] : 0;
}

double tddp_check_clamp(double value, double least, double most)
{
    return value < least ? least : value > most ? most : value;
}

bool tddp_check_is_between_hosts(const tddp_check_results *results, int from, int to)
{
    return strcmp(results->peers[from].host_id, results->peers[to].host_id) != 0;
}

void tddp_check_classify(tddp_check_results *results)
{
    int size = results->world_size;
    size_t links = (size_t)size * (size_t)size;
    double *speeds = tddp_check_allocate(2 * links, sizeof *speeds);
    double *latencies = speeds + links;
    for (int between_hosts = 0; between_hosts < 2; between_hosts++) {
        tddp_check_kind kind = {.from = -1, .to = -1};
        for (int i = 0; i < size * size; i++) {
            const tddp_check_link *link = &results->links[i];
            int from = i / size;
            int to = i % size;
            if (from == to || tddp_check_is_between_hosts(results, from, to) != between_hosts) {
                continue;
            }
            if (kind.count == 0 || link->bytes_per_second < kind.least) {
                kind.least = link->bytes_per_second;
                kind.from = from;
                kind.to = to;
            }
            latencies[kind.count] = link->latency;
            speeds[kind.count++] = link->bytes_per_second;
        }
        kind.latency = tddp_check_median(latencies, kind.count);
        kind.median = tddp_check_median(speeds, kind.count); /* sorts them */
        while (kind.slow < kind.count && speeds[kind.slow] < kind.median / 2) {
            kind.slow++;
        }
        kind.times_slower = kind.least > 0 ? kind.median / kind.least : 1;
        results->kinds[between_hosts] = kind;
    }
    free(speeds);
}
