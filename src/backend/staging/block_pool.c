/*
 * Memory for the copies: pinned on the host, or on a device. Its allocation takes longer than most
 * operations, so a context keeps blocks for later operations. Any thread; one lock, which is not
 * held while CUDA allocates memory.
 *
 * Invariant: a block belongs to an operation, or is in `free`, where it is unused, or in `held`,
 * where a copy or a failed operation may still use it. Held blocks are freed at the end only, after
 * the inner backend's context.
 */
#include <stdlib.h>

#include "backend/staging/staging.h"
#include "net/net.h"

enum {
    MAX_FREE = 8, /* blocks that are kept for later operations */
    MIN_BYTES = 64 * 1024,
    PAGE_BYTES = 2 << 20, /* larger blocks are multiples of it */
    LAST_MS = 1000,       /* for copies, at the end */
    POLL_MS = 1,
};

/* Larger blocks are allocated for each operation. */
#define MAX_FREE_BYTES ((size_t)256 << 20)

/* --- one block ------------------------------------------------------------------------------- */

static void destroy(tddp_staging_block *block)
{
    const tddp_cuda *cuda = block->cuda;
    tddp_cuda_place before;
    const bool entered = tddp_cuda_enter(cuda, block->device, &before) == TDDP_OK;
    if (block->data) {
        (void)(block->type == TDDP_CUDA ? cuda->cudaFree(block->data)
                                        : cuda->cudaFreeHost(block->data));
    }
    if (block->event) {
        (void)cuda->cudaEventDestroy(block->event);
    }
    if (block->stream) {
        (void)cuda->cudaStreamDestroy(block->stream);
    }
    (void)cuda->cudaGetLastError();
    if (entered) {
        tddp_cuda_leave(cuda, &before);
    }
    free(block);
}

static tddp_status allocate(tddp_staging_block *block)
{
    const tddp_cuda *cuda = block->cuda;
    bool on_device = block->type == TDDP_CUDA;
    void *data = NULL;
    tddp_cuda_error error = on_device
                                ? cuda->cudaMalloc(&data, block->bytes)
                                : cuda->cudaHostAlloc(&data, block->bytes, TDDP_CUDA_PORTABLE);
    tddp_status status = tddp_cuda_check(cuda, error, on_device ? "cudaMalloc" : "cudaHostAlloc");
    if (status) {
        return tddp_fail(status, "%s, for copies of %zu bytes on cuda:%d", tddp_error_message(),
                         block->bytes, block->device);
    }
    block->data = data;
    return TDDP_OK;
}

static tddp_status create(const tddp_cuda *cuda, tddp_device_type type, int device, size_t bytes,
                          tddp_staging_block **out)
{
    tddp_staging_block *block = tddp_alloc(sizeof *block);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    *block = (tddp_staging_block){.cuda = cuda, .bytes = bytes, .type = type, .device = device};
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaEventCreateWithFlags(&block->event, TDDP_CUDA_NO_TIMING),
                        "cudaEventCreateWithFlags");
    if (status == TDDP_OK && type == TDDP_CUDA) {
        status = tddp_cuda_check(
            cuda, cuda->cudaStreamCreateWithPriority(&block->stream, TDDP_CUDA_NON_BLOCKING, 0),
            "cudaStreamCreateWithPriority");
    }
    if (status == TDDP_OK) {
        status = allocate(block);
    }
    if (status) {
        destroy(block);
        return status;
    }
    *out = block;
    return TDDP_OK;
}

/* --- blocks that are kept -------------------------------------------------------------------- */

/* Removes the smallest free block that is large enough, else the largest; NULL: there is none. With
 * the lock held. */
static tddp_staging_block *find(tddp_staging_block_pool *self, tddp_device_type type, int device,
                                size_t bytes)
{
    tddp_staging_block **best = NULL;
    for (tddp_staging_block **link = &self->free; *link; link = &(*link)->next) {
        tddp_staging_block *each = *link;
        if (each->type != type || each->device != device) {
            continue;
        }
        bool fits = each->bytes >= bytes;
        bool best_fits = best && (*best)->bytes >= bytes;
        if (!best || (fits && !best_fits) ||
            (fits == best_fits && (each->bytes < (*best)->bytes) == fits)) {
            best = link;
        }
    }
    tddp_staging_block *found = best ? *best : NULL;
    if (found) {
        *best = found->next;
        self->free_count--;
    }
    return found;
}

static size_t capacity_for(size_t bytes)
{
    if (bytes >= PAGE_BYTES) {
        return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    }
    size_t size = MIN_BYTES;
    while (size < bytes) {
        size *= 2;
    }
    return size;
}

tddp_status tddp_staging_block_pool_take(tddp_staging_block_pool *self, const tddp_cuda *cuda,
                                         tddp_device_type type, int device, size_t bytes,
                                         tddp_staging_block **out)
{
    pthread_mutex_lock(&self->mutex);
    tddp_staging_block *found = find(self, type, device, bytes);
    pthread_mutex_unlock(&self->mutex);
    if (found && found->bytes < bytes) {
        destroy(found);
        found = NULL;
    }
    if (!found) {
        return create(cuda, type, device, capacity_for(bytes), out);
    }
    *out = found;
    return TDDP_OK;
}

void tddp_staging_block_pool_return(tddp_staging_block_pool *self, tddp_staging_block *block,
                                    bool idle)
{
    pthread_mutex_lock(&self->mutex);
    bool keeps = !idle || (self->free_count < MAX_FREE && block->bytes <= MAX_FREE_BYTES);
    if (keeps) {
        tddp_staging_block **list = idle ? &self->free : &self->held;
        block->next = *list;
        *list = block;
        self->free_count += idle;
    }
    pthread_mutex_unlock(&self->mutex);
    if (!keeps) {
        destroy(block);
    }
}

/* --- the end --------------------------------------------------------------------------------- */

/* Waits until the copies have ended; false if that isn't known by the deadline. */
static bool await_idle(const tddp_staging_block *block, int64_t deadline)
{
    while (block->copying && !block->lost &&
           block->cuda->cudaEventQuery(block->event) == TDDP_CUDA_NOT_READY) {
        if (tddp_now_ns() >= deadline) {
            return false;
        }
        tddp_status slept = tddp_net_sleep(tddp_deadline_after_ms(POLL_MS), -1);
        (void)slept; /* nothing can wake it */
    }
    return !block->lost;
}

/* Frees a block that may still be used, or leaves its memory behind. */
static void destroy_held(tddp_staging_block *block, int64_t deadline)
{
    if (await_idle(block, deadline)) {
        destroy(block);
        return;
    }
    tddp_log(TDDP_LOG_WARN, "backend",
             "a copy of cuda:%d is not known to have ended, so the %zu bytes that it uses are not "
             "freed",
             block->device, block->bytes);
    free(block);
}

void tddp_staging_block_pool_free(tddp_staging_block_pool *self)
{
    while (self->free) {
        tddp_staging_block *block = self->free;
        self->free = block->next;
        destroy(block);
    }
    int64_t deadline = tddp_deadline_after_ms(LAST_MS);
    while (self->held) {
        tddp_staging_block *block = self->held;
        self->held = block->next;
        destroy_held(block, deadline);
    }
    pthread_mutex_destroy(&self->mutex);
}
