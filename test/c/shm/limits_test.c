/*
 * Shared memory in processes with limits on address space or with a control group's memory limit.
 */
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include "backend/shm/control.h"
#include "launch/machine.h"
#include "ranks.h"

enum { MIB = 1024 * 1024 };

/* Limits this process to so much more address space. */
static void limit_address_space(size_t left)
{
    size_t pages;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    rlim_t bytes = (rlim_t)(pages * (size_t)sysconf(_SC_PAGESIZE) + left);
    CHECK_INT(setrlimit(RLIMIT_AS, &(struct rlimit){bytes, RLIM_INFINITY}), 0);
}

static size_t arena_of(const shm_rank *it)
{
    const tddp_shm_segment *segment = tddp_shm_self(it->shm)->segment;
    return segment->bytes - segment->arena;
}

/* Two thirds of the free address space stay for tensors, threads and libraries. */
static void in_small_address_space(shm_rank *it)
{
    void *handle;
    void *data;
    limit_address_space((size_t)1200 * MIB);
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    void *rest = mmap(NULL, (size_t)800 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(rest != MAP_FAILED);
    CHECK(arena_of(it) >= (size_t)100 * MIB && arena_of(it) <= (size_t)150 * MIB);
    CHECK_OK(tddp_shm_allocate(it->shm, 3 * MIB, &handle, &data));
    memset(data, 1, 3 * MIB);
    barrier_once(it);
    tddp_shm_deallocate(handle);
    CHECK_INT(munmap(rest, (size_t)800 * MIB), 0);
}

TEST(address_space_is_left_for_others)
{
    shm_run(
        (shm_job){.mode = SHM_PROCESSES, .size = 2, .body = in_small_address_space, .bare = true});
}

TEST(default_arena_size)
{
    struct sysinfo info;
    size_t room;
    (void)unsetenv("TDDP_SHM_ARENA");
    CHECK_INT(sysinfo(&info), 0);
    CHECK_OK(tddp_shm_arena_limit(2, &room));
    size_t half = info.totalram / 2 * info.mem_unit;
    half = (half + TDDP_SHM_HUGE - 1) / TDDP_SHM_HUGE * TDDP_SHM_HUGE;
    CHECK(room == half || room == (size_t)1024 * MIB); /* the latter with a sanitizer */
}

/* A requested arena is used as long as the same amount is left beside it. */
static void as_requested(shm_rank *it)
{
    setenv("TDDP_SHM_ARENA", "209715200", 1);
    limit_address_space((size_t)1200 * MIB);
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    CHECK_INT(arena_of(it), 200 * MIB);
    barrier_once(it);
}

TEST(requested_address_space)
{
    shm_run((shm_job){.mode = SHM_PROCESSES, .size = 2, .body = as_requested, .bare = true});
}

/* If the segments alone would use most of the address space, all ranks go without. */
static void without_address_space(shm_rank *it)
{
    if (it->rank == 1) {
        limit_address_space((size_t)10 * MIB);
    }
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_STATUS(tddp_shm_join(&opts, NULL, NULL, &it->shm), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 1 cannot share memory: address space is limited to ");
    CHECK_CONTAINS(tddp_error_message(), "for the segments of 3 ranks, and as much beside them; "
                                         "raise ulimit -v, or do without shared memory");
}

TEST(no_address_space_for_segments)
{
    shm_run(
        (shm_job){.mode = SHM_PROCESSES, .size = 3, .body = without_address_space, .bare = true});
}

/* --- control groups -------------------------------------------------------------------------- */

static char *group_with(const char *limit, const char *usage)
{
    char *root = machine_make();
    machine_file(root, "0::/job\n", "proc/self/cgroup");
    machine_file(root, limit, "sys/fs/cgroup/job/memory.max");
    machine_file(root, usage, "sys/fs/cgroup/job/memory.current");
    return root;
}

/* 100 MiB, of which 36 are in use: 30 fit if all ranks take as much at a time, 60 don't. */
static void below_a_limit(shm_rank *it)
{
    void *handle;
    void *data;
    char *root = group_with("104857600\n", "37748736\n");
    tddp_cgroup_root(root);
    CHECK_OK(tddp_shm_allocate(it->shm, 30 * MIB, &handle, &data));
    tddp_shm_deallocate(handle);
    CHECK_STATUS(tddp_shm_allocate(it->shm, 60 * MIB, &handle, &data), TDDP_OUT_OF_MEMORY);
    CHECK_CONTAINS(tddp_error_message(),
                   "no memory for 62914560 bytes of shared memory: /sys/fs/cgroup/job/memory.max "
                   "limits this process to 104857600 bytes, of which 67108864 are left");
    tddp_cgroup_root("");
    machine_remove(root);
    CHECK_INT(tddp_shm_self(it->shm)->segment->allocations, 0);
    barrier_once(it);
}

TEST(memory_below_a_cgroup_limit)
{
    run_shm(SHM_PROCESSES, 2, below_a_limit, NULL);
}

/* The check includes the portions that other ranks may be populating. */
TEST(other_ranks_take_memory_too)
{
    char *root = group_with("104857600\n", "20000000\n");
    tddp_cgroup_root(root);
    CHECK_STATUS(tddp_shm_check_memory(1, 100 * MIB), TDDP_OUT_OF_MEMORY);
    CHECK_OK(tddp_shm_check_memory(8, 10 * MIB));
    CHECK_STATUS(tddp_shm_check_memory(9, 10 * MIB), TDDP_OUT_OF_MEMORY);
    CHECK_STATUS(tddp_shm_check_memory(3, 60 * MIB), TDDP_OUT_OF_MEMORY);
    machine_remove(root);
}

/* A rank without memory for a segment fails before it touches a page. */
static void without_segments(shm_rank *it)
{
    char *root = group_with("1048576\n", "1000000\n");
    if (it->rank == 0) {
        tddp_cgroup_root(root);
    }
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_STATUS(tddp_shm_join(&opts, NULL, NULL, &it->shm), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), "/sys/fs/cgroup/job/memory.max limits this process to "
                                         "1048576 bytes, of which 48576 are left");
    tddp_cgroup_root("");
    machine_remove(root);
}

TEST(no_memory_for_segments)
{
    shm_run((shm_job){.mode = SHM_PROCESSES, .size = 2, .body = without_segments, .bare = true});
}
