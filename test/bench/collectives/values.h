/* Values by which results are checked: element i of rank r is a small whole number, exact in every
 * dtype, also when summed over ranks. */
#ifndef TDDP_BENCH_VALUES_H
#define TDDP_BENCH_VALUES_H

#include "measure.h"

enum { BENCH_SUM = -1 }; /* in place of a rank: the sum over all ranks */

/* Writes elements `first`... of rank `rank` (or BENCH_SUM) of `ranks`. */
void bench_fill(void *data, size_t count, bench_dtype dtype, int rank, int ranks, size_t first);

/* Whether they are there. */
bool bench_equals(const void *data, size_t count, bench_dtype dtype, int rank, int ranks,
                  size_t first);

#endif
