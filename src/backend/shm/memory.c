/*
 * Memory for callers in this rank's arena. Any thread, under the segment's lock.
 *
 * Invariant: spans are free and given back to the system, so that they read as zero; they do not
 * touch each other and lie in order. There is always room to note one more for each allocation, so
 * that freeing cannot fail. In a forked child an allocation is only forgotten: the parent uses it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/shm/control.h"

/* Of Linux 5.14. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct tddp_shm_span {
    size_t at; /* in the segment */
    size_t bytes;
} tddp_shm_span;

typedef struct memory {
    tddp_shm_segment *segment;
    size_t at;
    size_t bytes;
} memory;

/* --- spans; with the lock held --------------------------------------------------------------- */

static tddp_status make_room(tddp_shm_segment *segment, size_t arena)
{
    size_t needed = segment->taken + 3;
    if (segment->span_capacity < needed) {
        size_t capacity = 2 * needed;
        tddp_shm_span *more = tddp_resize(segment->spans, capacity * sizeof *more);
        if (!more) {
            return TDDP_OUT_OF_MEMORY;
        }
        bool first = !segment->spans;
        segment->spans = more;
        segment->span_capacity = capacity;
        if (first && segment->bytes > arena) {
            segment->spans[segment->span_count++] = (tddp_shm_span){arena, segment->bytes - arena};
        }
    }
    return TDDP_OK;
}

static void insert(tddp_shm_segment *segment, size_t index, tddp_shm_span span)
{
    tddp_shm_span *place = &segment->spans[index];
    memmove(place + 1, place, (segment->span_count - index) * sizeof span);
    *place = span;
    segment->span_count++;
}

static void erase(tddp_shm_segment *segment, size_t index)
{
    tddp_shm_span *place = &segment->spans[index];
    segment->span_count--;
    memmove(place, place + 1, (segment->span_count - index) * sizeof *place);
}

/* The first that is large enough; large ones lie as huge pages do. */
static bool take(tddp_shm_segment *segment, size_t bytes, size_t *at)
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

static void give(tddp_shm_segment *segment, tddp_shm_span span)
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

/* Of which there may be none left: better told here than by a signal when they are touched. Limits
 * are looked at before each piece, since other ranks populate theirs at the same time. */
static tddp_status back(const tddp_shm *shm, const tddp_shm_segment *segment, size_t at,
                        size_t bytes)
{
    (void)madvise(segment->base + at, bytes, MADV_HUGEPAGE);
    (void)madvise(segment->base + at, bytes, MADV_DODUMP);
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < TDDP_SHM_PIECE ? bytes - done : TDDP_SHM_PIECE;
        tddp_status status = tddp_shm_check_memory(shm->size, bytes - done);
        if (status) {
            return status;
        }
        int failed = madvise(segment->base + at + done, piece, MADV_POPULATE_WRITE);
        if (failed && errno == EINVAL) {
            failed = fallocate(segment->fd, 0, (off_t)(at + done), (off_t)piece);
        }
        if (failed && errno != EINTR && errno != EAGAIN) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "no memory for %zu bytes that are shared: %s",
                             bytes, strerror(errno));
        }
        done += failed ? 0 : piece;
    }
    return TDDP_OK;
}

static void clear(const tddp_shm_segment *segment, size_t at, size_t bytes)
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

static tddp_status reserve(const tddp_shm *shm, tddp_shm_segment *segment, size_t bytes, size_t *at)
{
    pthread_mutex_lock(&segment->mutex);
    tddp_status status = make_room(segment, shm->layout.arena);
    if (status == TDDP_OK && !take(segment, bytes, at)) {
        status = tddp_fail(TDDP_UNAVAILABLE,
                           "no room for %zu bytes in shared memory, which has %zu for all that "
                           "this rank takes: set TDDP_SHM_ARENA to more",
                           bytes, segment->bytes - shm->layout.arena);
    }
    if (status == TDDP_OK) {
        segment->taken++;
    }
    pthread_mutex_unlock(&segment->mutex);
    return status;
}

static void give_back(tddp_shm_segment *segment, size_t at, size_t bytes)
{
    clear(segment, at, bytes);
    pthread_mutex_lock(&segment->mutex);
    give(segment, (tddp_shm_span){at, bytes});
    segment->taken--;
    pthread_mutex_unlock(&segment->mutex);
}

tddp_status tddp_shm_allocate(tddp_shm *shm, size_t bytes, void **handle, void **data)
{
    tddp_shm_segment *segment = tddp_shm_self(shm)->segment;
    if (bytes == 0 || bytes > segment->bytes) {
        return tddp_fail(bytes ? TDDP_UNAVAILABLE : TDDP_INVALID_ARGUMENT,
                         "%zu bytes of shared memory: expected 1 to %zu", bytes,
                         segment->bytes - shm->layout.arena);
    }
    size_t whole = (bytes + TDDP_SHM_PAGE - 1) / TDDP_SHM_PAGE * TDDP_SHM_PAGE;
    memory *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    size_t at = 0;
    tddp_status status = reserve(shm, segment, whole, &at);
    if (status == TDDP_OK) {
        status = back(shm, segment, at, whole);
        if (status) {
            give_back(segment, at, whole);
        }
    }
    if (status) {
        free(made);
        return status;
    }
    *made = (memory){tddp_shm_segment_retain(segment), at, whole};
    *handle = made;
    *data = segment->base + at;
    return TDDP_OK;
}

void tddp_shm_deallocate(void *handle)
{
    memory *gone = handle;
    if (!gone) {
        return;
    }
    if (gone->segment->pid == tddp_process_id()) {
        give_back(gone->segment, gone->at, gone->bytes);
    }
    tddp_shm_segment_release(gone->segment);
    free(gone);
}

uint64_t tddp_shm_locate(const tddp_shm *shm, const void *data, size_t bytes)
{
    const tddp_shm_peer *self = tddp_shm_self(shm);
    uintptr_t at = (uintptr_t)data - (uintptr_t)self->base;
    if ((uintptr_t)data < (uintptr_t)self->base || at >= shm->layout.bytes ||
        shm->layout.bytes - at < bytes) {
        return TDDP_SHM_NOWHERE;
    }
    return at;
}

void *tddp_shm_at(const tddp_shm *shm, int rank, uint64_t where)
{
    return where == TDDP_SHM_NOWHERE ? NULL : shm->peers[rank].base + where;
}
