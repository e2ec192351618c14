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
    TDDP_LAUNCH_MAX_LISTED = 256, /* local ranks in a map or a list */
    TDDP_LAUNCH_MAX_SIGNALS = 32,
    TDDP_LAUNCH_FILTERS_BYTES = 1024,
};

/* How many workers a node runs: a number, or counted on this machine. */
typedef enum tddp_launch_processes {
    TDDP_LAUNCH_PROCESSES_NUMBER,
    TDDP_LAUNCH_PROCESSES_AUTO,
    TDDP_LAUNCH_PROCESSES_CPU,
    TDDP_LAUNCH_PROCESSES_GPU,
    TDDP_LAUNCH_PROCESSES_XPU,
} tddp_launch_processes;

typedef enum tddp_launch_rendezvous_kind {
    TDDP_LAUNCH_STATIC,
    TDDP_LAUNCH_C10D,
    TDDP_LAUNCH_ETCD,
} tddp_launch_rendezvous_kind;

/* In the order of --numa-binding's choices. */
typedef enum tddp_launch_binding_kind {
    TDDP_LAUNCH_BINDING_NONE,
    TDDP_LAUNCH_BINDING_NODE,
    TDDP_LAUNCH_BINDING_SOCKET,
    TDDP_LAUNCH_BINDING_EXCLUSIVE,
    TDDP_LAUNCH_BINDING_CORE_COMPLEX,
    TDDP_LAUNCH_BINDING_CORES,
} tddp_launch_binding_kind;

/* A place where nodes, or they and etcd, meet: a name or an address without brackets. Port 0: any
 * free one, which only one node alone can have. */
typedef struct tddp_launch_endpoint {
    char host[TDDP_LAUNCH_HOST_BYTES];
    int port;
} tddp_launch_endpoint;

/* --nproc-per-node: `number` counts only with TDDP_LAUNCH_PROCESSES_NUMBER. */
typedef struct tddp_launch_process_count {
    tddp_launch_processes kind;
    int number;
} tddp_launch_process_count;

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
    int heartbeat_timeout;
    int keep_alive_interval;    /* -1: not given */
    int keep_alive_max_attempt; /* a number; -1: not given */
    int use_libuv;              /* these two are checked, and have no effect */
    int store_type;
    const char *etcd_key;       /* the first key given that only etcd has, or NULL */
    tddp_launch_etcd_conf etcd; /* the last member */
} tddp_launch_conf;

/* "HOST:PORT", with brackets where they are needed. */
void tddp_launch_endpoint_text(const tddp_launch_endpoint *endpoint, char *text, size_t size);

/* Which streams go to files: bit 0 standard output, bit 1 standard error. */
enum { TDDP_LAUNCH_STDOUT = 1, TDDP_LAUNCH_STDERR = 2 };

/* --redirects, --tee: of all workers, or of those listed, by rising local rank. */
typedef struct tddp_launch_streams {
    int all;
    int count;
    struct {
        int16_t local_rank;
        int16_t streams;
    } listed[TDDP_LAUNCH_MAX_LISTED];
} tddp_launch_streams;

/* --local-ranks-filter: rising; none: not given, all are meant. */
typedef struct tddp_launch_ranks {
    int count;
    int16_t listed[TDDP_LAUNCH_MAX_LISTED];
} tddp_launch_ranks;

/* --duplicate-stdout-filters and its twin: `count` texts, one after the other, each with its NUL.
 */
typedef struct tddp_launch_filters {
    int count;
    char texts[TDDP_LAUNCH_FILTERS_BYTES];
} tddp_launch_filters;

