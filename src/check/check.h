/*
 * torchrun-check: what `torchrun --check` runs as its workers. They measure what training will use
 * (the store, all_reduce, the links between ranks); rank 0 prints it and says what is slow. A
 * program like any user's: it sees the public headers alone. What fails ends the process.
 */
#ifndef TDDP_CHECK_CHECK_H
#define TDDP_CHECK_CHECK_H

#include <stdbool.h>
#include <stdio.h>

#include <tddp.h>

/* A figure that each rank has. */
typedef struct tddp_check_ranks {
    double median;
    double most; /* that of the rank that has most... */
    int rank;    /* ...and which that is */
} tddp_check_ranks;

/* What all_reduce is measured with, in bytes. */
enum { TDDP_CHECK_SIZES = 3 };
static const size_t tddp_check_sizes[TDDP_CHECK_SIZES] = {4 << 10, 1 << 20, 16 << 20};

/* One direction between two ranks. */
typedef struct tddp_check_link {
    double bytes_per_second;
    double latency; /* seconds, half of a round trip */
} tddp_check_link;

/* Links of one kind: on a host, or between hosts. */
typedef struct tddp_check_kind {
    size_t count;
    size_t slow;         /* how many are slower than half the median */
    double median;       /* bytes per second */
    double latency;      /* seconds, the median */
    double least;        /* bytes per second, of the slowest: that... */
    int from;            /* ...from this rank; -1: there is no link of this kind */
    int to;              /* ...to this one */
    double times_slower; /* the median over the slowest */
} tddp_check_kind;

/* All that rank 0 prints. Times are in seconds, medians of repetitions. */
typedef struct tddp_check_results {
    int world_size;
    const char *carrier; /* what moves the data: tddp_group_carrier() */
    tddp_peer *peers;       /* by rank */
    tddp_check_ranks store; /* a set and a get */
    double barrier;
    double all_reduce[TDDP_CHECK_SIZES]; /* 0: left out, since it would have taken too long */
    tddp_check_ranks memory;  /* bytes: the most that was resident, shared memory included */
    tddp_check_link *links;   /* a row for each rank that sends, a column for each that receives */
    tddp_check_kind kinds[2]; /* links on one host, links between hosts */
} tddp_check_results;

/* --- fail.c ---------------------------------------------------------------------------------- */

/* Writes the reason to the error file that torchrun's report is made from. */
void tddp_check_write_reason(const char *text);

/* How long the group's operations have when it ends. */
enum { TDDP_CHECK_SHUTDOWN_MS = 2000 };

/* Unless the call has succeeded: prints tddp_error_message(), writes it as the reason, shuts the
 * group down (NULL: there is none yet) and ends the process with 1. */
void tddp_check_must(tddp_group *group, tddp_status status);

/* calloc() that ends the process where there is no memory. */
void *tddp_check_allocate(size_t count, size_t size);

/* --- measure.c ------------------------------------------------------------------------------- */

double tddp_check_now(void);

/* Measures all but `peers` and `kinds`. Called by all ranks at the same time; the results are the
 * same on all. Caller: free() of the links. */
void tddp_check_measure(tddp_group *group, tddp_store *store, tddp_check_results *out);

/* --- pairs.c ---------------------------------------------------------------------------------- */

/* Measures each pair of ranks both ways; the same on all ranks. Called by all at the same time,
 * with what all_reduce takes for a byte of large data. Caller: free(). */
tddp_check_link *tddp_check_pairs(tddp_group *group, double seconds_per_byte);

/* Which ranks meet: in each of world_size rounds a rank has one partner, or none (-1); after all
 * rounds it has met every other once. */
int tddp_check_partner(int rank, int round, int world_size);

/* --- figures.c: what measurements mean ---------------------------------------------------------
 */

/* Sorts the values; 0 if there are none. */
double tddp_check_median(double *values, size_t count);

/* Of durations: the one that a quarter of them does not reach; sorts them. What else runs on a
 * machine makes single ones longer, and none shorter. 0 if there are none. */
double tddp_check_lower_quartile(double *values, size_t count);

/* The value, or the bound that it is beyond. */
double tddp_check_clamp(double value, double least, double most);

/* Whether the link's ranks are on different hosts: its index in `kinds`. */
bool tddp_check_is_between_hosts(const tddp_check_results *results, int from, int to);

/* Fills `kinds` from the links. */
void tddp_check_classify(tddp_check_results *results);

/* --- table.c --------------------------------------------------------------------------------- */

/* "1.25 GB/s", "28.5 MiB", "730 us": at most three digits that count. */
enum { TDDP_CHECK_TEXT_BYTES = 32 };
enum { TDDP_CHECK_BYTES, TDDP_CHECK_SPEED, TDDP_CHECK_SECONDS };
const char *tddp_check_text(int unit, double value, char text[TDDP_CHECK_TEXT_BYTES]);

void tddp_check_print(FILE *to, const tddp_check_results *results);

/* The one line that counts; true if all is well. */
bool tddp_check_verdict(const tddp_check_results *results, char *text, size_t size);

#endif
