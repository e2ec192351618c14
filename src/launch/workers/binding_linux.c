/*
 * Reads Linux's description of its CPUs, below /sys/devices/system, and sets a worker's affinity.
 * Files that are missing (a container may hide them) make the machine look simpler, never the job
 * fail. Main thread, and a worker's child.
 */
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/binding.h"
#include "launch/workers/devices.h"
#include "launch/workers/resources.h"

enum {
    PATH_BYTES = 4096,
    LIST_BYTES = 16384,
    MOST_CPUS = 65536,
    MOST_CACHES = 16,
    NO_CACHE = INT_MIN
};

/* --- lists of CPUs --------------------------------------------------------------------------- */

/* The first line of a file below `root`; false if it cannot be read. */
static bool read_text(const char *root, const char *name, char *text, int size)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/sys/devices/system/%s", root, name);
    FILE *file = fopen(path, "re");
    bool got = file && fgets(text, size, file);
    if (file) {
        fclose(file);
    }
    return got;
}

/* Takes the next "3" or "0-7" of a list such as "0-7,16-23"; NULL at its end or at nonsense. */
static const char *take_range(const char *at, long *from, long *to)
{
    char *end;
    *from = strtol(at, &end, 10);
    if (end == at || *from < 0) {
        return NULL;
    }
    *to = *from;
    if (*end == '-') {
        at = end + 1;
        *to = strtol(at, &end, 10);
        if (end == at || *to < *from || *to >= MOST_CPUS) {
            return NULL;
        }
    }
    return *end == ',' ? end + 1 : end;
}

/* The first CPU of a list in a file; `otherwise` if there is none. */
static int first_of(const char *root, const char *name, int otherwise)
{
    char text[LIST_BYTES];
    long from;
    long to;
    return read_text(root, name, text, sizeof text) && take_range(text, &from, &to) ? (int)from
                                                                                    : otherwise;
}

/* --- topology -------------------------------------------------------------------------------- */

static void note(tddp_launch_topology *topology, const char *text)
{
    if (topology->note[0] == '\0') {
        (void)snprintf(topology->note, sizeof topology->note, "%s", text);
    }
}

/* Removes CPUs that are switched off: they may still stand in a mask that others made. */
static void drop_offline(const char *root, tddp_launch_topology *topology)
{
    char text[LIST_BYTES];
    if (!read_text(root, "cpu/online", text, sizeof text)) {
        return;
    }
    int kept = 0;
    for (int i = 0; i < topology->count; i++) {
        long from;
        long to;
        bool online = false;
        for (const char *at = text; !online && (at = take_range(at, &from, &to));) {
            online = topology->cpus[i].id >= from && topology->cpus[i].id <= to;
        }
        if (online) {
            topology->cpus[kept++] = topology->cpus[i];
        }
    }
    if (kept > 0) {
        topology->count = kept;
    }
}

static void read_nodes(const char *root, tddp_launch_topology *topology)
{
    char nodes[LIST_BYTES];
    long from;
    long to;
    if (!read_text(root, "node/online", nodes, sizeof nodes)) {
        note(topology, "the kernel shows no NUMA nodes: the machine is taken for one");
        return;
    }
    for (const char *at = nodes; (at = take_range(at, &from, &to));) {
        for (long node = from; node <= to; node++) {
            char name[64];
            char cpus[LIST_BYTES];
            long first;
            long last;
            (void)snprintf(name, sizeof name, "node/node%ld/cpulist", node);
            if (!read_text(root, name, cpus, sizeof cpus)) {
                continue;
            }
            for (const char *range = cpus; (range = take_range(range, &first, &last));) {
                for (int i = 0; i < topology->count; i++) {
                    tddp_launch_cpu *cpu = &topology->cpus[i];
                    cpu->node = cpu->id >= first && cpu->id <= last ? (int)node : cpu->node;
                }
            }
        }
    }
}

/* Says of all CPUs in a file's list that they share their largest cache. */
static void share_cache(const char *root, const char *name, tddp_launch_topology *topology)
{
    char text[LIST_BYTES];
    long from;
    long to;
    int first = -1;
    if (!read_text(root, name, text, sizeof text)) {
        return;
    }
    for (const char *at = text; (at = take_range(at, &from, &to));) {
        first = first < 0 ? (int)from : first;
        for (int i = 0; i < topology->count; i++) {
            tddp_launch_cpu *cpu = &topology->cpus[i];
            cpu->cache = cpu->id >= from && cpu->id <= to ? first : cpu->cache;
        }
    }
}

