/*
 * Arrays from one floating-point dtype to another, through float32: plain loops that the compiler
 * vectorises, one for each pair. Pure functions, any thread.
 */
#include <string.h>

#include "backend/half.h"
#include "reducer/hooks/hooks.h"

#define FROM_FLOAT16(x) tddp_backend_from_float16(x)
#define FROM_BFLOAT16(x) tddp_backend_from_bfloat16(x)
#define FROM_FLOAT32(x) (x)
#define FROM_FLOAT64(x) ((float)(x))
#define TO_FLOAT16(x) tddp_backend_to_float16(x)
#define TO_BFLOAT16(x) tddp_backend_to_bfloat16(x)
#define TO_FLOAT32(x) (x)
#define TO_FLOAT64(x) ((double)(x))

#define DEFINE_CAST(from_name, from_type, to_name, to_type)                                       \
    static void from_name##_##to_name(const void *restrict from, void *restrict to, size_t count, \
                                      float divisor)                                              \
    {                                                                                             \
        const from_type *restrict a = from;                                                       \
        to_type *restrict b = to;                                                                 \
        if (divisor == 1.0f) {                                                                    \
            for (size_t i = 0; i < count; i++) {                                                  \
                b[i] = TO_##to_name(FROM_##from_name(a[i]));                                      \
            }                                                                                     \
        } else {                                                                                  \
            for (size_t i = 0; i < count; i++) {                                                  \
                b[i] = TO_##to_name(FROM_##from_name(a[i]) / divisor);                            \
            }                                                                                     \
        }                                                                                         \
    }

DEFINE_CAST(FLOAT16, uint16_t, BFLOAT16, uint16_t)
DEFINE_CAST(FLOAT16, uint16_t, FLOAT32, float)
DEFINE_CAST(FLOAT16, uint16_t, FLOAT64, double)
DEFINE_CAST(BFLOAT16, uint16_t, FLOAT16, uint16_t)
DEFINE_CAST(BFLOAT16, uint16_t, FLOAT32, float)
DEFINE_CAST(BFLOAT16, uint16_t, FLOAT64, double)
DEFINE_CAST(FLOAT32, float, FLOAT16, uint16_t)
DEFINE_CAST(FLOAT32, float, BFLOAT16, uint16_t)
DEFINE_CAST(FLOAT32, float, FLOAT32, float)
DEFINE_CAST(FLOAT32, float, FLOAT64, double)
DEFINE_CAST(FLOAT64, double, FLOAT16, uint16_t)
DEFINE_CAST(FLOAT64, double, BFLOAT16, uint16_t)
DEFINE_CAST(FLOAT64, double, FLOAT32, float)

typedef void (*cast)(const void *restrict from, void *restrict to, size_t count, float divisor);

enum { DTYPE_COUNT = TDDP_FLOAT64 + 1 };

#define CAST(from_name, to_name) [TDDP_##from_name][TDDP_##to_name] = from_name##_##to_name

static const cast casts[DTYPE_COUNT][DTYPE_COUNT] = {
    CAST(FLOAT16, BFLOAT16), CAST(FLOAT16, FLOAT32),  CAST(FLOAT16, FLOAT64),
    CAST(BFLOAT16, FLOAT16), CAST(BFLOAT16, FLOAT32), CAST(BFLOAT16, FLOAT64),
    CAST(FLOAT32, FLOAT16),  CAST(FLOAT32, BFLOAT16), CAST(FLOAT32, FLOAT32),
    CAST(FLOAT32, FLOAT64),  CAST(FLOAT64, FLOAT16),  CAST(FLOAT64, BFLOAT16),
    CAST(FLOAT64, FLOAT32),
};

void tddp_hooks_cast(tddp_buffer from, tddp_buffer to, double divisor)
{
    casts[from.dtype][to.dtype](from.data, to.data, from.count, (float)divisor);
}

char *tddp_hooks_at(const tddp_buffer *buffer, size_t start)
{
    return (char *)buffer->data + start * tddp_dtype_size(buffer->dtype);
}

const float *tddp_hooks_floats(const tddp_buffer *buffer, size_t start, size_t count,
                               float *scratch)
{
    const void *from = tddp_hooks_at(buffer, start);
    if (buffer->dtype == TDDP_FLOAT32) {
        return from;
    }
    casts[buffer->dtype][TDDP_FLOAT32](from, scratch, count, 1.0f);
    return scratch;
}

void tddp_hooks_store_floats(const float *from, const tddp_buffer *buffer, size_t start,
                             size_t count)
{
    casts[TDDP_FLOAT32][buffer->dtype](from, tddp_hooks_at(buffer, start), count, 1.0f);
}
