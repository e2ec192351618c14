/*
 * Memory that what carries a group does not take: copied into memory that it does take, and back.
 *
 *   staging.c  an operation on copies, step by step
 *   copies.c   the copies: begun and waited for
 *   staging_layout.c  the offset of each of an operation's buffers among the copies
 *   block_pool.c      memory for the copies, reused by later operations
 */
#ifndef TDDP_GROUP_STAGING_H
#define TDDP_GROUP_STAGING_H

#include <tddp/cuda.h>

#include "group/group.h"

/* --- staging_layout.c ------------------------------------------------------------------------ */

/* Memory of the caller's that is copied in one call. */
typedef struct tddp_group_piece {
    char *data;
    size_t bytes;
    tddp_cuda_stream stream;
    bool in;
    bool out;
    size_t extent;
    size_t at; /* in the block */
} tddp_group_piece;

/* Pieces that overlap or are contiguous, as one. */
typedef struct tddp_group_extent {
    char *start;
    char *end;
    size_t at; /* in the block */
    bool assigned;
} tddp_group_extent;

typedef struct tddp_group_layout {
    tddp_group_piece *pieces; /* in the operation's order */
    size_t count;
    tddp_group_extent *extents; /* by address */
    size_t extent_count;
    size_t bytes; /* of the block */
} tddp_group_layout;

/* Allocates for up to `most` pieces: tddp_group_layout_free(). Adds a buffer that is copied in, out
 * or both. */
TDDP_NODISCARD tddp_status tddp_group_layout_init(tddp_group_layout *self, size_t most);
void tddp_group_layout_add(tddp_group_layout *self, const tddp_buffer *buffer, bool in, bool out);
/* Once all are added: assigns the offsets. Elements are `each` bytes. */
TDDP_NODISCARD tddp_status tddp_group_layout_assign(tddp_group_layout *self, size_t each);
/* The offset of the first byte of a buffer that was added, and is not empty, or of a part of it. */
size_t tddp_group_layout_offset(const tddp_group_layout *self, const void *data);
void tddp_group_layout_free(tddp_group_layout *self);

/* --- block_pool.c ---------------------------------------------------------------------------- */

/* A block of memory, and what copies from and to it need. */
typedef struct tddp_group_block {
    char *data;
    size_t bytes;
    tddp_device_type type; /* CUDA: on the device; CPU: pinned, for copies of that device */
    int device;
    tddp_cuda_event event;   /* of the last copies */
    tddp_cuda_stream stream; /* of a block on the device: for its copies; else NULL */
    bool copying;            /* copies have started, and are not known to have ended */
    bool lost;               /* it will never be known */
    struct tddp_group_block *next;
} tddp_group_block;

typedef struct tddp_group_block_pool tddp_group_block_pool;

/* With one reference: tddp_group_block_pool_release(). The last release frees all memory; after a
 * failure it waits a moment for copies that still use it. NULL is fine. */
TDDP_NODISCARD tddp_status tddp_group_block_pool_create(const tddp_cuda *cuda,
                                                        tddp_group_block_pool **out);
tddp_group_block_pool *tddp_group_block_pool_retain(tddp_group_block_pool *self);
void tddp_group_block_pool_release(tddp_group_block_pool *self);

/* A block of at least so many bytes: tddp_group_block_pool_return(). On a thread of that device. */
TDDP_NODISCARD tddp_status tddp_group_block_pool_acquire(tddp_group_block_pool *self,
                                                         tddp_device_type type, int device,
                                                         size_t bytes, tddp_group_block **out);
/* `idle`: it is unused. Otherwise it is not reused, and freed with the pool. */
void tddp_group_block_pool_return(tddp_group_block_pool *self, tddp_group_block *block, bool idle);

/* --- copies.c -------------------------------------------------------------------------------- */

typedef enum tddp_group_stage {
    TDDP_STAGE_FRESH,
    TDDP_STAGE_COPYING_IN,
    TDDP_STAGE_READY, /* for what carries it, or with that */
    TDDP_STAGE_COPYING_OUT,
} tddp_group_stage;

/* Of a work that is carried out on copies. */
struct tddp_group_staged {
    const tddp_cuda *cuda;
    tddp_group_block_pool *block_pool;
    tddp_group_block *block; /* NULL: there is nothing to copy */
    tddp_group_layout layout;
    tddp_device_type type; /* of the block's memory, as it is carried */
    int device;
    int64_t deadline;
    tddp_group_stage stage;
    tddp_op op;         /* what is carried out */
    tddp_buffer *parts; /* what its parts point to */
};

/* Begins the copies of one direction; waits for those that have begun. On the device. */
TDDP_NODISCARD tddp_status tddp_group_copies_begin(struct tddp_group_staged *self, bool inwards);
TDDP_NODISCARD tddp_status tddp_group_copies_await(tddp_group *group, tddp_work *work);

/* --- staging.c ------------------------------------------------------------------------------- */

/* Whether what carries the group takes the operation's memory as it is. */
static inline bool tddp_group_takes(const tddp_group *group, const tddp_op *op)
{
    return (group->backend->device_types >> op->input.device_type & 1u) != 0 ||
           op->kind == TDDP_OP_BARRIER;
}

/* The kind of memory in which what carries the group finds an operation's buffers. */
tddp_device_type tddp_group_carried_type(const tddp_group *group, tddp_device_type type);

/* Whether that is a device's, which takes it from a queue, though this memory is not. */
bool tddp_group_stages_for_queue(const tddp_group *group, tddp_device_type type);

/* For memory that is not taken as it is: says whether and why it cannot be copied. `name` is the
 * operation's. */
TDDP_NODISCARD tddp_status tddp_group_check_staging(tddp_group *group, const char *name,
                                                    const tddp_buffer *buffer);

/* Carries out an operation on copies by `carry`, which gets the operation to pass on. Called again
 * after TDDP_CANCELED it goes on. */
typedef tddp_status (*tddp_group_carry)(tddp_group *group, tddp_work *work, const tddp_op *op);
TDDP_NODISCARD tddp_status tddp_group_run_staged(tddp_group *group, tddp_work *work,
                                                 tddp_group_carry carry);

/* The steps of it, for sends and receives: the copies in, what is passed on, the copies out. The
 * last one is called once, with what became of the operation, and says what it ends with. */
TDDP_NODISCARD tddp_status tddp_group_stage_in(tddp_group *group, tddp_work *work);
const tddp_op *tddp_group_staged_op(tddp_work *work);
TDDP_NODISCARD tddp_status tddp_group_stage_out(tddp_group *group, tddp_work *work,
                                                tddp_status status);

void tddp_group_staged_free(struct tddp_group_staged *staged);

#endif