typedef struct tddp_launch_options {
    bool help;
    bool version;
    bool check; /* --check: no script, but torchrun-check */
    bool standalone;
    bool no_ruby;
    bool as_module; /* -m was given: what stands where a script would is `module` */
    bool run_path;
    bool pass_local_rank;
    bool virtual_local_rank;
    int min_nodes;
    int max_nodes; /* more than min_nodes: elastic */
    int node_rank; /* -1: not given */
    int master_port;
    int max_restarts;
    tddp_launch_process_count processes;
    tddp_launch_rendezvous_kind backend;
    tddp_launch_binding_kind numa_binding;
    tddp_launch_endpoint health; /* port -1: not given; host "": loopback */
    tddp_launch_endpoint endpoints[TDDP_LAUNCH_MAX_ENDPOINTS]; /* --master-addr makes one as well */
    int endpoint_count;                                        /* 0: none was given */
    tddp_launch_conf conf;
    double monitor_interval;
    double shutdown_timeout;
    tddp_launch_streams redirects;
    tddp_launch_streams tee;
    tddp_launch_ranks local_ranks_filter;
    tddp_launch_filters out_filters;
    tddp_launch_filters err_filters;
    int signals[TDDP_LAUNCH_MAX_SIGNALS]; /* those that end the job */
    int signal_count;
    const char *master_addr; /* as it was given; NULL: not given, as with those below */
    const char *local_addr;  /* without brackets or a port */
    const char *run_id;
    const char *role; /* never NULL */
    const char *log_dir;
    const char *line_prefix;
    const char *report_file;
    const char *print_completion; /* a shell's name */
    const char *start_method;     /* these three are checked, and have no effect */
    const char *event_log_handler;
    const char *logs_specs;
    const char *code;   /* -e, -c */
    const char *module; /* -m */
    const char *script; /* exactly one of the three is there, or `check` or a request for text */
    char **arguments;   /* those after the script */
    int argument_count;
    /* No flag: the folder that goes with the run, made before torchrun becomes two processes, so
     * that one can remove it for the other. NULL: none could be made. */
    const char *private_folder;
} tddp_launch_options;

/* The streams of a worker that --redirects or --tee name. */
int tddp_launch_streams_of(const tddp_launch_streams *streams, int local_rank);

/* Whether --local-ranks-filter lets a worker's lines through. */
bool tddp_launch_ranks_has(const tddp_launch_ranks *ranks, int local_rank);

/* Whether a line contains one of the texts; never if there are none. */
bool tddp_launch_filters_match(const tddp_launch_filters *filters, const char *line, size_t size);

/* Looks up an environment variable; getenv() but in tests. */
typedef const char *(*tddp_launch_lookup)(const char *name);

/*
 * Reads the environment's defaults, then the command line (argv[0] is the program). Errors:
 * TDDP_INVALID_ARGUMENT, its text one line that names the flag, the value and what was expected.
 * A password among the arguments is overwritten there.
 */
TDDP_NODISCARD tddp_status tddp_launch_options_parse(int argc, char **argv,
                                                     tddp_launch_lookup lookup,
                                                     tddp_launch_options *out);

/* After how long without a sign of life a node counts as lost, in seconds: heartbeat_timeout, or
 * what keep_alive_interval and keep_alive_max_attempt make of it; 0: never, which is static's
 * default. All nodes must have the same. */
int tddp_launch_silence_s(const tddp_launch_options *options);

/* Whether nodes may come and go while the job runs: --nnodes=MIN:MAX, but not with static. */
bool tddp_launch_is_elastic(const tddp_launch_options *options);

/* Checks local ranks that were named against the number of workers, once that is known. */
TDDP_NODISCARD tddp_status tddp_launch_options_check_local(const tddp_launch_options *options,
                                                           int local_size);

/* Prints the help, made from the table of flags. */
void tddp_launch_options_help(FILE *to);

/* --- between the files of this folder -------------------------------------------------------- */

typedef enum tddp_launch_kind {
    TDDP_LAUNCH_KIND_SWITCH,
    TDDP_LAUNCH_KIND_TEXT,
    TDDP_LAUNCH_KIND_CODE,   /* as text, but may begin with a dash */
    TDDP_LAUNCH_KIND_WORD,   /* a text that is one of the choices */
    TDDP_LAUNCH_KIND_CHOICE, /* an enum in the order of the choices */
    TDDP_LAUNCH_KIND_ADDRESS,
    TDDP_LAUNCH_KIND_LISTENER,
    TDDP_LAUNCH_KIND_NUMBER,
    TDDP_LAUNCH_KIND_SECONDS,
    TDDP_LAUNCH_KIND_NODES, /* two ints, one after the other */
    TDDP_LAUNCH_KIND_PROCESSES,
    TDDP_LAUNCH_KIND_ENDPOINTS,
    TDDP_LAUNCH_KIND_CONF,
    TDDP_LAUNCH_KIND_STREAMS,
    TDDP_LAUNCH_KIND_RANKS,
    TDDP_LAUNCH_KIND_FILTERS,
    TDDP_LAUNCH_KIND_SIGNALS,
} tddp_launch_kind;

