/*
 * The table of torchrun's flags. To add one, add a row and a field: the parser, --help and the
 * PET_* default follow. Names are PyTorch's. Read only, any thread.
 */
#include "launch/command/options.h"

#define FIELD(name) offsetof(tddp_launch_options, name)

static const char workers[] = "Workers";
static const char nodes[] = "Several nodes";
static const char failures[] = "Failures";
static const char others[] = "Other";

const tddp_launch_flag tddp_launch_flags[] = {
    {"standalone", NULL, 0, TDDP_LAUNCH_SWITCH, FIELD(standalone), 0, 0, workers, NULL,
     "one node, meeting on a free port (also what happens when no address is given)"},
    {"nproc-per-node", NULL, 0, TDDP_LAUNCH_PROCESSES, FIELD(processes), 1, TDDP_LAUNCH_MAX_LOCAL,
     workers, "N|auto|cpu|gpu",
     "workers on this node: a number, one per usable core (cpu), one per GPU (gpu), or one per "
     "GPU and without GPUs one per core (auto); default 1"},
    {"no-ruby", "no-python", 0, TDDP_LAUNCH_SWITCH, FIELD(no_ruby), 0, 0, workers, NULL,
     "run SCRIPT as a program of its own instead of with ruby or python3"},
    {"e", NULL, 'e', TDDP_LAUNCH_CODE, FIELD(code), 0, 0, workers, "CODE",
     "run this Ruby code instead of a script"},
    {"role", NULL, 0, TDDP_LAUNCH_TEXT, FIELD(role), 0, 0, workers, "NAME",
     "the workers' ROLE_NAME; default \"default\""},
    {"nnodes", NULL, 0, TDDP_LAUNCH_NODES, FIELD(nodes), 1, TDDP_LAUNCH_MAX_NODES, nodes, "N",
     "number of nodes; default 1"},
    {"node-rank", NULL, 0, TDDP_LAUNCH_NUMBER, FIELD(node_rank), 0, TDDP_LAUNCH_MAX_NODES - 1,
     nodes, "N",
     "this node's rank, 0 to nnodes - 1; node 0 hosts the rendezvous. With c10d it may be left "
     "out: nodes are numbered as they come"},
    {"master-addr", NULL, 0, TDDP_LAUNCH_TEXT, FIELD(master_addr), 0, 0, nodes, "HOST",
     "node 0's address (static rendezvous); default 127.0.0.1"},
    {"master-port", NULL, 0, TDDP_LAUNCH_NUMBER, FIELD(master_port), 0, 65535, nodes, "PORT",
     "node 0's port (static rendezvous); default 29500, on one node a free port"},
    {"rdzv-backend", NULL, 0, TDDP_LAUNCH_BACKEND, FIELD(backend), 0, 0, nodes, "static|c10d",
     "how nodes find each other; default static"},
    {"rdzv-endpoint", NULL, 0, TDDP_LAUNCH_ENDPOINT, FIELD(endpoint), 0, 0, nodes, "HOST[:PORT]",
     "where nodes meet; default port 29400 (c10d) or 29500 (static)"},
    {"rdzv-id", NULL, 0, TDDP_LAUNCH_TEXT, FIELD(run_id), 0, 0, nodes, "ID",
     "the job's name, the same on all nodes"},
    {"rdzv-conf", NULL, 0, TDDP_LAUNCH_CONF, FIELD(conf), 0, 0, nodes, "KEY=VALUE,...",
     "join_timeout: seconds to wait for the other nodes (600); heartbeat_timeout: seconds without "
     "a sign of life after which a node counts as lost (5); is_host: whether this node hosts the "
     "rendezvous"},
    {"max-restarts", NULL, 0, TDDP_LAUNCH_NUMBER, FIELD(max_restarts), 0, 1000000, failures, "N",
     "after a failure start all workers again, at most so many times; default 0"},
    {"shutdown-timeout", NULL, 0, TDDP_LAUNCH_SECONDS, FIELD(shutdown_timeout), 0, 86400, failures,
     "SECONDS", "time from SIGTERM to SIGKILL when workers are ended; default 30"},
    {"monitor-interval", NULL, 0, TDDP_LAUNCH_SECONDS, FIELD(monitor_interval), 0, 86400, failures,
     "SECONDS", "accepted for PyTorch's sake: workers are watched without polling"},
    {"help", NULL, 'h', TDDP_LAUNCH_SWITCH, FIELD(help), 0, 0, others, NULL, "show this help"},
    {"version", NULL, 0, TDDP_LAUNCH_SWITCH, FIELD(version), 0, 0, others, NULL,
     "show the version"},
};

const size_t tddp_launch_flag_count = sizeof tddp_launch_flags / sizeof tddp_launch_flags[0];
