#include "base/base.h"
#include "launch/workers/binding.h"
#include "machine.h"

/* How many of each a machine has within the one above; CPUs are numbered as on PCs: first one of
 * every core, then the second of every core. */
typedef struct shape {
    int packages;
    int nodes;  /* of a package */
    int caches; /* of a node */
    int cores;  /* of a cache */
    int siblings;
} shape;

static int cores_of(shape of)
{
    return of.packages * of.nodes * of.caches * of.cores;
}

/* "4,12": one CPU of each core from `from` on, `count` cores, all siblings. */
static void list_of(shape of, int from, int count, char *text, size_t size)
{
    size_t at = 0;
    for (int sibling = 0; sibling < of.siblings; sibling++) {
        int first = sibling * cores_of(of) + from;
        at += (size_t)snprintf(text + at, size - at, count > 1 ? "%s%d-%d" : "%s%d",
                               sibling ? "," : "", first, first + count - 1);
    }
    (void)snprintf(text + at, size - at, "\n");
}

static void make_cpu(const char *root, shape of, int cpu)
{
    char text[128];
    int core = cpu % cores_of(of);
    int cache = core / of.cores;
    int package = cache / of.caches / of.nodes;
    (void)snprintf(text, sizeof text, "%d\n", package);
    machine_file(root, text, "sys/devices/system/cpu/cpu%d/topology/physical_package_id", cpu);
    list_of(of, core, 1, text, sizeof text);
    machine_file(root, text, "sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    for (int index = 0; index < 4; index++) {
        static const char *const types[] = {"Data\n", "Instruction\n", "Unified\n", "Unified\n"};
        static const char *const levels[] = {"1\n", "1\n", "2\n", "3\n"};
        const char *folder = "sys/devices/system/cpu";
        machine_file(root, types[index], "%s/cpu%d/cache/index%d/type", folder, cpu, index);
        machine_file(root, levels[index], "%s/cpu%d/cache/index%d/level", folder, cpu, index);
        list_of(of, index == 3 ? cache * of.cores : core, index == 3 ? of.cores : 1, text,
                sizeof text);
        machine_file(root, text, "%s/cpu%d/cache/index%d/shared_cpu_list", folder, cpu, index);
    }
}

static char *machine_shaped(shape of)
{
    char *root = machine_make();
    char text[128];
    int nodes = of.packages * of.nodes;
    for (int cpu = 0; cpu < cores_of(of) * of.siblings; cpu++) {
        make_cpu(root, of, cpu);
    }
    for (int node = 0; node < nodes; node++) {
        int each = of.caches * of.cores;
        list_of(of, node * each, each, text, sizeof text);
        machine_file(root, text, "sys/devices/system/node/node%d/cpulist", node);
    }
    (void)snprintf(text, sizeof text, nodes > 1 ? "0-%d\n" : "0\n", nodes - 1);
    machine_file(root, text, "sys/devices/system/node/online");
    (void)snprintf(text, sizeof text, "0-%d\n", cores_of(of) * of.siblings - 1);
    machine_file(root, text, "sys/devices/system/cpu/online");
    return root;
}

/* What is asked of a plan. */
typedef struct question {
    const char *root;
    tddp_launch_binding_kind kind;
    int workers;
    int from;         /* CPUs from this one on may be used, */
    int to;           /* up to but without this one */
    const int *nodes; /* of GPUs */
    int devices;
} question;

static tddp_status plan(question asked, tddp_launch_binding *out)
{
    static int allowed[256];
    tddp_launch_topology topology;
    for (int i = asked.from; i < asked.to; i++) {
        allowed[i - asked.from] = i;
    }
    CHECK_OK(tddp_launch_topology_read(asked.root, allowed, asked.to - asked.from, &topology));
    tddp_status status = tddp_launch_binding_spread(&topology, asked.kind, asked.nodes,
                                                    asked.devices, asked.workers, out);
    tddp_launch_topology_free(&topology);
    return status;
}

