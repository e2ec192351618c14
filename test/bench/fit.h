/* Least squares: the constants with which a sum of known terms comes closest to what was measured.
 */
#ifndef TDDP_BENCH_FIT_H
#define TDDP_BENCH_FIT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

enum { FIT_MOST = 4 };

/* Solves the normal equations by elimination. `terms` has FIT_MOST values for each measurement, of
 * which `count` are used. False: the measurements do not determine the constants. */
static inline bool fit(const double (*terms)[FIT_MOST], const double *measured, size_t measurements,
                       size_t count, double *constants)
{
    double rows[FIT_MOST][FIT_MOST + 1] = {{0}};
    for (size_t m = 0; m < measurements; m++) {
        for (size_t i = 0; i < count; i++) {
            for (size_t j = 0; j < count; j++) {
                rows[i][j] += terms[m][i] * terms[m][j] / (measured[m] * measured[m]);
            }
            rows[i][count] += terms[m][i] / measured[m];
        }
    }
    for (size_t i = 0; i < count; i++) {
        size_t pivot = i;
        for (size_t k = i + 1; k < count; k++) {
            pivot = fabs(rows[k][i]) > fabs(rows[pivot][i]) ? k : pivot;
        }
        if (measurements < count || !(fabs(rows[pivot][i]) > 1e-15)) {
            return false;
        }
        for (size_t j = 0; j <= count; j++) {
            const double kept = rows[i][j];
            rows[i][j] = rows[pivot][j];
            rows[pivot][j] = kept;
        }
        for (size_t k = 0; k < count; k++) {
            const double factor = k == i ? 0 : rows[k][i] / rows[i][i];
            for (size_t j = i; j <= count; j++) {
                rows[k][j] -= factor * rows[i][j];
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        constants[i] = rows[i][count] / rows[i][i];
    }
    return true;
}

#endif
