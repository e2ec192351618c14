/*
 * The allocator of a rank's arena. Any thread, under the segment's lock.
 *
 * Invariant: free spans are sorted by offset, never adjacent, and returned to the system, so that
 * they read as zero. Each allocation reserves room for one more span, so that freeing cannot fail.
 * A forked child has copies (forks.c): freeing there gives a copy's pages back, and the parent
 * still uses its memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/shm/control.h"

/* Since Linux 5.14. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct tddp_shm_span {
    size_t at; /* offset in the segment */
    size_t bytes;
} tddp_shm_span;

typedef struct allocation {
    tddp_shm_segment *segment;
    size_t at;
    size_t bytes;
    tddp_shm_given given;
} allocation;

/* --- spans; with the lock held --------------------------------------------------------------- */

static tddp_status reserve_spans(tddp_shm_segment *segment)
{
    size_t needed = segment->allocations + 3;
    if (segment->span_capacity < needed) {
        size_t capacity = 2 * needed;
        tddp_shm_span *more = tddp_resize(segment->spans, capacity * sizeof *more);
        if (!more) {
            return TDDP_OUT_OF_MEMORY;
        }
        bool first = !segment->spans;
        segment->spans = more;
        segment->span_capacity = capacity;
        if (first && segment->bytes > segment->arena) {
            segment->spans[segment->span_count++] =
                (tddp_shm_span){segment->arena, segment->bytes - segment->arena};
        }
    }
    return TDDP_OK;
}

static void insert(tddp_shm_segment *segment, size_t index, tddp_shm_span span)
{
    tddp_shm_span *slot = &segment->spans[index];
    memmove(slot + 1, slot, (segment->span_count - index) * sizeof span);
    *slot = span;
    segment->span_count++;
}

static void erase(tddp_shm_segment *segment, size_t index)
{
    tddp_shm_span *slot = &segment->spans[index];
    segment->span_count--;
    memmove(slot, slot + 1, (segment->span_count - index) * sizeof *slot);
}

/* First fit. Large spans are aligned to huge pages. */
static bool take_span(tddp_shm_segment *segment, size_t bytes, size_t *at)
{
    size_t alignment = bytes >= TDDP_SHM_HUGE ? TDDP_SHM_HUGE : TDDP_SHM_PAGE;
    for (size_t i = 0; i < segment->span_count; i++) {
        tddp_shm_span span = segment->spans[i];
        size_t start = (span.at + alignment - 1) / alignment * alignment;
        size_t end = span.at + span.bytes;
        if (start > end || end - start < bytes) {
            continue;
        }
        erase(segment, i);
        if (end > start + bytes) {
            insert(segment, i, (tddp_shm_span){start + bytes, end - start - bytes});
        }
        if (start > span.at) {
            insert(segment, i, (tddp_shm_span){span.at, start - span.at});
        }
        *at = start;
        return true;
    }
    return false;
}

static void free_span(tddp_shm_segment *segment, tddp_shm_span span)
{
    size_t i = 0;
    while (i < segment->span_count && segment->spans[i].at < span.at) {
        i++;
    }
    if (i < segment->span_count && segment->spans[i].at == span.at + span.bytes) {
        span.bytes += segment->spans[i].bytes;
        erase(segment, i);
    }
    if (i > 0 && segment->spans[i - 1].at + segment->spans[i - 1].bytes == span.at) {
        segment->spans[i - 1].bytes += span.bytes;
    } else {
        insert(segment, i, span);
    }
}

/* --- pages ----------------------------------------------------------------------------------- */

/* Allocates pages now: running out of memory is an error here, and a signal when they are
 * touched. The limits are checked before each portion, since other ranks populate theirs at the
 * same time. */
