/*
 * Spreads workers over a machine's CPUs, as hwloc describes it. Each worker gets a domain: the NUMA
 * node or socket of its GPU, or without GPUs the one with most CPUs for each; then its parts of
 * that domain: all of it, whole cores, or one cache. Main thread.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/hwloc.h"

/* One of hwloc's objects, with those of its CPUs that may be used. */
typedef struct area {
    tddp_launch_cpus cpus;
    int count;       /* of CPUs */
    unsigned number; /* as the kernel counts NUMA nodes */
} area;

/* Those of one type that have CPUs, in hwloc's order: neighbours beside each other. */
typedef struct level {
    area *list;
    int count;
} level;

typedef struct spread {
    const tddp_hwloc *hwloc;
    void *topology;
    tddp_launch_binding_kind kind;
    int part; /* the type of what a domain is divided into */
    level nodes;
    level domains;
    int *assigned; /* of each worker: its domain */
    int workers;
    tddp_launch_cpus *sets; /* of each worker */
} spread;

/* By kind: domains, parts, and what is in place of parts that the machine does not show: of caches
 * the next smaller ones. */
static const int types[][3] = {
    [TDDP_LAUNCH_BINDING_NODE] = {TDDP_HWLOC_NUMANODE},
    [TDDP_LAUNCH_BINDING_SOCKET] = {TDDP_HWLOC_PACKAGE},
    [TDDP_LAUNCH_BINDING_EXCLUSIVE] = {TDDP_HWLOC_NUMANODE, TDDP_HWLOC_CORE, TDDP_HWLOC_PU},
    [TDDP_LAUNCH_BINDING_CORE_COMPLEX] = {TDDP_HWLOC_NUMANODE, TDDP_HWLOC_L5CACHE,
                                          TDDP_HWLOC_L1CACHE},
    [TDDP_LAUNCH_BINDING_CORES] = {TDDP_HWLOC_MACHINE, TDDP_HWLOC_CORE, TDDP_HWLOC_PU}};

static bool is_shown(const spread *all, int type)
{
    return all->hwloc->get_type_depth(all->topology, type) != TDDP_HWLOC_UNKNOWN;
}

/* The areas of a type within `within`, which is the only one where the machine shows none; of
 * caches those with most CPUs first. Caller: free() of the list. False if memory is short. */
static bool read_level(const spread *all, int type, const tddp_launch_cpus *within, level *out)
{
    const tddp_hwloc *hwloc = all->hwloc;
    int depth = hwloc->get_type_depth(all->topology, type);
    bool sorted = type >= TDDP_HWLOC_L1CACHE && type <= TDDP_HWLOC_L5CACHE;
    unsigned objects = is_shown(all, type) ? hwloc->get_nbobjs_by_depth(all->topology, depth) : 0;
    *out = (level){.list = tddp_alloc_array((size_t)objects + 1, sizeof *out->list)};
    for (unsigned i = 0; out->list && i < objects; i++) {
        const tddp_hwloc_object *object = hwloc->get_obj_by_depth(all->topology, depth, i);
        area one = {.number = object->os_index};
        for (unsigned word = 0; word < TDDP_LAUNCH_CPU_WORDS; word++) {
            one.cpus.words[word] =
                hwloc->bitmap_to_ith_ulong(object->cpuset, word) & within->words[word];
        }
        one.count = tddp_launch_cpus_count(&one.cpus);
        int at = out->count;
        for (; sorted && at > 0 && one.count > out->list[at - 1].count; at--) {
            out->list[at] = out->list[at - 1];
        }
        out->list[at] = one;
        out->count += one.count > 0; /* one without CPUs is at the end */
    }
    if (out->list && out->count == 0) {
        out->list[out->count++] = (area){*within, tddp_launch_cpus_count(within), 0};
    }
    return out->list != NULL;
}

static bool overlap(const area *one, const area *other)
{
    bool common = false;
    for (int i = 0; i < TDDP_LAUNCH_CPU_WORDS; i++) {
        common |= (one->cpus.words[i] & other->cpus.words[i]) != 0;
    }
    return common;
}

/* --- domains --------------------------------------------------------------------------------- */

/* Memory without CPUs of its own has those of its neighbours: of areas that overlap the smallest is
 * a domain. */
static void keep_smallest(level *domains)
{
    area *list = domains->list;
    for (int i = domains->count - 1; i > 0; i--) {
        for (int j = 0; j < domains->count; j++) {
            int more = list[i].count - list[j].count;
            if (overlap(&list[i], &list[j]) && (more > 0 || (more == 0 && j < i))) {
                domains->count--;
                memmove(&list[i], &list[i + 1], (size_t)(domains->count - i) * sizeof *list);
                break;
            }
        }
    }
}

/* That of a worker's GPU; -1 if that is not known or has no CPUs. */
static int domain_of_device(const spread *all, const tddp_launch_devices *devices, int gpu)
{
    int node = devices->list[gpu].node;
    if (node < 0 && all->domains.count == 1) {
        return 0;
    }
    for (int i = 0; i < all->nodes.count; i++) {
        const area *found = &all->nodes.list[i];
        for (int at = 0; (int)found->number == node && at < all->domains.count; at++) {
            if (overlap(found, &all->domains.list[at])) {
                return at;
            }
        }
    }
    tddp_log(TDDP_LOG_WARN, "launch",
             "--numa-binding: no CPU that may be used here is known to be near GPU %d: its worker "
             "is bound elsewhere",
             gpu);
    return -1;
}

/* Without GPUs, and for those whose GPU is of no help, in proportion to the domains' CPUs: so
 * neighbouring ranks get neighbouring domains, and the sockets their share. */
