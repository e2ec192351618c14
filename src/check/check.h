/*
 * torchrun-check: what `torchrun --check` runs as its workers. They measure what training will use
 * (the store, all_reduce, the links between ranks); rank 0 prints it and says what is slow. A
 * program like any user's: it sees the public headers alone.
 */
#ifndef TDDP_CHECK_CHECK_H
#define TDDP_CHECK_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <tddp.h>

/* --- figures.c: what measurements mean ---------------------------------------------------------
 */

/* One direction between two ranks. */
typedef struct tddp_check_link {
    int from;
    int to;
    bool between_hosts;
    double bytes_per_second;
    double latency; /* seconds, half of a round trip */
} tddp_check_link;

/* Links of one kind: on a host, or between hosts. */
typedef struct tddp_check_kind {
    int count;
    int slow;            /* how many are slower than half the median */
    double median;       /* bytes per second */
    double latency;      /* seconds, the median */
    int slowest;         /* index of the link; -1: there is none of this kind */
    double times_slower; /* the median over the slowest */
} tddp_check_kind;

/* Sorts the values; 0 if there are none. */
double tddp_check_median(double *values, size_t count);

/* Of durations: the one that a quarter of them does not reach; sorts them. What else runs on a
 * machine makes single ones longer, and none shorter. 0 if there are none. */
double tddp_check_quick(double *values, size_t count);

/* Whether a link is slower than half the median of its kind. */
bool tddp_check_is_slow(const tddp_check_link *link, const tddp_check_kind *kind);

/* What the links of a kind have in common. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_check_judge(const tddp_check_link *links, size_t count,
                                            bool between_hosts, tddp_check_kind *out);

/* --- measure.c ------------------------------------------------------------------------------- */

enum { TDDP_CHECK_SIZES = 3 };

/* A figure that each rank has. */
typedef struct tddp_check_ranks {
    double median;
    double most; /* that of the rank that has most... */
    int rank;    /* ...and which that is */
} tddp_check_ranks;

/* Seconds; medians of repetitions. */
typedef struct tddp_check_times {
    tddp_check_ranks store; /* a set and a get */
    double barrier;
    size_t sizes[TDDP_CHECK_SIZES];      /* bytes */
    double all_reduce[TDDP_CHECK_SIZES]; /* 0: left out, since it would have taken too long */
} tddp_check_times;

double tddp_check_now(void);

/* Called by all ranks at the same time; the results are the same on all. */
TDDP_NODISCARD tddp_status tddp_check_measure(tddp_group *group, tddp_check_times *out);

/* The most memory that each process had at any time, in bytes: resident, shared memory included.
 * Called by all ranks after what is measured. */
TDDP_NODISCARD tddp_status tddp_check_memory(tddp_group *group, tddp_check_ranks *out);

/* --- pairs.c ---------------------------------------------------------------------------------- */

/* Measures each pair of ranks both ways; the same on all ranks: world_size * (world_size - 1)
 * links. Called by all at the same time. Caller: free(). */
TDDP_NODISCARD tddp_status tddp_check_pairs(tddp_group *group, tddp_check_link **links,
                                            size_t *count);

/* From this many ranks on, pairs that share no rank are measured at the same time. */
enum { TDDP_CHECK_CROWD = 9 };

/* Who meets whom: in round 0 to size - 2 (size even) or size - 1 (odd) each rank has one partner,
 * or none (-1); after all rounds it has met every other once. */
int tddp_check_rounds(int world_size);
int tddp_check_partner(int rank, int round, int world_size);

/* --- table.c --------------------------------------------------------------------------------- */

/* All that rank 0 prints. */
typedef struct tddp_check_results {
    int world_size;
    int hosts;
    const char *const *host_of; /* by rank */
    tddp_check_times times;
    tddp_check_ranks memory;
    const tddp_check_link *links;
    size_t link_count;
    tddp_check_kind local;  /* links on one host */
    tddp_check_kind remote; /* links between hosts */
} tddp_check_results;

/* "1.25 GB/s", "28.5 MiB", "730 us": at most three digits that count. */
enum { TDDP_CHECK_TEXT_BYTES = 32 };
const char *tddp_check_bytes(double bytes, char text[TDDP_CHECK_TEXT_BYTES]);
const char *tddp_check_speed(double bytes_per_second, char text[TDDP_CHECK_TEXT_BYTES]);
const char *tddp_check_duration(double seconds, char text[TDDP_CHECK_TEXT_BYTES]);

void tddp_check_print(FILE *to, const tddp_check_results *results);

/* The one line that counts; true if all is well. */
bool tddp_check_verdict(const tddp_check_results *results, char *text, size_t size);

#endif
