/*
 * matrix.c's functions for one type: REAL, with DTYPE and NAME(). Included once per type; no guard.
 */

static REAL NAME(dot)(const REAL *restrict a, const REAL *restrict b, size_t count)
{
    REAL sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    for (size_t j = 0; i < count; i++, j++) {
        sums[j] += a[i] * b[i];
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t j = 0; j < half; j++) {
            sums[j] += sums[j + half];
        }
    }
    return sums[0];
}

/* In double: squares of float32 neither underflow nor overflow. */
static double NAME(wide_dot)(const REAL *a, const REAL *b, size_t count)
{
    double sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            sums[j] += (double)a[i + j] * (double)b[i + j];
        }
    }
    for (size_t j = 0; i < count; i++, j++) {
        sums[j] += (double)a[i] * (double)b[i];
    }
    for (size_t j = 1; j < LANES; j++) {
        sums[0] += sums[j];
    }
    return sums[0];
}

static void NAME(add_scaled)(REAL *restrict into, const REAL *restrict from, REAL factor,
                             size_t count)
{
    for (size_t i = 0; i < count; i++) {
        into[i] += factor * from[i];
    }
}

/* --- products -------------------------------------------------------------------------------- */

static void NAME(times)(const tddp_hooks_shape *shape, const void *matrix, const void *narrow,
                        void *product)
{
    const REAL *m = matrix;
    const REAL *q = narrow;
    REAL *p = product;
    memset(p, 0, shape->rows * shape->rank * sizeof *p);
    for (size_t from = 0; from < shape->cols; from += BLOCK) {
        size_t width = tddp_hooks_min(BLOCK, shape->cols - from);
        for (size_t i = 0; i < shape->rows; i++) {
            const REAL *row = m + i * shape->cols + from;
            for (size_t k = 0; k < shape->rank; k++) {
                p[k * shape->rows + i] += NAME(dot)(row, q + k * shape->cols + from, width);
            }
        }
    }
}

/* Adds four rows at a time, to read and write the result once for them. */
static void NAME(add_four)(REAL *restrict into, const REAL *restrict rows, size_t stride,
                           const REAL *restrict factors, size_t count)
{
    const REAL *restrict row0 = rows;
    const REAL *restrict row1 = rows + stride;
    const REAL *restrict row2 = rows + 2 * stride;
    const REAL *restrict row3 = rows + 3 * stride;
    REAL f0 = factors[0];
    REAL f1 = factors[1];
    REAL f2 = factors[2];
    REAL f3 = factors[3];
    for (size_t i = 0; i < count; i++) {
        into[i] += f0 * row0[i] + f1 * row1[i] + (f2 * row2[i] + f3 * row3[i]);
    }
}

static void NAME(transposed_times)(const tddp_hooks_shape *shape, const void *matrix,
                                   const void *narrow, void *product)
{
    const REAL *m = matrix;
    const REAL *p = narrow;
    REAL *q = product;
    memset(q, 0, shape->cols * shape->rank * sizeof *q);
    for (size_t from = 0; from < shape->cols; from += BLOCK) {
        size_t width = tddp_hooks_min(BLOCK, shape->cols - from);
        size_t i = 0;
        for (; i + 4 <= shape->rows; i += 4) {
            const REAL *rows = m + i * shape->cols + from;
            for (size_t k = 0; k < shape->rank; k++) {
                NAME(add_four)
                (q + k * shape->cols + from, rows, shape->cols, p + k * shape->rows + i, width);
            }
        }
        for (; i < shape->rows; i++) {
            const REAL *row = m + i * shape->cols + from;
            for (size_t k = 0; k < shape->rank; k++) {
                NAME(add_scaled)(q + k * shape->cols + from, row, p[k * shape->rows + i], width);
            }
        }
    }
}

static void NAME(row_of_product)(const tddp_hooks_shape *shape, const void *left, const void *right,
                                 size_t row, size_t from, size_t width, void *result)
{
    const REAL *p = left;
    const REAL *q = right;
    REAL *out = result;
    memset(out, 0, width * sizeof *out);
    for (size_t k = 0; k < shape->rank; k++) {
        NAME(add_scaled)(out, q + k * shape->cols + from, p[k * shape->rows + row], width);
    }
}

/* --- orthonormalization ---------------------------------------------------------------------- */

