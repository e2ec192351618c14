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

enum { TDDP_LAUNCH_HOST_BYTES = 256, TDDP_LAUNCH_MAX_LOCAL = 4096, TDDP_LAUNCH_MAX_NODES = 65536 };

/* How many workers a node runs: a number, or counted on this machine. */
typedef enum tddp_launch_processes {
    TDDP_LAUNCH_PROCESSES_NUMBER,
    TDDP_LAUNCH_PROCESSES_AUTO,
    TDDP_LAUNCH_PROCESSES_CPU,
    TDDP_LAUNCH_PROCESSES_GPU,
} tddp_launch_processes;

typedef enum tddp_launch_rendezvous_kind {
    TDDP_LAUNCH_STATIC,
    TDDP_LAUNCH_C10D,
} tddp_launch_rendezvous_kind;

/* Where the nodes meet; an empty host: not given. Port -1: not given. */
typedef struct tddp_launch_endpoint {
    char host[TDDP_LAUNCH_HOST_BYTES];
    int port;
} tddp_launch_endpoint;

/* --nproc-per-node: `number` counts only with TDDP_LAUNCH_PROCESSES_NUMBER. */
typedef struct tddp_launch_process_count {
    tddp_launch_processes kind;
    int number;
} tddp_launch_process_count;

/* --rdzv-conf's keys. */
typedef struct tddp_launch_conf {
    int is_host; /* -1: found out */
    int join_timeout;
    int heartbeat_timeout;
} tddp_launch_conf;

typedef struct tddp_launch_options {
    bool help;
    bool version;
    bool standalone;
    bool no_ruby;
    int nodes;
    int node_rank; /* -1: not given */
    int master_port;
    int max_restarts;
    tddp_launch_process_count processes;
    tddp_launch_rendezvous_kind backend;
    tddp_launch_endpoint endpoint;
    tddp_launch_conf conf;
    double monitor_interval;
    double shutdown_timeout;
    const char *master_addr; /* NULL: not given */
    const char *run_id;      /* NULL: not given */
    const char *role;
    const char *code;   /* -e; NULL: a script */
    const char *script; /* NULL with -e, --help and --version */
    char **arguments;   /* those after the script */
    int argument_count;
} tddp_launch_options;

/* Looks up an environment variable; getenv() but in tests. */
typedef const char *(*tddp_launch_lookup)(const char *name);

/*
 * Reads the environment's defaults, then the command line (argv[0] is the program). Errors:
 * TDDP_INVALID_ARGUMENT, its text one line that names the flag, the value and what was expected.
 */
TDDP_NODISCARD tddp_status tddp_launch_options_parse(int argc, char **argv,
                                                     tddp_launch_lookup lookup,
                                                     tddp_launch_options *out);

/* Prints the help, made from the table of flags. */
void tddp_launch_options_help(FILE *to);

/* --- between options.c, flags.c, values.c and help.c ----------------------------------------- */

typedef enum tddp_launch_kind {
    TDDP_LAUNCH_SWITCH,
    TDDP_LAUNCH_TEXT,
    TDDP_LAUNCH_CODE, /* as text, but may begin with a dash */
    TDDP_LAUNCH_NUMBER,
    TDDP_LAUNCH_SECONDS,
    TDDP_LAUNCH_NODES,
    TDDP_LAUNCH_PROCESSES,
    TDDP_LAUNCH_BACKEND,
    TDDP_LAUNCH_ENDPOINT,
    TDDP_LAUNCH_CONF,
} tddp_launch_kind;

/* One row: parser, help and environment default of a flag all come from it. */
typedef struct tddp_launch_flag {
    const char *name; /* "nproc-per-node": --nproc-per-node, --nproc_per_node, PET_NPROC_PER_NODE */
    const char *alias; /* a second name, with an environment default too; or NULL */
    char letter;       /* -h; 0: none */
    tddp_launch_kind kind;
    size_t offset; /* of its field in tddp_launch_options */
    int64_t min;
    int64_t max;
    const char *group; /* heading in the help */
    const char *value; /* what the help calls its value; NULL for a switch */
    const char *help;
} tddp_launch_flag;

extern const tddp_launch_flag tddp_launch_flags[];
extern const size_t tddp_launch_flag_count;

/* Stores `value` in the field of `flag`; `source` names it in a failure's text. */
TDDP_NODISCARD tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                                   const char *value, tddp_launch_options *out);

/* The known name nearest to `name` (no dashes before it), for "did you mean". */
const char *tddp_launch_flag_nearest(const char *name);

#endif
