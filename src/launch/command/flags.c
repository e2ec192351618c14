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
    {"nproc-per-node", tddp_launch_read_processes, FIELD(processes), 1, TDDP_LAUNCH_MAX_LOCAL,
     "N|auto|cpu|gpu",
     "workers on this node: a number, one per usable core (cpu), one per GPU (gpu), or one per GPU "
     "and without GPUs one per core (auto); default 1"},
    {"standalone", tddp_launch_read_switch, FIELD(standalone), 0, 0, NULL,
     "one node, meeting on a free port (also what happens when no address is given); "
     "--rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored"},
    {"e c", tddp_launch_read_code, FIELD(code), 0, 0, "CODE",
     "run this Ruby code instead of a script"},
    {"m module", tddp_launch_read_switch, FIELD(as_module), 0, 0, NULL,
     "the script is named as a program of a gem, or else as a Ruby library on the load path (a/b)"},
    {"no-ruby no-python", tddp_launch_read_switch, FIELD(no_ruby), 0, 0, NULL,
     "run SCRIPT as a program of its own instead of with ruby or python3"},
    {"pass-local-rank-arg", tddp_launch_read_switch, FIELD(pass_local_rank), 0, 0, NULL,
     "give each worker --local-rank=N, its own, as a last argument"},
    {"role", tddp_launch_read_text, FIELD(role), 0, 0, "NAME",
     "the workers' ROLE_NAME; default \"default\""},
    {"virtual-local-rank", tddp_launch_read_switch, FIELD(virtual_local_rank), 0, 0, NULL,
     "each worker has LOCAL_RANK 0 and sees one GPU, its own"},
    {"numa-binding", tddp_launch_read_choice, FIELD(numa_binding), 0, 0,
     "none|node|socket|exclusive|core-complex|cores",
     "bind workers to processor cores: those of their GPU's NUMA node (node) or socket (socket), a "
     "share of the node's for each (exclusive), those with one L3 cache (core-complex), a share of "
     "all (cores); default none"},
    {.names = "", .help = "Several nodes"},
    {"nnodes", tddp_launch_read_nodes, FIELD(min_nodes), 1, TDDP_LAUNCH_MAX_NODES, "N|MIN:MAX",
     "number of nodes; as MIN:MAX nodes may join and leave while the job runs (not with static); "
     "default 1"},
    {"node-rank", tddp_launch_read_number, FIELD(node_rank), 0, TDDP_LAUNCH_MAX_NODES - 1, "N",
     "this node's rank, 0 to nnodes - 1; node 0 hosts the rendezvous. With c10d and etcd it may be "
     "left out: nodes are numbered as they come"},
    {"master-addr", tddp_launch_read_host, FIELD(master_addr), 0, 0, "HOST",
     "node 0's address (static rendezvous); default 127.0.0.1, or ::1 without IPv4"},
    {"master-port", tddp_launch_read_number, FIELD(master_port), 0, 65535, "PORT",
     "node 0's port (static rendezvous); default 29500, on one node a free port"},
    {"local-addr", tddp_launch_read_host, FIELD(local_addr), 0, 0, "HOST",
     "the address under which the other nodes reach this one; default: the one that its connection "
     "to the rendezvous has"},
    {"rdzv-backend", tddp_launch_read_choice, FIELD(backend), 0, 0, "static|c10d|etcd",
     "how nodes find each other: over a store that one of them hosts (static, c10d), or over a "
     "cluster of etcd v3, with which a job survives the loss of any node; default static"},
    {"rdzv-endpoint", tddp_launch_read_endpoints, 0, 0, 0, "HOST[:PORT],...",
     "where nodes meet; default port 29400 (c10d), 29500 (static) or 2379 (etcd). With etcd there "
     "may be several, up to 7: its members"},
    {"rdzv-id", tddp_launch_read_text, FIELD(run_id), 1, 256, "ID",
     "the job's name of at most 256 bytes, the same on all nodes; with etcd no other job's"},
    {"rdzv-conf", NULL, 0, 0, 0, "KEY=VALUE,...", "settings of the rendezvous, which stand below"},
    {.names = "", .help = "Failures and signals"},
    {"max-restarts", tddp_launch_read_number, FIELD(max_restarts), 0, 1000000, "N",
     "after a failure start all workers again, at most so many times; default 0"},
    {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT shutdown-timeout", tddp_launch_read_seconds,
     FIELD(shutdown_timeout), 0, DAY_S, "SECONDS",
     "time from SIGTERM to SIGKILL for workers and what they have started; default 30"},
    {"signals-to-handle", tddp_launch_read_signals, 0, 0, 0, "SIGNAL,...",
     "signals that are passed on to the workers and end the job; default "
     "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
    {"report-file", tddp_launch_read_text, FIELD(report_file), 0, 0, "FILE",
     "write the report of a failed job to this file too, as JSON"},
    {.names = "", .help = "Output"},
    {"log-dir", tddp_launch_read_text, FIELD(log_dir), 0, 0, "FOLDER",
     "where log files go, in a folder of their own for each run; default: a temporary one"},
    {"r redirects", tddp_launch_read_by_rank, FIELD(redirects), 0, 3, "0|1|2|3|RANK:N,...",
     "what workers write to files instead of here: 0 nothing, 1 standard output, 2 standard error, "
     "3 both; or by local rank, such as 0:1,1:3; default 0"},
    {"t tee", tddp_launch_read_by_rank, FIELD(tee), 0, 3, "0|1|2|3|RANK:N,...",
     "what goes to files as well as here, in the same form; default 0"},
    {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE log-line-prefix-template", tddp_launch_read_text,
     FIELD(line_prefix), 0, 0, "TEMPLATE",
     "what stands before each line of a worker; ${role_name}, ${local_rank}, ${rank} and "
     "${hostname} are replaced; default [${role_name}${local_rank}]: with --tee"},
    {"local-ranks-filter", tddp_launch_read_by_rank, FIELD(local_ranks_filter), 0, 0, "RANK,...",
     "show only these local ranks' output here; files keep all"},
    {"duplicate-stdout-filters", tddp_launch_read_filters, FIELD(out_filters), 0, 0, "TEXT,...",
     "copy lines of standard output that contain one of these texts to filtered_stdout.log; two "
     "commas stand for one that belongs to a text"},
    {"duplicate-stderr-filters", tddp_launch_read_filters, FIELD(err_filters), 0, 0, "TEXT,...",
     "the same for standard error and filtered_stderr.log"},
    {.names = "", .help = "Watching and checking"},
    {"TORCHELASTIC_HEALTH_CHECK_PORT health-check-port", tddp_launch_read_listener, FIELD(health),
     0, 0, "[ADDRESS:]PORT",
     "answer HTTP requests with the job's state as JSON: 200, or 503 once the job has "
     "failed; on loopback, or on this address (0.0.0.0: all); port 0: a free one, which is shown"},
    {"check", tddp_launch_read_action, FIELD(check), 0, 0, NULL,
     "instead of a script, measure the store, all_reduce and each pair of ranks, and name a slow "
     "link; with one node 2 workers by default"},
    {.names = "", .help = "Accepted for PyTorch's sake"},
    {"monitor-interval", tddp_launch_read_seconds, FIELD(ignored_seconds), 0, DAY_S, "SECONDS",
     "no effect: workers are watched without polling"},
    {"start-method", tddp_launch_read_choice, FIELD(ignored), 0, 0, "spawn|fork|forkserver",
     "no effect: it concerns Python functions, and workers are programs"},
    {"run-path", tddp_launch_read_switch, FIELD(run_path), 0, 0, NULL,
     "no effect: the script runs as without it"},
    {"event-log-handler", tddp_launch_read_choice, FIELD(ignored), 0, 0, "null",
     "null only: there are no events to log; --report-file has what failed"},
    {"logs-specs", tddp_launch_read_choice, FIELD(ignored), 0, 0, "default",
     "default only: others are Python classes; --log-dir says where logs go"},
    {.names = "", .help = "Other"},
    {"print-completion", tddp_launch_read_choice, FIELD(print_completion), 0, 0, "bash|zsh|fish",
     "print what makes a shell complete this command line: bash, zsh or fish; such as source "
     "<(torchrun --print-completion bash)"},
    {"h help", tddp_launch_read_action, FIELD(help), 0, 0, NULL, "show this help"},
    {"version", tddp_launch_read_action, FIELD(version), 0, 0, NULL, "show the version"},
};

