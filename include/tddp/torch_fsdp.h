/**
 * @file torch_fsdp.h
 * @brief Fully sharded training: parameters of libtorch tensors on a tddp_sharder (libtddp_torch).
 *
 * A parameter is a handle, the tensor in the host language's object. Between steps the handle
 * refers to this rank's piece of the parameter, a leaf of one dimension that optimizers update.
 * While its unit runs, forwards or backwards, it refers to the full parameter instead, a leaf in
 * the parameter's own shape whose memory comes and goes. The object stays the same.
 *
 * The host calls the functions below around the forward of each unit; backward needs no host code:
 * hooks of autograd gather the units, and reduce their gradients.
 */
#ifndef TDDP_TORCH_FSDP_H
#define TDDP_TORCH_FSDP_H

#include <tddp/sharder.h>
#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A model whose parameters are sharded. */
typedef struct tddp_fsdp tddp_fsdp;

/** A parameter of a unit. */
typedef struct tddp_fsdp_param {
    tddp_tensor *handle; /**< a contiguous leaf; must stay at its address as long as the model */
    const char *name;    /**< as in the model; copied */
} tddp_fsdp_param;

/** A unit, for tddp_fsdp_add(). Begin with TDDP_FSDP_UNIT_OPTS_INIT. */
typedef struct tddp_fsdp_unit_opts {
    size_t size;               /**< sizeof(tddp_fsdp_unit_opts) */
    const char *name;          /**< copied */
    tddp_group *shard_group;   /**< retained; NULL: the unit is not divided */
    tddp_group *replica_group; /**< retained; NULL: none */
    const tddp_fsdp_param *params;
    size_t param_count;
    int gather_dtype; /**< tddp_dtype; -1: that of the parameters */
    int reduce_dtype; /**< tddp_dtype; -1: the gather dtype */
    int reshard_after_forward;
    /** Pieces, their gradients and so the optimizer's state are in the CPU's memory, and are copied
     *  beside what the device computes. Without effect for parameters on the CPU. */
    int offload;
    int pin_memory; /**< that memory is page-locked: copies are faster, and the host waits less */
} tddp_fsdp_unit_opts;

/** The defaults: the parameters' dtype, sharded again after forward, not offloaded. */
#define TDDP_FSDP_UNIT_OPTS_INIT                                                \
    {                                                                           \
        sizeof(tddp_fsdp_unit_opts), NULL, NULL, NULL, NULL, 0, -1, -1, 1, 0, 1 \
    }

/** A model without units. `region`: for waits in backward; NULL: none. Caller: tddp_fsdp_free().
 *  Errors: TDDP_OUT_OF_MEMORY. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_create(tddp_blocking_region region, tddp_fsdp **out);

/** Its parameters remain pieces. What is freed must not be part of a graph: see
 *  tddp_fsdp_in_graph(). NULL is allowed. */
TDDP_API void tddp_fsdp_free(tddp_fsdp *fsdp);

/** Whether a graph may still come to the model in backward: then it must not be freed, nor its
 *  handles, which backward assigns. Takes no lock and allocates nothing. */
TDDP_API int tddp_fsdp_in_graph(const tddp_fsdp *fsdp);

/**
 * Adds a unit, whose number is the count of those before, and divides its parameters: this rank
 * keeps its piece of their values. A collective call. Errors: those of tddp_sharder_add();
 * TDDP_INVALID_ARGUMENT (not a leaf, not contiguous, a parameter of another unit: the text names
 * it), TDDP_UNSUPPORTED (dtype, device).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_add(tddp_fsdp *fsdp, const tddp_fsdp_unit_opts *opts,
                                                  const tddp_wait *wait);

/** Moves all units of `from` behind those of `into`, as tddp_sharder_merge() does; before the first
 *  forward. Errors: as there; TDDP_INVALID_ARGUMENT (a forward has run). */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_merge(tddp_fsdp *into, tddp_fsdp *from);

/** Whether the unit is sharded again after its forward, from now on; the same on every rank. */
TDDP_API void tddp_fsdp_set_reshard(tddp_fsdp *fsdp, size_t unit, int after_forward);

/** Whether the unit's gradients are reduced by the backwards that follow; else they are kept
 * unsharded, and added to. The same on every rank; on at first. */
