/* The limits of control groups, in made-up machines. */
#include <limits.h>

#include "base/base.h"
#include "launch/machine.h"

static tddp_memory_limit limit_of(const char *root)
{
    tddp_memory_limit limit;
    tddp_cgroup_root(root);
    tddp_cgroup_memory(&limit);
    tddp_cgroup_root("");
    return limit;
}

static void check_limit(const char *root, uint64_t bytes, uint64_t left, const char *file)
{
    tddp_memory_limit limit = limit_of(root);
    CHECK_INT(limit.bytes, bytes);
    CHECK_INT(limit.left, left);
    CHECK_TEXT(limit.file, file);
}

TEST(the_own_groups_can_be_read)
{
    tddp_memory_limit limit;
    tddp_cgroup_memory(&limit);
    CHECK(limit.left > 0);
    CHECK_INT(limit.bytes == UINT64_MAX, limit.file[0] == '\0');
}

TEST(no_groups_are_no_limit)
{
    char *root = machine_make();
    check_limit(root, UINT64_MAX, UINT64_MAX, "");
    machine_file(root, "nonsense\n1\n0::/user\n", "proc/self/cgroup");
    check_limit(root, UINT64_MAX, UINT64_MAX, "");
    machine_file(root, "max\n", "sys/fs/cgroup/user/memory.max");
    machine_file(root, "1\n", "sys/fs/cgroup/user/memory.current");
    check_limit(root, UINT64_MAX, UINT64_MAX, "");
    machine_remove(root);
}

TEST(unified_groups)
{
    char *root = machine_make();
    machine_file(root, "0::/a/b\n", "proc/self/cgroup");
    machine_file(root, "8000000\n", "sys/fs/cgroup/a/memory.max");
    machine_file(root, "5000000\n", "sys/fs/cgroup/a/memory.current");
    check_limit(root, 8000000, 3000000, "/sys/fs/cgroup/a/memory.max");
    /* The group with the least left counts, not the one with the lowest limit. */
    machine_file(root, "7000000\n", "sys/fs/cgroup/a/b/memory.max");
    machine_file(root, "1000000\n", "sys/fs/cgroup/a/b/memory.current");
    check_limit(root, 8000000, 3000000, "/sys/fs/cgroup/a/memory.max");
    machine_file(root, "6500000\n", "sys/fs/cgroup/a/b/memory.current");
    check_limit(root, 7000000, 500000, "/sys/fs/cgroup/a/b/memory.max");
    /* The kernel takes pages of files away before it ends anybody. */
    machine_file(root, "anon 6000000\nfile 500000\ninactive_file 300000\nactive_file 100000\n",
                 "sys/fs/cgroup/a/b/memory.stat");
    check_limit(root, 7000000, 900000, "/sys/fs/cgroup/a/b/memory.max");
    machine_file(root, "9000000\n", "sys/fs/cgroup/a/memory.current");
    check_limit(root, 8000000, 0, "/sys/fs/cgroup/a/memory.max");
    machine_remove(root);
}

/* A container's group goes by the host's name, which leads nowhere in it. */
TEST(the_root_of_a_container)
{
    char *root = machine_make();
    machine_file(root, "0::/docker/1234\n", "proc/self/cgroup");
    machine_file(root, "1000\n", "sys/fs/cgroup/memory.max");
    machine_file(root, "400\n", "sys/fs/cgroup/memory.current");
    check_limit(root, 1000, 600, "/sys/fs/cgroup/memory.max");
    machine_remove(root);
}

