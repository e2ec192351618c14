/*
 * What rank 0 prints: the figures as a table, and the conclusion. Pure but for the stream; one
 * thread.
 */
#include "check/check.h"

enum { WIDEST_TABLE = 12 };

/* A figure as text, which lives as long as the block. */
#define TEXT(unit, value) \
    tddp_check_text(TDDP_CHECK_##unit, value, (char[TDDP_CHECK_TEXT_BYTES]){0})

/* The ranks and hosts of a kind's slowest link. */
#define ENDS "rank %d (%s) to rank %d (%s)"
#define ENDS_OF(results, kind) \
    (kind)->from, (results)->peers[(kind)->from].host, (kind)->to, (results)->peers[(kind)->to].host

const char *tddp_check_text(int unit, double value, char text[TDDP_CHECK_TEXT_BYTES])
{
    static const char *const names[][6] = {
        [TDDP_CHECK_BYTES] = {"B", "KiB", "MiB", "GiB", "TiB"},
        [TDDP_CHECK_SPEED] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"},
        [TDDP_CHECK_SECONDS] = {"us", "ms", "s"}};
    const char *const *name = names[unit];
    for (value *= unit == TDDP_CHECK_SECONDS ? 1e6 : 1; value >= 999.5 && name[1]; name++) {
        value /= unit == TDDP_CHECK_BYTES ? 1024 : 1000;
    }
    int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    (void)snprintf(text, TDDP_CHECK_TEXT_BYTES, "%.*f %s", digits, value, *name);
    return text;
}

/* `text` has places for the median, the rank that has most, and how much that is. */
#define PRINT_RANKS(to, text, unit, figure) \
    fprintf(to, text, TEXT(unit, (figure).median), (figure).rank, TEXT(unit, (figure).most))

static void print_all_reduce(FILE *to, size_t bytes, double seconds)
{
    size_t kib = bytes >> 10;
    fprintf(to, "all_reduce  %zu %s ", kib < 1024 ? kib : kib >> 10, kib < 1024 ? "KiB" : "MiB");
    if (seconds > 0) {
        fprintf(to, "in %s, %s\n", TEXT(SECONDS, seconds), TEXT(SPEED, (double)bytes / seconds));
    } else {
        fprintf(to, "left out: it would take more than a second\n");
    }
}

static void print_links(FILE *to, const tddp_check_results *results)
{
    int size = results->world_size;
    fprintf(to, "\nsend and receive, each row's rank to each column's\n%6s", "");
    for (int rank = 0; rank < size; rank++) {
        fprintf(to, "%11d", rank);
    }
    for (int from = 0; from < size; from++) {
        fprintf(to, "\n%6d", from);
        for (int at = 0; at < size; at++) {
            double speed = results->links[from * size + at].bytes_per_second;
            bool between = tddp_check_is_between_hosts(results, from, at);
            bool slow = from != at && speed < results->kinds[between].median / 2;
            fprintf(to, "%10s%c", from == at ? "-" : TEXT(SPEED, speed), slow ? '!' : ' ');
        }
        fprintf(to, "  %s", results->peers[from].host);
    }
    fprintf(to, "\n");
}

void tddp_check_print(FILE *to, const tddp_check_results *results)
{
    int hosts = 0;
    for (int rank = 0; rank < results->world_size; rank++) {
        int first = 0;
        while (tddp_check_is_between_hosts(results, first, rank)) {
            first++;
        }
        hosts += first == rank;
    }
    fprintf(to, "%d rank%s on %d host%s, over %s\n\n", results->world_size,
            results->world_size == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s", results->carrier);
    PRINT_RANKS(to, "store       %s to set and get a key; slowest for rank %d, %s\n", SECONDS,
                results->store);
    PRINT_RANKS(to, "memory      %s resident at its peak; most for rank %d, %s\n", BYTES,
                results->memory);
    if (results->world_size > 1) {
        fprintf(to, "barrier     %s\n", TEXT(SECONDS, results->barrier));
        for (int i = 0; i < TDDP_CHECK_SIZES; i++) {
            print_all_reduce(to, tddp_check_sizes[i], results->all_reduce[i]);
        }
    }
    if (results->world_size > 1 && results->world_size <= WIDEST_TABLE) {
        print_links(to, results);
    }
    fprintf(to, "\n");
    for (int between_hosts = 0; between_hosts < 2; between_hosts++) {
        const tddp_check_kind *kind = &results->kinds[between_hosts];
        if (kind->count > 0) {
            fprintf(to, "%-14s%zu links, median %s and %s; slowest %s, " ENDS "\n",
                    between_hosts ? "between hosts" : "on one host", kind->count,
                    TEXT(SPEED, kind->median), TEXT(SECONDS, kind->latency),
                    TEXT(SPEED, kind->least), ENDS_OF(results, kind));
        }
    }
}

bool tddp_check_verdict(const tddp_check_results *results, char *text, size_t size)
{
    const tddp_check_kind *kinds = results->kinds;
    bool between_hosts = kinds[1].times_slower > kinds[0].times_slower;
    const tddp_check_kind *worse = &kinds[between_hosts]; /* one without slow links is less so */
    size_t slow = kinds[0].slow + kinds[1].slow;
    if (slow == 0) {
        (void)snprintf(text, size, "verdict: good%s",
                       results->world_size > 1 ? ", no link is slow"
                                               : "; one rank has no links to measure");
    } else {
        (void)snprintf(text, size,
                       "verdict: %zu slow link%s; the slowest is " ENDS ": %s, %.1f times slower "
                       "than the median %s (%s)",
                       slow, slow == 1 ? "" : "s", ENDS_OF(results, worse),
                       TEXT(SPEED, worse->least), worse->times_slower,
                       between_hosts ? "between hosts" : "on a host", TEXT(SPEED, worse->median));
    }
    return slow == 0;
}
