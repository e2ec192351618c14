/**
 * @file buffer.h
 * @brief Memory as the collectives see it: an address, a number of elements, their type, a device.
 */
#ifndef TDDP_BUFFER_H
#define TDDP_BUFFER_H

#include <stddef.h>
#include <stdint.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** X(name, code, bytes per element, text). The CPU moves the last two, but has no arithmetic for
 * them. */
#define TDDP_DTYPE_MAP(X)                    \
    X(UINT8, 0, 1, "uint8")                  \
    X(INT8, 1, 1, "int8")                    \
    X(INT16, 2, 2, "int16")                  \
    X(INT32, 3, 4, "int32")                  \
    X(INT64, 4, 8, "int64")                  \
    X(FLOAT16, 5, 2, "float16")              \
    X(BFLOAT16, 6, 2, "bfloat16")            \
    X(FLOAT32, 7, 4, "float32")              \
    X(FLOAT64, 8, 8, "float64")              \
    X(COMPLEX64, 9, 8, "complex64")          \
    X(COMPLEX128, 10, 16, "complex128")      \
    X(BOOL, 11, 1, "bool")                   \
    X(FLOAT8_E4M3FN, 12, 1, "float8_e4m3fn") \
    X(FLOAT8_E5M2, 13, 1, "float8_e5m2")

/** The type of an element. */
typedef enum tddp_dtype {
#define TDDP_DTYPE_ENUM(name, code, bytes, text) TDDP_##name = code,
    TDDP_DTYPE_MAP(TDDP_DTYPE_ENUM)
#undef TDDP_DTYPE_ENUM
} tddp_dtype;

/** The kind of device whose memory it is. */
typedef enum tddp_device_type {
    TDDP_CPU = 0,
    TDDP_CUDA = 1,
} tddp_device_type;

/** A borrowed, contiguous piece of memory. The caller keeps it alive until the work is done.
 */
typedef struct tddp_buffer {
    void *data;   /**< NULL only if count is 0 */
    size_t count; /**< elements, not bytes */
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index; /**< the GPU's number; 0 for the CPU */
    void *stream;         /**< cudaStream_t the data was written on; NULL for the CPU */
} tddp_buffer;

/** Bytes of one element; 0 for a value that is no dtype. */
TDDP_API size_t tddp_dtype_size(tddp_dtype dtype);

/** Bytes of all elements. */
static inline size_t tddp_buffer_bytes(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

/** "float32" and so on; "unknown" for a value that is no dtype. Static. */
TDDP_API const char *tddp_dtype_name(tddp_dtype dtype);

/** "cpu" or "cuda". Static. */
TDDP_API const char *tddp_device_type_name(tddp_device_type type);

#ifdef __cplusplus
}
#endif

#endif
