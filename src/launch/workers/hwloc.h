/*
 * hwloc, which describes the machine. The declarations are ours, so nothing is needed to build, and
 * the library is loaded when processes are bound, so torchrun starts without it;
 * test/c/launch/binding_test.c holds them against <hwloc.h>. They are those of ABI 15 (hwloc 2).
 */
#ifndef TDDP_LAUNCH_HWLOC_H
#define TDDP_LAUNCH_HWLOC_H

#include <stdint.h>

#include "launch/workers/machine.h"

typedef struct tddp_hwloc_bitmap tddp_hwloc_bitmap; /* struct hwloc_bitmap_s */

/* struct hwloc_obj, on 64-bit systems. */
typedef struct tddp_hwloc_object {
    int type;
    char *subtype;
    unsigned os_index;
    uint64_t unused[20];
    tddp_hwloc_bitmap *cpuset;
} tddp_hwloc_object;

/* hwloc_obj_type_t and others. Caches from the first level to the fifth follow each other. */
enum {
    TDDP_HWLOC_MACHINE = 0,
    TDDP_HWLOC_PACKAGE = 1,
    TDDP_HWLOC_CORE = 2,
    TDDP_HWLOC_PU = 3,
    TDDP_HWLOC_L1CACHE = 4,
    TDDP_HWLOC_L5CACHE = 8,
    TDDP_HWLOC_NUMANODE = 13,
    TDDP_HWLOC_UNKNOWN = -1, /* the depth of a type that the machine does not show */
};

/* Result, name without "hwloc_", arguments. */
#define TDDP_HWLOC_FUNCTIONS(X)                                                           \
    X(int, topology_init, (void **topology))                                              \
    X(int, topology_load, (void *topology))                                               \
    X(void, topology_destroy, (void *topology))                                           \
    X(int, get_type_depth, (void *topology, int type))                                    \
    X(unsigned, get_nbobjs_by_depth, (void *topology, int depth))                         \
    X(tddp_hwloc_object *, get_obj_by_depth, (void *topology, int depth, unsigned index)) \
    X(unsigned long, bitmap_to_ith_ulong, (const tddp_hwloc_bitmap *, unsigned word))

#define TDDP_HWLOC_MEMBER(result, name, arguments) result(*name) arguments;
typedef struct tddp_hwloc {
    TDDP_HWLOC_FUNCTIONS(TDDP_HWLOC_MEMBER)
} tddp_hwloc;

/* The functions, which stay for the life of the process. Errors: TDDP_UNAVAILABLE (the text
 * names the package). */
TDDP_NODISCARD tddp_status tddp_hwloc_load(tddp_hwloc *out);

/* tddp_launch_binding_plan() for a topology that hwloc has loaded, within these CPUs. Worker i
 * belongs to GPU i; with more workers than GPUs it starts again with the first. Without GPUs
 * workers are spread over the machine. */
TDDP_NODISCARD tddp_status tddp_launch_binding_spread(const tddp_hwloc *hwloc, void *topology,
                                                      const tddp_launch_cpus *allowed,
                                                      tddp_launch_binding_kind kind,
                                                      const tddp_launch_devices *devices,
                                                      int workers, tddp_launch_cpus **out);

#endif