const size_t tddp_launch_flag_count = sizeof tddp_launch_flags / sizeof tddp_launch_flags[0];

const tddp_launch_flag tddp_launch_conf_keys[] = {
    {"join_timeout", tddp_launch_read_number, FIELD(conf.join_timeout), 1, DAY_S, "SECONDS",
     "to wait for the other nodes; default 600"},
    {"timeout", tddp_launch_read_number, FIELD(conf.join_timeout), 1, DAY_S, "SECONDS",
     "the same, as PyTorch's static rendezvous has it"},
    {"last_call_timeout", tddp_launch_read_number, FIELD(conf.last_call_timeout), 1, DAY_S,
     "SECONDS", "to wait for more nodes than MIN; default 30"},
    {"heartbeat_timeout", tddp_launch_read_number, FIELD(conf.heartbeat_timeout), 1, DAY_S,
     "SECONDS",
     "without a sign of life until a node counts as lost; default 30, with static never. PyTorch's "
     "is how long sending one may take"},
    {"keep_alive_interval", tddp_launch_read_number, FIELD(conf.keep_alive_interval), 1, DAY_S,
     "SECONDS",
     "between two signs of life; default 5. If this or keep_alive_max_attempt is given, their "
     "product replaces heartbeat_timeout"},
    {"keep_alive_max_attempt", tddp_launch_read_number, FIELD(conf.keep_alive_max_attempt), 1, 1000,
     "N", "signs of life missed until a node counts as lost; default 3"},
    {"read_timeout", tddp_launch_read_number, FIELD(conf.read_timeout), 1, DAY_S, "SECONDS",
     "for an answer before the connection is made again; default 60, and at most a quarter of "
     "heartbeat_timeout"},
    {"close_timeout", tddp_launch_read_number, FIELD(conf.close_timeout), 1, DAY_S, "SECONDS",
     "for all nodes to read that the job has ended; default 3"},
    {"report_interval", tddp_launch_read_number, FIELD(conf.report_interval), 1, DAY_S, "SECONDS",
     "between two lines about what is waited for; default 10"},
    {"is_host", tddp_launch_read_switch, FIELD(conf.is_host), 0, 0, "0|1",
     "whether this node hosts the rendezvous; default: the node with the endpoint's address does"},
    {"use_libuv", tddp_launch_read_switch, FIELD(ignored), 0, 0, "0|1", "no effect"},
    {"store_type", tddp_launch_read_choice, FIELD(ignored), 0, 0, "tcp",
     "tcp only: nodes meet over the network, not in a file"},
    {"protocol", tddp_launch_read_choice, FIELD(conf.etcd.https), 0, 0, "http|https",
     "of etcd; default http"},
    {"cacert", tddp_launch_read_copy, FIELD(conf.etcd.cacert), 0, 0, "FILE",
     "etcd's authority, in PEM"},
    {"cert", tddp_launch_read_copy, FIELD(conf.etcd.cert), 0, 0, "FILE",
     "this client's certificate, in PEM"},
    {"key", tddp_launch_read_copy, FIELD(conf.etcd.key), 0, 0, "FILE",
     "the certificate's key, in PEM"},
    {"username", tddp_launch_read_copy, FIELD(conf.etcd.username), 0, 0, "NAME", "at etcd"},
    {"password", tddp_launch_read_copy, FIELD(conf.etcd.password), 0, 0, "TEXT",
     "at etcd; better in a file, or the whole value in PET_RDZV_CONF"},
    {"password_file", tddp_launch_read_first_line, FIELD(conf.etcd.password), 0, 0, "FILE",
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
