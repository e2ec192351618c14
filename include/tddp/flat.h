/**
 * @file flat.h
 * @brief Flat buffers: parameters, or their gradients, in contiguous memory, so that one operation
 * includes all of them.
 *
 * Parameters are identified by number, and each has a slice of a buffer. Nothing here knows
 * tensors: their owner describes them, and allocates memory on devices.
 */
#ifndef TDDP_FLAT_H
#define TDDP_FLAT_H

#include <tddp/buffer.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The description of a parameter. */
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

/** A parameter's slice of a flat buffer, in the buffer's elements. */
typedef struct tddp_flat_slice {
    size_t param;        /**< the parameter's number */
    size_t offset;       /**< of the first element */
    size_t count;        /**< elements; of a complex parameter twice as many: buffers are real */
    const int64_t *dims; /**< the parameter's shape; borrowed from its description */
    size_t ndim;
} tddp_flat_slice;

/**
 * Callbacks for memory on TDDP_CUDA (on the CPU buffers are in the group's memory). `device` is a
 * device's index. Callbacks queue work on the calling thread's current stream of that device, and
 * need not wait for it. They are called on any thread, also under a lock of this library, and must
 * not call the object that uses them. The table is copied; `user` must live as long as any of the
 * memory. Programs that were compiled against an older version may pass a smaller struct: the
 * callbacks that it lacks are not called.
 */
typedef struct tddp_device_memory_ops {
    size_t size; /**< sizeof(tddp_device_memory_ops) */
    void *user;
    /** Allocates `bytes` zeroed bytes, at least 1. Sets `*data` to the address, a multiple of 64,
     *  and `*handle` to what release() gets. */
    tddp_status (*allocate)(void *user, int32_t device, size_t bytes, void **handle, void **data);
    /** Frees the memory. Called when no operation of this library uses it any more. */
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

/** The memory of flat buffers, reference counted, for tensors that may outlive the buffers' owner.
 *  Any thread. */
typedef struct tddp_flat_memory tddp_flat_memory;
/** Returns its argument. */
TDDP_API tddp_flat_memory *tddp_flat_memory_retain(tddp_flat_memory *memory);
/** NULL is allowed. */
TDDP_API void tddp_flat_memory_release(tddp_flat_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
