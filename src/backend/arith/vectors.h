/*
 * The vectors of loops.h and sum.h, as GCC's and clang's vector types of VECTOR_BYTES bytes. Each
 * set_*.c defines VECTOR_BYTES before it includes this file; afterwards it defines stream_vector(),
 * any_nan() and, if the processor has the instructions, the functions of float16.
 */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "backend/half.h"

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNROLLED _Pragma("GCC unroll 4")
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Keeps a loop over a few last elements scalar: vector code for it would only be larger. */
#define KEEP_SCALAR __asm__ volatile("")

typedef float floats __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef double doubles __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), may_alias));

/* Stores to a multiple of VECTOR_BYTES, past the cache. */
INLINE void stream_vector(void *into, words vector);

/* Whether there is a NaN in either. */
INLINE bool any_nan(floats a, floats b);

enum { FLOATS = VECTOR_BYTES / sizeof(float), DOUBLES = VECTOR_BYTES / sizeof(double) };

#define DEFINE_KIT(kit, kit_type, kit_vector, kit_lanes)         \
    typedef kit_type kit##_type;                                 \
    typedef kit_type kit##_real;                                 \
    typedef kit_vector kit##_vector;                             \
    enum { kit##_lanes = kit_lanes };                            \
    INLINE kit_type kit##_get(kit_type element)                  \
    {                                                            \
        return element;                                          \
    }                                                            \
    INLINE kit_type kit##_put(kit_type real)                     \
    {                                                            \
        return real;                                             \
    }                                                            \
    INLINE kit_vector kit##_load(const kit_type *from)           \
    {                                                            \
        kit_vector vector;                                       \
        memcpy(&vector, from, sizeof vector);                    \
        return vector;                                           \
    }                                                            \
    INLINE void kit##_store(kit_type *into, kit_vector vector)   \
    {                                                            \
        memcpy(into, &vector, sizeof vector);                    \
    }                                                            \
    INLINE void kit##_stream(kit_type *into, kit_vector vector)  \
    {                                                            \
        stream_vector(into, (words)vector);                      \
    }                                                            \
    INLINE kit_vector kit##_add(kit_vector a, kit_vector b)      \
    {                                                            \
        return a + b;                                            \
    }                                                            \
    INLINE kit_vector kit##_times(kit_vector a, kit_type factor) \
    {                                                            \
        return a * factor;                                       \
    }

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bfloat16 lie in words by their order");

/* Two vectors of float32: the elements with even and with odd numbers, which are in the lower
 * and upper halves of the loaded words. */
typedef struct pairs {
    floats even;
    floats odd;
} pairs;

typedef uint16_t bfloat16_type;
typedef float bfloat16_real;
typedef pairs bfloat16_vector;
enum { bfloat16_lanes = 2 * FLOATS };

INLINE float bfloat16_get(uint16_t element)
{
    return tddp_backend_from_bfloat16(element);
}

INLINE uint16_t bfloat16_put(float real)
{
    return tddp_backend_to_bfloat16(real);
}

INLINE pairs bfloat16_load(const uint16_t *from)
{
    words both;
    memcpy(&both, from, sizeof both);
    return (pairs){(floats)(both << 16), (floats)(both & 0xffff0000u)};
}

/* Rounds like tddp_backend_to_bfloat16() for numbers that aren't NaN: the results are the upper
 * halves of words. */
INLINE words rounded(floats real)
{
    const words bits = (words)real;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

INLINE words rounded_or_nan(floats real)
{
    const words nan = (words)(real != real);
    return (rounded(real) & ~nan) | (((words)real | 0x00400000u) & nan);
}

INLINE words bfloat16_words(pairs vector)
{
    if (__builtin_expect(any_nan(vector.even, vector.odd), 0)) {
        return (rounded_or_nan(vector.even) >> 16) | (rounded_or_nan(vector.odd) & 0xffff0000u);
    }
    return (rounded(vector.even) >> 16) | (rounded(vector.odd) & 0xffff0000u);
}

INLINE void bfloat16_store(uint16_t *into, pairs vector)
{
    const words both = bfloat16_words(vector);
    memcpy(into, &both, sizeof both);
}

INLINE void bfloat16_stream(uint16_t *into, pairs vector)
{
    stream_vector(into, bfloat16_words(vector));
}

INLINE pairs bfloat16_add(pairs a, pairs b)
{
    return (pairs){a.even + b.even, a.odd + b.odd};
}

INLINE pairs bfloat16_times(pairs a, float factor)
{
    return (pairs){a.even * factor, a.odd * factor};
}

DEFINE_KIT(float32, float, floats, FLOATS)
DEFINE_KIT(float64, double, doubles, DOUBLES)

/* float16: the set defines float16_load(), float16_store() and float16_stream(). */
typedef uint16_t float16_type;
typedef float float16_real;
typedef floats float16_vector;
enum { float16_lanes = FLOATS };

INLINE float float16_get(uint16_t element)
{
    return tddp_backend_from_float16(element);
}

INLINE uint16_t float16_put(float real)
{
    return tddp_backend_to_float16(real);
}

INLINE floats float16_add(floats a, floats b)
{
    return a + b;
}

INLINE floats float16_times(floats a, float factor)
{
    return a * factor;
}
