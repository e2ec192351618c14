/*
 * The machine as Linux and the NVIDIA driver show it: the affinity mask, what cgroups count, and
 * GPUs. /proc/driver/nvidia/gpus has a folder for each of the machine, named by its PCI address;
 * /dev has those that may be used here, all or a container's. CUDA_VISIBLE_DEVICES is read as the
 * driver reads it: numbers as strtol takes them, or identifiers, of which a beginning that only one
 * GPU has is enough; what cannot be read or does not exist ends the list, and naming a GPU twice
 * leaves none. Any thread.
 */
#include <ctype.h>
#include <glob.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/workers/machine.h"

enum { PATH_BYTES = 4096, UUID_BYTES = 64, MOST_GPUS = 1024 };

/* --- CPUs and memory ------------------------------------------------------------------------- */

tddp_launch_cpus tddp_launch_cpus_allowed(void)
{
    tddp_launch_cpus cpus = {{0}};
    (void)sched_getaffinity(0, sizeof cpus.words, (cpu_set_t *)cpus.words);
    return cpus;
}

bool tddp_launch_cpus_bind(const tddp_launch_cpus *cpus)
{
    return sched_setaffinity(0, sizeof cpus->words, (const cpu_set_t *)cpus->words) == 0;
}

int tddp_launch_cpus_count(const tddp_launch_cpus *cpus)
{
    return CPU_COUNT_S(sizeof cpus->words, (const cpu_set_t *)cpus->words);
}

int tddp_launch_cores(void)
{
    const tddp_launch_cpus allowed = tddp_launch_cpus_allowed();
    int cores = tddp_launch_cpus_count(&allowed);
    int limit = tddp_core_limit();
    cores = cores > 0 ? cores : 1; /* where the system does not show any */
    return limit < cores ? limit : cores;
}

/* The nearest group's: version 2 counts the groups below it too. */
static bool read_kills(int version, const char *folder, void *data)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/%s", folder,
                   version == 2 ? "memory.events" : "memory.oom_control");
    return !tddp_scan_file(path, "oom_kill %lld", (long long *)data);
}

long long tddp_launch_oom_kills(const char *root)
{
    long long kills = -1;
    tddp_cgroup_walk(root, "memory", read_kills, &kills);
    return kills;
}

/* --- the machine's GPUs ---------------------------------------------------------------------- */

/* One GPU as the driver shows it. */
typedef struct gpu {
    char uuid[UUID_BYTES]; /* "GPU-..."; empty: not known */
    int node;
} gpu;

typedef struct gpu_list {
    gpu list[MOST_GPUS];
    int count;
    bool uncounted; /* a driver that does not show its GPUs in files, as Windows' and Jetson's */
} gpu_list;

/* Paths below the root that match the pattern, in order. Caller: globfree(). */
static glob_t list_paths(const char *root, const char *pattern)
{
    char path[PATH_BYTES];
    glob_t found = {0};
    (void)snprintf(path, sizeof path, "%s%s", root, pattern);
    (void)glob(path, GLOB_BRACE, NULL, &found); /* none is no error */
    return found;
}

static bool is_device(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 && S_ISCHR(found.st_mode);
}

/* What a folder of the driver's shows; false if the GPU has no device file. */
static bool read_gpu(const char *root, const char *folder, gpu *out)
{
    char path[PATH_BYTES];
    int minor = -1;
    *out = (gpu){.node = -1};
    (void)snprintf(path, sizeof path, "%s/information", folder);
    (void)tddp_scan_file(path, "GPU UUID: %63s", out->uuid);
    (void)tddp_scan_file(path, "Device Minor: %d", &minor);
    int head = snprintf(path, sizeof path, "%s/sys/bus/pci/devices/", root);
    (void)snprintf(path + head, sizeof path - (size_t)head, "%s/numa_node",
                   strrchr(folder, '/') + 1);
    for (char *at = path + head; *at; at++) {
        *at = (char)tolower((unsigned char)*at); /* the driver's names are in capitals */
    }
    (void)tddp_scan_file(path, "%d", &out->node);
    (void)snprintf(path, sizeof path, "%s/dev/nvidia%d", root, minor);
    return is_device(path);
}

