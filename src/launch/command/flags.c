/*
 * The tables of torchrun's flags and of --rdzv-conf's keys. To add one, add a row and a field: the
 * parser, its messages, --help, the shells' completion and the PET_* default follow. Names are
 * PyTorch's, but for those under "Watching and checking". Read only, any thread.
 */
#include <stdio.h>
#include <string.h>

#include "launch/command/flags.h"

#define FIELD(name) offsetof(tddp_launch_options, name)

enum { DAY_S = 86400 };

const tddp_launch_flag tddp_launch_flags[] = {
    {.names = "", .help = "Workers"},
    {"nproc-per-node", TDDP_LAUNCH_KIND_PROCESSES, FIELD(processes), 1, TDDP_LAUNCH_MAX_LOCAL,
     "N|auto|cpu|gpu",
     "workers on this node: a number, one per usable core (cpu), one per GPU (gpu), or one per GPU "
     "and without GPUs one per core (auto); default 1"},
    {"standalone", TDDP_LAUNCH_KIND_SWITCH, FIELD(standalone), 0, 0, NULL,
     "one node, meeting on a free port (also what happens when no address is given); "
     "--rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored"},
    {"e c", TDDP_LAUNCH_KIND_CODE, FIELD(code), 0, 0, "CODE",
     "run this Ruby code instead of a script"},
    {"m module", TDDP_LAUNCH_KIND_SWITCH, FIELD(as_module), 0, 0, NULL,
     "the script is named as a program of a gem, or else as a Ruby library on the load path that "
     "is run as the program (a/b or A::B); a.b is a module of Python's"},
    {"no-ruby no-python", TDDP_LAUNCH_KIND_SWITCH, FIELD(no_ruby), 0, 0, NULL,
     "run SCRIPT as a program of its own instead of with ruby or python3"},
    {"pass-local-rank-arg", TDDP_LAUNCH_KIND_SWITCH, FIELD(pass_local_rank), 0, 0, NULL,
     "give each worker --local-rank=N, its own, as a last argument"},
    {"role", TDDP_LAUNCH_KIND_TEXT, FIELD(role), 0, 0, "NAME",
     "the workers' ROLE_NAME; default \"default\""},
    {"virtual-local-rank", TDDP_LAUNCH_KIND_SWITCH, FIELD(virtual_local_rank), 0, 0, NULL,
     "each worker has LOCAL_RANK 0 and sees one GPU, its own"},
    {"numa-binding", TDDP_LAUNCH_KIND_CHOICE, FIELD(numa_binding), 0, 0,
     "none|node|socket|exclusive|core-complex|cores",
     "bind workers to processor cores: those of their GPU's NUMA node (node) or socket (socket), a "
     "share of the node's for each (exclusive), those with one L3 cache (core-complex), a share of "
     "all (cores); default none"},
    {.names = "", .help = "Several nodes"},
    {"nnodes", TDDP_LAUNCH_KIND_NODES, FIELD(min_nodes), 1, TDDP_LAUNCH_MAX_NODES, "N|MIN:MAX",
     "number of nodes; as MIN:MAX nodes may join and leave while the job runs (not with static); "
     "default 1"},
    {"node-rank", TDDP_LAUNCH_KIND_NUMBER, FIELD(node_rank), 0, TDDP_LAUNCH_MAX_NODES - 1, "N",
     "this node's rank, 0 to nnodes - 1; node 0 hosts the rendezvous. With c10d and etcd it may be "
     "left out: nodes are numbered as they come"},
    {"master-addr", TDDP_LAUNCH_KIND_HOST, FIELD(master_addr), 0, 0, "HOST",
     "node 0's address (static rendezvous); default 127.0.0.1, or ::1 without IPv4"},
    {"master-port", TDDP_LAUNCH_KIND_NUMBER, FIELD(master_port), 0, 65535, "PORT",
     "node 0's port (static rendezvous); default 29500, on one node a free port"},
    {"local-addr", TDDP_LAUNCH_KIND_HOST, FIELD(local_addr), 0, 0, "HOST",
     "the address under which the other nodes reach this one; default: the one that its connection "
     "to the rendezvous has"},
    {"rdzv-backend", TDDP_LAUNCH_KIND_CHOICE, FIELD(backend), 0, 0, "static|c10d|etcd",
     "how nodes find each other: over a store that one of them hosts (static, c10d), or over a "
     "cluster of etcd v3, with which a job survives the loss of any node; default static"},
    {"rdzv-endpoint", TDDP_LAUNCH_KIND_ENDPOINTS, 0, 0, 0, "HOST[:PORT],...",
     "where nodes meet; default port 29400 (c10d), 29500 (static) or 2379 (etcd). With etcd there "
     "may be several, up to 7: its members"},
    {"rdzv-id", TDDP_LAUNCH_KIND_TEXT, FIELD(run_id), 0, 0, "ID",
     "the job's name, the same on all nodes; with etcd no other job's"},
    {"rdzv-conf", TDDP_LAUNCH_KIND_CONF, 0, 0, 0, "KEY=VALUE,...",
     "settings of the rendezvous, which stand below"},
    {.names = "", .help = "Failures and signals"},
    {"max-restarts", TDDP_LAUNCH_KIND_NUMBER, FIELD(max_restarts), 0, 1000000, "N",
     "after a failure start all workers again, at most so many times; default 0"},
    {"shutdown-timeout TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TDDP_LAUNCH_KIND_SECONDS,
     FIELD(shutdown_timeout), 0, DAY_S, "SECONDS",
     "time from SIGTERM to SIGKILL for workers and what they have started; default 30"},
    {"signals-to-handle", TDDP_LAUNCH_KIND_SIGNALS, 0, 0, 0, "SIGNAL,...",
     "signals that are passed on to the workers and end the job; default "
     "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
    {"report-file", TDDP_LAUNCH_KIND_TEXT, FIELD(report_file), 0, 0, "FILE",
     "write the report of a failed job to this file too, as JSON"},
    {.names = "", .help = "Output"},
    {"log-dir", TDDP_LAUNCH_KIND_TEXT, FIELD(log_dir), 0, 0, "FOLDER",
     "where log files go, in a folder of their own for each run; default: a temporary one"},
    {"r redirects", TDDP_LAUNCH_KIND_STREAMS, FIELD(redirects), 0, 0, "0|1|2|3|RANK:N,...",
     "what workers write to files instead of here: 0 nothing, 1 standard output, 2 standard error, "
     "3 both; or by local rank, such as 0:1,1:3; default 0"},
    {"t tee", TDDP_LAUNCH_KIND_STREAMS, FIELD(tee), 0, 0, "0|1|2|3|RANK:N,...",
     "what goes to files as well as here, in the same form; default 0"},
    {"log-line-prefix-template TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", TDDP_LAUNCH_KIND_TEXT,
     FIELD(line_prefix), 0, 0, "TEMPLATE",
     "what stands before each line of a worker; ${role_name}, ${local_rank}, ${rank} and "
     "${hostname} are replaced; default [${role_name}${local_rank}]: with --tee"},
    {"local-ranks-filter", TDDP_LAUNCH_KIND_RANKS, FIELD(local_ranks_filter), 0, 0, "RANK,...",
     "show only these local ranks' output here; files keep all"},
    {"duplicate-stdout-filters", TDDP_LAUNCH_KIND_FILTERS, FIELD(out_filters), 0, 0, "TEXT,...",
     "copy lines of standard output that contain one of these texts to filtered_stdout.log; two "
     "commas stand for one that belongs to a text"},
    {"duplicate-stderr-filters", TDDP_LAUNCH_KIND_FILTERS, FIELD(err_filters), 0, 0, "TEXT,...",
     "the same for standard error and filtered_stderr.log"},
    {.names = "", .help = "Watching and checking"},
    {"health-check-port TORCHELASTIC_HEALTH_CHECK_PORT", TDDP_LAUNCH_KIND_LISTENER, FIELD(health),
     0, 0, "[ADDRESS:]PORT",
     "answer HTTP requests with the job's state as JSON: 200, or 503 once the job has "
     "failed; on loopback, or on this address (0.0.0.0: all); port 0: a free one, which is shown"},
    {"check", TDDP_LAUNCH_KIND_ACTION, FIELD(check), 0, 0, NULL,
     "instead of a script, measure the store, all_reduce and each pair of ranks, and name a slow "
     "link; with one node 2 workers by default"},
    {.names = "", .help = "Accepted for PyTorch's sake"},
    {"monitor-interval", TDDP_LAUNCH_KIND_SECONDS, FIELD(ignored_seconds), 0, DAY_S, "SECONDS",
     "no effect: workers are watched without polling"},
    {"start-method", TDDP_LAUNCH_KIND_CHOICE, FIELD(ignored), 0, 0, "spawn|fork|forkserver",
     "no effect: it concerns Python functions, and workers are programs"},
    {"run-path", TDDP_LAUNCH_KIND_SWITCH, FIELD(run_path), 0, 0, NULL,
     "no effect: the script runs as without it"},
    {"event-log-handler", TDDP_LAUNCH_KIND_CHOICE, FIELD(ignored), 0, 0, "null",
     "null only: there are no events to log; --report-file has what failed"},
    {"logs-specs", TDDP_LAUNCH_KIND_CHOICE, FIELD(ignored), 0, 0, "default",
     "default only: others are Python classes; --log-dir says where logs go"},
    {.names = "", .help = "Other"},
    {"print-completion", TDDP_LAUNCH_KIND_CHOICE, FIELD(print_completion), 0, 0, "bash|zsh|fish",
     "print what makes a shell complete this command line: bash, zsh or fish; such as source "
     "<(torchrun --print-completion bash)"},
    {"h help", TDDP_LAUNCH_KIND_ACTION, FIELD(help), 0, 0, NULL, "show this help"},
    {"version", TDDP_LAUNCH_KIND_ACTION, FIELD(version), 0, 0, NULL, "show the version"},
};

const size_t tddp_launch_flag_count = sizeof tddp_launch_flags / sizeof tddp_launch_flags[0];

const tddp_launch_flag tddp_launch_conf_keys[] = {
    {"join_timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.join_timeout), 1, DAY_S, "SECONDS",
     "to wait for the other nodes; default 600"},
    {"timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.join_timeout), 1, DAY_S, "SECONDS",
     "the same, as PyTorch's static rendezvous has it"},
    {"last_call_timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.last_call_timeout), 1, DAY_S,
     "SECONDS", "to wait for more nodes than MIN; default 30"},
    {"heartbeat_timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.heartbeat_timeout), 1, DAY_S,
     "SECONDS",
     "without a sign of life until a node counts as lost; default 30, with static never. PyTorch's "
     "is how long sending one may take"},
    {"keep_alive_interval", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.keep_alive_interval), 1, DAY_S,
     "SECONDS",
     "between two signs of life; default 5. If this or keep_alive_max_attempt is given, their "
     "product replaces heartbeat_timeout"},
    {"keep_alive_max_attempt", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.keep_alive_max_attempt), 1, 1000,
     "N", "signs of life missed until a node counts as lost; default 3"},
    {"read_timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.read_timeout), 1, DAY_S, "SECONDS",
     "for an answer before the connection is made anew; default 60, and at most a quarter of "
     "heartbeat_timeout"},
    {"close_timeout", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.close_timeout), 1, DAY_S, "SECONDS",
     "for all nodes to read that the job has ended; default 3"},
    {"report_interval", TDDP_LAUNCH_KIND_NUMBER, FIELD(conf.report_interval), 1, DAY_S, "SECONDS",
     "between two lines about what is waited for; default 10"},
    {"is_host", TDDP_LAUNCH_KIND_SWITCH, FIELD(conf.is_host), 0, 0, "0|1",
     "whether this node hosts the rendezvous; default: the node with the endpoint's address does"},
    {"use_libuv", TDDP_LAUNCH_KIND_SWITCH, FIELD(ignored), 0, 0, "0|1", "no effect"},
    {"store_type", TDDP_LAUNCH_KIND_CHOICE, FIELD(ignored), 0, 0, "tcp",
     "tcp only: nodes meet over the network, not in a file"},
    {"protocol", TDDP_LAUNCH_KIND_CHOICE, FIELD(conf.etcd.https), 0, 0, "http|https",
     "of etcd; default http"},
    {"cacert", TDDP_LAUNCH_KIND_CONF_TEXT, FIELD(conf.etcd.cacert), 0, 0, "FILE",
     "etcd's authority, in PEM"},
    {"cert", TDDP_LAUNCH_KIND_CONF_TEXT, FIELD(conf.etcd.cert), 0, 0, "FILE",
     "this client's certificate, in PEM"},
    {"key", TDDP_LAUNCH_KIND_CONF_TEXT, FIELD(conf.etcd.key), 0, 0, "FILE",
     "the certificate's key, in PEM"},
    {"username", TDDP_LAUNCH_KIND_CONF_TEXT, FIELD(conf.etcd.username), 0, 0, "NAME", "at etcd"},
    {"password", TDDP_LAUNCH_KIND_PASSWORD, FIELD(conf.etcd.password), 0, 0, "TEXT",
     "at etcd; better in a file, or the whole value in PET_RDZV_CONF"},
    {"password_file", TDDP_LAUNCH_KIND_PASSWORD_FILE, FIELD(conf.etcd.password), 0, 0, "FILE",
     "whose first line, of 1 to 255 bytes, is the password"},
};

const size_t tddp_launch_conf_key_count =
    sizeof tddp_launch_conf_keys / sizeof tddp_launch_conf_keys[0];

bool tddp_launch_word(const char *text, int index, char word[TDDP_LAUNCH_WORD_BYTES])
{
    static const char separators[] = " |";
    for (; index > 0 && *text != '\0'; index--) {
        text += strcspn(text, separators);
        text += strspn(text, separators);
    }
    int length = (int)strcspn(text, separators);
    (void)snprintf(word, TDDP_LAUNCH_WORD_BYTES, "%.*s", length, text);
    return length > 0;
}
