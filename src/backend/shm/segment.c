/*
 * Segments: unnamed files (memfd) and their mappings. Any thread.
 *
 * Invariant: a file has its final size before other ranks get it, and is sealed against shrinking
 * and growing, so that no access can fault. The owner holds a record lock on the first byte while
 * its process lives. The kernel releases the lock however the process ends, a forked child doesn't
 * inherit it, and nothing else in that process closes a descriptor of the file (other ranks in the
 * process share the owner's mapping).
 *
 * control.h has the layout, segment_exchange.c passes segments between ranks.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/shm/control.h"

/* Since Linux 6.3; older kernels reject unknown flags. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

tddp_shm_layout tddp_shm_layout_of(int size)
{
    tddp_shm_layout layout;
    layout.slots = round_up(sizeof(tddp_shm_control), TDDP_SHM_PAGE);
    layout.slot_bytes =
        round_up(sizeof(tddp_shm_slot) + (size_t)size * sizeof(tddp_call), TDDP_SHM_PAGE);
    layout.staging = layout.slots + 2 * layout.slot_bytes;
    layout.p2p = layout.staging + 2 * TDDP_SHM_STAGING_BYTES;
    layout.bytes = layout.p2p + tddp_shm_p2p_region_bytes(size);
    return layout;
}

size_t tddp_shm_arena_at(const tddp_shm_layout *layout)
{
    return round_up(layout->bytes, TDDP_SHM_HUGE);
}

/* --- files ----------------------------------------------------------------------------------- */

static int create_memfd(void)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create("tddp", flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) {
        fd = memfd_create("tddp", flags);
    }
    return fd;
}

tddp_status tddp_shm_allocate_pages(int fd, size_t at, size_t bytes)
{
    int failed;
    do {
        failed = fallocate(fd, 0, (off_t)at, (off_t)bytes);
    } while (failed && errno == EINTR);
    return failed ? tddp_fail_errno("memory for a shared segment") : TDDP_OK;
}

static tddp_status prepare(int fd, size_t bytes, size_t base_bytes)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    if (bytes > tddp_shm_max_file_bytes()) {
        return tddp_fail(TDDP_SYSTEM,
                         "files are limited to %zu bytes: expected %zu for a shared segment; raise "
                         "ulimit -f",
                         tddp_shm_max_file_bytes(), bytes);
    }
    if (ftruncate(fd, (off_t)bytes)) {
        return tddp_fail_errno("sizing a shared segment");
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        return tddp_fail_errno("sealing a shared segment");
    }
    if (fcntl(fd, F_SETLK, &lock)) {
        return tddp_fail_errno("locking a shared segment");
    }
    return tddp_shm_allocate_pages(fd, 0, base_bytes);
}

static tddp_status map_file(int fd, size_t bytes, bool owned, tddp_shm_segment **out)
{
    tddp_shm_segment *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        tddp_fail_errno("mapping a shared segment");
        free(made);
        return TDDP_SYSTEM;
    }
    /* Not worth its size in a core dump. */
    (void)madvise(base, bytes, MADV_DONTDUMP);
    atomic_init(&made->references, 1);
    made->fd = fd;
    made->owned = owned;
    made->pid = tddp_process_id();
    made->base = base;
    made->bytes = bytes;
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_shm_segment_create(const tddp_shm_layout *layout, size_t arena,
                                    tddp_shm_segment **out)
{
    const size_t at = tddp_shm_arena_at(layout);
    int fd = create_memfd();
    if (fd < 0) {
        return tddp_fail_errno("memfd_create");
    }
    tddp_status status = prepare(fd, at + arena, layout->p2p);
    if (status == TDDP_OK) {
        status = map_file(fd, at + arena, true, out);
    }
    if (status) {
        tddp_close(fd);
        return status;
    }
    (*out)->arena = at;
    return TDDP_OK;
}

tddp_status tddp_shm_segment_map(int fd, size_t bytes, tddp_shm_segment **out)
{
    /* Reading beyond the end of a shorter file would kill this process. */
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    tddp_status status = TDDP_OK;
    if (fstat(fd, &file) || (size_t)file.st_size != bytes || seals < 0 ||
        !(seals & F_SEAL_SHRINK)) {
        status =
            tddp_fail(TDDP_PROTOCOL,
                      "a shared segment is not sealed at %zu bytes, as its rank reported", bytes);
    } else {
        status = map_file(fd, bytes, false, out);
    }
    if (status) {
        tddp_close(fd);
    }
    return status;
}

tddp_shm_segment *tddp_shm_segment_retain(tddp_shm_segment *segment)
{
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
    return segment;
}

void tddp_shm_segment_release(tddp_shm_segment *segment)
{
    if (!segment || atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    (void)munmap(segment->base, segment->bytes);
    tddp_close(segment->fd);
    free(segment);
}

bool tddp_shm_segment_owner_ended(const tddp_shm_segment *segment)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return !segment->owned && fcntl(segment->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}
