/*
 * Finds GPUs by the NVIDIA driver's files: /proc/driver/nvidia/gpus has a folder for each of the
 * machine, named by its PCI address; /dev has those that may be used here, all or a container's.
 * CUDA_VISIBLE_DEVICES is read as the driver reads it: numbers as strtol takes them, or
 * identifiers, of which a beginning that only one GPU has is enough; what cannot be read or does
 * not exist ends the list, and naming a GPU twice leaves none. Only reads; any thread.
 */
#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/workers/devices.h"

enum { PATH_BYTES = 4096, UUID_BYTES = 64, ADDRESS_BYTES = 32, MOST_GPUS = 1024 };

/* One GPU as the driver shows it. */
typedef struct gpu {
    char address[ADDRESS_BYTES]; /* "0000:17:00.0"; empty: not known */
    char uuid[UUID_BYTES];       /* "GPU-..."; empty: not known */
    int minor;                   /* of /dev/nvidiaMINOR; -1: not known */
} gpu;

typedef struct gpu_list {
    gpu *list;
    int count;
    bool uncounted;  /* a driver that does not show its GPUs in files */
    int unreachable; /* GPUs of the machine where none has a device file */
} gpu_list;

/* --- what is there --------------------------------------------------------------------------- */

static bool add_gpu(gpu_list *all, const gpu *one)
{
    if (!all->list) {
        all->list = tddp_alloc_array(MOST_GPUS, sizeof *all->list);
    }
    if (all->list && all->count < MOST_GPUS) {
        all->list[all->count++] = *one;
    }
    return all->list != NULL;
}

static void read_information(const char *root, gpu *one)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus/%s/information", root,
                   one->address);
    (void)tddp_scan_file(path, "GPU UUID: %63s", one->uuid);
    (void)tddp_scan_file(path, "Device Minor: %d", &one->minor);
}

static tddp_status find_in_proc(const char *root, gpu_list *all)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus", root);
    DIR *folder = opendir(path);
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && folder && (entry = readdir(folder))) {
        gpu one = {.minor = -1};
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof one.address) {
            continue;
        }
        (void)snprintf(one.address, sizeof one.address, "%.*s", ADDRESS_BYTES - 1, entry->d_name);
        read_information(root, &one);
        status = add_gpu(all, &one) ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    if (folder) {
        closedir(folder);
    }
    return status;
}

static bool has_minor(const gpu_list *all, int64_t minor)
{
    for (int i = 0; i < all->count; i++) {
        if (all->list[i].minor == minor) {
            return true;
        }
    }
    return false;
}

static bool is_device(const char *folder, const char *name)
{
    char path[PATH_BYTES + 256];
    struct stat found;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &found) == 0 && S_ISCHR(found.st_mode);
}

/* The device files: "nvidia0", but not "nvidiactl". */
static tddp_status find_in_dev(const char *root, gpu_list *all)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/dev", root);
    DIR *folder = opendir(path);
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && folder && (entry = readdir(folder))) {
        int64_t minor;
        if (strncmp(entry->d_name, "nvidia", 6) == 0 &&
            tddp_parse_int(entry->d_name + 6, 0, INT_MAX, &minor) &&
            is_device(path, entry->d_name)) {
            gpu one = {.minor = (int)minor};
            status = add_gpu(all, &one) ? TDDP_OK : TDDP_OUT_OF_MEMORY;
        }
        /* The drivers of Windows' Linux and of Jetson show no GPU in a file of its own. */
        all->uncounted |=
            strcmp(entry->d_name, "dxg") == 0 || strcmp(entry->d_name, "nvhost-gpu") == 0;
    }
    if (folder) {
        closedir(folder);
    }
    return status;
}

static int by_address(const void *a, const void *b)
{
    const gpu *first = a;
    const gpu *second = b;
    int order = strcmp(first->address, second->address);
    return order ? order : (first->minor > second->minor) - (first->minor < second->minor);
}

/* Without a device file a GPU is of no use, and not every container has the driver's folder: so the
 * device files count, and the folder adds what else is known of them. */
static tddp_status find_gpus(const char *root, gpu_list *out)
{
    gpu_list shown = {0};
    gpu_list usable = {0};
    tddp_status status = find_in_proc(root, &shown);
    if (status == TDDP_OK) {
        status = find_in_dev(root, &usable);
    }
    if (status != TDDP_OK) {
        free(shown.list);
        free(usable.list);
        return status;
    }
    shown.uncounted = usable.uncounted;
    if (shown.count == 0 || usable.count == 0) {
        usable.unreachable = usable.count == 0 ? shown.count : 0;
        free(shown.list);
        *out = usable;
    } else {
        int kept = 0;
        for (int i = 0; i < shown.count; i++) {
            if (shown.list[i].minor < 0 || has_minor(&usable, shown.list[i].minor)) {
                shown.list[kept++] = shown.list[i];
            }
        }
        shown.count = kept;
        free(usable.list);
        *out = shown;
    }
    if (out->count > 1) {
        qsort(out->list, (size_t)out->count, sizeof *out->list, by_address);
    }
    return TDDP_OK;
}

/* The driver's names are in capitals, the kernel's are not. */
static int node_of(const char *root, const gpu *one)
{
    char path[PATH_BYTES];
    char address[ADDRESS_BYTES];
    int node = -1;
    for (size_t i = 0; i < sizeof address; i++) {
        address[i] = (char)tolower((unsigned char)one->address[i]);
    }
    (void)snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%s/numa_node", root, address);
    (void)tddp_scan_file(address[0] != '\0' ? path : NULL, "%d", &node);
    return node;
}

