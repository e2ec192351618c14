/*
 * Units of parameters that are divided between ranks. Public part: <tddp/sharder.h>.
 *
 *     sharder.c     a model's units
 *     unit.c        one unit: the layout of its flat buffer, its shard
 *     blocks.c      the memory of full units and gradients, which units share
 *     gather.c      sharded, gathering, unsharded; and which unit is gathered ahead
 *     reduce.c      gradients on their way to the shards
 *     operation.c   waits for an operation, or leaves it its memory
 */
#ifndef TDDP_SHARDER_SHARDER_H
#define TDDP_SHARDER_SHARDER_H

#include <tddp/sharder.h>

#include "base/base.h"
#include "flat/flat.h"

/* --- blocks.c -------------------------------------------------------------------------------- */

/* Memory that is used by one unit after the other. */
typedef struct tddp_block {
    struct tddp_block *next;
    tddp_group *group; /* whose memory it is */
    tddp_device_type device_type;
    int32_t device_index;
    size_t bytes;
    void *data;
    tddp_flat_memory *memory;
    bool used;
} tddp_block;

typedef struct tddp_blocks {
    tddp_device_memory_ops device; /* all zero: none */
    tddp_block *first;
    size_t bytes;
    size_t peak_bytes;
} tddp_blocks;

/* A block of at least this size, its contents undefined. Errors: those of allocation. */
TDDP_NODISCARD tddp_status tddp_block_take(tddp_blocks *blocks, tddp_group *group,
                                           const tddp_buffer *like, size_t bytes, tddp_block **out);
/* NULL is allowed. */
void tddp_block_give(tddp_block *block);
/* Forgets a block, whose memory lives until its last release; NULL is allowed. */
void tddp_block_drop(tddp_blocks *blocks, tddp_block *block);
void tddp_blocks_free(tddp_blocks *blocks);

/* --- operation.c ----------------------------------------------------------------------------- */

/* An operation and the memory that it uses. */
typedef struct tddp_operation {
    tddp_work *work; /* NULL: none */
    tddp_block *in;  /* NULL: not a block */
    tddp_block *out;
    tddp_flat_memory *reads; /* memory that is no block; borrowed */
} tddp_operation;

/* Submits it; on a device after what the input's stream was given, or if it has none the calling
 * thread's current one. */
TDDP_NODISCARD tddp_status tddp_operation_submit(const tddp_device_memory_ops *device,
                                                 tddp_group *group, tddp_op_args *args,
                                                 tddp_operation *operation);

/* Waits for the work, on a device orders the current stream behind it. `*done`: it is over, well
 * or not, and released; else `wait` ended first. */
TDDP_NODISCARD tddp_status tddp_operation_wait(const tddp_device_memory_ops *device,
                                               const tddp_buffer *like, tddp_operation *operation,
                                               const tddp_wait *wait, bool *done);
/* Without waiting: blocks of an operation that still runs are dropped, others are given back. */
void tddp_operation_leave(tddp_blocks *blocks, tddp_operation *operation);

/* --- unit.c ---------------------------------------------------------------------------------- */

typedef enum tddp_unit_state { TDDP_SHARDED, TDDP_GATHERING, TDDP_UNSHARDED } tddp_unit_state;

typedef struct tddp_unit {
    char *name;
    tddp_group *shard_group;   /* NULL: the shard is the full unit */
    tddp_group *replica_group; /* or NULL */
    tddp_group *memory_group;  /* one of the two */
    size_t ranks;              /* of the shard group */
    size_t rank;
    bool reshard_after_forward;
    bool offloaded; /* `shard` has no address, `memory` is NULL */

    /* the flat buffer */
    tddp_flat_slice *slices;
    size_t slice_count;
    tddp_buffer shard; /* in the parameters' dtype; with device */
    tddp_dtype gather_dtype;
    tddp_dtype reduce_dtype;
    tddp_flat_memory *memory; /* of the shard */

    /* gather.c */
    tddp_unit_state state;
    tddp_operation gather; /* `out`: the full parameters; NULL where the shard is the full unit */
    unsigned forwards;     /* that are running */
    uint64_t iteration;    /* in which it was used last */
    bool kept;             /* unsharded between forward and backward */
    bool in_backward;
    bool passed; /* backward has come to it */

    /* reduce.c */
    tddp_block *gradient;
} tddp_unit;

TDDP_NODISCARD tddp_status tddp_unit_open(const tddp_unit_opts *opts,
                                          const tddp_device_memory_ops *device,
                                          const tddp_wait *wait, tddp_unit *out);
void tddp_unit_close(tddp_unit *unit);
/* A buffer for `shards` shards in a dtype, at no address. */
tddp_buffer tddp_unit_buffer(const tddp_unit *unit, size_t shards, tddp_dtype dtype);

/* --- gather.c -------------------------------------------------------------------------------- */

/* The units in the order in which an iteration's forward comes to them. */
typedef struct tddp_unit_order {
    size_t *units;
    size_t count;
    size_t capacity;
} tddp_unit_order;

/* Makes it sharded, whatever it is; a gather that still runs is left. */
void tddp_unit_reshard(tddp_sharder *sharder, size_t number);

/* --- reduce.c -------------------------------------------------------------------------------- */

/* Gradients of a unit on their way: reduce_scatter, then all_reduce over the replicas. */
typedef struct tddp_reduction {
    size_t unit;
    tddp_operation operation; /* `out`: the result */
    bool over_replicas;       /* the second operation */
} tddp_reduction;

/* That may be on their way while backward fills the next gradient. */
enum { TDDP_REDUCTIONS = 1 };

void tddp_reductions_leave(tddp_sharder *sharder);
/* Gives back what is copied to the CPU: this thread's current stream follows the copy. */
TDDP_NODISCARD tddp_status tddp_copied_give(tddp_sharder *sharder);
void tddp_end_of_backward(tddp_sharder *sharder);

/* --- sharder.c ------------------------------------------------------------------------------- */

struct tddp_sharder {
    tddp_sharder_ops ops; /* its `device` points to blocks.device, or is NULL */
    tddp_blocks blocks;
    tddp_unit *units;
    size_t count;
    size_t capacity;
    uint64_t iteration;
    tddp_unit_order order;  /* of this iteration's forward */
    tddp_unit_order before; /* of the last one's */
    bool in_backward;
    tddp_reduction reductions[TDDP_REDUCTIONS];
    size_t reduction_count;
    tddp_block *copied; /* a reduced gradient that is copied to the CPU, or NULL */
};

#endif
