/*
 * The allocator of this process's arenas, and what a fork does with their memory. Any thread, under
 * one lock, which is also held during a fork.
 *
 * Invariant: the spans in use are in one list, sorted by address; what is between them is free, has
 * been returned to the system, and reads as zero. A span is in its owner's memory, so that freeing
 * it cannot fail.
 *
 * Other ranks map an arena's file, so a forked child that inherited the mapping would write into
 * its parent's tensors, and see later steps. Instead it gets copies of what callers have, as of the
 * fork, at the same addresses. A lazy private mapping of the file would not do: pages that it has
 * not written yet follow the parent's. The parent makes the copies before it forks, as memory of
 * its own, and unmaps them afterwards; the child moves them to where the originals are mapped.
 * Nothing is copied for vfork(), posix_spawn() and system(), which run no handlers, nor while
 * copies are disabled, for a child that becomes another program. fork() cannot fail because of
 * this: without a copy, the child's pages cannot be accessed, rather than be wrong.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <tddp/group.h>

#include "backend/shm/control.h"

/* Since Linux 5.14. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static struct {
    pthread_mutex_t mutex;
    tddp_shm_span *first;
} spans = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static size_t offset_of(const tddp_shm_span *span)
{
    return (size_t)(span->data - span->segment->base);
}

/* --- forks ----------------------------------------------------------------------------------- */

/* How often copies were enabled more than disabled. */
static atomic_int wanted = 1;

void tddp_fork_copies_enable(void)
{
    atomic_fetch_add(&wanted, 1);
}

void tddp_fork_copies_disable(void)
{
    atomic_fetch_sub(&wanted, 1);
}

static void *copy_of(const tddp_shm_span *span)
{
    void *copy =
        mmap(NULL, span->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(copy, span->bytes, MADV_HUGEPAGE);
    memcpy(copy, span->data, span->bytes);
    return copy;
}

static void before_fork(void)
{
    size_t bytes = 0;
    pthread_mutex_lock(&spans.mutex);
    if (atomic_load(&wanted) <= 0) {
        return;
    }
    for (const tddp_shm_span *each = spans.first; each; each = each->next) {
        bytes += each->allocated ? each->bytes : 0;
    }
    bool enough = bytes == 0 || tddp_shm_check_memory(1, bytes) == TDDP_OK;
    for (tddp_shm_span *each = spans.first; each && enough; each = each->next) {
        each->copy = each->allocated ? copy_of(each) : NULL;
        enough = !each->allocated || each->copy;
    }
    if (!enough) {
        tddp_log(TDDP_LOG_WARN, "shm",
                 "process %d forks without memory for a copy of %zu bytes of gradients and "
                 "parameters: the child ends if it uses them",
                 (int)tddp_process_id(), bytes);
    }
}

static void after_fork_in_parent(void)
{
    for (tddp_shm_span *each = spans.first; each; each = each->next) {
        if (each->copy) {
            (void)munmap(each->copy, each->bytes);
            each->copy = NULL;
        }
    }
    pthread_mutex_unlock(&spans.mutex);
}

/* Taking access away needs no memory and no address space. */
static void make_private(const tddp_shm_span *span)
{
    bool moved = span->copy && mremap(span->copy, span->bytes, span->bytes,
                                      MREMAP_MAYMOVE | MREMAP_FIXED, span->data) != MAP_FAILED;
    if (!moved && mprotect(span->data, span->bytes, PROT_NONE)) {
        abort(); /* rather than write to the parent's */
    }
}

/* From here on it is memory as any other: a child of the child inherits it. */
static void after_fork_in_child(void)
{
    for (tddp_shm_span *each = spans.first; each; each = each->next) {
        if (each->allocated) {
            make_private(each);
        }
    }
    spans.first = NULL;
    pthread_mutex_unlock(&spans.mutex);
}

static bool handlers_registered;

static void register_handlers(void)
{
    handlers_registered =
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
}

/* --- pages ----------------------------------------------------------------------------------- */

/* Allocates pages now: running out of memory is an error here, and a signal when they are
 * touched. The limits are checked before each portion, since other ranks populate theirs at the
 * same time. */
static tddp_status populate(int ranks, const tddp_shm_span *span)
{
    (void)madvise(span->data, span->bytes, MADV_HUGEPAGE);
    (void)madvise(span->data, span->bytes, MADV_DODUMP);
    for (size_t done = 0; done < span->bytes;) {
        const size_t left = span->bytes - done;
        const size_t length = left < TDDP_SHM_POPULATE_BYTES ? left : TDDP_SHM_POPULATE_BYTES;
        tddp_status status = tddp_shm_check_memory(ranks, left);
        if (status) {
            return status;
        }
        int failed = madvise(span->data + done, length, MADV_POPULATE_WRITE);
        if (failed && errno == EINVAL) {
            failed =
                fallocate(span->segment->fd, 0, (off_t)(offset_of(span) + done), (off_t)length);
        }
        if (failed && errno != EINTR && errno != EAGAIN) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "no memory for %zu bytes of shared memory: %s",
                             span->bytes, strerror(errno));
        }
        done += failed ? 0 : length;
    }
    return TDDP_OK;
}

