/*
 * Spreads workers over a machine's CPUs, as hwloc describes it. Each worker gets a domain: the NUMA
 * node or socket of its GPU, or without GPUs the one with most CPUs for each; then its parts of
 * that domain: all of it, whole cores, or one cache. Main thread.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "launch/workers/binding.h"

enum { WORD_BITS = sizeof(unsigned long) * CHAR_BIT, ROOT = 0 };

/* hwloc's objects of one type, in its order: neighbours beside each other. */
typedef struct level {
    int depth;
    int count;
} level;

typedef struct spread {
    const tddp_hwloc *hwloc;
    void *topology;
    tddp_launch_binding_kind kind;
    const tddp_hwloc_object **domains;
    int domain_count;
    int *assigned; /* of each worker: its domain */
    level parts;
    const tddp_hwloc_object **own; /* the parts of one domain */
    tddp_hwloc_bitmap *common;     /* what the last two sets that were compared have in common */
    tddp_launch_binding *out;
} spread;

static level find_level(const spread *all, int type, int otherwise)
{
    int depth = all->hwloc->get_type_depth(all->topology, type);
    depth =
        depth == TDDP_HWLOC_UNKNOWN ? all->hwloc->get_type_depth(all->topology, otherwise) : depth;
    return (level){depth, (int)all->hwloc->get_nbobjs_by_depth(all->topology, depth)};
}

static const tddp_hwloc_object *object(const spread *all, level of, int index)
{
    return all->hwloc->get_obj_by_depth(all->topology, of.depth, (unsigned)index);
}

/* How many CPUs two objects have in common; they are in `common` then. */
static int overlap(const spread *all, const tddp_hwloc_object *a, const tddp_hwloc_object *b)
{
    (void)all->hwloc->bitmap_and(all->common, a->cpuset, b->cpuset);
    return all->hwloc->bitmap_weight(all->common);
}

/* --- domains --------------------------------------------------------------------------------- */

/* Memory without CPUs of its own has those of its neighbours: of objects that overlap the smallest
 * is a domain. */
static void find_domains(spread *all, level of)
{
    for (int i = 0; i < of.count; i++) {
        const tddp_hwloc_object *one = object(all, of, i);
        int cpus = overlap(all, one, one);
        bool own = cpus > 0;
        for (int j = 0; own && j < of.count; j++) {
            const tddp_hwloc_object *other = object(all, of, j);
            int more = cpus - overlap(all, other, other);
            own = overlap(all, one, other) == 0 || more < 0 || (more == 0 && i <= j);
        }
        if (own) {
            all->domains[all->domain_count++] = one;
        }
    }
}

/* The domain with CPUs of a NUMA node; -1 if there is none. */
static int domain_of_node(const spread *all, int node)
{
    level nodes = find_level(all, TDDP_HWLOC_NUMANODE, TDDP_HWLOC_MACHINE);
    for (int i = 0; i < nodes.count; i++) {
        const tddp_hwloc_object *found = object(all, nodes, i);
        for (int domain = 0; (int)found->os_index == node && domain < all->domain_count; domain++) {
            if (overlap(all, found, all->domains[domain]) > 0) {
                return domain;
            }
        }
    }
    return -1;
}

/* That of a worker's GPU; -1, with a note, if that is not possible. */
static int domain_of_device(const spread *all, const tddp_launch_devices *devices, int gpu)
{
    int node = devices->list[gpu].node;
    int domain = node < 0 && all->domain_count == 1 ? 0 : domain_of_node(all, node);
    if (domain < 0 && all->out->note[0] == '\0') {
        (void)snprintf(all->out->note, TDDP_LAUNCH_NOTE_BYTES,
                       node < 0 ? "the NUMA node of GPU %d is not known: its worker may be far "
                                  "from it"
                                : "GPU %d is at NUMA node %d, of which no CPU may be used here: "
                                  "its worker is bound elsewhere",
                       gpu, node);
    }
    return domain;
}

/* Without GPUs, and for those whose GPU is of no help, in proportion to the domains' CPUs: so
 * neighbouring ranks get neighbouring domains, and the sockets their share. */
