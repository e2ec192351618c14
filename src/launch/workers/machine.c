/*
 * How many workers --nproc-per-node means, and the GPU of each. GPUs are looked for only where the
 * answer depends on them. Main thread.
 */
#include <stdio.h>
#include <stdlib.h>

#include "launch/workers/machine.h"

bool tddp_launch_devices_name(const tddp_launch_devices *devices, const char *visible,
                              int local_rank, char name[TDDP_LAUNCH_DEVICE_BYTES])
{
    bool named = local_rank < devices->named;
    if (devices->named == 0 && !visible) {
        (void)snprintf(name, TDDP_LAUNCH_DEVICE_BYTES, "%d", local_rank);
        return true;
    }
    (void)snprintf(name, TDDP_LAUNCH_DEVICE_BYTES, "%s",
                   named ? devices->list[local_rank].name : "");
    return named || (visible && *visible == '\0'); /* GPUs are not wanted at all */
}

void tddp_launch_devices_free(tddp_launch_devices *devices)
{
    free(devices->list);
    *devices = (tddp_launch_devices){0};
}

static int count(const tddp_launch_options *options, const tddp_launch_devices *devices)
{
    /* Of MIG's instances a process sees one, but each worker can be given its own. */
    int gpus = devices->count > 0 && options->virtual_local_rank ? devices->named : devices->count;
    switch (options->processes) {
    case TDDP_LAUNCH_PROCESSES_CPU:
        return tddp_launch_cores();
    case TDDP_LAUNCH_PROCESSES_AUTO:
        return gpus > 0 ? gpus : tddp_launch_cores();
    case TDDP_LAUNCH_PROCESSES_GPU:
        return gpus;
    }
    return options->processes;
}

tddp_status tddp_launch_count_processes(const tddp_launch_options *options,
                                        tddp_launch_devices *devices, int *out)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char name[TDDP_LAUNCH_DEVICE_BYTES];
    char seen[256] = "there are no more device files such as /dev/nvidia0";
    bool depends = options->processes == TDDP_LAUNCH_PROCESSES_GPU ||
                   options->processes == TDDP_LAUNCH_PROCESSES_AUTO ||
                   options->virtual_local_rank || options->numa_binding != TDDP_LAUNCH_BINDING_NONE;
    *devices = (tddp_launch_devices){0};
    if (depends && tddp_launch_devices_find("", visible, devices) != TDDP_OK) {
        return TDDP_OUT_OF_MEMORY;
    }
    *out = count(options, devices);
    /* Without a driver what the variable names is no GPU. */
    bool driver = devices->count > 0 || devices->named == 0;
    if (visible && (driver || *out > 0)) {
        (void)snprintf(seen, sizeof seen, "CUDA_VISIBLE_DEVICES=\"%s\"", visible);
    }
    if (*out == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nproc-per-node=gpu: no GPU here (%s); expected at least one, or "
                         "--nproc-per-node=auto, cpu or a number",
                         seen);
    }
    if (options->virtual_local_rank &&
        !tddp_launch_devices_name(devices, visible, *out - 1, name)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--virtual-local-rank: %d workers, but no GPU for each (%s); expected at "
                         "most as many workers as GPUs",
                         *out, seen);
    }
    return TDDP_OK;
}
