/*
 * How many workers --nproc-per-node means. GPUs are looked for only where the answer depends on
 * them. Main thread.
 */
#include <stdlib.h>

#include "base/base.h"
#include "launch/workers/devices.h"
#include "launch/workers/resources.h"

/* What there is instead of GPUs, for people. */
static tddp_status no_gpu(const tddp_launch_devices *devices, const char *visible)
{
    if (devices->unreachable > 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nproc-per-node=gpu: the NVIDIA driver shows %d GPU%s, but there is no "
                         "/dev/nvidia0 or the like to use one; give the container its GPUs, or on "
                         "a machine that was just started run nvidia-smi as root",
                         devices->unreachable, devices->unreachable == 1 ? "" : "s");
    }
    const char *found = devices->driver ? "" : "no NVIDIA driver's devices found";
    const char *both = visible && !devices->driver ? ", " : "";
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "--nproc-per-node=gpu: no GPU here (%s%s%s%s%s); expected at least one, or "
                     "--nproc-per-node=auto, cpu or a number",
                     visible ? "CUDA_VISIBLE_DEVICES=\"" : "", visible ? visible : "",
                     visible ? "\"" : "", both, found);
}

/* Of MIG's instances a process sees one, however many are named; but each worker can be given its
 * own. */
static int usable(const tddp_launch_devices *devices, bool each_its_own)
{
    return devices->one_a_process && !each_its_own && devices->count > 1 ? 1 : devices->count;
}

static tddp_status count(const tddp_launch_options *options, const tddp_launch_devices *devices,
                         const char *visible, int *out)
{
    int gpus = usable(devices, options->virtual_local_rank);
    switch (options->processes.kind) {
    case TDDP_LAUNCH_PROCESSES_NUMBER:
        *out = options->processes.number;
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_CPU:
        *out = tddp_launch_cores();
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_AUTO:
        *out = gpus > 0 ? gpus : tddp_launch_cores();
        return TDDP_OK;
    case TDDP_LAUNCH_PROCESSES_GPU:
        break;
    }
    *out = gpus;
    return gpus > 0 ? TDDP_OK : no_gpu(devices, visible);
}

static bool depends_on_gpus(const tddp_launch_options *options)
{
    return options->processes.kind == TDDP_LAUNCH_PROCESSES_GPU ||
           options->processes.kind == TDDP_LAUNCH_PROCESSES_AUTO || options->virtual_local_rank ||
           options->numa_binding != TDDP_LAUNCH_BINDING_NONE;
}

/* --virtual-local-rank needs a GPU for each worker, unless there is none at all. */
static tddp_status check_virtual(const tddp_launch_devices *devices, const char *visible,
                                 int workers)
{
    char entry[TDDP_LAUNCH_DEVICE_BYTES];
    if (tddp_launch_devices_name(devices, visible, workers - 1, entry)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "--virtual-local-rank: %d workers, but no GPU for each (%s%s%s); expected at "
                     "most as many workers as GPUs",
                     workers, visible ? "CUDA_VISIBLE_DEVICES=\"" : "there are fewer",
                     visible ? visible : "", visible ? "\"" : "");
}

tddp_status tddp_launch_count_processes(const tddp_launch_options *options,
                                        tddp_launch_devices *devices, int *out)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *devices = (tddp_launch_devices){0};
    tddp_status status =
        depends_on_gpus(options) ? tddp_launch_devices_find("", visible, devices) : TDDP_OK;
    if (status == TDDP_OK) {
        status = count(options, devices, visible, out);
    }
    if (status == TDDP_OK && options->virtual_local_rank) {
        status = check_virtual(devices, visible, *out);
    }
    return status;
}
