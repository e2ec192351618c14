/*
 * Spreads workers over a machine's CPUs: first each gets a domain (the NUMA node or socket of its
 * GPU; without GPUs, domains by the CPUs they have), then its part of the domain. Pure: depends
 * only on the given topology. binding_linux.c reads it and applies the result.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/binding_spread.h"

static int compare(int a, int b)
{
    return (a > b) - (a < b);
}

static int by_neighbourhood(const void *a, const void *b)
{
    const tddp_launch_cpu *x = a;
    const tddp_launch_cpu *y = b;
    int order = compare(x->package, y->package);
    order = order ? order : compare(x->node, y->node);
    order = order ? order : compare(x->cache, y->cache);
    order = order ? order : compare(x->core, y->core);
    return order ? order : compare(x->id, y->id);
}

int tddp_launch_spread_key(const tddp_launch_spread *all, const tddp_launch_cpu *cpu)
{
    switch (all->kind) {
    case TDDP_LAUNCH_BINDING_SOCKET:
        return cpu->package;
    case TDDP_LAUNCH_BINDING_NODE:
    case TDDP_LAUNCH_BINDING_EXCLUSIVE:
    case TDDP_LAUNCH_BINDING_CORE_COMPLEX:
        return cpu->node;
    case TDDP_LAUNCH_BINDING_CORES:
    case TDDP_LAUNCH_BINDING_NONE:
        break;
    }
    return 0; /* the whole machine */
}

static int domain_of(const tddp_launch_spread *all, int key)
{
    for (int i = 0; i < all->domain_count; i++) {
        if (all->domains[i].key == key) {
            return i;
        }
    }
    return -1;
}

static void find_domains(tddp_launch_spread *all)
{
    for (int i = 0; i < all->topology->count; i++) {
        const tddp_launch_cpu *cpu = &all->ordered[i];
        int key = tddp_launch_spread_key(all, cpu);
        int at = domain_of(all, key);
        if (at < 0) {
            at = all->domain_count++;
            all->domains[at] = (tddp_launch_domain){.key = key, .package = cpu->package};
        }
        all->domains[at].cpus++;
    }
}

/* --- homes ----------------------------------------------------------------------------------- */

static int workers_on_package(const tddp_launch_spread *all, int package)
{
    int count = 0;
    for (int i = 0; i < all->domain_count; i++) {
        count += all->domains[i].package == package ? all->domains[i].workers : 0;
    }
    return count;
}

/* Where one worker more would have the most CPUs; among equals, on the emptier socket. */
static int roomiest(const tddp_launch_spread *all)
{
    int best = 0;
    for (int i = 1; i < all->domain_count; i++) {
        const tddp_launch_domain *one = &all->domains[i];
        const tddp_launch_domain *other = &all->domains[best];
        int64_t better = (int64_t)one->cpus * (other->workers + 1);
        int64_t than = (int64_t)other->cpus * (one->workers + 1);
        if (better > than || (better == than && workers_on_package(all, one->package) <
                                                    workers_on_package(all, other->package))) {
            best = i;
        }
    }
    return best;
}

/* Gives a home to workers that have none; neighbouring ranks get neighbouring homes. */
static void settle(tddp_launch_spread *all)
{
    int *added = all->homes + all->workers; /* of each domain; there is room behind the homes */
    for (int i = 0; i < all->workers; i++) {
        if (all->homes[i] < 0) {
            int home = roomiest(all);
            all->domains[home].workers++;
            added[home]++;
        }
    }
    int home = 0;
    for (int i = 0; i < all->workers; i++) {
        if (all->homes[i] < 0) {
            while (added[home] == 0) {
                home++;
            }
            added[home]--;
            all->homes[i] = home;
        }
    }
}

/* The domain that a GPU's NUMA node lies in; -1 if it has no CPU for us. */
static int home_of_node(const tddp_launch_spread *all, int node)
{
    for (int i = 0; i < all->topology->count; i++) {
        if (all->ordered[i].node == node) {
            return domain_of(all, tddp_launch_spread_key(all, &all->ordered[i]));
        }
    }
    return -1;
}

