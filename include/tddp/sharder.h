/**
 * @file sharder.h
 * @brief Parameters that are divided between ranks, and unsharded only while they are used.
 *
 * A model's parameters form units, each with a flat buffer: its parameters one after another,
 * padded and cut into equal shards, of which every rank holds one. A unit is gathered before its
 * forward and its backward, and its gradient is reduced to the shards. The unit that is used next
 * is gathered meanwhile. Nothing here knows tensors: the owner places parameters in the memory that
 * it is given.
 *
 *     sharded --before_forward, before_backward, or the unit before--> gathering --> unsharded
 *     unsharded --after_forward (of units that are resharded), after_backward-----> sharded
 *
 * One thread at a time: that which runs forward, or backward. Every rank makes the same calls in
 * the same order. Waits may be ended by `wait`; the same call, made again, continues.
 */
#ifndef TDDP_SHARDER_H
#define TDDP_SHARDER_H

#include <tddp/flat.h>
#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The units of one model. */
typedef struct tddp_sharder tddp_sharder;

/** Callbacks of the owner. They must not call the sharder. The table is copied. */
typedef struct tddp_sharder_ops {
    size_t size; /**< sizeof(tddp_sharder_ops) */
    void *user;
    /** The unit's parameters are at `data` from now on, each at its slice; NULL: nowhere. */
    void (*place)(void *user, size_t unit, void *data);
    /** Converts the shard to the gather dtype: `count` elements. Only called where that is not the
     *  parameters' dtype. */
    tddp_status (*cast_shard)(void *user, size_t unit, void *into, size_t count);
    /** The mean of all ranks' gradients for this rank's shard, in the reduce dtype: adds it to what
     *  the optimizer gets. `from` is valid during the call; of a unit that is offloaded until
     *  follow_copies(). */
    tddp_status (*reduced)(void *user, size_t unit, void *from, size_t count);
    /** Memory and streams of devices; NULL: all units are on the CPU. */
    const tddp_device_memory_ops *device;
    /** For units that are offloaded, else NULL. Queues the copy of the shard, in the gather dtype,
     *  to the device: `count` elements, after what the calling thread's current stream was given
     *  before. `*stream`, at first that one: the stream that copies. */
    tddp_status (*load_shard)(void *user, size_t unit, void *into, size_t count, void **stream);
    /** Has the calling thread's current stream wait for all copies so far, also those that
     * `reduced` has queued. */
    tddp_status (*follow_copies)(void *user, int32_t device);
} tddp_sharder_ops;

/** A unit, for tddp_sharder_add(). Begin with TDDP_UNIT_OPTS_INIT. */
typedef struct tddp_unit_opts {
    size_t size;               /**< sizeof(tddp_unit_opts) */
    const char *name;          /**< for messages, and compared between the ranks; copied */
    tddp_group *shard_group;   /**< whose ranks hold a shard each; retained.
 NULL: the replica group's ranks hold everything */
    tddp_group *replica_group; /**< whose ranks hold the same shard: gradients are averaged over
                                *   them too; retained. NULL: none */
    const tddp_param *params;  /**< of one dtype and device; only read during the call */
    size_t param_count;        /**< more than 0 */
    tddp_dtype gather_dtype;   /**< in which the unit is gathered and used */
    tddp_dtype reduce_dtype;   /**< of its gradients, and in which they are reduced */
    int reshard_after_forward; /**< 0: it stays unsharded from forward to backward */
    int offload;               /**< its shard is the owner's, in the CPU's memory; on a device */
} tddp_unit_opts;

/** The defaults: float32, sharded again after forward. */
#define TDDP_UNIT_OPTS_INIT                                                                 \
    {                                                                                       \
        sizeof(tddp_unit_opts), NULL, NULL, NULL, NULL, 0, TDDP_FLOAT32, TDDP_FLOAT32, 1, 0 \
    }

/** Caller: tddp_sharder_free(). Errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_create(const tddp_sharder_ops *ops,
                                                        tddp_sharder **out);

/** Frees it without waiting; memory that operations still use lives until they are done. Calls no
 *  callback but follow_copies() and those of the device; copies must be over. NULL is allowed. */
TDDP_API void tddp_sharder_free(tddp_sharder *sharder);

/**
 * Adds a unit, whose number is the count of those before. A collective call: ranks that differ in
 * name, parameters or options are TDDP_MISMATCH on all of them. The shard's memory is zero; the
 * caller fills it. Errors: TDDP_INVALID_ARGUMENT (no parameter; different dtypes or devices; a
 * sparse one; to be offloaded, but on the CPU or without the callbacks for it), TDDP_OUT_OF_MEMORY,
 * those of the group.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_add(tddp_sharder *sharder,
                                                     const tddp_unit_opts *opts,
                                                     const tddp_wait *wait);

/** Moves all units of `from`, which then has none, behind those of `into`: parts of a model that
 * were made apart. Before the first forward of either. Errors: TDDP_INVALID_ARGUMENT (something is
 * unsharded or on its way), TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_merge(tddp_sharder *into, tddp_sharder *from);

/** Whether the unit is sharded again after its forward, from now on; the same on every rank. */
TDDP_API void tddp_sharder_set_reshard(tddp_sharder *sharder, size_t unit, int after_forward);

