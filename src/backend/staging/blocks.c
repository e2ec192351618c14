/*
 * Pinned memory, and the copies from and to it. To pin memory takes longer than most operations, so
 * a context has blocks for later ones. Any thread; one lock, which is not held while CUDA allocates
 * memory. CUDA's own thread counts an event when copies have ended that nobody waits for.
 *
 * Invariants: a block belongs to an operation, or is in `free`, where it is unused, or in `held`,
 * where a copy or a failed operation may still use it. Held blocks are freed at the end only, after
 * the inner backend's context. A block is marked as being copied until its event has completed; if
 * that can't be recorded, the block is lost. The pool is there until CUDA has made all calls.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/staging/staging.h"
#include "net/net.h"

enum {
    MAX_FREE = 8, /* blocks for later operations */
    MIN_BYTES = 64 * 1024,
    PAGE_BYTES = 2 << 20, /* larger blocks are multiples of it */
    LAST_MS = 1000,       /* for copies, at the end */
    POLL_MS = 1,
    TEXT_BYTES = 1024,
};

/* Larger blocks are allocated for each operation. */
#define MAX_FREE_BYTES ((size_t)256 << 20)

struct tddp_staging_pool {
    atomic_int references;   /* the context's, and one for each call that CUDA still has to make */
    pthread_mutex_t mutex;   /* guards the others */
    tddp_eventcount *events; /* NULL: none are counted, or not any more */
    tddp_staging_block *free;
    size_t free_count;
    tddp_staging_block *held;
};

/* --- one block ------------------------------------------------------------------------------- */

static void destroy(tddp_staging_block *block)
{
    const tddp_cuda *cuda = block->cuda;
    tddp_cuda_place before;
    const bool entered = tddp_cuda_enter(cuda, block->device, &before) == TDDP_OK;
    if (block->data) {
        (void)cuda->cudaFreeHost(block->data);
    }
    if (block->event) {
        (void)cuda->cudaEventDestroy(block->event);
    }
    (void)cuda->cudaGetLastError();
    if (entered) {
        tddp_cuda_leave(cuda, &before);
    }
    free(block);
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

static tddp_status create(const tddp_cuda *cuda, int device, size_t bytes, tddp_staging_block **out)
{
    void *data = NULL;
    tddp_staging_block *block = tddp_alloc(sizeof *block);
    if (!block) {
        return TDDP_OUT_OF_MEMORY;
    }
    *block = (tddp_staging_block){.cuda = cuda, .bytes = capacity_for(bytes), .device = device};
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaEventCreateWithFlags(&block->event, TDDP_CUDA_NO_TIMING),
                        "cudaEventCreateWithFlags");
    if (status == TDDP_OK) {
        status = tddp_cuda_check(cuda, cuda->cudaHostAlloc(&data, block->bytes, TDDP_CUDA_PORTABLE),
                                 "cudaHostAlloc");
        status = status ? tddp_fail(status, "%s, for copies of %zu bytes on cuda:%d",
                                    tddp_error_message(), block->bytes, device)
                        : TDDP_OK;
    }
    block->data = data;
    if (status) {
        destroy(block);
        return status;
    }
    *out = block;
    return TDDP_OK;
}

/* --- copies ---------------------------------------------------------------------------------- */

tddp_status tddp_staging_copy(tddp_staging_block *self, char *host, const tddp_buffer *buffer,
                              bool inwards)
{
    const tddp_cuda *cuda = self->cuda;
    const size_t bytes = tddp_buffer_bytes(buffer);
    tddp_status status = TDDP_OK;
    if (bytes == 0) {
        return TDDP_OK;
    }
    if (self->copying && self->last != buffer->stream) {
        status = tddp_cuda_follow(cuda, self->event, buffer->stream, self->last);
    }
    if (status == TDDP_OK) {
        self->copying = true;
        self->last = buffer->stream;
        status = tddp_cuda_check(cuda,
                                 cuda->cudaMemcpyAsync(inwards ? host : buffer->data,
                                                       inwards ? buffer->data : host, bytes,
                                                       TDDP_CUDA_COPY_ANY, buffer->stream),
                                 "cudaMemcpyAsync");
    }
    return status;
}

static tddp_status record(const tddp_staging_block *self)
{
    return tddp_cuda_check(self->cuda, self->cuda->cudaEventRecord(self->event, self->last),
                           "cudaEventRecord");
}

