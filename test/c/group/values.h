/*
 * Small whole numbers in memory of any dtype, for tests that compare results with formulas: put()
 * stores one, get() reads it back, as_stored() is what the dtype keeps of it.
 */
#ifndef TDDP_TEST_VALUES_H
#define TDDP_TEST_VALUES_H

#include <complex.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/buffer.h>

#include "backend/half.h"
#include "check.h"

static inline void put(tddp_dtype dtype, void *data, size_t i, double value)
{
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_FLOAT8_E4M3FN: /* bits that nobody computes with */
    case TDDP_FLOAT8_E5M2:
        ((uint8_t *)data)[i] = (uint8_t)(int64_t)value;
        break;
    case TDDP_INT8:
        ((int8_t *)data)[i] = (int8_t)(int64_t)value;
        break;
    case TDDP_INT16:
        ((int16_t *)data)[i] = (int16_t)(int64_t)value;
        break;
    case TDDP_INT32:
        ((int32_t *)data)[i] = (int32_t)value;
        break;
    case TDDP_INT64:
        ((int64_t *)data)[i] = (int64_t)value;
        break;
    case TDDP_FLOAT16:
        ((uint16_t *)data)[i] = tddp_backend_to_float16((float)value);
        break;
    case TDDP_BFLOAT16:
        ((uint16_t *)data)[i] = tddp_backend_to_bfloat16((float)value);
        break;
    case TDDP_FLOAT32:
        ((float *)data)[i] = (float)value;
        break;
    case TDDP_FLOAT64:
        ((double *)data)[i] = value;
        break;
    case TDDP_COMPLEX64:
        ((float complex *)data)[i] = (float)value;
        break;
    case TDDP_COMPLEX128:
        ((double complex *)data)[i] = value;
        break;
    case TDDP_BOOL:
        ((uint8_t *)data)[i] = value != 0;
        break;
    }
}

static inline double get(tddp_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case TDDP_UINT8:
    case TDDP_BOOL:
    case TDDP_FLOAT8_E4M3FN:
    case TDDP_FLOAT8_E5M2:
        return ((const uint8_t *)data)[i];
    case TDDP_INT8:
        return ((const int8_t *)data)[i];
    case TDDP_INT16:
        return ((const int16_t *)data)[i];
    case TDDP_INT32:
        return ((const int32_t *)data)[i];
    case TDDP_INT64:
        return (double)((const int64_t *)data)[i];
    case TDDP_FLOAT16:
        return tddp_backend_from_float16(((const uint16_t *)data)[i]);
    case TDDP_BFLOAT16:
        return tddp_backend_from_bfloat16(((const uint16_t *)data)[i]);
    case TDDP_FLOAT32:
        return ((const float *)data)[i];
    case TDDP_FLOAT64:
        return ((const double *)data)[i];
    case TDDP_COMPLEX64:
        return crealf(((const float complex *)data)[i]);
    case TDDP_COMPLEX128:
        return creal(((const double complex *)data)[i]);
    }
    return NAN;
}

static inline double as_stored(tddp_dtype dtype, double value)
{
    double complex room = 0;
    put(dtype, &room, 0, value);
    return get(dtype, &room, 0);
}

/* Memory for `count` elements of any dtype; free(). Never NULL, so that a leak or a write beyond
 * the end of an empty one is seen. */
static inline void *room_for(size_t count)
{
    void *memory = calloc(count ? count : 1, sizeof(double complex));
    CHECK(memory);
    return memory;
}

#endif
