#include <unistd.h>

#include "check.h"
#include "launch/workers/machine.h"

TEST(cores_are_at_least_one_and_at_most_the_machines)
{
    CHECK(tddp_launch_cores() >= 1);
    CHECK(tddp_launch_cores() <= sysconf(_SC_NPROCESSORS_ONLN));
}

static tddp_status count(int processes, bool each_its_own, int *out)
{
    tddp_launch_options options = {.processes = processes, .virtual_local_rank = each_its_own};
    tddp_launch_devices devices;
    tddp_status status = tddp_launch_count_processes(&options, &devices, out);
    tddp_launch_devices_free(&devices);
    return status;
}

TEST(processes_are_counted)
{
    int workers = -1;
    unsetenv("CUDA_VISIBLE_DEVICES");
    CHECK_OK(count(3, false, &workers));
    CHECK_INT(workers, 3);
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_CPU, false, &workers));
    CHECK_INT(workers, tddp_launch_cores());
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    CHECK_OK(count(TDDP_LAUNCH_PROCESSES_AUTO, false, &workers));
    CHECK_INT(workers, tddp_launch_cores());
    CHECK_STATUS(count(TDDP_LAUNCH_PROCESSES_GPU, false, &workers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no GPU here (CUDA_VISIBLE_DEVICES=\"\"");
    CHECK_OK(count(3, true, &workers));
    setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
    CHECK_STATUS(count(3, true, &workers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "--virtual-local-rank: 3 workers, but no GPU for each "
                                         "(CUDA_VISIBLE_DEVICES=\"0,1\")");
}