/* --- what is visible ------------------------------------------------------------------------- */

/* The GPU that a text means: its place, or -1. */
static int meant(const gpu_list *all, const char *text, bool by_uuid)
{
    if (!by_uuid) {
        char *end;
        long number = strtol(text, &end, 10);
        bool exists = number < all->count || (all->uncounted && number < MOST_GPUS);
        return end != text && number >= 0 && exists ? (int)number : -1;
    }
    int found = -1;
    for (int i = 0; i < all->count; i++) {
        if (strncmp(all->list[i].uuid, text, strlen(text)) == 0) {
            if (found >= 0) {
                return -1; /* it could be either */
            }
            found = i;
        }
    }
    return found;
}

static void add_device(tddp_launch_devices *devices, const char *name, int node)
{
    tddp_launch_device *device = &devices->list[devices->count++];
    (void)snprintf(device->name, sizeof device->name, "%s", name);
    device->node = node;
}

static bool is_named(const tddp_launch_devices *devices, const char *name)
{
    for (int i = 0; i < devices->count; i++) {
        if (strcmp(devices->list[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* The next entry without blanks around it; what follows the comma, or NULL after the last. */
static const char *take_entry(const char *at, char entry[TDDP_LAUNCH_DEVICE_BYTES])
{
    size_t length = strcspn(at, ",");
    const char *next = at[length] == ',' ? at + length + 1 : NULL;
    while (length > 0 && isspace((unsigned char)*at)) {
        at++;
        length--;
    }
    while (length > 0 && isspace((unsigned char)at[length - 1])) {
        length--;
    }
    (void)snprintf(entry, TDDP_LAUNCH_DEVICE_BYTES, "%.*s", (int)length, at);
    return next;
}

/* The kind of the first entry is that of all; an entry of another kind ends the list. */
static void choose(const char *root, const gpu_list *all, const char *visible,
                   tddp_launch_devices *devices)
{
    char entry[TDDP_LAUNCH_DEVICE_BYTES];
    bool seen[MOST_GPUS] = {false};
    (void)take_entry(visible, entry);
    bool by_uuid = strncmp(entry, "GPU-", 4) == 0;
    devices->one_a_process = strncmp(entry, "MIG-", 4) == 0;
    for (const char *at = visible; at && devices->count < MOST_GPUS;) {
        at = take_entry(at, entry);
        if (devices->one_a_process) {
            if (strncmp(entry, "MIG-", 4) != 0) {
                return;
            }
            if (is_named(devices, entry)) {
                devices->count = 0;
                return;
            }
            add_device(devices, entry, -1);
            continue;
        }
        int index = by_uuid && strncmp(entry, "GPU-", 4) != 0 ? -1 : meant(all, entry, by_uuid);
        if (index < 0) {
            return;
        }
        if (seen[index]) {
            devices->count = 0;
            return;
        }
        seen[index] = true;
        add_device(devices, entry, index < all->count ? node_of(root, &all->list[index]) : -1);
    }
}

tddp_status tddp_launch_devices_find(const char *root, const char *visible,
                                     tddp_launch_devices *out)
{
    gpu_list all = {0};
    tddp_launch_devices found = {0};
    tddp_status status = find_gpus(root, &all);
    if (status != TDDP_OK) {
        return status;
    }
    found.driver = all.count > 0 || all.uncounted;
    found.unreachable = all.unreachable;
    if (!found.driver) {
        free(all.list);
        *out = found;
        return TDDP_OK;
    }
    found.list = tddp_alloc_array(MOST_GPUS, sizeof *found.list);
    if (!found.list) {
        free(all.list);
        return TDDP_OUT_OF_MEMORY;
    }
    if (visible) {
        choose(root, &all, visible, &found);
    } else {
        char number[16];
        /* A driver that does not say has one, as far as is known. */
        for (int i = 0; i < all.count || (i == 0 && all.uncounted); i++) {
            (void)snprintf(number, sizeof number, "%d", i);
            add_device(&found, number, i < all.count ? node_of(root, &all.list[i]) : -1);
        }
    }
    free(all.list);
    *out = found;
    return TDDP_OK;
}

bool tddp_launch_devices_name(const tddp_launch_devices *devices, const char *visible,
                              int local_rank, char name[TDDP_LAUNCH_DEVICE_BYTES])
{
    if (devices->driver && devices->count > 0) {
        bool exists = local_rank < devices->count;
        (void)snprintf(name, TDDP_LAUNCH_DEVICE_BYTES, "%s",
                       exists ? devices->list[local_rank].name : "");
        return exists;
    }
    name[0] = '\0';
    if (!visible) {
        (void)snprintf(name, TDDP_LAUNCH_DEVICE_BYTES, "%d", local_rank);
        return true;
    }
    if (*visible == '\0') {
        return true; /* GPUs are not wanted at all */
    }
    const char *at = visible;
    for (int i = 0; at && i <= local_rank; i++) {
        at = take_entry(at, name);
        if (!at && i < local_rank) {
            return false;
        }
    }
    return true;
}

void tddp_launch_devices_free(tddp_launch_devices *devices)
{
    free(devices->list);
    *devices = (tddp_launch_devices){0};
}
