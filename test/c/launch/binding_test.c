#include <dlfcn.h>
#include <stddef.h>

#include "base/base.h"
#include "check.h"
#include "launch/workers/hwloc.h"

#if defined(__has_include)
#if __has_include(<hwloc.h>)
#define HAS_HWLOC 1
#include <hwloc.h>
_Static_assert(HWLOC_API_VERSION >> 16 == 2, "hwloc 2");
_Static_assert((int)TDDP_HWLOC_MACHINE == (int)HWLOC_OBJ_MACHINE, "machine");
_Static_assert((int)TDDP_HWLOC_PACKAGE == (int)HWLOC_OBJ_PACKAGE, "package");
_Static_assert((int)TDDP_HWLOC_CORE == (int)HWLOC_OBJ_CORE, "core");
_Static_assert((int)TDDP_HWLOC_PU == (int)HWLOC_OBJ_PU, "pu");
_Static_assert((int)TDDP_HWLOC_L1CACHE == (int)HWLOC_OBJ_L1CACHE, "L1");
_Static_assert((int)TDDP_HWLOC_L5CACHE == (int)HWLOC_OBJ_L5CACHE, "L5");
_Static_assert((int)TDDP_HWLOC_NUMANODE == (int)HWLOC_OBJ_NUMANODE, "node");
_Static_assert((int)TDDP_HWLOC_UNKNOWN == (int)HWLOC_TYPE_DEPTH_UNKNOWN, "unknown");
_Static_assert(offsetof(tddp_hwloc_object, os_index) == offsetof(struct hwloc_obj, os_index),
               "hwloc_obj");
_Static_assert(offsetof(tddp_hwloc_object, cpuset) == offsetof(struct hwloc_obj, cpuset),
               "hwloc_obj");
#endif
#endif

/* How many of each a machine has within the one above; CPUs are numbered as on PCs: first one of
 * every core, then the second of every core. 0 cores: the machine shows nothing but CPUs. */
typedef struct shape {
    int packages;
    int nodes;  /* of a package */
    int caches; /* of a node */
    int cores;  /* of a cache */
    int siblings;
} shape;

static int (*set_synthetic)(void *topology, const char *description);

static const tddp_hwloc *library(void)
{
    static tddp_hwloc loaded;
    if (tddp_hwloc_load(&loaded) != TDDP_OK) {
        CHECK_CONTAINS(tddp_error_message(), "apt install libhwloc15");
        check_skip("libhwloc is not installed (Debian: libhwloc15)");
    }
    void *handle = dlopen("libhwloc.so.15", RTLD_NOW);
    CHECK(handle != NULL);
    *(void **)&set_synthetic = dlsym(handle, "hwloc_topology_set_synthetic");
    CHECK(set_synthetic != NULL);
    return &loaded;
}

/* Caller: topology_destroy(). */
static void *make_machine(const tddp_hwloc *hwloc, shape of)
{
    char text[1024];
    void *topology;
    int cores = of.packages * of.nodes * of.caches * of.cores;
    int at = snprintf(text, sizeof text,
                      "pack:%d group:%d [numa(memory=1GB)] l3:%d l2:%d core:1 pu:%d(indexes=",
                      of.packages, of.nodes, of.caches, of.cores, of.siblings);
    for (int cpu = 0; cpu < cores * of.siblings; cpu++) {
        at += snprintf(text + at, sizeof text - (size_t)at, cpu > 0 ? ",%d" : "%d",
                       cpu / of.siblings + cpu % of.siblings * cores);
    }
    (void)snprintf(text + at, sizeof text - (size_t)at, ")");
    if (cores == 0) {
        (void)snprintf(text, sizeof text, "pu:%d", of.siblings);
    }
    CHECK_INT(hwloc->topology_init(&topology), 0);
    CHECK_INT(set_synthetic(topology, text), 0);
    CHECK_INT(hwloc->topology_load(topology), 0);
    return topology;
}

static void allow(tddp_launch_cpus *cpus, int cpu)
{
    cpus->words[cpu / TDDP_LAUNCH_WORD_BITS] |= 1UL << (cpu % TDDP_LAUNCH_WORD_BITS);
}

/* Whether a worker may run on a CPU. */
static bool has(const tddp_launch_cpus *sets, int worker, int cpu)
{
    return sets[worker].words[cpu / TDDP_LAUNCH_WORD_BITS] >> (cpu % TDDP_LAUNCH_WORD_BITS) & 1;
}

