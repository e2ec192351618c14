/*
 * A backend for CUDA memory over one for the CPU's, the inner: operations on copies in pinned host
 * memory.
 *
 *     staging.c    its table and context; an operation, step by step
 *     blocks.c     pinned memory for later operations; copies from and to it
 */
#ifndef TDDP_STAGING_H
#define TDDP_STAGING_H

#include <tddp/cuda.h>

#include "backend/wrapper.h"
#include "base/base.h"

/* Whether a backend takes host memory, but no CUDA memory. */
bool tddp_staging_is_needed(const tddp_backend_v1 *backend);

/* Opens one, which from now on owns `inner`: its destroy() destroys that too. Not so its abort().
 * The table lives as long as the context. `opts` are the group's. `name` is the requested
 * backend's, for messages, and lives as long as the process. */
TDDP_NODISCARD tddp_status tddp_staging_open(const tddp_inner *inner, const char *name,
                                             const tddp_backend_opts *opts, tddp_inner *out);

/* --- blocks.c -------------------------------------------------------------------------------- */

/* Pinned memory, and what copies from and to a device's need. */
typedef struct tddp_staging_block {
    const tddp_cuda *cuda;
    char *data;
    size_t bytes;
    int device;            /* whose memory it has copies of */
    tddp_cuda_event event; /* of the last copies */
    tddp_cuda_stream last; /* on which they all have ended in the end */
    bool copying;          /* copies have started, and are not known to have ended */
    bool lost;             /* their end can't be known */
    struct tddp_staging_block *next;
} tddp_staging_block;

/* A context's blocks that no operation uses, and the events that it counts. */
typedef struct tddp_staging_pool tddp_staging_pool;

/* `events`: NULL, or there until tddp_staging_pool_stop(). */
TDDP_NODISCARD tddp_status tddp_staging_pool_create(tddp_eventcount *events,
                                                    tddp_staging_pool **out);

/* A block of at least so many bytes, until it is returned. The device is current. */
TDDP_NODISCARD tddp_status tddp_staging_pool_take(tddp_staging_pool *self, const tddp_cuda *cuda,
                                                  int device, size_t bytes,
                                                  tddp_staging_block **out);
/* `idle`: nothing uses it. Otherwise it stays unused until the pool is freed. */
void tddp_staging_pool_return(tddp_staging_pool *self, tddp_staging_block *block, bool idle);

/* Counts an event once the block's copies have ended; if CUDA cannot do that, none. */
void tddp_staging_pool_alert(tddp_staging_pool *self, const tddp_staging_block *block);
/* Counts no events from now on. */
void tddp_staging_pool_stop(tddp_staging_pool *self);
/* Frees all memory; waits a moment for copies that may still use it, else leaves it behind. */
void tddp_staging_pool_free(tddp_staging_pool *self);

/* Starts a copy between the block and a buffer, on the buffer's stream, after those that have been
 * started since the last ones ended. Then tddp_staging_copies_mark(), also after a failure. */
TDDP_NODISCARD tddp_status tddp_staging_copy(tddp_staging_block *self, char *host,
                                             const tddp_buffer *buffer, bool inwards);
/* Begins to watch for their end. Returns the status passed in, or the watch's own failure. */
TDDP_NODISCARD tddp_status tddp_staging_copies_mark(tddp_staging_block *self, tddp_status status);

#endif