/* "0-3,8:4 ..." for each worker: its CPUs and its share. */
static void check_plan(question asked, const char *expected, const char *note)
{
    char text[2048];
    size_t at = 0;
    tddp_launch_binding made;
    CHECK_OK(plan(asked, &made));
    for (int worker = 0; worker < made.workers; worker++) {
        const char *gap = worker > 0 ? " " : "";
        for (int cpu = 0; cpu < 300; cpu++) {
            int last = cpu;
            while (tddp_launch_binding_has(&made, worker, last)) {
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
                               tddp_launch_binding_share(&made, worker, -1));
    }
    CHECK_TEXT(text, expected);
    if (note) {
        CHECK_CONTAINS(made.note, note);
    } else {
        CHECK_TEXT(made.note, "");
    }
    tddp_launch_binding_free(&made);
}

/* 2 sockets of 2 nodes of 2 caches of 2 cores of 2 CPUs: 32 CPUs, siblings 16 apart. */
static const shape server = {2, 2, 2, 2, 2};

TEST(workers_are_spread_over_nodes)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 4, 0, 32, NULL, 0};
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
    machine_remove(root);
}

TEST(workers_are_spread_over_sockets)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_SOCKET, 3, 0, 32, NULL, 0};
    check_plan(asked, "0-7,16-23:8 0-7,16-23:8 8-15,24-31:16", NULL);
    machine_remove(root);
}

TEST(exclusive_cores_of_a_node)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_EXCLUSIVE, 6, 0, 32, NULL, 0};
    check_plan(asked, "0-1,16-17:4 2-3,18-19:4 4-7,20-23:8 8-9,24-25:4 10-11,26-27:4 12-15,28-31:8",
               NULL);
    asked.workers = 12; /* 4 cores for 3: the first has one more */
    tddp_launch_binding made;
    CHECK_OK(plan(asked, &made));
    CHECK_INT(made.shares[0], 4);
    CHECK_INT(made.shares[1], 2);
    CHECK_INT(made.shares[2], 2);
    CHECK(tddp_launch_binding_has(&made, 0, 16) && tddp_launch_binding_has(&made, 0, 17));
    tddp_launch_binding_free(&made);
    machine_remove(root);
}

TEST(a_cache_each)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_CORE_COMPLEX, 4, 0, 32, NULL, 0};
    check_plan(asked, "0-1,16-17:4 4-5,20-21:4 8-9,24-25:4 12-13,28-29:4", NULL);
    asked.workers = 8;
    check_plan(asked,
               "0-1,16-17:4 2-3,18-19:4 4-5,20-21:4 6-7,22-23:4 8-9,24-25:4 10-11,26-27:4 "
               "12-13,28-29:4 14-15,30-31:4",
               NULL);
    asked.from = 1; /* of the first cache one CPU is missing: the other comes first */
    asked.workers = 1;
    check_plan(asked, "4-5,20-21:4", NULL);
    asked.to = 4;
    check_plan(asked, "2-3:2", NULL);
    machine_remove(root);
}

TEST(whole_cores_each)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_CORES, 3, 0, 32, NULL, 0};
    check_plan(asked, "0-5,16-21:12 6-10,22-26:10 11-15,27-31:10", NULL);
    asked.workers = 16;
    tddp_launch_binding made;
    CHECK_OK(plan(asked, &made));
    for (int i = 0; i < 16; i++) {
        CHECK(tddp_launch_binding_has(&made, i, i) && tddp_launch_binding_has(&made, i, i + 16));
        CHECK_INT(made.shares[i], 2);
    }
    tddp_launch_binding_free(&made);
    asked.workers = 17;
    CHECK_STATUS(plan(asked, &made), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(),
               "--numa-binding=cores: 16 usable cores on this machine for 17 workers; expected at "
               "least one each: start fewer workers, or take --numa-binding=node");
    asked.kind = TDDP_LAUNCH_BINDING_EXCLUSIVE;
    CHECK_STATUS(plan(asked, &made), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "exclusive: 4 usable cores on NUMA node 0 for 5 workers");
    machine_remove(root);
}

/* Of 32 CPUs the first socket's may be used. */
TEST(a_cpuset_with_half_of_the_machine)
{
    char *root = machine_shaped(server);
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 2, 0, 8, NULL, 0};
    check_plan(asked, "0-3:4 4-7:4", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_SOCKET;
    check_plan(asked, "0-7:4 0-7:4", NULL);
    asked.to = 6; /* the room counts: two thirds are on node 0 */
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    asked.workers = 3;
    check_plan(asked, "0-3:2 0-3:2 4-5:2", NULL);
    machine_remove(root);
}

