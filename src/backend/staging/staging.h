/*
 * A backend for memory that another one, the inner, doesn't support: operations on copies in memory
 * that it does support. CUDA memory is copied to pinned host memory for a backend on the host, host
 * memory to a device's for a backend on devices, whose operations are launched.
 *
 *     table.c       its table and its context
 *     staged.c      an operation on copies, step by step
 *     copies.c      the copies: started and waited for
 *     alarm.c       tells the thread that polls operations that copies have ended
 *     layout.c      where each piece of an operation's memory lies among the copies
 *     block_pool.c  the memory for the copies, kept for later operations
 */
#ifndef TDDP_STAGING_H
#define TDDP_STAGING_H

#include <stdatomic.h>

#include <tddp/cuda.h>

#include "backend/wrapper.h"
#include "base/base.h"

/* Whether a backend supports only one of host memory and CUDA memory. */
bool tddp_staging_is_needed(const tddp_backend_v1 *backend);

/* Opens one for the other kind of memory, which from now on owns `inner`: its destroy() destroys
 * that too. Not so its abort(). The table lives as long as the context. `opts` are the group's.
 * `name` is the requested backend's, for messages, and lives as long as the process. */
TDDP_NODISCARD tddp_status tddp_staging_open(const tddp_inner *inner, const char *name,
                                             const tddp_backend_opts *opts, tddp_inner *out);

/* Whether such memory can be copied now, for an operation of this kind: on the thread that calls
 * it, before anything else is done. The text of TDDP_UNSUPPORTED names the operation. */
TDDP_NODISCARD tddp_status tddp_staging_check(void *context, tddp_op_kind kind,
                                              const tddp_buffer *buffer);

/* --- layout.c -------------------------------------------------------------------------------- */

/* Memory of the caller that is copied at once. */
typedef struct tddp_staging_piece {
    char *data;
    size_t bytes;
    tddp_cuda_stream stream;
    bool in;
    bool out;
    size_t extent;
    size_t at; /* in the block */
} tddp_staging_piece;

/* Pieces that overlap or adjoin, as one. */
typedef struct tddp_staging_extent {
    char *start;
    char *end;
    size_t at; /* in the block */
    bool placed;
} tddp_staging_extent;

typedef struct tddp_staging_layout {
    tddp_staging_piece *pieces; /* in the operation's order */
    size_t count;
    tddp_staging_extent *extents; /* by address */
    size_t extent_count;
    size_t bytes;  /* of the block */
    bool separate; /* each piece has an extent of its own */
} tddp_staging_layout;

/* Allocates a layout for at most so many pieces; `separate`: they don't overlap, and are to be
 * contiguous. Freed by tddp_staging_layout_free(). */
TDDP_NODISCARD tddp_status tddp_staging_layout_init(tddp_staging_layout *self, size_t max_count,
                                                    bool separate);
/* Adds a buffer that is copied in, out or both. */
void tddp_staging_layout_add(tddp_staging_layout *self, const tddp_buffer *buffer, bool in,
                             bool out);
/* Places all that were added. Elements are `element` bytes. */
TDDP_NODISCARD tddp_status tddp_staging_layout_compute(tddp_staging_layout *self, size_t element);
/* The offset in the block of an address within a buffer that was added. */
size_t tddp_staging_layout_find(const tddp_staging_layout *self, const void *data);
void tddp_staging_layout_free(tddp_staging_layout *self);

/* --- block_pool.c ---------------------------------------------------------------------------- */

/* A piece of memory, and what copies from and to it need. */
typedef struct tddp_staging_block {
    const tddp_cuda *cuda;
    char *data;
    size_t bytes;
    tddp_device_type type; /* CUDA: on the device; CPU: pinned, for copies of that device */
    int device;
    tddp_cuda_event event;   /* of the last copies */
    tddp_cuda_stream stream; /* of a block on the device: for its copies; else NULL */
    bool copying;            /* copies have started, and are not known to have ended */
    bool lost;               /* their end can't be known */
    struct tddp_staging_block *next;
} tddp_staging_block;

/* The blocks that no operation uses. */
typedef struct tddp_staging_block_pool {
    pthread_mutex_t mutex; /* guards the others */
    tddp_staging_block *free;
    size_t free_count;
    tddp_staging_block *held;
} tddp_staging_block_pool;