static void assign_domains(const spread *all, const tddp_launch_devices *devices)
{
    bool near_gpus = devices->count > 0 && all->kind != TDDP_LAUNCH_BINDING_CORES;
    int64_t cpus = 0;
    for (int i = 0; i < all->domains.count; i++) {
        cpus += all->domains.list[i].count;
    }
    for (int i = 0; i < all->workers; i++) {
        int domain = near_gpus ? domain_of_device(all, devices, i % devices->named) : -1;
        int64_t before = domain < 0 ? i * cpus / all->workers : -1;
        while (before >= 0) {
            before -= all->domains.list[++domain].count;
        }
        all->assigned[i] = domain;
    }
}

/* --- parts ----------------------------------------------------------------------------------- */

/* Where whole cores cannot be divided evenly the first workers have one more. */
static tddp_status assign_cpus(const spread *all, int worker)
{
    const area *domain = &all->domains.list[all->assigned[worker]];
    bool divided = all->part == TDDP_HWLOC_CORE || all->part == TDDP_HWLOC_PU;
    bool whole = all->kind == TDDP_LAUNCH_BINDING_CORES;
    int workers = 0; /* in the domain */
    int place = 0;   /* of this one among them */
    level parts;
    for (int i = 0; i < all->workers; i++) {
        workers += all->assigned[i] == all->assigned[worker];
        place += i < worker && all->assigned[i] == all->assigned[worker];
    }
    if (!read_level(all, all->part, &domain->cpus, &parts)) {
        return TDDP_OUT_OF_MEMORY;
    }
    int from = divided ? (place * parts.count + workers - 1) / workers : place % parts.count;
    int to = divided ? ((place + 1) * parts.count + workers - 1) / workers : from + 1;
    for (int i = from; i < to; i++) {
        for (int word = 0; word < TDDP_LAUNCH_CPU_WORDS; word++) {
            all->sets[worker].words[word] |= parts.list[i].cpus.words[word];
        }
    }
    free(parts.list);
    return !divided || parts.count >= workers
               ? TDDP_OK
               : tddp_fail(TDDP_INVALID_ARGUMENT,
                           "--numa-binding=%s: %d usable cores on %s for %d workers; expected at "
                           "least one each: start fewer workers, or take --numa-binding=node",
                           whole ? "cores" : "exclusive", parts.count,
                           whole ? "this machine" : "a NUMA node", workers);
}

/* --- all of it ------------------------------------------------------------------------------- */

tddp_status tddp_launch_binding_spread(const tddp_hwloc *hwloc, void *topology,
                                       const tddp_launch_cpus *allowed,
                                       tddp_launch_binding_kind kind,
                                       const tddp_launch_devices *devices, int workers,
                                       tddp_launch_cpus **out)
{
    spread all = {hwloc, topology, kind, .part = types[kind][1], .workers = workers};
    while (all.part != types[kind][2] && !is_shown(&all, all.part)) {
        all.part += all.part < types[kind][2] ? 1 : -1;
    }
    all.sets = tddp_alloc_array((size_t)workers, sizeof *all.sets);
    all.assigned = tddp_alloc_array((size_t)workers, sizeof *all.assigned);
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (all.sets && all.assigned && read_level(&all, TDDP_HWLOC_NUMANODE, allowed, &all.nodes) &&
        read_level(&all, types[kind][0], allowed, &all.domains)) {
        keep_smallest(&all.domains);
        assign_domains(&all, devices);
        status = TDDP_OK;
    }
    for (int i = 0; status == TDDP_OK && i < workers; i++) {
        status = assign_cpus(&all, i);
    }
    free(all.nodes.list);
    free(all.domains.list);
    free(all.assigned);
    if (status == TDDP_OK) {
        *out = all.sets;
    } else {
        free(all.sets);
    }
    return status;
}

tddp_status tddp_hwloc_load(tddp_hwloc *out)
{
    void *library = dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        const char *why = dlerror();
        return tddp_fail(TDDP_UNAVAILABLE,
                         "--numa-binding needs hwloc 2 (Debian: apt install libhwloc15): %.300s",
                         why ? why : "it was not found");
    }
    bool loaded = true;
#define FIND(result, name, arguments) \
    loaded = loaded && (*(void **)&out->name = dlsym(library, "hwloc_" #name)) != NULL;
    TDDP_HWLOC_FUNCTIONS(FIND)
    return loaded
               ? TDDP_OK
               : tddp_fail(TDDP_UNAVAILABLE, "--numa-binding: libhwloc.so.15 is another library");
}

tddp_status tddp_launch_binding_plan(tddp_launch_binding_kind kind,
                                     const tddp_launch_devices *devices, int workers,
                                     tddp_launch_cpus **out)
{
    const tddp_launch_cpus allowed = tddp_launch_cpus_allowed();
    tddp_hwloc hwloc;
    void *topology = NULL;
    tddp_status status = tddp_hwloc_load(&hwloc);
    if (status != TDDP_OK) {
        return status;
    }
    bool ready = hwloc.topology_init(&topology) == 0 && hwloc.topology_load(topology) == 0;
    status =
        ready ? tddp_launch_binding_spread(&hwloc, topology, &allowed, kind, devices, workers, out)
              : tddp_fail_errno("--numa-binding: hwloc cannot read this machine");
    if (topology) {
        hwloc.topology_destroy(topology);
    }
    return status;
}

int tddp_launch_binding_share(const tddp_launch_cpus *sets, int workers, int local_rank)
{
    const tddp_launch_cpus *own = &sets[local_rank];
    int sharers = 0;
    for (int i = 0; i < workers; i++) {
        sharers += memcmp(&sets[i], own, sizeof *own) == 0;
    }
    int share = tddp_launch_cpus_count(own) / sharers;
    return share > 1 ? share : 1;
}
