/*
 * What rank 0 prints: the figures as a table, and the conclusion. Pure but for the stream; one
 * thread.
 */
#include "check/check.h"

enum { WIDEST_TABLE = 12 };

/* In the unit in which it has at most three digits before the point. */
static const char *in_units(double value, double step, const char *const units[5],
                            char text[TDDP_CHECK_TEXT_BYTES])
{
    size_t unit = 0;
    for (; value >= 999.5 && unit < 4; unit++) {
        value /= step;
    }
    (void)snprintf(text, TDDP_CHECK_TEXT_BYTES, "%.*f %s",
                   value < 9.995   ? 2
                   : value < 99.95 ? 1
                                   : 0,
                   value, units[unit]);
    return text;
}

const char *tddp_check_bytes(double bytes, char text[TDDP_CHECK_TEXT_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    return in_units(bytes, 1024, units, text);
}

const char *tddp_check_speed(double bytes_per_second, char text[TDDP_CHECK_TEXT_BYTES])
{
    static const char *const units[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
    return in_units(bytes_per_second, 1000, units, text);
}

const char *tddp_check_duration(double seconds, char text[TDDP_CHECK_TEXT_BYTES])
{
    double value = seconds * 1e6;
    const char *unit = value < 1e3 ? "us" : value < 1e6 ? "ms" : "s";
    value /= value < 1e3 ? 1 : value < 1e6 ? 1e3 : 1e6;
    (void)snprintf(text, TDDP_CHECK_TEXT_BYTES, "%.*f %s",
                   value < 9.995   ? 2
                   : value < 99.95 ? 1
                                   : 0,
                   value, unit);
    return text;
}

static void print_size(FILE *to, size_t bytes)
{
    fprintf(to, bytes < 1 << 20 ? "%zu KiB" : "%zu MiB",
            bytes < 1 << 20 ? bytes >> 10 : bytes >> 20);
}

static void print_times(FILE *to, const tddp_check_results *results)
{
    const tddp_check_times *times = &results->times;
    char text[TDDP_CHECK_TEXT_BYTES];
    char other[TDDP_CHECK_TEXT_BYTES];
    fprintf(to, "store       %s to set and get a key; slowest for rank %d, %s\n",
            tddp_check_duration(times->store.median, text), times->store.rank,
            tddp_check_duration(times->store.most, other));
    fprintf(to, "memory      %s resident at its peak; most for rank %d, %s\n",
            tddp_check_bytes(results->memory.median, text), results->memory.rank,
            tddp_check_bytes(results->memory.most, other));
    if (results->world_size == 1) {
        return;
    }
    fprintf(to, "barrier     %s\n", tddp_check_duration(times->barrier, text));
    for (int i = 0; i < TDDP_CHECK_SIZES; i++) {
        fprintf(to, "all_reduce  ");
        print_size(to, times->sizes[i]);
        if (times->all_reduce[i] > 0) {
            fprintf(to, " in %s, %s\n", tddp_check_duration(times->all_reduce[i], text),
                    tddp_check_speed((double)times->sizes[i] / times->all_reduce[i], other));
        } else {
            fprintf(to, " left out: it would take more than a second\n");
        }
    }
}

/* Rows send, columns receive; links are sorted by sender, then receiver. */
static void print_links(FILE *to, const tddp_check_results *results)
{
    int size = results->world_size;
    fprintf(to, "\nsend and receive, each row's rank to each column's\n%6s", "");
    for (int rank = 0; rank < size; rank++) {
        fprintf(to, "%11d", rank);
    }
    fprintf(to, "\n");
    const tddp_check_link *link = results->links;
    for (int from = 0; from < size; from++) {
        fprintf(to, "%6d", from);
        for (int to_rank = 0; to_rank < size; to_rank++) {
            char text[TDDP_CHECK_TEXT_BYTES] = "-";
            if (to_rank != from) {
                const tddp_check_kind *kind =
                    link->between_hosts ? &results->remote : &results->local;
                tddp_check_speed(link->bytes_per_second, text);
                fprintf(to, "%10s%c", text, tddp_check_is_slow(link, kind) ? '!' : ' ');
                link++;
            } else {
                fprintf(to, "%10s ", text);
            }
        }
        fprintf(to, "  %s\n", results->host_of[from]);
    }
}

static void print_kind(FILE *to, const tddp_check_results *results, const tddp_check_kind *kind,
                       const char *name)
{
    char median[TDDP_CHECK_TEXT_BYTES];
    char latency[TDDP_CHECK_TEXT_BYTES];
    char slowest[TDDP_CHECK_TEXT_BYTES];
    if (kind->count == 0) {
        return;
    }
    const tddp_check_link *link = &results->links[kind->slowest];
    fprintf(to, "%-14s%d links, median %s and %s; slowest %s, rank %d (%s) to rank %d (%s)\n", name,
            kind->count, tddp_check_speed(kind->median, median),
            tddp_check_duration(kind->latency, latency),
            tddp_check_speed(link->bytes_per_second, slowest), link->from,
            results->host_of[link->from], link->to, results->host_of[link->to]);
}

void tddp_check_print(FILE *to, const tddp_check_results *results)
{
    fprintf(to, "%d rank%s on %d host%s\n\n", results->world_size,
            results->world_size == 1 ? "" : "s", results->hosts, results->hosts == 1 ? "" : "s");
    print_times(to, results);
    if (results->world_size > 1 && results->world_size <= WIDEST_TABLE) {
        print_links(to, results);
    }
    fprintf(to, "\n");
    print_kind(to, results, &results->local, "on one host");
    print_kind(to, results, &results->remote, "between hosts");
}

static const tddp_check_kind *worse(const tddp_check_results *results)
{
    bool remote =
        results->remote.slow > 0 &&
        (results->local.slow == 0 || results->remote.times_slower > results->local.times_slower);
    return remote ? &results->remote : &results->local;
}

bool tddp_check_verdict(const tddp_check_results *results, char *text, size_t size)
{
    char speed[TDDP_CHECK_TEXT_BYTES];
    char median[TDDP_CHECK_TEXT_BYTES];
    const tddp_check_kind *kind = worse(results);
    int slow = results->local.slow + results->remote.slow;
    if (slow == 0) {
        (void)snprintf(text, size, "verdict: good%s",
                       results->world_size > 1 ? ", no link is slow"
                                               : "; one rank has no links to measure");
        return true;
    }
    const tddp_check_link *link = &results->links[kind->slowest];
    (void)snprintf(text, size,
                   "verdict: %d slow link%s; the slowest is rank %d (%s) to rank %d (%s): %s, %.1f "
                   "times slower than the median %s (%s)",
                   slow, slow == 1 ? "" : "s", link->from, results->host_of[link->from], link->to,
                   results->host_of[link->to], tddp_check_speed(link->bytes_per_second, speed),
                   kind->times_slower, link->between_hosts ? "between hosts" : "on a host",
                   tddp_check_speed(kind->median, median));
    return false;
}
