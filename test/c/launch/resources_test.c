#include <limits.h>
#include <unistd.h>

#include "launch/workers/resources.h"
#include "machine.h"

TEST(cores_are_at_least_one_and_at_most_the_machines)
{
    CHECK(tddp_launch_cores() >= 1);
    CHECK(tddp_launch_cores() <= sysconf(_SC_NPROCESSORS_ONLN));
}

static void check_limit(const char *root, int expected)
{
    CHECK_INT(tddp_launch_cpu_limit(root), expected);
}

TEST(no_cgroups_are_no_limit)
{
    char *root = machine_make();
    check_limit(root, INT_MAX);
    machine_file(root, "0::/user\n", "proc/self/cgroup");
    check_limit(root, INT_MAX);
    machine_file(root, "nonsense\n1\n", "proc/self/cgroup");
    check_limit(root, INT_MAX);
    machine_remove(root);
}

/* Version 2: the tightest of a group and those around it. */
TEST(limits_of_unified_cgroups)
{
    char *root = machine_make();
    machine_file(root, "0::/a/b\n", "proc/self/cgroup");
    machine_file(root, "max 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_limit(root, INT_MAX);
    machine_file(root, "250000 100000\n", "sys/fs/cgroup/a/cpu.max");
    check_limit(root, 3);
    machine_file(root, "400000 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_limit(root, 3);
    machine_file(root, "50000 100000\n", "sys/fs/cgroup/a/b/cpu.max");
    check_limit(root, 1);
    machine_remove(root);
}

/* A container's path may be the host's: what is mounted at the root is its own. */
TEST(limits_of_a_container)
{
    char *root = machine_make();
    machine_file(root, "0::/docker/1234\n", "proc/self/cgroup");
    machine_file(root, "200000 100000\n", "sys/fs/cgroup/cpu.max");
    check_limit(root, 2);
    machine_remove(root);
}

TEST(limits_of_cgroups_of_the_first_kind)
{
    char *root = machine_make();
    machine_file(root, "5:cpuset:/x\n4:cpuacct,cpu:/a\n1:name=systemd:/a\n0::/\n",
                 "proc/self/cgroup");
    machine_file(root, "150000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us");
    check_limit(root, INT_MAX); /* no period */
    machine_file(root, "50000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us");
    check_limit(root, 3);
    machine_file(root, "-1\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us");
    check_limit(root, INT_MAX);
    machine_file(root, "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    machine_file(root, "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us");
    check_limit(root, 1);
    machine_remove(root);
}

static tddp_status count(tddp_launch_processes kind, bool each_its_own, int *out)
{
    tddp_launch_options options = {.processes = {kind, 3}, .virtual_local_rank = each_its_own};
    return tddp_launch_count_processes(&options, out);
}

TEST(processes_are_counted)
{
    int workers = -1;
    unsetenv("CUDA_VISIBLE_DEVICES");
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_NUMBER, false, &workers));
    CHECK_INT(workers, 3);
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_CPU, false, &workers));
    CHECK_INT(workers, tddp_launch_cores());
    CHECK_STATUS(count(TDDP_LAUNCH_PROCESSES_XPU, false, &workers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "xpu");
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_AUTO, false, &workers));
    CHECK_INT(workers, tddp_launch_cores());
    CHECK_STATUS(count(TDDP_LAUNCH_PROCESSES_GPU, false, &workers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no GPU here (CUDA_VISIBLE_DEVICES=\"\"");
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_NUMBER, true, &workers));
    setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
    CHECK_STATUS(count(TDDP_LAUNCH_PROCESSES_NUMBER, true, &workers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "--virtual-local-rank: 3 workers, but no GPU for each "
                                         "(CUDA_VISIBLE_DEVICES=\"0,1\")");
}