static void assign_domains(spread *all, const tddp_launch_devices *devices)
{
    bool near_gpus = devices->count > 0 && all->kind != TDDP_LAUNCH_BINDING_CORES;
    int64_t cpus = 0;
    for (int i = 0; i < all->domain_count; i++) {
        cpus += overlap(all, all->domains[i], all->domains[i]);
    }
    for (int i = 0; i < all->out->workers; i++) {
        int domain = near_gpus ? domain_of_device(all, devices, i % devices->count) : -1;
        int64_t before = domain < 0 ? i * cpus / all->out->workers : -1;
        while (before >= 0) {
            domain++;
            before -= overlap(all, all->domains[domain], all->domains[domain]);
        }
        all->assigned[i] = domain;
    }
}

/* --- parts ----------------------------------------------------------------------------------- */

/* Fills `own`; of caches those with most CPUs come first. Returns how many. */
static int find_parts(spread *all, const tddp_hwloc_object *domain)
{
    bool sorted = all->kind == TDDP_LAUNCH_BINDING_CORE_COMPLEX;
    int count = 0;
    for (int i = 0; i < all->parts.count; i++) {
        const tddp_hwloc_object *part = object(all, all->parts, i);
        int cpus = overlap(all, part, domain);
        int at = count;
        while (sorted && at > 0 && cpus > overlap(all, all->own[at - 1], domain)) {
            all->own[at] = all->own[at - 1];
            at--;
        }
        all->own[at] = part;
        count += cpus > 0; /* one without CPUs is at the end */
    }
    all->own[count] = domain; /* there are CPUs without a cache */
    return count > 0 ? count : 1;
}

/* Where whole cores cannot be divided evenly the first workers have one more. */
static tddp_status assign_cpus(spread *all, int worker)
{
    bool whole = all->kind == TDDP_LAUNCH_BINDING_CORES;
    bool divided = whole || all->kind == TDDP_LAUNCH_BINDING_EXCLUSIVE;
    const tddp_hwloc_object *domain = all->domains[all->assigned[worker]];
    unsigned long *set = all->out->sets + (size_t)worker * all->out->words;
    int count = find_parts(all, domain);
    int workers = 0; /* in the domain */
    int place = 0;   /* of this one among them */
    int cpus = 0;
    for (int i = 0; i < all->out->workers; i++) {
        workers += all->assigned[i] == all->assigned[worker];
        place += i < worker && all->assigned[i] == all->assigned[worker];
    }
    if (divided && count < workers) {
        char where[48] = "this machine";
        if (!whole) {
            (void)snprintf(where, sizeof where, "NUMA node %u", domain->os_index);
        }
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--numa-binding=%s: %d usable cores on %s for %d workers; expected at "
                         "least one each: start fewer workers, or take --numa-binding=node",
                         whole ? "cores" : "exclusive", count, where, workers);
    }
    int from = divided ? (place * count + workers - 1) / workers : place % count;
    int to = divided ? ((place + 1) * count + workers - 1) / workers : from + 1;
    int sharers = divided ? 1 : (workers - from + count - 1) / count;
    for (int i = from; i < to; i++) {
        cpus += overlap(all, all->own[i], domain);
        for (size_t word = 0; word < all->out->words; word++) {
            set[word] |= all->hwloc->bitmap_to_ith_ulong(all->common, (unsigned)word);
        }
    }
    all->out->shares[worker] = cpus > sharers ? cpus / sharers : 1;
    return TDDP_OK;
}

/* --- all of it ------------------------------------------------------------------------------- */

static tddp_status fill(spread *all, const tddp_launch_devices *devices, level domains)
{
    tddp_status status = TDDP_OK;
    find_domains(all, domains);
    assign_domains(all, devices);
    for (int i = 0; status == TDDP_OK && i < all->out->workers; i++) {
        status = assign_cpus(all, i);
    }
    return status;
}

/* The largest cache is that of the highest level. */
static int cache_type(const spread *all)
{
    int type = TDDP_HWLOC_L5CACHE;
    while (type > TDDP_HWLOC_L1CACHE &&
           all->hwloc->get_type_depth(all->topology, type) == TDDP_HWLOC_UNKNOWN) {
        type--;
    }
    return type;
}