/* What a shell offers for a value that is not one of the choices. */
typedef enum tddp_launch_offer {
    TDDP_LAUNCH_OFFER_NOTHING,
    TDDP_LAUNCH_OFFER_FILES,
    TDDP_LAUNCH_OFFER_FOLDERS,
    TDDP_LAUNCH_OFFER_HOSTS,
} tddp_launch_offer;

/* One row: parser, help, completion and environment default of a flag all come from it. */
typedef struct tddp_launch_flag {
    const char *name; /* "nproc-per-node": --nproc-per-node, --nproc_per_node, PET_NPROC_PER_NODE */
    const char *alias;    /* a second name, with an environment default too; or NULL */
    char letter;          /* -h; 0: none */
    bool here_only;       /* has no environment default */
    const char *variable; /* a further variable that is its default, weaker than PET_*; or NULL */
    tddp_launch_kind kind;
    size_t offset; /* of its field in tddp_launch_options */
    int64_t min;
    int64_t max;
    const char *group;   /* heading in the help */
    const char *value;   /* what the help calls its value; NULL for a switch */
    const char *choices; /* words with spaces between them, for values and completion; or NULL */
    tddp_launch_offer offer;
    const char *help;
} tddp_launch_flag;

extern const tddp_launch_flag tddp_launch_flags[];
extern const size_t tddp_launch_flag_count;

/* Whether a flag has a long form: -e and -c have none. */
bool tddp_launch_flag_is_long(const tddp_launch_flag *flag);

/* Stores `value` in the field of `flag`; `source` names it in a failure's text. */
TDDP_NODISCARD tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                                   const char *value, tddp_launch_options *out);

/* The same for the kinds that are lists: ENDPOINTS, CONF, STREAMS, RANKS, FILTERS and SIGNALS. */
TDDP_NODISCARD tddp_status tddp_launch_list_store(const tddp_launch_flag *flag, const char *source,
                                                  const char *value, tddp_launch_options *out);

/* One key of --rdzv-conf: parser and help come from it. */
typedef struct tddp_launch_conf_key {
    const char *name;
    enum {
        TDDP_LAUNCH_CONF_NUMBER,
        TDDP_LAUNCH_CONF_BOOL,
        TDDP_LAUNCH_CONF_CHOICE, /* an int: the place of the value among those in `value` */
        TDDP_LAUNCH_CONF_TEXT,
        TDDP_LAUNCH_CONF_PASSWORD,
        TDDP_LAUNCH_CONF_FILE /* the text is its first line */
    } kind;
    size_t offset;     /* of its field in tddp_launch_conf */
    const char *value; /* what the help calls its value */
    const char *help;
} tddp_launch_conf_key;

extern const tddp_launch_conf_key tddp_launch_conf_keys[];
extern const size_t tddp_launch_conf_key_count;

/* endpoints.c and conf.c, for lists.c. */
TDDP_NODISCARD tddp_status tddp_launch_endpoints_store(const char *source, const char *value,
                                                       tddp_launch_options *out);
TDDP_NODISCARD tddp_status tddp_launch_conf_store(const tddp_launch_flag *flag, const char *source,
                                                  const char *value, tddp_launch_conf *out);

/* Overwrites the password in a value of --rdzv-conf, and what follows it, with stars of the same
 * length: the command line is for all users of the machine to see. */
void tddp_launch_conf_hide_password(char *value);

/* HOST, HOST:PORT, [V6] or [V6]:PORT; a text with several colons and no brackets is a bare V6. A
 * port that is not there is -1. */
bool tddp_launch_endpoint_read(const char *text, tddp_launch_endpoint *out);

/* Copies the part at *at without the spaces around it and steps over its comma; false if it is
 * longer than any that makes sense. */
enum { TDDP_LAUNCH_PART_BYTES = TDDP_LAUNCH_HOST_BYTES + 16 };
bool tddp_launch_list_next(const char **at, char part[TDDP_LAUNCH_PART_BYTES]);

/* "SOURCE=VALUE: expected EXPECTED". */
TDDP_NODISCARD tddp_status tddp_launch_value_refuse(const char *source, const char *value,
                                                    const char *expected);

/* What only several flags together tell; settles what they leave open. */
TDDP_NODISCARD tddp_status tddp_launch_options_resolve(tddp_launch_options *options);

#endif