/* What is asked of a plan. */
typedef struct question {
    shape machine;
    tddp_launch_binding_kind kind;
    int workers;
    int from;         /* CPUs from this one on may be used, */
    int to;           /* up to but without this one */
    const int *nodes; /* of GPUs */
    int devices;
    const int *allowed; /* these, in place of `from` to `to` */
} question;

static char logged[256];

static void keep_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level, (void)room, (void)data;
    (void)snprintf(logged, sizeof logged, "%s", text);
}

static tddp_status plan(question asked, tddp_launch_cpus **out)
{
    const tddp_hwloc *hwloc = library();
    tddp_launch_cpus allowed = {{0}};
    tddp_launch_device list[8] = {0};
    tddp_launch_devices devices = {.list = list, .named = asked.devices, .count = asked.devices};
    for (int i = asked.from; i < asked.to; i++) {
        allow(&allowed, asked.allowed ? asked.allowed[i] : i);
    }
    for (int i = 0; i < asked.devices; i++) {
        list[i].node = asked.nodes[i];
    }
    void *topology = make_machine(hwloc, asked.machine);
    tddp_status status = tddp_launch_binding_spread(hwloc, topology, &allowed, asked.kind, &devices,
                                                    asked.workers, out);
    hwloc->topology_destroy(topology);
    return status;
}

/* "0-3,8:4 ..." for each worker: its CPUs and its share. */
static void check_plan(question asked, const char *expected, const char *note)
{
    char text[2048];
    size_t at = 0;
    tddp_launch_cpus *made = NULL;
    logged[0] = '\0';
    tddp_log_set_sink(keep_line, NULL);
    CHECK_OK(plan(asked, &made));
    for (int worker = 0; worker < asked.workers; worker++) {
        const char *gap = worker > 0 ? " " : "";
        for (int cpu = 0; cpu < 300; cpu++) {
            int last = cpu;
            while (has(made, worker, last)) {
                last++;
            }
            if (last > cpu) {
                at += (size_t)snprintf(text + at, sizeof text - at,
                                       last - cpu > 1 ? "%s%d-%d" : "%s%d", gap, cpu, last - 1);
                gap = ",";
                cpu = last;
            }
        }
        at += (size_t)snprintf(text + at, sizeof text - at, ":%d",
                               tddp_launch_binding_share(made, asked.workers, worker));
    }
    CHECK_TEXT(text, expected);
    if (note) {
        CHECK_CONTAINS(logged, note);
    } else {
        CHECK_TEXT(logged, "");
    }
    free(made);
}

/* 2 sockets of 2 nodes of 2 caches of 2 cores of 2 CPUs: 32 CPUs, siblings 16 apart. */
static const shape server = {2, 2, 2, 2, 2};

TEST(workers_are_spread_over_nodes)
{
    question asked = {server, TDDP_LAUNCH_BINDING_NODE, 4, 0, 32, NULL, 0, NULL};
    check_plan(asked, "0-3,16-19:8 4-7,20-23:8 8-11,24-27:8 12-15,28-31:8", NULL);
    asked.workers = 1;
    check_plan(asked, "0-3,16-19:8", NULL);
    asked.workers = 2; /* one each socket */
    check_plan(asked, "0-3,16-19:8 8-11,24-27:8", NULL);
    asked.workers = 5;
    check_plan(asked, "0-3,16-19:4 0-3,16-19:4 4-7,20-23:8 8-11,24-27:8 12-15,28-31:8", NULL);
    asked.workers = 9; /* 3 on the first: a share of 8 / 3 */
    check_plan(asked,
               "0-3,16-19:2 0-3,16-19:2 0-3,16-19:2 4-7,20-23:4 4-7,20-23:4 8-11,24-27:4 "
               "8-11,24-27:4 12-15,28-31:4 12-15,28-31:4",
               NULL);
}

TEST(workers_are_spread_over_sockets)
{
    question asked = {server, TDDP_LAUNCH_BINDING_SOCKET, 3, 0, 32, NULL, 0, NULL};
    check_plan(asked, "0-7,16-23:8 0-7,16-23:8 8-15,24-31:16", NULL);
}

