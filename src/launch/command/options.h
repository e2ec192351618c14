/*
 * torchrun's command line: what was asked for, after the command line, the PET_* environment and
 * the defaults have been put together. Strings are borrowed from argv and the environment.
 */
#ifndef TDDP_LAUNCH_OPTIONS_H
#define TDDP_LAUNCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <tddp/status.h>

enum {
    TDDP_LAUNCH_HOST_BYTES = 256,
    TDDP_LAUNCH_MAX_LOCAL = 4096,
    TDDP_LAUNCH_MAX_NODES = 65536,
    TDDP_LAUNCH_MAX_ENDPOINTS = 7,
    TDDP_LAUNCH_MAX_SIGNALS = 32,
    TDDP_LAUNCH_FILTERS_BYTES = 1024,
};

/* How many workers a node runs, where that is not a number: counted on this machine. By the places
 * of --nproc-per-node's choices, the number being the first. */
enum {
    TDDP_LAUNCH_PROCESSES_AUTO = -1,
    TDDP_LAUNCH_PROCESSES_CPU = -2,
    TDDP_LAUNCH_PROCESSES_GPU = -3,
};

/* In the order of their flags' choices. */
typedef enum tddp_launch_rendezvous_kind {
    TDDP_LAUNCH_STATIC,
    TDDP_LAUNCH_C10D,
    TDDP_LAUNCH_ETCD,
} tddp_launch_rendezvous_kind;

typedef enum tddp_launch_binding_kind {
    TDDP_LAUNCH_BINDING_NONE,
    TDDP_LAUNCH_BINDING_NODE,
    TDDP_LAUNCH_BINDING_SOCKET,
    TDDP_LAUNCH_BINDING_EXCLUSIVE,
    TDDP_LAUNCH_BINDING_CORE_COMPLEX,
    TDDP_LAUNCH_BINDING_CORES,
} tddp_launch_binding_kind;

/* A place where nodes, or they and etcd, meet: a name or an address without brackets. Port 0: any
 * free one, which only one node alone can have; -1: not given. */
typedef struct tddp_launch_endpoint {
    char host[TDDP_LAUNCH_HOST_BYTES];
    int port;
} tddp_launch_endpoint;

/* --rdzv-conf's keys for etcd. Texts are empty where they were not given. */
typedef struct tddp_launch_etcd_conf {
    int https;                           /* 1: TLS */
    char cacert[TDDP_LAUNCH_HOST_BYTES]; /* files in PEM */
    char cert[TDDP_LAUNCH_HOST_BYTES];
    char key[TDDP_LAUNCH_HOST_BYTES];
    char username[TDDP_LAUNCH_HOST_BYTES];
    char password[TDDP_LAUNCH_HOST_BYTES];
} tddp_launch_etcd_conf;

/* --rdzv-conf's keys, in seconds. */
typedef struct tddp_launch_conf {
    int is_host; /* -1: found out */
    int join_timeout;
    int last_call_timeout;
    int close_timeout;
    int report_interval; /* between two lines about what is waited for */
    int read_timeout;
    int heartbeat_timeout;      /* -1: not given */
    int keep_alive_interval;    /* 0: not given */
    int keep_alive_max_attempt; /* a number; 0: not given */
    const char *etcd_key;       /* the first key given that only etcd has, or NULL */
    tddp_launch_etcd_conf etcd;
} tddp_launch_conf;

/* "HOST:PORT", with brackets where they are needed. */
void tddp_launch_endpoint_text(const tddp_launch_endpoint *endpoint, char *text, size_t size);

/* --redirects, --tee, --local-ranks-filter: what was asked for by local rank. Of streams bit 0 is
 * standard output, bit 1 standard error. */
typedef struct tddp_launch_by_rank {
    bool given;                              /* anything was */
    int highest;                             /* local rank that was named; -1: none */
    unsigned char of[TDDP_LAUNCH_MAX_LOCAL]; /* the streams; more than these if it was named */
} tddp_launch_by_rank;

/* --duplicate-stdout-filters and its twin: `count` texts, one after the other, each with its NUL.
 */