tddp_status tddp_launch_binding_spread(const tddp_hwloc *hwloc, void *topology,
                                       tddp_launch_binding_kind kind,
                                       const tddp_launch_devices *devices, int local_size,
                                       tddp_launch_binding *out)
{
    tddp_launch_binding made = {.workers = local_size};
    spread all = {.hwloc = hwloc, .topology = topology, .kind = kind, .out = &made};
    /* By kind: domains, parts, and what is in place of parts that the machine does not show. */
    const int types[][3] = {
        [TDDP_LAUNCH_BINDING_NODE] = {TDDP_HWLOC_NUMANODE, TDDP_HWLOC_MACHINE},
        [TDDP_LAUNCH_BINDING_SOCKET] = {TDDP_HWLOC_PACKAGE, TDDP_HWLOC_MACHINE},
        [TDDP_LAUNCH_BINDING_EXCLUSIVE] = {TDDP_HWLOC_NUMANODE, TDDP_HWLOC_CORE, TDDP_HWLOC_PU},
        [TDDP_LAUNCH_BINDING_CORE_COMPLEX] = {TDDP_HWLOC_NUMANODE, cache_type(&all)},
        [TDDP_LAUNCH_BINDING_CORES] = {TDDP_HWLOC_MACHINE, TDDP_HWLOC_CORE, TDDP_HWLOC_PU}};
    level domains = find_level(&all, types[kind][0], TDDP_HWLOC_MACHINE);
    all.parts = find_level(&all, types[kind][1], types[kind][2]);
    if (hwloc->get_type_depth(topology, TDDP_HWLOC_CORE) == TDDP_HWLOC_UNKNOWN) {
        (void)snprintf(made.note, sizeof made.note,
                       "the kernel does not show how the CPUs belong together: each is taken for a "
                       "core, all for one socket");
    }
    int last = hwloc->bitmap_last(hwloc->get_obj_by_depth(topology, ROOT, 0)->cpuset);
    made.words = (size_t)last / WORD_BITS + 1;
    made.sets = tddp_alloc_array((size_t)local_size, made.words * sizeof *made.sets);
    made.shares = tddp_alloc_array((size_t)local_size, sizeof *made.shares);
    size_t objects = (size_t)domains.count + (size_t)all.parts.count + 1;
    all.domains = tddp_alloc_array(objects, sizeof *all.domains);
    all.assigned = tddp_alloc_array((size_t)local_size, sizeof *all.assigned);
    all.common = hwloc->bitmap_alloc();
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (made.sets && made.shares && all.domains && all.assigned && all.common) {
        all.own = all.domains + domains.count;
        status = fill(&all, devices, domains);
    }
    free(all.domains);
    free(all.assigned);
    hwloc->bitmap_free(all.common);
    if (status != TDDP_OK) {
        tddp_launch_binding_free(&made);
    }
    *out = made;
    return status;
}

tddp_status tddp_launch_binding_plan(tddp_launch_binding_kind kind,
                                     const tddp_launch_devices *devices, int local_size,
                                     tddp_launch_binding *out)
{
    tddp_hwloc hwloc;
    void *topology = NULL;
    tddp_status status = tddp_hwloc_load(&hwloc);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_hwloc_bitmap *set = hwloc.bitmap_alloc();
    bool ready = set && hwloc.topology_init(&topology) == 0 && hwloc.topology_load(topology) == 0 &&
                 hwloc.get_cpubind(topology, set, TDDP_HWLOC_THREAD) == 0 &&
                 hwloc.topology_restrict(topology, set, 0) == 0;
    status = ready ? tddp_launch_binding_spread(&hwloc, topology, kind, devices, local_size, out)
                   : tddp_fail_errno("--numa-binding: hwloc cannot read this machine");
    if (topology) {
        hwloc.topology_destroy(topology);
    }
    hwloc.bitmap_free(set);
    return status;
}

int tddp_launch_binding_share(const tddp_launch_binding *binding, int local_rank, int otherwise)
{
    return local_rank < binding->workers ? binding->shares[local_rank] : otherwise;
}

void tddp_launch_binding_free(tddp_launch_binding *binding)
{
    free(binding->sets);
    free(binding->shares);
    *binding = (tddp_launch_binding){0};
}