TEST(exclusive_cores_of_a_node)
{
    question asked = {server, TDDP_LAUNCH_BINDING_EXCLUSIVE, 6, 0, 32, NULL, 0, NULL};
    check_plan(asked, "0-1,16-17:4 2-3,18-19:4 4-7,20-23:8 8-9,24-25:4 10-11,26-27:4 12-15,28-31:8",
               NULL);
    asked.workers = 12; /* 4 cores for 3: the first has one more */
    tddp_launch_cpus *made = NULL;
    CHECK_OK(plan(asked, &made));
    CHECK_INT(tddp_launch_binding_share(made, 12, 0), 4);
    CHECK_INT(tddp_launch_binding_share(made, 12, 1), 2);
    CHECK_INT(tddp_launch_binding_share(made, 12, 2), 2);
    CHECK(has(made, 0, 16) && has(made, 0, 17));
    free(made);
}

TEST(a_cache_each)
{
    question asked = {server, TDDP_LAUNCH_BINDING_CORE_COMPLEX, 4, 0, 32, NULL, 0, NULL};
    check_plan(asked, "0-1,16-17:4 4-5,20-21:4 8-9,24-25:4 12-13,28-29:4", NULL);
    asked.workers = 8;
    check_plan(asked,
               "0-1,16-17:4 2-3,18-19:4 4-5,20-21:4 6-7,22-23:4 8-9,24-25:4 10-11,26-27:4 "
               "12-13,28-29:4 14-15,30-31:4",
               NULL);
    asked.from = 1; /* of the first cache one CPU is missing: the other comes first */
    asked.workers = 1;
    check_plan(asked, "2-3,18-19:4", NULL);
    asked.to = 4;
    check_plan(asked, "2-3:2", NULL);
}

TEST(whole_cores_each)
{
    question asked = {server, TDDP_LAUNCH_BINDING_CORES, 3, 0, 32, NULL, 0, NULL};
    check_plan(asked, "0-5,16-21:12 6-10,22-26:10 11-15,27-31:10", NULL);
    asked.workers = 16;
    tddp_launch_cpus *made = NULL;
    CHECK_OK(plan(asked, &made));
    for (int i = 0; i < 16; i++) {
        CHECK(has(made, i, i) && has(made, i, i + 16));
        CHECK_INT(tddp_launch_binding_share(made, 16, i), 2);
    }
    free(made);
    asked.workers = 17;
    CHECK_STATUS(plan(asked, &made), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(),
               "--numa-binding=cores: 16 usable cores on this machine for 17 workers; expected at "
               "least one each: start fewer workers, or take --numa-binding=node");
    asked.kind = TDDP_LAUNCH_BINDING_EXCLUSIVE;
    CHECK_STATUS(plan(asked, &made), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "exclusive: 4 usable cores on a NUMA node for 5 workers");
}