typedef struct tddp_launch_filters {
    int count;
    char texts[TDDP_LAUNCH_FILTERS_BYTES];
} tddp_launch_filters;

/* Switches are 0 or 1. */
typedef struct tddp_launch_options {
    int help;
    int version;
    int check; /* --check: no script, but torchrun-check */
    int standalone;
    int no_ruby;
    int as_module; /* -m was given: what stands where a script would is `module` */
    int run_path;
    int pass_local_rank;
    int virtual_local_rank;
    int min_nodes;
    int max_nodes; /* follows min_nodes; more than that: elastic */
    int node_rank; /* -1: not given */
    int master_port;
    int max_restarts;
    int processes;        /* a number, or one of those above; 0: not given */
    int print_completion; /* a shell's place among its choices; -1: not given */
    int ignored;          /* what is checked and has no effect */
    double ignored_seconds;
    double shutdown_timeout;
    tddp_launch_rendezvous_kind backend;
    tddp_launch_binding_kind numa_binding;
    tddp_launch_endpoint health; /* port -1: not given; host "": loopback */
    tddp_launch_endpoint endpoints[TDDP_LAUNCH_MAX_ENDPOINTS]; /* --master-addr makes one as well */
    int endpoint_count;                                        /* 0: none was given */
    tddp_launch_conf conf;
    tddp_launch_by_rank redirects;
    tddp_launch_by_rank tee;
    tddp_launch_by_rank local_ranks_filter;
    tddp_launch_filters out_filters;
    tddp_launch_filters err_filters;
    int signals[TDDP_LAUNCH_MAX_SIGNALS]; /* those that end the job */
    int signal_count;
    char master_addr[TDDP_LAUNCH_HOST_BYTES]; /* without brackets; "": not given */
    char local_addr[TDDP_LAUNCH_HOST_BYTES];
    const char *run_id; /* NULL: not given, as with those below */
    const char *role;   /* never NULL */
    const char *log_dir;
    const char *line_prefix;
    const char *report_file;
    const char *code;   /* -e, -c */
    const char *module; /* -m */
    const char *script; /* exactly one of the three is there, or `check` or a request for text */
    char **arguments;   /* those after the script */
    int argument_count;
    /* No flag: the folder that goes with the run. Its name is known before torchrun becomes two
     * processes, so that one can remove it for the other. NULL: none could be made. */
    const char *private_folder;
} tddp_launch_options;

/* Whether a line contains one of the texts; never if there are none. */
bool tddp_launch_filters_match(const tddp_launch_filters *filters, const char *line, size_t size);

/* getenv(), but in tests. */
typedef char *tddp_launch_lookup(const char *name);

/*
 * Reads the environment's defaults, then the command line (argv[0] is the program). Errors:
 * TDDP_INVALID_ARGUMENT, its text one line that names the flag, the value and what was expected.
 * A password among the arguments is overwritten there.
 */
TDDP_NODISCARD tddp_status tddp_launch_options_parse(int argc, char **argv,
                                                     tddp_launch_lookup *lookup,
                                                     tddp_launch_options *out);

/* After how long without a sign of life a node counts as lost, in seconds: heartbeat_timeout, or
 * what keep_alive_interval and keep_alive_max_attempt make of it; 0: never, which is static's
 * default. All nodes must have the same. */
int tddp_launch_silence_s(const tddp_launch_options *options);

/* What --nnodes says: "2", or "2:4" where min_nodes and max_nodes differ. */
#define TDDP_LAUNCH_NODES_BYTES 32
void tddp_launch_nodes_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_NODES_BYTES]);

/* Whether nodes may come and go while the job runs: --nnodes=MIN:MAX, but not with static. */
bool tddp_launch_is_elastic(const tddp_launch_options *options);

/* Checks local ranks that were named against the number of workers, once that is known. */
TDDP_NODISCARD tddp_status tddp_launch_options_check_local(const tddp_launch_options *options,
                                                           int local_size);

/* Prints the help, made from the table of flags. */
void tddp_launch_options_help(FILE *to);

#endif