static void resolve_by_devices(tddp_launch_spread *all, const int *nodes, int count)
{
    for (int i = 0; i < all->workers; i++) {
        int node = nodes[i % count];
        int home = node < 0 && all->domain_count == 1 ? 0 : home_of_node(all, node);
        if (home >= 0) {
            all->homes[i] = home;
            all->domains[home].workers++;
            continue;
        }
        char *note = all->out->note;
        if (note[0] == '\0' && node < 0) {
            (void)snprintf(note, TDDP_LAUNCH_NOTE_BYTES,
                           "the NUMA node of GPU %d is not known: its worker may be far from it",
                           i % count);
        } else if (note[0] == '\0') {
            (void)snprintf(note, TDDP_LAUNCH_NOTE_BYTES,
                           "no CPU of NUMA node %d, where GPU %d is, may be used here: its worker "
                           "is bound elsewhere",
                           node, i % count);
        }
    }
}

/* --- all of it ------------------------------------------------------------------------------- */

static tddp_status fill(tddp_launch_spread *all, const int *device_nodes, int device_count)
{
    memcpy(all->ordered, all->topology->cpus, (size_t)all->topology->count * sizeof *all->ordered);
    qsort(all->ordered, (size_t)all->topology->count, sizeof *all->ordered, by_neighbourhood);
    find_domains(all);
    for (int i = 0; i < all->workers; i++) {
        all->homes[i] = -1;
    }
    if (device_count > 0 && all->kind != TDDP_LAUNCH_BINDING_CORES) {
        resolve_by_devices(all, device_nodes, device_count);
    }
    settle(all);
    for (int i = 0; i < all->workers; i++) {
        tddp_status status = tddp_launch_spread_give(all, i);
        if (status != TDDP_OK) {
            return status;
        }
    }
    return tddp_launch_spread_count_shares(all);
}

tddp_status tddp_launch_binding_spread(const tddp_launch_topology *topology,
                                       tddp_launch_binding_kind kind, const int *device_nodes,
                                       int device_count, int local_size, tddp_launch_binding *out)
{
    size_t cpus = (size_t)topology->count;
    size_t workers = (size_t)local_size;
    size_t word = sizeof(unsigned long);
    size_t highest = (size_t)topology->cpus[topology->count - 1].id;
    tddp_launch_binding made = {.workers = local_size,
                                .set_bytes = (highest / (word * CHAR_BIT) + 1) * word};
    tddp_launch_spread all = {
        .topology = topology, .kind = kind, .workers = local_size, .out = &made};
    memcpy(made.note, topology->note, sizeof made.note);
    made.sets = tddp_alloc_array(workers, made.set_bytes);
    made.shares = tddp_alloc_array(workers, sizeof *made.shares);
    all.ordered = tddp_alloc_array(cpus, sizeof *all.ordered);
    all.domains = tddp_alloc_array(cpus, sizeof *all.domains);
    all.homes = tddp_alloc_array(workers + cpus, sizeof *all.homes);
    tddp_status status = TDDP_OUT_OF_MEMORY;
    if (made.sets && made.shares && all.ordered && all.domains && all.homes) {
        status = fill(&all, device_nodes, device_count);
    }
    free(all.ordered);
    free(all.domains);
    free(all.homes);
    if (status == TDDP_OK) {
        *out = made;
    } else {
        tddp_launch_binding_free(&made);
    }
    return status;
}

bool tddp_launch_binding_has(const tddp_launch_binding *binding, int local_rank, int cpu)
{
    const char *set = binding->sets + (size_t)local_rank * binding->set_bytes;
    const unsigned long *words = (const unsigned long *)(const void *)set;
    size_t bits = sizeof *words * CHAR_BIT;
    size_t word = (size_t)cpu / bits;
    return word < binding->set_bytes / sizeof *words && (words[word] >> ((size_t)cpu % bits) & 1);
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
