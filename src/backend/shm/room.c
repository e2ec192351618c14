/*
 * How much memory and address space there is for segments: what the process's limits and its
 * control groups leave. Only reads; any thread.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "backend/shm/control.h"

/* Of the address space that a limit leaves: what segments may take at most, and arenas of a size
 * that nobody has asked for. Tensors, threads and libraries need the rest. */
enum { MOST_SHARE = 2, ARENA_SHARE = 4 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MOST_ARENA ((size_t)1 << 30)
#else
#define MOST_ARENA ((size_t)1 << 42)
#endif

size_t tddp_shm_largest_file(void)
{
    struct rlimit limit;
    bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return limited ? (size_t)limit.rlim_cur : SIZE_MAX;
}

static size_t least_of(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t least_arena(size_t room, size_t most)
{
    return least_of(room, most) / TDDP_SHM_HUGE * TDDP_SHM_HUGE;
}

/* --- address space --------------------------------------------------------------------------- */

/* What this process has mapped. */
static size_t address_space_taken(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file) {
        if (fscanf(file, "%zu", &pages) != 1) {
            pages = 0;
        }
        (void)fclose(file);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* What it may map beside that; SIZE_MAX: as much as there is. */
static size_t address_space_left(size_t *most)
{
    struct rlimit limit;
    *most = SIZE_MAX;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    *most = (size_t)limit.rlim_cur;
    size_t taken = address_space_taken();
    return *most > taken ? *most - taken : 0;
}

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

/* Cuts `room`, of each of `size` arenas, down to what a limit leaves. */
static tddp_status keep_to_address_space(int size, size_t base, bool asked, size_t *room)
{
    size_t most;
    size_t left = address_space_left(&most);
    if (left == SIZE_MAX) {
        return TDDP_OK;
    }
    size_t all = left / MOST_SHARE / (size_t)size;
    if (all < base) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "address space is limited to %zu bytes, of which %zu are left: expected "
                         "%zu for the segments of %d ranks, and as much beside them; raise "
                         "ulimit -v, or do without shared memory (TDDP_SHM=0)",
                         most, left, base * (size_t)size, size);
    }
    size_t share = asked ? all : left / ARENA_SHARE / (size_t)size;
    *room = least_arena(*room, share > base ? share - base : 0);
    return TDDP_OK;
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
    size_t file = tddp_shm_largest_file();
    size_t base = tddp_shm_lay_out(size, 0).bytes;
    size_t room = ((size_t)bytes + TDDP_SHM_HUGE - 1) / TDDP_SHM_HUGE * TDDP_SHM_HUGE;
    room = least_arena(room, least_of(MOST_ARENA, file > base ? file - base : 0));
    tddp_status status = keep_to_address_space(size, base, asked, &room);
    while (status == TDDP_OK && room > 0 && !fits((size_t)size * room)) {
        room = least_arena(room / 2, room);
    }
    *out = room;
    return status;
}

/* --- memory ---------------------------------------------------------------------------------- */

tddp_status tddp_shm_check_memory(int ranks, size_t bytes)
{
    tddp_memory_limit limit;
    tddp_cgroup_memory(&limit);
    /* Each other rank that has found room may be at one piece. */
    size_t others = (size_t)(ranks - 1) * least_of(bytes, TDDP_SHM_PIECE);
    if (limit.left >= bytes && limit.left - bytes >= others) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_OUT_OF_MEMORY,
                     "no memory for %zu bytes that are shared: %s limits this process to %" PRIu64
                     " bytes, of which %" PRIu64
                     " are left for %d ranks; raise the limit of the control group, or take less",
                     bytes, limit.file, limit.bytes, limit.left, ranks);
}