static void discard(const tddp_shm_span *span)
{
    int failed;
    (void)madvise(span->data, span->bytes, MADV_DONTDUMP);
    do {
        failed = fallocate(span->segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                           (off_t)offset_of(span), (off_t)span->bytes);
    } while (failed && errno == EINTR);
    if (failed) {
        memset(span->data, 0, span->bytes);
    }
}

/* --- spans ----------------------------------------------------------------------------------- */

/* First fit. Large spans are aligned to huge pages. With the lock held. */
static bool take(tddp_shm_segment *segment, size_t bytes, tddp_shm_span *out)
{
    const size_t alignment = bytes >= TDDP_SHM_HUGE ? TDDP_SHM_HUGE : TDDP_SHM_PAGE;
    size_t at = segment->arena;
    tddp_shm_span **link = &spans.first;
    while (*link && (*link)->data < segment->base + at) {
        link = &(*link)->next;
    }
    for (;; link = &(*link)->next) {
        const bool is_last = !*link || (*link)->segment != segment;
        const size_t end = is_last ? segment->bytes : offset_of(*link);
        at = (at + alignment - 1) / alignment * alignment;
        if (at <= end && end - at >= bytes) {
            break;
        }
        if (is_last) {
            return false;
        }
        at = end + (*link)->bytes;
    }
    *out = (tddp_shm_span){
        .segment = segment, .data = segment->base + at, .bytes = bytes, .next = *link};
    *link = out;
    return true;
}

tddp_status tddp_shm_arena_reserve(tddp_shm_segment *segment, size_t bytes, tddp_shm_span *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, register_handlers);
    if (!handlers_registered) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to prepare shared memory for forks");
    }
    pthread_mutex_lock(&spans.mutex);
    const bool taken = take(segment, bytes, out);
    segment->allocations += taken;
    pthread_mutex_unlock(&spans.mutex);
    return taken ? TDDP_OK
                 : tddp_fail(TDDP_UNAVAILABLE,
                             "no space for %zu bytes of shared memory in this rank's arena of %zu "
                             "bytes: set TDDP_SHM_ARENA to more",
                             bytes, segment->bytes - segment->arena);
}

void tddp_shm_arena_release(tddp_shm_span *span)
{
    tddp_shm_span **link = &spans.first;
    discard(span);
    pthread_mutex_lock(&spans.mutex);
    while (*link != span) {
        link = &(*link)->next;
    }
    *link = span->next;
    span->segment->allocations--;
    pthread_mutex_unlock(&spans.mutex);
}

/* --- allocations ----------------------------------------------------------------------------- */

static void set_allocated(tddp_shm_span *span, bool allocated)
{
    pthread_mutex_lock(&spans.mutex);
    span->allocated = allocated;
    pthread_mutex_unlock(&spans.mutex);
}

tddp_status tddp_shm_allocate(tddp_shm *shm, size_t bytes, void **handle, void **data)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    if (bytes == 0 || bytes > segment->bytes) {
        return tddp_fail(bytes ? TDDP_UNAVAILABLE : TDDP_INVALID_ARGUMENT,
                         "%zu bytes of shared memory: expected 1 to %zu", bytes,
                         segment->bytes - segment->arena);
    }
    tddp_shm_span *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    const size_t rounded = (bytes + TDDP_SHM_PAGE - 1) / TDDP_SHM_PAGE * TDDP_SHM_PAGE;
    tddp_status status = tddp_shm_arena_reserve(segment, rounded, made);
    if (status) {
        free(made);
        return status;
    }
    status = populate(shm->size, made);
    if (status) {
        tddp_shm_arena_release(made);
        free(made);
        return status;
    }
    set_allocated(made, true);
    (void)tddp_shm_segment_retain(segment);
    *handle = made;
    *data = made->data;
    return TDDP_OK;
}

void tddp_shm_deallocate(void *handle)
{
    tddp_shm_span *freed = handle;
    if (!freed) {
        return;
    }
    if (freed->segment->pid == tddp_process_id()) {
        set_allocated(freed, false);
        tddp_shm_arena_release(freed);
    } else {
        (void)madvise(freed->data, freed->bytes, MADV_DONTNEED);
    }
    tddp_shm_segment_release(freed->segment);
    free(freed);
}

uint64_t tddp_shm_offset_of(const tddp_shm *shm, const void *data, size_t bytes)
{
    const tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    uintptr_t at = (uintptr_t)data - (uintptr_t)segment->base;
    if ((uintptr_t)data < (uintptr_t)segment->base || at >= segment->bytes ||
        segment->bytes - at < bytes) {
        return TDDP_SHM_NOT_SHARED;
    }
    return at;
}

void *tddp_shm_address(const tddp_shm *shm, int rank, uint64_t offset)
{
    return offset == TDDP_SHM_NOT_SHARED ? NULL : shm->peers[rank].segment->base + offset;
}