TEST(swap_is_memory_as_far_as_the_group_may_use_it)
{
    char *root = machine_make();
    machine_file(root, "0::/a\n", "proc/self/cgroup");
    machine_file(root, "1000\n", "sys/fs/cgroup/a/memory.max");
    machine_file(root, "900\n", "sys/fs/cgroup/a/memory.current");
    machine_file(root, "max\n", "sys/fs/cgroup/a/memory.swap.max");
    machine_file(root, "0\n", "sys/fs/cgroup/a/memory.swap.current");
    machine_file(root, "SwapTotal: 9 kB\nSwapFree:    2 kB\n", "proc/meminfo");
    check_limit(root, 1000, 100 + 2048, "/sys/fs/cgroup/a/memory.max");
    machine_file(root, "500\n", "sys/fs/cgroup/a/memory.swap.max");
    machine_file(root, "200\n", "sys/fs/cgroup/a/memory.swap.current");
    check_limit(root, 1000, 100 + 300, "/sys/fs/cgroup/a/memory.max");
    machine_file(root, "SwapFree: 0 kB\n", "proc/meminfo");
    check_limit(root, 1000, 100, "/sys/fs/cgroup/a/memory.max");
    machine_remove(root);
}

TEST(groups_of_version_1)
{
    static const char *const file = "/sys/fs/cgroup/memory/a/memory.limit_in_bytes";
    char *root = machine_make();
    machine_file(root, "5:cpu,cpuacct:/c\n4:memory:/a\n0::/\n", "proc/self/cgroup");
    machine_file(root, "9223372036854771712\n", "sys/fs/cgroup/memory/memory.limit_in_bytes");
    machine_file(root, "77\n", "sys/fs/cgroup/memory/memory.usage_in_bytes");
    check_limit(root, UINT64_MAX, UINT64_MAX, "");
    machine_file(root, "1000\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes");
    machine_file(root, "900\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes");
    machine_file(root, "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n",
                 "sys/fs/cgroup/memory/a/memory.stat");
    check_limit(root, 1000, 150, file);
    /* Of memory and swap together. */
    machine_file(root, "SwapFree: 2 kB\n", "proc/meminfo");
    machine_file(root, "1500\n", "sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes");
    machine_file(root, "1100\n", "sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes");
    check_limit(root, 1000, 400 + 50, file);
    machine_remove(root);
}

/* --- processor time -------------------------------------------------------------------------- */

static void check_cores(const char *root, int expected)
{
    tddp_cgroup_root(root);
    CHECK_INT(tddp_core_limit(), expected);
    tddp_cgroup_root("");
}

TEST(no_groups_leave_all_cores)
{
    char *root = machine_make();
    check_cores(root, INT_MAX);
    machine_file(root, "0::/user\n", "proc/self/cgroup");
    check_cores(root, INT_MAX);
    machine_file(root, "nonsense\n1\n", "proc/self/cgroup");
    check_cores(root, INT_MAX);
    machine_remove(root);
}

/* Version 2: the tightest of a group and those around it. */
TEST(cores_of_unified_groups)
{
    char *root = machine_make();
    machine_file(root, "0::/a/b\n", "proc/self/cgroup");
    machine_file(root, "max 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_cores(root, INT_MAX);
    machine_file(root, "250000 100000\n", "sys/fs/cgroup/a/cpu.max");
    check_cores(root, 3);
    machine_file(root, "400000 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_cores(root, 3);
    machine_file(root, "50000 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_cores(root, 1);
    machine_remove(root);
}

/* A container's path may be the host's: what is mounted at the root is its own. */
TEST(cores_of_a_container)
{
    char *root = machine_make();
    machine_file(root, "0::/docker/1234\n", "proc/self/cgroup");
    machine_file(root, "200000 100000\n", "sys/fs/cgroup/cpu.max");
    check_cores(root, 2);
    machine_remove(root);
}

TEST(cores_of_groups_of_the_first_kind)
{
    char *root = machine_make();
    machine_file(root, "5:cpuset:/x\n4:cpuacct,cpu:/a\n1:name=systemd:/a\n0::/\n",
                 "proc/self/cgroup");
    machine_file(root, "150000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us");
    check_cores(root, INT_MAX); /* no period */
    machine_file(root, "50000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us");
    check_cores(root, 3);
    machine_file(root, "-1\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us");
    check_cores(root, INT_MAX);
    machine_file(root, "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    machine_file(root, "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us");
    check_cores(root, 1);
    machine_remove(root);
}
