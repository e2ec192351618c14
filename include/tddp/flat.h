/**
 * @file flat.h
 * @brief Flat buffers: parameters, or their gradients, that lie one behind the other in one piece
 * of memory, so that one operation serves all of them.
 *
 * Parameters are known by their numbers, and what belongs to each is a slice of a buffer. Nothing
 * here sees a tensor: the owner of the tensors describes them, and gives memory on devices.
 */
#ifndef TDDP_FLAT_H
#define TDDP_FLAT_H

#include <tddp/buffer.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A parameter, as its owner describes it. */
typedef struct tddp_param {
    const char *name; /**< for messages */
    size_t count;     /**< elements */
    tddp_dtype dtype;
    tddp_device_type device_type;
    int32_t device_index;
    const int64_t *dims; /**< its shape */
    size_t ndim;
    int sparse; /**< its gradient is sparse: it has no slice in any buffer */
} tddp_param;

/** Where something of a parameter lies in a flat buffer, in the buffer's elements. */
typedef struct tddp_flat_slice {
    size_t param;  /**< the parameter's number */
    size_t offset; /**< of the first element */
    size_t count;  /**< of a complex parameter twice its elements: buffers hold real numbers */
    const int64_t *dims; /**< the parameter's shape; borrowed from its description */
    size_t ndim;
} tddp_flat_slice;

/**
 * Memory on TDDP_CUDA, which the owner of the tensors gives: on the CPU buffers lie in memory of
 * the group. `device` is a device's number. Work is put on the calling thread's current stream of
 * that device and need not be done when a call returns. Calls come from any thread, also one that
 * holds a lock of this library, and must not call what they serve. The table is copied; `user`, and
 * what the calls need, live as long as any of the memory.
 */
typedef struct tddp_device_memory_ops {
    size_t size; /**< sizeof(tddp_device_memory_ops) */
    void *user;
    /** So many bytes, more than 0, that are zero: `*data` is the address, at a multiple of 64, and
     *  `*handle` what release() gets. */
    tddp_status (*allocate)(void *user, int32_t device, size_t bytes, void **handle, void **data);
    /** Once nothing uses the memory that this library knows of: operations on it are done. */
    void (*release)(void *user, void *handle);
    tddp_status (*copy)(void *user, int32_t device, void *into, const void *from, size_t bytes);
    tddp_status (*zero)(void *user, int32_t device, void *data, size_t bytes);
    /** into[i] = from[i] / divisor, rounded to float16, bfloat16, float32 or float64; both have
     *  `count` elements, more than 0, and do not overlap. */
    tddp_status (*cast)(void *user, int32_t device, void *into, tddp_dtype into_dtype,
                        const void *from, tddp_dtype from_dtype, size_t count, double divisor);
    /** The current stream of the calling thread: a cudaStream_t, NULL is the default one. */
    void *(*stream)(void *user, int32_t device);
} tddp_device_memory_ops;

/** The memory behind some flat buffers, reference counted, for those whose tensors may outlive
 *  whatever made the buffers. Any thread. */
typedef struct tddp_flat_memory tddp_flat_memory;
/** Returns its argument. */
TDDP_API tddp_flat_memory *tddp_flat_memory_retain(tddp_flat_memory *memory);
/** NULL is fine. */
TDDP_API void tddp_flat_memory_release(tddp_flat_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