static double NAME(norm)(const REAL *column, size_t length)
{
    return sqrt(NAME(wide_dot)(column, column, length));
}

/* Subtracts column `k`'s projections on the columns before it, whose norm is 1 or 0, or with an
 * epsilon less than 1. */
static void NAME(project)(REAL *columns, size_t length, size_t k, bool shorter_than_one)
{
    REAL *column = columns + k * length;
    for (size_t j = 0; j < k; j++) {
        const REAL *before = columns + j * length;
        double along = NAME(wide_dot)(before, column, length);
        double square = shorter_than_one ? NAME(wide_dot)(before, before, length) : 1.0;
        if (square > 0.0) {
            NAME(add_scaled)(column, before, (REAL)(-along / square), length);
        }
    }
}

/* Modified Gram-Schmidt for one column. Returns false if it is linearly dependent. If the first
 * pass removes most of the column, the rest is largely rounding error, and a second pass projects
 * it again; if that removes most of it too, the column is linearly dependent. */
static bool NAME(make_orthonormal)(REAL *columns, size_t length, size_t k, double epsilon)
{
    REAL *column = columns + k * length;
    double norm = NAME(norm)(column, length);
    for (int pass = 0; pass < 2 && k > 0 && norm > DBL_MIN; pass++) {
        double before = norm;
        NAME(project)(columns, length, k, epsilon > 0.0);
        norm = NAME(norm)(column, length);
        if (norm > 0.7 * before) {
            break;
        }
        if (pass == 1) {
            return false;
        }
    }
    if (!(norm > DBL_MIN) || !isfinite(norm)) {
        return false;
    }
    double factor = 1.0 / (norm + epsilon);
    for (size_t i = 0; i < length; i++) {
        column[i] = (REAL)((double)column[i] * factor);
    }
    return true;
}

static void NAME(randomize)(void *array, size_t length, size_t count, uint64_t key)
{
    REAL *columns = array;
    for (size_t i = 0; i < length * count; i++) {
        columns[i] = (REAL)normal(key, i);
    }
}

static void NAME(orthonormalize)(void *array, size_t length, size_t count, double epsilon,
                                 const uint64_t *key)
{
    REAL *columns = array;
    for (size_t k = 0; k < count; k++) {
        bool done = NAME(make_orthonormal)(columns, length, k, epsilon);
        for (uint64_t attempt = 0; !done && key && attempt < ATTEMPTS; attempt++) {
            uint64_t column_key = tddp_hooks_mix(tddp_hooks_mix(*key, k), attempt);
            NAME(randomize)(columns + k * length, length, 1, column_key);
            done = NAME(make_orthonormal)(columns, length, k, epsilon);
        }
        if (!done) {
            memset(columns + k * length, 0, length * sizeof *columns);
        }
    }
}

/* --- arrays ---------------------------------------------------------------------------------- */

static void NAME(add)(void *into, const void *from, size_t count)
{
    REAL *restrict a = into;
    const REAL *restrict b = from;
    for (size_t i = 0; i < count; i++) {
        a[i] += b[i];
    }
}

static void NAME(subtract)(void *from, const void *what, size_t count)
{
    REAL *restrict a = from;
    const REAL *restrict b = what;
    for (size_t i = 0; i < count; i++) {
        a[i] -= b[i];
    }
}

static void NAME(fill)(void *array, double value, size_t count)
{
    REAL *a = array;
    for (size_t i = 0; i < count; i++) {
        a[i] = (REAL)value;
    }
}

/* A number that isn't finite times zero is NaN. */
static bool NAME(finite)(const void *array, size_t count)
{
    const REAL *a = array;
    REAL sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            sums[j] += a[i + j] * (REAL)0;
        }
    }
    for (; i < count; i++) {
        sums[0] += a[i] * (REAL)0;
    }
    for (size_t j = 1; j < LANES; j++) {
        sums[0] += sums[j];
    }
    return sums[0] == (REAL)0;
}

static const tddp_hooks_algebra NAME(algebra) = {
    .dtype = DTYPE,
    .size = sizeof(REAL),
    .times = NAME(times),
    .transposed_times = NAME(transposed_times),
    .row_of_product = NAME(row_of_product),
    .orthonormalize = NAME(orthonormalize),
    .randomize = NAME(randomize),
    .add = NAME(add),
    .subtract = NAME(subtract),
    .fill = NAME(fill),
    .finite = NAME(finite),
};
