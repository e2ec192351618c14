/* Where the ranks of a partner meet between timed calls, and put their times together: a file that
 * all of them map. One meeting a process. */
#ifndef TDDP_BENCH_MEETING_H
#define TDDP_BENCH_MEETING_H

#include <stdbool.h>
#include <stddef.h>

enum {
    MEETING_MOST = 4096, /* times of a rank */
    MEETING_RANKS = 64,
    MEETING_LINE = 64,
    MEETING_HEAD = MEETING_RANKS * MEETING_LINE,
};

/* Maps the file "meeting" of the driver's folder. */
void meeting_open(const char *folder, int rank, int ranks);

/* Returns when all ranks have come. */
void meeting_come(void);

/* Whether timed call `i` is the last one: rank 0 says so to all one call ahead, when `over` there.
 * All ranks ask after each call, and begin a series of calls with meeting_begin(). */
void meeting_begin(void);
bool meeting_ends(size_t i, bool over);

/* How many ranks say so. All have come to it. */
int meeting_count(int say);

/* The place for a rank's times. */
double *meeting_times(int rank);

/* Of each time the largest over ranks, in an array of this rank's until the next call of this; all
 * have come to it, and may write their times again. */
double *meeting_worst(size_t count);

#endif
