/*
 * Segments: memory behind a file without a name, and what a process has mapped of it. Any thread.
 *
 * Invariant: a file is as large as its layout says before others get it, and can be neither cut nor
 * extended from then on, so that nobody's access can fail. The owner holds a record lock on the
 * first byte as long as its process lives: the system lets go of it however it ends, a forked child
 * does not inherit it, and nobody else closes a descriptor of the file in that process (its other
 * ranks, if it has several, share the owner's mapping).
 *
 * What stands in a segment is control.h's; who gets it is handover.c's.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "backend/shm/control.h"

/* Of Linux 6.3; older ones refuse what they do not know. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

enum { HUGE = 2 * 1024 * 1024 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MOST_ARENA ((size_t)1 << 30)
#else
#define MOST_ARENA ((size_t)1 << 42)
#endif

static size_t rounded(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

tddp_shm_layout tddp_shm_lay_out(int size, size_t arena)
{
    tddp_shm_layout layout;
    layout.slots = rounded(sizeof(tddp_shm_control), TDDP_SHM_PAGE);
    layout.slot_bytes =
        rounded(sizeof(tddp_shm_slot) + (size_t)size * sizeof(tddp_call), TDDP_SHM_PAGE);
    layout.staging = layout.slots + 2 * layout.slot_bytes;
    layout.mail = layout.staging + 2 * TDDP_SHM_STAGING_BYTES;
    layout.arena = rounded(layout.mail + tddp_shm_mail_bytes(size), HUGE);
    layout.bytes = layout.arena + arena;
    return layout;
}

/* --- files ----------------------------------------------------------------------------------- */

static int open_memory(void)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create("tddp", flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) {
        fd = memfd_create("tddp", flags);
    }
    return fd;
}

static tddp_status back(int fd, size_t bytes)
{
    int failed;
    do {
        failed = fallocate(fd, 0, 0, (off_t)bytes);
    } while (failed && errno == EINTR);
    return failed ? tddp_fail_errno("memory for a shared segment") : TDDP_OK;
}

/* How large a file of this process may be: one that is larger is answered with a signal. */
static size_t largest_file(void)
{
    struct rlimit limit;
    bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return limited ? (size_t)limit.rlim_cur : SIZE_MAX;
}

static tddp_status prepare(int fd, size_t bytes, size_t base_bytes)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    if (bytes > largest_file()) {
        return tddp_fail(TDDP_SYSTEM,
                         "files are limited to %zu bytes: expected %zu for a shared segment; raise "
                         "ulimit -f",
                         largest_file(), bytes);
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
    return back(fd, base_bytes);
}

static tddp_status wrap(int fd, size_t bytes, bool own, tddp_shm_segment **out)
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
    /* Of little use in a core dump, and slow to look through. */
    (void)madvise(base, bytes, MADV_DONTDUMP);
    atomic_init(&made->references, 1);
    made->fd = fd;
    made->own = own;
    made->pid = tddp_process_id();
    made->base = base;
    made->bytes = bytes;
    pthread_mutex_init(&made->mutex, NULL);
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_shm_segment_create(size_t bytes, size_t base_bytes, tddp_shm_segment **out)
{
    int fd = open_memory();
    if (fd < 0) {
        return tddp_fail_errno("memfd_create");
    }
    tddp_status status = prepare(fd, bytes, base_bytes);
    if (status == TDDP_OK) {
        status = wrap(fd, bytes, true, out);
    }
    if (status) {
        tddp_close(fd);
    }
    return status;
}

tddp_status tddp_shm_segment_map(int fd, size_t bytes, tddp_shm_segment **out)
{
    /* What is shorter than it says would end this process when it is read. */
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    tddp_status status = TDDP_OK;
    if (fstat(fd, &file) || (size_t)file.st_size != bytes || seals < 0 ||
        !(seals & F_SEAL_SHRINK)) {
        status =
            tddp_fail(TDDP_PROTOCOL,
                      "a shared segment is not what its rank says, %zu bytes that stay", bytes);
    } else {
        status = wrap(fd, bytes, false, out);
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
    pthread_mutex_destroy(&segment->mutex);
    free(segment->spans);
    free(segment);
}

bool tddp_shm_segment_is_orphan(const tddp_shm_segment *segment)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return fcntl(segment->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* --- address space --------------------------------------------------------------------------- */

/* Whether the address space has room for so much at once. */
static bool fits(size_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return false;
    }
    (void)munmap(base, bytes);
    return true;
}

tddp_status tddp_shm_arena_room(int size, size_t *out)
{
    struct sysinfo info;
    const char *asked = getenv("TDDP_SHM_ARENA");
    int64_t bytes = 0;
    if (asked && !tddp_parse_int(asked, 0, INT64_C(1) << 42, &bytes)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TDDP_SHM_ARENA=\"%s\": expected bytes of shared memory for each rank, 0 "
                         "to 2^42",
                         asked);
    }
    if (!asked && sysinfo(&info) == 0) {
        bytes = (int64_t)(info.totalram / 2 * info.mem_unit);
    }
    size_t room = rounded((size_t)bytes, HUGE);
    size_t base = tddp_shm_lay_out(size, 0).bytes;
    size_t most = largest_file() > base ? (largest_file() - base) / HUGE * HUGE : 0;
    room = room < MOST_ARENA ? room : MOST_ARENA;
    room = room < most ? room : most;
    while (room > 0 && !fits((size_t)size * room)) {
        room = room / 2 / HUGE * HUGE;
    }
    *out = room;
    return TDDP_OK;
}