/* A block of at least so many bytes, until tddp_staging_block_pool_return(). The device is current.
 */
TDDP_NODISCARD tddp_status tddp_staging_block_pool_take(tddp_staging_block_pool *self,
                                                        const tddp_cuda *cuda,
                                                        tddp_device_type type, int device,
                                                        size_t bytes, tddp_staging_block **out);
/* `idle`: nothing uses it. Otherwise it stays unused until tddp_staging_block_pool_free(). */
void tddp_staging_block_pool_return(tddp_staging_block_pool *self, tddp_staging_block *block,
                                    bool idle);
/* Frees all memory; waits a moment for copies that may still use it, else leaves it behind. */
void tddp_staging_block_pool_free(tddp_staging_block_pool *self);

/* --- alarm.c --------------------------------------------------------------------------------- */

typedef struct tddp_staging_alarm tddp_staging_alarm;

/* Counts among these events, until tddp_staging_alarm_end(). */
TDDP_NODISCARD tddp_status tddp_staging_alarm_create(tddp_eventcount *events,
                                                     tddp_staging_alarm **out);
/* Counts one once the stream has done what is on it now; if it cannot be told to, none. The device
 * is current. NULL: does nothing, like the next. */
void tddp_staging_alarm_set(tddp_staging_alarm *self, const tddp_cuda *cuda,
                            tddp_cuda_stream stream);
void tddp_staging_alarm_end(tddp_staging_alarm *self);

/* --- a context ------------------------------------------------------------------------------- */

struct tddp_staged;

typedef struct tddp_staging {
    tddp_backend_v1 table;
    tddp_inner inner;
    const char *name; /* the requested backend's */
    int rank;
    int world_size;
    atomic_int device; /* host memory is copied to it; -1: not determined yet */
    atomic_bool aborted;
    tddp_staging_block_pool block_pool;
    tddp_staging_alarm *alarm;   /* NULL: the inner backend has no events */
    struct tddp_staged *running; /* the collective that runs, or was interrupted; NULL: none */
} tddp_staging;

/* --- staged.c, copies.c ---------------------------------------------------------------------- */

typedef enum tddp_staging_stage {
    TDDP_STAGING_NEW,
    TDDP_STAGING_COPYING_IN,
    TDDP_STAGING_READY, /* for the inner backend, or with it */
    TDDP_STAGING_COPYING_OUT,
} tddp_staging_stage;

/* An operation on copies. Used by one thread at a time. */
typedef struct tddp_staged {
    tddp_staging *owner;
    const tddp_cuda *cuda;
    const tddp_op *requested;  /* on the caller's memory */
    const tddp_cancel *cancel; /* ends waits for copies, which then resume; NULL: nothing does */
    tddp_staging_block *block; /* NULL: there is nothing to copy */
    tddp_staging_layout layout;
    tddp_device_type type; /* of the block's memory, which the inner backend supports */
    int device;
    int64_t deadline;
    tddp_staging_stage stage;
    tddp_status outcome;   /* so far, of an operation that was given to launch() */
    tddp_cuda_stream last; /* on which all copies of this direction have ended in the end */
    bool alarmed;          /* and it tells of that */
    tddp_op op;            /* the inner backend's */
    void *request;         /* likewise, of what was posted */
    int source;            /* of a message whose copy out may be interrupted */
    tddp_buffer *parts;    /* of `op` */
} tddp_staged;

TDDP_NODISCARD tddp_status tddp_staged_create(tddp_staging *owner, const tddp_op *op,
                                              tddp_staged **out);

/* Each starts the copies, or continues after TDDP_CANCELED, and waits for them. Does nothing if
 * they are complete. */
TDDP_NODISCARD tddp_status tddp_staged_copy_in(tddp_staged *self);
TDDP_NODISCARD tddp_status tddp_staged_copy_out(tddp_staged *self);

/* The inner backend's operation, with the remaining time. */
const tddp_op *tddp_staged_inner_op(tddp_staged *self);

/* Frees it. The operation has ended with this status. */
void tddp_staged_end(tddp_staged *self, tddp_status status);

/* Starts the copies of one direction; waits for those that have started. The device is current. */
TDDP_NODISCARD tddp_status tddp_staging_copies_begin(tddp_staged *self, bool inwards);
TDDP_NODISCARD tddp_status tddp_staging_copies_await(tddp_staged *self);

#endif