/* The largest cache that holds data is that of the highest level. */
static void read_cache(const char *root, tddp_launch_topology *topology, int cpu)
{
    char name[96];
    char text[64];
    long highest = 0;
    int largest = -1;
    for (int index = 0; index < MOST_CACHES; index++) {
        (void)snprintf(name, sizeof name, "cpu/cpu%d/cache/index%d/type", cpu, index);
        if (!read_text(root, name, text, sizeof text)) {
            break;
        }
        if (strncmp(text, "Instruction", 11) == 0) {
            continue;
        }
        (void)snprintf(name, sizeof name, "cpu/cpu%d/cache/index%d/level", cpu, index);
        long level = read_text(root, name, text, sizeof text) ? strtol(text, NULL, 10) : 0;
        if (level > highest) {
            highest = level;
            largest = index;
        }
    }
    if (largest >= 0) {
        (void)snprintf(name, sizeof name, "cpu/cpu%d/cache/index%d/shared_cpu_list", cpu, largest);
        share_cache(root, name, topology);
    }
}

static void read_cpu(const char *root, tddp_launch_topology *topology, tddp_launch_cpu *cpu)
{
    char name[96];
    char text[64];
    (void)snprintf(name, sizeof name, "cpu/cpu%d/topology/physical_package_id", cpu->id);
    long package = read_text(root, name, text, sizeof text) ? strtol(text, NULL, 10) : -1;
    if (package < 0) { /* -1 is also what some virtual machines say */
        note(topology, "the kernel does not show how the CPUs belong together: each is taken for a "
                       "core, all for one socket");
    }
    cpu->package = package < 0 ? 0 : (int)package;
    (void)snprintf(name, sizeof name, "cpu/cpu%d/topology/thread_siblings_list", cpu->id);
    cpu->core = first_of(root, name, cpu->id);
    if (cpu->cache == NO_CACHE) { /* else a CPU before it has told of both */
        read_cache(root, topology, cpu->id);
    }
    if (cpu->cache == NO_CACHE) {
        cpu->cache = -1 - cpu->package; /* below 0, as no CPU is: one for the socket */
    }
}

static int by_id(const void *a, const void *b)
{
    const tddp_launch_cpu *x = a;
    const tddp_launch_cpu *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

tddp_status tddp_launch_topology_read(const char *root, const int *allowed, int count,
                                      tddp_launch_topology *out)
{
    tddp_launch_topology made = {.count = count};
    made.cpus = tddp_alloc_array((size_t)count, sizeof *made.cpus);
    if (!made.cpus) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int i = 0; i < count; i++) {
        made.cpus[i] = (tddp_launch_cpu){.id = allowed[i], .cache = NO_CACHE};
    }
    qsort(made.cpus, (size_t)count, sizeof *made.cpus, by_id);
    drop_offline(root, &made);
    read_nodes(root, &made);
    for (int i = 0; i < made.count; i++) {
        read_cpu(root, &made, &made.cpus[i]);
    }
    *out = made;
    return TDDP_OK;
}

void tddp_launch_topology_free(tddp_launch_topology *topology)
{
    free(topology->cpus);
    *topology = (tddp_launch_topology){0};
}

/* --- this machine ---------------------------------------------------------------------------- */

static tddp_status spread(const tddp_launch_options *options, int local_size,
                          const tddp_launch_topology *topology, tddp_launch_binding *out)
{
    tddp_launch_devices devices;
    tddp_status status = tddp_launch_devices_find("", getenv("CUDA_VISIBLE_DEVICES"), &devices);
    if (status != TDDP_OK) {
        return status;
    }
    int *nodes = tddp_alloc_array((size_t)devices.count + 1, sizeof *nodes);
    for (int i = 0; nodes && i < devices.count; i++) {
        nodes[i] = devices.list[i].node;
    }
    status = nodes ? tddp_launch_binding_spread(topology, options->numa_binding, nodes,
                                                devices.count, local_size, out)
                   : TDDP_OUT_OF_MEMORY;
    free(nodes);
    tddp_launch_devices_free(&devices);
    return status;
}

tddp_status tddp_launch_binding_plan(const tddp_launch_options *options, int local_size,
                                     tddp_launch_binding *out)
{
    *out = (tddp_launch_binding){0};
    if (options->numa_binding == TDDP_LAUNCH_BINDING_NONE) {
        return TDDP_OK;
    }
    tddp_launch_topology topology;
    int count;
    int *allowed = tddp_launch_allowed_cpus(&count);
    if (!allowed) {
        return TDDP_SYSTEM;
    }
    tddp_status status = tddp_launch_topology_read("", allowed, count, &topology);
    if (status == TDDP_OK) {
        status = spread(options, local_size, &topology, out);
        tddp_launch_topology_free(&topology);
    }
    free(allowed);
    return status;
}

bool tddp_launch_binding_apply(const tddp_launch_binding *binding, int local_rank)
{
    if (local_rank >= binding->workers) {
        return true;
    }
    const char *set = binding->sets + (size_t)local_rank * binding->set_bytes;
    return sched_setaffinity(0, binding->set_bytes, (const cpu_set_t *)(const void *)set) == 0;
}
