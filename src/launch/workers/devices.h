/*
 * The GPUs that workers will see, found without any GPU library: what the NVIDIA driver shows in
 * files, cut down and ordered by CUDA_VISIBLE_DEVICES as CUDA does it.
 */
#ifndef TDDP_LAUNCH_DEVICES_H
#define TDDP_LAUNCH_DEVICES_H

#include <stdbool.h>

#include <tddp/status.h>

enum { TDDP_LAUNCH_DEVICE_BYTES = 96 };

typedef struct tddp_launch_device {
    char name[TDDP_LAUNCH_DEVICE_BYTES]; /* what CUDA_VISIBLE_DEVICES calls it: "2", "GPU-89...";
                                            a number where the variable is not set */
    int node;                            /* its NUMA node; -1: not known */
} tddp_launch_device;

typedef struct tddp_launch_devices {
    tddp_launch_device *list; /* as CUDA numbers them */
    int count;
    bool one_a_process; /* instances of MIG: of all that are named a process sees the first */
    bool driver;        /* whether devices that may be used were found at all */
    int unreachable;    /* GPUs that the driver shows where none has a device file */
} tddp_launch_devices;

/* Looks below `root` ("" for this machine); `visible` is CUDA_VISIBLE_DEVICES or NULL. No GPU is no
 * error. GPUs are in the order of their PCI addresses. */
TDDP_NODISCARD tddp_status tddp_launch_devices_find(const char *root, const char *visible,
                                                    tddp_launch_devices *out);

/* What to call the GPU of one worker alone: "3". Without any GPU as PyTorch does it: the worker's
 * entry of `visible`, or its local rank. False if there is no such GPU. */
bool tddp_launch_devices_name(const tddp_launch_devices *devices, const char *visible,
                              int local_rank, char name[TDDP_LAUNCH_DEVICE_BYTES]);

void tddp_launch_devices_free(tddp_launch_devices *devices);

#endif