TDDP_API void tddp_fsdp_set_sync(tddp_fsdp *fsdp, size_t unit, int sync);

/** Around the forward of the model, or that of a part of it from outside; also around those of
 *  segments that are computed again. Errors: TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_begin_forward(tddp_fsdp *fsdp);
/** The end of that, well or not. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_end_forward(tddp_fsdp *fsdp);

/** Before a unit's forward: gathers it. If `wait` ends first, the same call continues, also on
 *  another thread: the first one has a timeout of 0 then, and its streams count. Errors:
 *  those of the group. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_before_forward(tddp_fsdp *fsdp, size_t unit,
                                                             const tddp_wait *wait);

/** After that: the handles refer to full parameters. What operations of this thread save for
 *  backward keeps them in reach: backward gathers the unit when it reads one. Errors:
 *  TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_enter(tddp_fsdp *fsdp, size_t unit);

/** After the unit's forward, also if it failed (then without outputs): the handles refer to pieces
 *  again, and backward gathers the unit when it comes to the outputs. Errors: TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_leave(tddp_fsdp *fsdp, size_t unit,
                                                    tddp_tensor *const *outputs, size_t count);

/** In backward, before a segment of the unit's forward is computed again: gathers it if it is not
 *  there any more; the handles refer to full parameters. Errors: those of the group. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_recompute(tddp_fsdp *fsdp, size_t unit);

/** After an exception in forward or backward: everything is sharded, gradients that are not reduced
 *  yet are dropped. */
TDDP_API void tddp_fsdp_abandon(tddp_fsdp *fsdp);
/** Whether something is left of a backward that did not end. */
TDDP_API int tddp_fsdp_unfinished(const tddp_fsdp *fsdp);
/** Whether the host's handles refer to pieces now, rather than to whole parameters. */
TDDP_API int tddp_fsdp_hidden(const tddp_fsdp *fsdp, size_t unit);

/** Outside of forward and backward: gathers the unit. A collective call; then tddp_fsdp_expose().
 *  Errors: those of the group. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_unshard(tddp_fsdp *fsdp, size_t unit,
                                                      const tddp_wait *wait);
/** The handles of a unit that was gathered refer to full parameters, which are not to be written
 * to, until tddp_fsdp_reshard(). */
TDDP_API void tddp_fsdp_expose(tddp_fsdp *fsdp, size_t unit);
/** The handles refer to pieces again. */
TDDP_API void tddp_fsdp_reshard(tddp_fsdp *fsdp, size_t unit);

/** This rank's shard of a unit's flat buffer as a tensor, in the parameters' dtype, on the device
 * on which it is gathered. Assigns the existing handle `into`. Errors: TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_shard(const tddp_fsdp *fsdp, size_t unit,
                                                    tddp_tensor *into);

/** The handles refer to parts of `flat`, which holds the shards of all ranks, until
 *  tddp_fsdp_hide(). Errors: TDDP_INVALID_ARGUMENT (not as many elements), TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_show(tddp_fsdp *fsdp, size_t unit,
                                                   const tddp_tensor *flat);
/** Ends tddp_fsdp_show(); with `write` this rank's piece of what was written is kept. Errors:
 *  TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_fsdp_hide(tddp_fsdp *fsdp, size_t unit, int write);

/** Where the rank's piece of a parameter begins, in the parameter's elements, and how many it has;
 *  the parameter's shape, borrowed. */
typedef struct tddp_fsdp_piece {
    int64_t offset; /**< of the parameter, in the flat buffer */
    int64_t start;
    int64_t count;
    const int64_t *dims;
    size_t ndim;
} tddp_fsdp_piece;
/** This rank's piece of a parameter. */
TDDP_API tddp_fsdp_piece tddp_fsdp_piece_of(const tddp_fsdp *fsdp, size_t unit, size_t param);

/** Bytes that units which are offloaded have copied since they were made. */
typedef struct tddp_fsdp_copied {
    size_t to_device;
    size_t to_cpu;
} tddp_fsdp_copied;
/** How much was copied so far. */
TDDP_API tddp_fsdp_copied tddp_fsdp_copied_bytes(const tddp_fsdp *fsdp);

/** The sharder, borrowed, for its queries. */
TDDP_API const tddp_sharder *tddp_fsdp_sharder(const tddp_fsdp *fsdp);

#ifdef __cplusplus
}
#endif

#endif