/** Where a unit's parameters lie in its flat buffer, in elements: one slice for each. */
TDDP_API const tddp_flat_slice *tddp_sharder_slices(const tddp_sharder *sharder, size_t unit,
                                                    size_t *count);

/** This rank's shard: elements [offset, offset + count) of the flat buffer, in the parameters'
 *  dtype. The memory lives until the last release of `*memory`, which is retained for the caller. A
 *  unit that is offloaded has none here: the address and `*memory` are NULL. */
TDDP_API tddp_buffer tddp_sharder_shard(const tddp_sharder *sharder, size_t unit, size_t *offset,
                                        tddp_flat_memory **memory);

/** Whether the unit's parameters are placed. */
TDDP_API int tddp_sharder_unsharded(const tddp_sharder *sharder, size_t unit);

/** Bytes of this process's memory for shards, and for what is unsharded now (parameters and
 * gradients, free blocks included), and the most that there ever was of the latter. */
typedef struct tddp_sharder_bytes {
    size_t shards;
    size_t unsharded;
    size_t peak_unsharded;
} tddp_sharder_bytes;
/** The memory that the units take now. */
TDDP_API tddp_sharder_bytes tddp_sharder_memory(const tddp_sharder *sharder);

/** Makes the unit unsharded, outside of training. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_unshard(tddp_sharder *sharder, size_t unit,
                                                         const tddp_wait *wait);
/** Makes it sharded: what was written to the full parameters is lost. */
TDDP_API void tddp_sharder_reshard(tddp_sharder *sharder, size_t unit);

/** An iteration begins: the forward of the model, or that of a part of it from outside. Without
 *  effect in backward, which computes segments again. */
TDDP_API void tddp_sharder_begin_forward(tddp_sharder *sharder);
/** That forward has ended, well or not: what was gathered ahead and not used is sharded again. */
TDDP_API void tddp_sharder_end_forward(tddp_sharder *sharder);

/**
 * Before a unit's forward: gathers it, and starts to gather the one that followed it in the last
 * iteration, unless another one is being gathered. One that is still there from an earlier
 * iteration's forward is gathered again, since the shards may have changed. Errors: those of the
 * group.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_before_forward(tddp_sharder *sharder, size_t unit,
                                                                const tddp_wait *wait);

/** After it, also if it failed. `backward` 0: no backward will follow. */
TDDP_API void tddp_sharder_after_forward(tddp_sharder *sharder, size_t unit, int backward);

/** Backward begins, which tddp_sharder_finish() ends. */
TDDP_API void tddp_sharder_begin_backward(tddp_sharder *sharder);

/** When backward comes to a unit: gathers it, and starts to gather the one before it in this
 *  iteration, unless another one is being gathered. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_before_backward(tddp_sharder *sharder, size_t unit,
                                                                 const tddp_wait *wait);

/**
 * Memory for the gradient of the full unit, in the reduce dtype. `*fresh` is 1 if it holds nothing
 * yet: the caller then writes all slices before reduce. Errors: TDDP_OUT_OF_MEMORY and others of
 * allocation.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_gradient(tddp_sharder *sharder, size_t unit,
                                                          void **data, int *fresh);

/** Whether the unit has a gradient that is not being reduced. */
TDDP_API int tddp_sharder_has_gradient(const tddp_sharder *sharder, size_t unit);

/** Starts to reduce the unit's gradient; waits for the one before it, so that memory is bounded.
 * Errors: those of the group and of `reduced`. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_reduce(tddp_sharder *sharder, size_t unit,
                                                        const tddp_wait *wait);

/** When no part of backward needs the unit's parameters any more. */
TDDP_API void tddp_sharder_after_backward(tddp_sharder *sharder, size_t unit);

/** At the end of backward: waits until all gradients are reduced; those of units that are offloaded
 * are queued to be copied then. Errors: as above. */
TDDP_API TDDP_NODISCARD tddp_status tddp_sharder_finish(tddp_sharder *sharder,
                                                        const tddp_wait *wait);

/** After an exception in forward or backward: all units are sharded again, and gradients that are
 *  not reduced yet are dropped. Never waits. */
TDDP_API void tddp_sharder_abandon(tddp_sharder *sharder);

#ifdef __cplusplus
}
#endif

#endif