/* Of 32 CPUs the first socket's may be used. */
TEST(a_cpuset_with_half_of_the_machine)
{
    question asked = {server, TDDP_LAUNCH_BINDING_NODE, 2, 0, 8, NULL, 0, NULL};
    check_plan(asked, "0-3:4 4-7:4", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_SOCKET;
    check_plan(asked, "0-7:4 0-7:4", NULL);
    asked.to = 6; /* the room counts: two thirds are on node 0 */
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    asked.workers = 3;
    check_plan(asked, "0-3:2 0-3:2 4-5:2", NULL);
}

TEST(odd_counts)
{
    question asked = {{1, 1, 1, 7, 1}, TDDP_LAUNCH_BINDING_CORES, 3, 0, 7, NULL, 0, NULL};
    check_plan(asked, "0-2:3 3-4:2 5-6:2", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    check_plan(asked, "0-6:2 0-6:2 0-6:2", NULL);
    asked.workers = 9;
    check_plan(asked, "0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1", NULL);
}

TEST(cpus_that_are_switched_off)
{
    static const int online[] = {0, 2, 3, 4, 5, 7};
    question asked = {{1, 2, 1, 2, 2}, TDDP_LAUNCH_BINDING_NODE, 2, 0, 6, NULL, 0, online};
    check_plan(asked, "0,4-5:3 2-3,7:3", NULL);
}

TEST(a_node_without_cpus)
{
    static const int allowed[] = {0, 1, 4, 5};
    question asked = {{1, 3, 1, 2, 1}, TDDP_LAUNCH_BINDING_NODE, 3, 0, 4, NULL, 0, allowed};
    check_plan(asked, "0-1:1 0-1:1 4-5:2", NULL);
}

/* Of memory beside the CPUs' own: a GPU's, or a second kind. */
TEST(nodes_that_share_cpus)
{
    const tddp_hwloc *hwloc = library();
    tddp_launch_devices none = {0};
    tddp_launch_cpus *made = NULL;
    void *topology;
    CHECK_INT(hwloc->topology_init(&topology), 0);
    CHECK_INT(set_synthetic(topology, "[numa] pack:2 [numa] [numa] core:2 pu:1"), 0);
    CHECK_INT(hwloc->topology_load(topology), 0);
    tddp_launch_cpus allowed = {{0xf}};
    CHECK_OK(tddp_launch_binding_spread(hwloc, topology, &allowed, TDDP_LAUNCH_BINDING_EXCLUSIVE,
                                        &none, 4, &made));
    for (int worker = 0; worker < 4; worker++) {
        CHECK_INT(tddp_launch_binding_share(made, 4, worker), 1);
        for (int cpu = 0; cpu < 4; cpu++) {
            CHECK_INT(has(made, worker, cpu), cpu == worker);
        }
    }
    free(made);
    hwloc->topology_destroy(topology);
}

TEST(a_machine_that_shows_nothing)
{
    question asked = {{0, 0, 0, 0, 5}, TDDP_LAUNCH_BINDING_CORES, 2, 0, 5, NULL, 0, NULL};
    check_plan(asked, "0-2:3 3-4:2", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_CORE_COMPLEX;
    check_plan(asked, "0-4:2 0-4:2", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_SOCKET;
    check_plan(asked, "0-4:2 0-4:2", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    check_plan(asked, "0-4:2 0-4:2", NULL);
}

TEST(workers_are_near_their_gpus)
{
    static const int nodes[] = {3, 3, 1, 0};
    question asked = {server, TDDP_LAUNCH_BINDING_NODE, 4, 0, 32, nodes, 4, NULL};
    check_plan(asked, "12-15,28-31:4 12-15,28-31:4 4-7,20-23:8 0-3,16-19:8", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_SOCKET;
    check_plan(asked, "8-15,24-31:8 8-15,24-31:8 0-7,16-23:8 0-7,16-23:8", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_EXCLUSIVE;
    check_plan(asked, "12-13,28-29:4 14-15,30-31:4 4-7,20-23:8 0-3,16-19:8", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_CORE_COMPLEX;
    check_plan(asked, "12-13,28-29:4 14-15,30-31:4 4-5,20-21:4 0-1,16-17:4", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    asked.workers = 6; /* two more than GPUs */
    check_plan(asked,
               "12-15,28-31:2 12-15,28-31:2 4-7,20-23:8 0-3,16-19:8 12-15,28-31:2 12-15,28-31:2",
               NULL);
}

TEST(gpus_whose_place_is_no_help)
{
    static const int nodes[] = {-1, -1};
    question asked = {server, TDDP_LAUNCH_BINDING_NODE, 2, 0, 32, nodes, 2, NULL};
    check_plan(asked, "0-3,16-19:8 8-11,24-27:8",
               "is known to be near GPU 1: its worker is bound elsewhere");
    static const int far[] = {0, 3};
    asked.nodes = far;
    asked.to = 8; /* node 3 has no CPU for us */
    check_plan(
        asked, "0-3:4 4-7:4",
        "no CPU that may be used here is known to be near GPU 1: its worker is bound elsewhere");
    /* One node: what the kernel calls -1 is 0. */
    asked = (question){{1, 1, 1, 4, 1}, TDDP_LAUNCH_BINDING_NODE, 2, 0, 4, nodes, 2, NULL};
    check_plan(asked, "0-3:2 0-3:2", NULL);
}

TEST(short_memory_is_survived)
{
    question asked = {{1, 2, 1, 2, 1}, TDDP_LAUNCH_BINDING_CORE_COMPLEX, 2, 0, 4, NULL, 0, NULL};
    (void)library();
    for (int nth = 1;; nth++) {
        tddp_launch_cpus *made = NULL;
        tddp_fail_allocation(nth);
        tddp_status status = plan(asked, &made);
        tddp_fail_allocation(0);
        if (status == TDDP_OK) {
            free(made);
            CHECK(nth > 4);
            break;
        }
        CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
    }
}