static tddp_status populate(const tddp_shm *shm, const tddp_shm_segment *segment, size_t at,
                            size_t bytes)
{
    (void)madvise(segment->base + at, bytes, MADV_HUGEPAGE);
    (void)madvise(segment->base + at, bytes, MADV_DODUMP);
    for (size_t done = 0; done < bytes;) {
        size_t length =
            bytes - done < TDDP_SHM_POPULATE_BYTES ? bytes - done : TDDP_SHM_POPULATE_BYTES;
        tddp_status status = tddp_shm_check_memory(shm->size, bytes - done);
        if (status) {
            return status;
        }
        int failed = madvise(segment->base + at + done, length, MADV_POPULATE_WRITE);
        if (failed && errno == EINVAL) {
            failed = fallocate(segment->fd, 0, (off_t)(at + done), (off_t)length);
        }
        if (failed && errno != EINTR && errno != EAGAIN) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "no memory for %zu bytes of shared memory: %s",
                             bytes, strerror(errno));
        }
        done += failed ? 0 : length;
    }
    return TDDP_OK;
}

static void discard(const tddp_shm_segment *segment, size_t at, size_t bytes)
{
    int failed;
    (void)madvise(segment->base + at, bytes, MADV_DONTDUMP);
    do {
        failed = fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
                           (off_t)bytes);
    } while (failed && errno == EINTR);
    if (failed) {
        memset(segment->base + at, 0, bytes);
    }
}

/* --- allocations ----------------------------------------------------------------------------- */

tddp_status tddp_shm_arena_reserve(tddp_shm_segment *segment, size_t bytes, size_t *at)
{
    pthread_mutex_lock(&segment->mutex);
    tddp_status status = reserve_spans(segment);
    if (status == TDDP_OK && !take_span(segment, bytes, at)) {
        status = tddp_fail(TDDP_UNAVAILABLE,
                           "no space for %zu bytes of shared memory in this rank's arena of %zu "
                           "bytes: set TDDP_SHM_ARENA to more",
                           bytes, segment->bytes - segment->arena);
    }
    if (status == TDDP_OK) {
        segment->allocations++;
    }
    pthread_mutex_unlock(&segment->mutex);
    return status;
}

void tddp_shm_arena_release(tddp_shm_segment *segment, size_t at, size_t bytes)
{
    discard(segment, at, bytes);
    pthread_mutex_lock(&segment->mutex);
    free_span(segment, (tddp_shm_span){at, bytes});
    segment->allocations--;
    pthread_mutex_unlock(&segment->mutex);
}

tddp_status tddp_shm_allocate(tddp_shm *shm, size_t bytes, void **handle, void **data)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    if (bytes == 0 || bytes > segment->bytes) {
        return tddp_fail(bytes ? TDDP_UNAVAILABLE : TDDP_INVALID_ARGUMENT,
                         "%zu bytes of shared memory: expected 1 to %zu", bytes,
                         segment->bytes - segment->arena);
    }
    size_t rounded = (bytes + TDDP_SHM_PAGE - 1) / TDDP_SHM_PAGE * TDDP_SHM_PAGE;
    allocation *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t at = 0;
    tddp_status status = tddp_shm_arena_reserve(segment, rounded, &at);
    if (status == TDDP_OK) {
        status = populate(shm, segment, at, rounded);
        if (status == TDDP_OK) {
            status = tddp_shm_give(&made->given, segment->base + at, rounded);
        }
        if (status) {
            tddp_shm_arena_release(segment, at, rounded);
        }
    }
    if (status) {
        free(made);
        return status;
    }
    made->segment = tddp_shm_segment_retain(segment);
    made->at = at;
    made->bytes = rounded;
    *handle = made;
    *data = segment->base + at;
    return TDDP_OK;
}

void tddp_shm_deallocate(void *handle)
{
    allocation *freed = handle;
    if (!freed) {
        return;
    }
    if (freed->segment->pid == tddp_process_id()) {
        tddp_shm_take_back(&freed->given);
        tddp_shm_arena_release(freed->segment, freed->at, freed->bytes);
    } else {
        (void)madvise(freed->segment->base + freed->at, freed->bytes, MADV_DONTNEED);
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