TEST(odd_counts)
{
    char *root = machine_shaped((shape){1, 1, 1, 7, 1});
    question asked = {root, TDDP_LAUNCH_BINDING_CORES, 3, 0, 7, NULL, 0};
    check_plan(asked, "0-2:3 3-4:2 5-6:2", NULL);
    asked.kind = TDDP_LAUNCH_BINDING_NODE;
    check_plan(asked, "0-6:2 0-6:2 0-6:2", NULL);
    asked.workers = 9;
    check_plan(asked, "0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1 0-6:1", NULL);
    machine_remove(root);
}

TEST(cpus_that_are_switched_off)
{
    char *root = machine_shaped((shape){1, 2, 1, 2, 2});
    machine_file(root, "0,2-5,7\n", "sys/devices/system/cpu/online");
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 2, 0, 8, NULL, 0};
    check_plan(asked, "0,4-5:3 2-3,7:3", NULL);
    machine_remove(root);
}

TEST(a_node_without_cpus)
{
    char *root = machine_shaped((shape){1, 2, 1, 2, 1});
    machine_file(root, "\n", "sys/devices/system/node/node2/cpulist");
    machine_file(root, "0-2,5\n", "sys/devices/system/node/online");
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 3, 0, 4, NULL, 0};
    check_plan(asked, "0-1:1 0-1:1 2-3:2", NULL);
    machine_remove(root);
}

TEST(a_machine_that_shows_nothing)
{
    char *root = machine_make();
    question asked = {root, TDDP_LAUNCH_BINDING_CORES, 2, 0, 5, NULL, 0};
    check_plan(asked, "0-2:3 3-4:2", "no NUMA nodes: the machine is taken for one");
    asked.kind = TDDP_LAUNCH_BINDING_CORE_COMPLEX;
    check_plan(asked, "0-4:2 0-4:2", "no NUMA nodes");
    machine_file(root, "0\n", "sys/devices/system/node/online");
    check_plan(asked, "0-4:2 0-4:2", "does not show how the CPUs belong together");
    machine_file(root, "0-x,\n", "sys/devices/system/cpu/online"); /* nonsense */
    check_plan(asked, "0-4:2 0-4:2", "does not show how the CPUs belong together");
    machine_remove(root);
}

TEST(workers_are_near_their_gpus)
{
    char *root = machine_shaped(server);
    static const int nodes[] = {3, 3, 1, 0};
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 4, 0, 32, nodes, 4};
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
    machine_remove(root);
}

TEST(gpus_whose_place_is_no_help)
{
    char *root = machine_shaped(server);
    static const int nodes[] = {-1, -1};
    question asked = {root, TDDP_LAUNCH_BINDING_NODE, 2, 0, 32, nodes, 2};
    check_plan(asked, "0-3,16-19:8 8-11,24-27:8", "NUMA node of GPU 0 is not known");
    static const int far[] = {0, 3};
    asked.nodes = far;
    asked.to = 8; /* node 3 has no CPU for us */
    check_plan(asked, "0-3:4 4-7:4", "no CPU of NUMA node 3, where GPU 1 is, may be used here");
    machine_remove(root);
    root = machine_shaped((shape){1, 1, 1, 4, 1}); /* one node: what the kernel calls -1 is 0 */
    asked = (question){root, TDDP_LAUNCH_BINDING_NODE, 2, 0, 4, nodes, 2};
    check_plan(asked, "0-3:2 0-3:2", NULL);
    machine_remove(root);
}

TEST(short_memory_is_survived)
{
    char *root = machine_shaped((shape){1, 2, 1, 2, 1});
    for (int nth = 1;; nth++) {
        tddp_launch_topology topology;
        tddp_launch_binding made;
        static const int allowed[] = {0, 1, 2, 3};
        tddp_fail_allocation(nth);
        tddp_status status = tddp_launch_topology_read(root, allowed, 4, &topology);
        if (status == TDDP_OK) {
            status = tddp_launch_binding_spread(&topology, TDDP_LAUNCH_BINDING_CORE_COMPLEX, NULL,
                                                0, 2, &made);
            tddp_launch_topology_free(&topology);
        }
        tddp_fail_allocation(0);
        if (status == TDDP_OK) {
            tddp_launch_binding_free(&made);
            CHECK(nth > 5);
            break;
        }
        CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
    }
    machine_remove(root);
}
