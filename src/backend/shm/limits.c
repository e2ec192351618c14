/*
 * How much memory and address space segments may use: what the process's resource limits and its
 * control groups leave. Only reads; any thread.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include "backend/shm/control.h"

/* Fractions of the free address space: for all segments, if the user set the arenas' size, and if
 * not. Tensors, threads and libraries need the rest. */
enum { SEGMENT_DIVISOR = 2, ARENA_DIVISOR = 4 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MAX_ARENA ((size_t)1 << 30)
#else
#define MAX_ARENA ((size_t)1 << 42)
#endif

size_t tddp_shm_max_file_bytes(void)
{
    struct rlimit limit;
    bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return limited ? (size_t)limit.rlim_cur : SIZE_MAX;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t clamp_arena(size_t arena, size_t limit)
{
    return min_size(arena, limit) / TDDP_SHM_HUGE * TDDP_SHM_HUGE;
}

/* --- address space --------------------------------------------------------------------------- */

/* Whether so many bytes of address space are free at one place, and a limit allows them. */
static bool fits(size_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return false;
    }
    (void)munmap(base, bytes);
    return true;
}

static tddp_status check_base(int size, size_t base)
{
    struct rlimit limit = {0};
    if (fits(SEGMENT_DIVISOR * base * (size_t)size)) {
        return TDDP_OK;
    }
    (void)getrlimit(RLIMIT_AS, &limit);
    return tddp_fail(TDDP_UNAVAILABLE,
                     "address space is limited to %zu bytes: expected %zu for the segments of %d "
                     "ranks, and as much beside them; raise ulimit -v, or do without shared memory "
                     "(TDDP_SHM=0)",
                     (size_t)limit.rlim_cur, base * (size_t)size, size);
}

tddp_status tddp_shm_arena_limit(int size, size_t *out)
{
    struct sysinfo info;
    const char *requested = getenv("TDDP_SHM_ARENA");
    int64_t bytes = 0;
    if (requested && !tddp_parse_int(requested, 0, INT64_C(1) << 42, &bytes)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "TDDP_SHM_ARENA=\"%s\": expected bytes of shared memory for each rank, 0 "
                         "to 2^42",
                         requested);
    }
    if (!requested && sysinfo(&info) == 0) {
        bytes = (int64_t)(info.totalram / 2 * info.mem_unit);
    }
    size_t file = tddp_shm_max_file_bytes();
    const tddp_shm_layout layout = tddp_shm_layout_of(size);
    size_t base = tddp_shm_arena_at(&layout);
    size_t arena = ((size_t)bytes + TDDP_SHM_HUGE - 1) / TDDP_SHM_HUGE * TDDP_SHM_HUGE;
    arena = clamp_arena(arena, min_size(MAX_ARENA, file > base ? file - base : 0));
    const size_t share = (size_t)size * (requested ? SEGMENT_DIVISOR : ARENA_DIVISOR);
    tddp_status status = check_base(size, base);
    while (status == TDDP_OK && arena > 0 && !fits(share * (base + arena))) {
        arena = clamp_arena(arena / 4 * 3, arena);
    }
    *out = arena;
    return status;
}

/* --- memory ---------------------------------------------------------------------------------- */

tddp_status tddp_shm_check_memory(int ranks, size_t bytes)
{
    tddp_memory_limit limit;
    tddp_cgroup_memory(&limit);
    /* Each other rank may have passed this check and be populating one portion. */
    size_t others = (size_t)(ranks - 1) * min_size(bytes, TDDP_SHM_POPULATE_BYTES);
    if (limit.left >= bytes && limit.left - bytes >= others) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_OUT_OF_MEMORY,
                     "no memory for %zu bytes of shared memory: %s limits this process to %" PRIu64
                     " bytes, of which %" PRIu64
                     " are left for %d ranks; raise the limit of the control group, or take less",
                     bytes, limit.file, limit.bytes, limit.left, ranks);
}