/* Without a device file a GPU is of no use, and not every container has the driver's folder: then
 * the device files are all that is known. */
static void find_gpus(const char *root, gpu_list *out)
{
    glob_t shown = list_paths(root, "/proc/driver/nvidia/gpus/*");
    glob_t files = list_paths(root, "/dev/nvidia[0-9]*");
    glob_t others = list_paths(root, "/dev/{dxg,nvhost-gpu}");
    for (size_t i = 0; i < shown.gl_pathc && out->count < MOST_GPUS; i++) {
        out->count += read_gpu(root, shown.gl_pathv[i], &out->list[out->count]);
    }
    bool known = out->count > 0;
    for (size_t i = 0; !known && i < files.gl_pathc && out->count < MOST_GPUS; i++) {
        out->list[out->count].node = -1;
        out->count += is_device(files.gl_pathv[i]);
    }
    out->uncounted = others.gl_pathc > 0;
    globfree(&shown);
    globfree(&files);
    globfree(&others);
}

/* --- the visible ones ------------------------------------------------------------------------ */

enum { NAME_ALONE = -1, NO_GPU = -2 };

/* 'M' of an instance of MIG, 'G' of an identifier, else '0'. */
static char kind_of(const char *entry)
{
    return strncmp(entry, "MIG-", 4) == 0 || strncmp(entry, "GPU-", 4) == 0 ? entry[0] : '0';
}

/* The place of the GPU that an entry means. Where none is known, the entry is believed. */
static int meant(const gpu_list *all, const char *entry)
{
    char *end;
    int found = NO_GPU;
    if (kind_of(entry) == '0') {
        long number = strtol(entry, &end, 10);
        bool exists = number >= 0 && number < (all->count > 0 ? all->count : MOST_GPUS);
        return end != entry && exists ? (int)number : NO_GPU;
    }
    if (kind_of(entry) == 'M' || all->count == 0) {
        return NAME_ALONE;
    }
    for (int i = 0; i < all->count; i++) {
        if (strncmp(all->list[i].uuid, entry, strlen(entry)) == 0) {
            if (found >= 0) {
                return NO_GPU; /* it could be either */
            }
            found = i;
        }
    }
    return found;
}

/* The GPUs that the variable names, or without it all; an uncounted driver has one, as far as is
 * known. The kind of the first entry is that of all; an entry of another kind ends the list. */
static void choose(const gpu_list *all, const char *visible, tddp_launch_devices *out)
{
    const int most = visible ? MOST_GPUS : all->count > 0 ? all->count : all->uncounted;
    const char *at = visible;
    while (out->named < most && (at || !visible)) {
        tddp_launch_device one = {.node = -1};
        if (at) {
            (void)sscanf(at, " %95[^, \t\n]", one.name); /* without the blanks around it */
            at = strchr(at, ',');
            at = at ? at + 1 : NULL;
        } else {
            (void)snprintf(one.name, sizeof one.name, "%d", out->named);
        }
        one.place = meant(all, one.name);
        if (one.place == NO_GPU ||
            (out->named > 0 && kind_of(out->list[0].name) != kind_of(one.name))) {
            return;
        }
        for (int i = 0; i < out->named; i++) {
            if (one.place >= 0 ? out->list[i].place == one.place
                               : strcmp(out->list[i].name, one.name) == 0) {
                out->named = 0;
                return;
            }
        }
        one.node = one.place >= 0 && one.place < all->count ? all->list[one.place].node : -1;
        out->list[out->named++] = one;
    }
}

tddp_status tddp_launch_devices_find(const char *root, const char *visible,
                                     tddp_launch_devices *out)
{
    gpu_list *all = tddp_alloc(sizeof *all);
    *out = (tddp_launch_devices){.list = tddp_alloc_array(MOST_GPUS, sizeof *out->list)};
    if (!all || !out->list) {
        free(all);
        return TDDP_OUT_OF_MEMORY;
    }
    find_gpus(root, all);
    choose(all, visible, out);
    bool instances = out->named > 0 && kind_of(out->list[0].name) == 'M';
    out->count = all->count == 0 && !all->uncounted ? 0 : instances ? 1 : out->named;
    free(all);
    return TDDP_OK;
}
