/*
 * A pool of memory blocks for the copies that staging.c makes: pinned on the host, or on a device.
 * Allocating one takes longer than most operations, so a group's blocks are reused. Any thread; one
 * lock, which is not held while CUDA allocates.
 *
 * Invariant: a block is used by an operation, or in `free`, where it is unused, or in `held`, where
 * a copy or an operation that failed may still use it; those are freed only with the pool, after
 * the backend's context is destroyed. A forked child does not call CUDA and frees nothing.
 */
#include <stdlib.h>

#include "group/staging.h"

enum {
    MOST_FREE = 8, /* unused blocks that are kept */
    LEAST_BYTES = 64 * 1024,
    PAGE_BYTES = 2 << 20, /* larger blocks are whole numbers of these */
    DESTROY_MS = 1000,    /* to wait for copies when the pool is destroyed */
    POLL_MS = 1,
};

/* Larger blocks are freed after each operation. */
#define MOST_REUSED_BYTES ((size_t)256 << 20)

struct tddp_group_block_pool {
    atomic_int references;
    pid_t pid;
    const tddp_cuda *cuda;
    pthread_mutex_t mutex; /* guards what follows */
    tddp_group_block *free;
    size_t free_count;
    tddp_group_block *held;
};

tddp_status tddp_group_block_pool_create(const tddp_cuda *cuda, tddp_group_block_pool **out)
{
    tddp_group_block_pool *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&self->references, 1);
    self->pid = tddp_process_id();
    self->cuda = cuda;
    pthread_mutex_init(&self->mutex, NULL);
    *out = self;
    return TDDP_OK;
}

tddp_group_block_pool *tddp_group_block_pool_retain(tddp_group_block_pool *self)
{
    atomic_fetch_add(&self->references, 1);
    return self;
}

/* --- one block ------------------------------------------------------------------------------- */

static void destroy(const tddp_cuda *cuda, tddp_group_block *block)
{
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
    free(block);
}

static tddp_status make_memory(const tddp_cuda *cuda, tddp_group_block *block)
{
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

static tddp_status make(const tddp_cuda *cuda, tddp_device_type type, int device, size_t bytes,
                        tddp_group_block **out)
{
    tddp_group_block *block = tddp_alloc(sizeof *block);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    *block = (tddp_group_block){.bytes = bytes, .type = type, .device = device};
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaEventCreateWithFlags(&block->event, TDDP_CUDA_NO_TIMING),
                        "cudaEventCreateWithFlags");
    if (status == TDDP_OK && type == TDDP_CUDA) {
        status = tddp_cuda_check(
            cuda, cuda->cudaStreamCreateWithPriority(&block->stream, TDDP_CUDA_NON_BLOCKING, 0),
            "cudaStreamCreateWithPriority");
    }
    if (status == TDDP_OK) {
        status = make_memory(cuda, block);
    }
    if (status) {
        destroy(cuda, block);
        return status;
    }
    *out = block;
    return TDDP_OK;
}

/* --- the pool -------------------------------------------------------------------------------- */

/* Removes the smallest free block that is large enough, else the largest that is not; NULL: there
 * is none. With the lock held. */
static tddp_group_block *remove_best(tddp_group_block_pool *self, tddp_device_type type, int device,
                                     size_t bytes)
{
    tddp_group_block **best = NULL;
    for (tddp_group_block **link = &self->free; *link; link = &(*link)->next) {
        tddp_group_block *each = *link;
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
    tddp_group_block *found = best ? *best : NULL;
    if (found) {
        *best = found->next;
        self->free_count--;
    }
    return found;
}

static size_t round_up(size_t bytes)
{
    if (bytes >= PAGE_BYTES) {
        return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    }
    size_t size = LEAST_BYTES;
    while (size < bytes) {
        size *= 2;
    }
    return size;
}

tddp_status tddp_group_block_pool_acquire(tddp_group_block_pool *self, tddp_device_type type,
                                          int device, size_t bytes, tddp_group_block **out)
{
    pthread_mutex_lock(&self->mutex);
    tddp_group_block *found = remove_best(self, type, device, bytes);
    pthread_mutex_unlock(&self->mutex);
    if (found && found->bytes < bytes) {
        destroy(self->cuda, found);
        found = NULL;
    }
    if (!found) {
        return make(self->cuda, type, device, round_up(bytes), out);
    }
    *out = found;
    return TDDP_OK;
}

void tddp_group_block_pool_return(tddp_group_block_pool *self, tddp_group_block *block, bool idle)
{
    if (self->pid != tddp_process_id()) {
        return;
    }
    pthread_mutex_lock(&self->mutex);
    bool kept = !idle || (self->free_count < MOST_FREE && block->bytes <= MOST_REUSED_BYTES);
    if (kept) {
        tddp_group_block **list = idle ? &self->free : &self->held;
        block->next = *list;
        *list = block;
        self->free_count += idle;
    }
    pthread_mutex_unlock(&self->mutex);
    if (!kept) {
        destroy(self->cuda, block);
    }
}

/* --- destruction ----------------------------------------------------------------------------- */

/* Waits for the block's copies until the deadline; false if they are not known to have ended. */
static bool wait_for_copies(const tddp_cuda *cuda, const tddp_group_block *block, int64_t deadline)
{
    while (block->copying && !block->lost &&
           cuda->cudaEventQuery(block->event) == TDDP_CUDA_NOT_READY) {
        if (tddp_now_ns() >= deadline) {
            return false;
        }
        tddp_status slept = tddp_net_sleep(tddp_deadline_after_ms(POLL_MS), -1);
        (void)slept; /* it cannot be woken */
    }
    return !block->lost;
}

void tddp_group_block_pool_release(tddp_group_block_pool *self)
{
    if (!self || atomic_fetch_sub(&self->references, 1) != 1 || self->pid != tddp_process_id()) {
        return;
    }
    while (self->free) {
        tddp_group_block *block = self->free;
        self->free = block->next;
        destroy(self->cuda, block);
    }
    int64_t deadline = tddp_deadline_after_ms(DESTROY_MS);
    while (self->held) {
        tddp_group_block *block = self->held;
        self->held = block->next;
        if (wait_for_copies(self->cuda, block, deadline)) {
            destroy(self->cuda, block);
        } else {
            tddp_log(TDDP_LOG_WARN, "group",
                     "a copy of cuda:%d is not known to have ended, so the %zu bytes that it uses "
                     "are not freed",
                     block->device, block->bytes);
            free(block);
        }
    }
    pthread_mutex_destroy(&self->mutex);
    free(self);
}
