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
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "--nproc-per-node=gpu: no GPU here (%s%s%s); expected at least one, or "
                     "--nproc-per-node=auto, cpu or a number",
                     visible ? "CUDA_VISIBLE_DEVICES=\"" : "no NVIDIA driver's devices found",
                     visible ? visible : "", visible ? "\"" : "");
}

static tddp_status count(const tddp_launch_options *options, const tddp_launch_devices *devices,
                         const char *visible, int *out)
{
    /* Of MIG's instances a process sees one, but each worker can be given its own. */
    int gpus = devices->count > 0 && options->virtual_local_rank ? devices->named : devices->count;
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
    case TDDP_LAUNCH_PROCESSES_XPU:
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nproc-per-node=xpu: GPUs of Intel are not supported; expected gpu, "
                         "cpu, auto or a number");
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

tddp_status tddp_launch_count_processes(const tddp_launch_options *options,
                                        tddp_launch_devices *devices, int *out)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char name[TDDP_LAUNCH_DEVICE_BYTES];
    *devices = (tddp_launch_devices){0};
    tddp_status status =
        depends_on_gpus(options) ? tddp_launch_devices_find("", visible, devices) : TDDP_OK;
    if (status == TDDP_OK) {
        status = count(options, devices, visible, out);
    }
    if (status == TDDP_OK && options->virtual_local_rank &&
        !tddp_launch_devices_name(devices, visible, *out - 1, name)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "--virtual-local-rank: %d workers, but no GPU for each (%s%s%s); "
                           "expected at most as many workers as GPUs",
                           *out, visible ? "CUDA_VISIBLE_DEVICES=\"" : "there are fewer",
                           visible ? visible : "", visible ? "\"" : "");
    }
    return status;
}