tddp_status tddp_staging_copies_mark(tddp_staging_block *self, tddp_status status)
{
    char text[TEXT_BYTES];
    status = !self->copying || status ? status : record(self);
    if (status && self->copying) {
        /* Earlier copies may be in flight. */
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        self->lost = record(self) != TDDP_OK;
        return tddp_fail(status, "%s", text);
    }
    return status;
}

/* --- the pool -------------------------------------------------------------------------------- */

tddp_status tddp_staging_pool_create(tddp_eventcount *events, tddp_staging_pool **out)
{
    tddp_staging_pool *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&self->references, 1);
    pthread_mutex_init(&self->mutex, NULL);
    self->events = events;
    *out = self;
    return TDDP_OK;
}

static void release(tddp_staging_pool *self)
{
    if (atomic_fetch_sub(&self->references, 1) == 1) {
        pthread_mutex_destroy(&self->mutex);
        free(self);
    }
}

/* Whether one block is better than another for so many bytes: the smallest that is large enough,
 * else the largest, which makes room for one that is. */
static bool is_better(const tddp_staging_block *block, const tddp_staging_block *other,
                      size_t bytes)
{
    if ((block->bytes >= bytes) != (other->bytes >= bytes)) {
        return block->bytes >= bytes;
    }
    return (block->bytes < other->bytes) == (block->bytes >= bytes);
}

/* NULL: there is none of the device. */
static tddp_staging_block *take_free(tddp_staging_pool *self, int device, size_t bytes)
{
    tddp_staging_block **best = NULL;
    pthread_mutex_lock(&self->mutex);
    for (tddp_staging_block **link = &self->free; *link; link = &(*link)->next) {
        if ((*link)->device == device && (!best || is_better(*link, *best, bytes))) {
            best = link;
        }
    }
    tddp_staging_block *found = best ? *best : NULL;
    if (found) {
        *best = found->next;
        self->free_count--;
    }
    pthread_mutex_unlock(&self->mutex);
    return found;
}

tddp_status tddp_staging_pool_take(tddp_staging_pool *self, const tddp_cuda *cuda, int device,
                                   size_t bytes, tddp_staging_block **out)
{
    tddp_staging_block *found = take_free(self, device, bytes);
    if (found && found->bytes >= bytes) {
        *out = found;
        return TDDP_OK;
    }
    if (found) {
        destroy(found);
    }
    return create(cuda, device, bytes, out);
}

void tddp_staging_pool_return(tddp_staging_pool *self, tddp_staging_block *block, bool idle)
{
    pthread_mutex_lock(&self->mutex);
    const bool stays = !idle || (self->free_count < MAX_FREE && block->bytes <= MAX_FREE_BYTES);
    if (stays) {
        tddp_staging_block **list = idle ? &self->free : &self->held;
        block->next = *list;
        *list = block;
        self->free_count += idle;
    }
    pthread_mutex_unlock(&self->mutex);
    if (!stays) {
        destroy(block);
    }
}

/* --- events ---------------------------------------------------------------------------------- */

/* On CUDA's thread. */
static void count_event(void *data)
{
    tddp_staging_pool *self = data;
    pthread_mutex_lock(&self->mutex);
    if (self->events) {
        tddp_eventcount_notify(self->events);
    }
    pthread_mutex_unlock(&self->mutex);
    release(self);
}

void tddp_staging_pool_alert(tddp_staging_pool *self, const tddp_staging_block *block)
{
    atomic_fetch_add(&self->references, 1);
    if (block->cuda->cudaLaunchHostFunc(block->last, count_event, self)) {
        (void)block->cuda->cudaGetLastError();
        release(self);
    }
}

void tddp_staging_pool_stop(tddp_staging_pool *self)
{
    pthread_mutex_lock(&self->mutex);
    self->events = NULL;
    pthread_mutex_unlock(&self->mutex);
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

/* Frees blocks that may still be used, or leaves their memory behind. */
static void destroy_all(tddp_staging_block *list)
{
    const int64_t deadline = tddp_deadline_after_ms(LAST_MS);
    while (list) {
        tddp_staging_block *block = list;
        list = block->next;
        if (await_idle(block, deadline)) {
            destroy(block);
            continue;
        }
        tddp_log(TDDP_LOG_WARN, "backend",
                 "a copy of cuda:%d is not known to have ended, so the %zu bytes that it uses are "
                 "not freed",
                 block->device, block->bytes);
        free(block);
    }
}

void tddp_staging_pool_free(tddp_staging_pool *self)
{
    destroy_all(self->free);
    destroy_all(self->held);
    release(self);
}
