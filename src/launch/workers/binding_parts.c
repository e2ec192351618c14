/*
 * Divides a domain's CPUs between the workers that have it as their home: all for everyone, whole
 * cores in stretches, or one cache each. A core or cache is whole as far as its CPUs may be used
 * here. Pure.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "launch/workers/binding_spread.h"

static void allow(tddp_launch_spread *all, int worker, int cpu)
{
    char *set = all->out->sets + (size_t)worker * all->out->set_bytes;
    unsigned long *words = (unsigned long *)(void *)set;
    size_t bits = sizeof *words * CHAR_BIT;
    words[(size_t)cpu / bits] |= 1UL << ((size_t)cpu % bits);
}

static bool in_domain(const tddp_launch_spread *all, int place, int home)
{
    return tddp_launch_spread_key(all, &all->ordered[place]) == all->domains[home].key;
}

static void give_all(tddp_launch_spread *all, int worker)
{
    for (int i = 0; i < all->topology->count; i++) {
        if (in_domain(all, i, all->homes[worker])) {
            allow(all, worker, all->ordered[i].id);
        }
    }
}

/* Cores follow each other in this order, so a new one begins where the number changes. */
static int count_cores(const tddp_launch_spread *all, int home)
{
    int cores = 0;
    int last = -1;
    for (int i = 0; i < all->topology->count; i++) {
        if (in_domain(all, i, home) && all->ordered[i].core != last) {
            last = all->ordered[i].core;
            cores++;
        }
    }
    return cores;
}

/* The worker that is the `place`th in its home gets its stretch of whole cores; where they cannot
 * be divided evenly the first workers have one more. */
static tddp_status give_cores(tddp_launch_spread *all, int worker, int place)
{
    int home = all->homes[worker];
    int mates = all->domains[home].workers;
    int cores = count_cores(all, home);
    if (cores < mates) {
        bool whole = all->kind == TDDP_LAUNCH_BINDING_CORES;
        char where[48] = "this machine";
        if (!whole) {
            (void)snprintf(where, sizeof where, "NUMA node %d", all->domains[home].key);
        }
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--numa-binding=%s: %d usable cores on %s for %d workers; expected at "
                         "least one each: start fewer workers, or take --numa-binding=node",
                         whole ? "cores" : "exclusive", cores, where, mates);
    }
    int more = cores % mates;
    int from = place * (cores / mates) + (place < more ? place : more);
    int to = from + cores / mates + (place < more ? 1 : 0);
    int core = -1;
    int last = -1;
    for (int i = 0; i < all->topology->count; i++) {
        if (!in_domain(all, i, home)) {
            continue;
        }
        if (all->ordered[i].core != last) {
            last = all->ordered[i].core;
            core++;
        }
        if (core >= from && core < to) {
            allow(all, worker, all->ordered[i].id);
        }
    }
    return TDDP_OK;
}

typedef struct cache {
    int key;
    int cpus;
} cache;

static int compare(int a, int b)
{
    return (a > b) - (a < b);
}

/* Caches with most CPUs first. */
static int by_size(const void *a, const void *b)
{
    const cache *x = a;
    const cache *y = b;
    int order = compare(y->cpus, x->cpus);
    return order ? order : compare(x->key, y->key);
}

static tddp_status give_cache(tddp_launch_spread *all, int worker, int place)
{
    int home = all->homes[worker];
    cache *caches = tddp_alloc_array((size_t)all->topology->count, sizeof *caches);
    int count = 0;
    if (!caches) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int i = 0; i < all->topology->count; i++) {
        if (!in_domain(all, i, home)) {
            continue;
        }
        if (count == 0 || caches[count - 1].key != all->ordered[i].cache) {
            caches[count++] = (cache){all->ordered[i].cache, 0};
        }
        caches[count - 1].cpus++;
    }
    qsort(caches, (size_t)count, sizeof *caches, by_size);
    int key = caches[place % count].key;
    free(caches);
    for (int i = 0; i < all->topology->count; i++) {
        if (in_domain(all, i, home) && all->ordered[i].cache == key) {
            allow(all, worker, all->ordered[i].id);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_launch_spread_give(tddp_launch_spread *all, int worker)
{
    int place = 0;
    for (int i = 0; i < worker; i++) {
        place += all->homes[i] == all->homes[worker];
    }
    switch (all->kind) {
    case TDDP_LAUNCH_BINDING_EXCLUSIVE:
    case TDDP_LAUNCH_BINDING_CORES:
        return give_cores(all, worker, place);
    case TDDP_LAUNCH_BINDING_CORE_COMPLEX:
        return give_cache(all, worker, place);
    case TDDP_LAUNCH_BINDING_NODE:
    case TDDP_LAUNCH_BINDING_SOCKET:
    case TDDP_LAUNCH_BINDING_NONE:
        break;
    }
    give_all(all, worker);
    return TDDP_OK;
}

tddp_status tddp_launch_spread_count_shares(tddp_launch_spread *all)
{
    const tddp_launch_topology *topology = all->topology;
    int *sharers = tddp_alloc_array((size_t)topology->count, sizeof *sharers);
    if (!sharers) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int worker = 0; worker < all->workers; worker++) {
        for (int i = 0; i < topology->count; i++) {
            sharers[i] += tddp_launch_binding_has(all->out, worker, topology->cpus[i].id);
        }
    }
    for (int worker = 0; worker < all->workers; worker++) {
        double share = 0;
        for (int i = 0; i < topology->count; i++) {
            if (tddp_launch_binding_has(all->out, worker, topology->cpus[i].id)) {
                share += 1.0 / sharers[i];
            }
        }
        /* A little more: three thirds are one. */
        all->out->shares[worker] = share < 1 ? 1 : (int)(share + 1e-6);
    }
    free(sharers);
    return TDDP_OK;
}
