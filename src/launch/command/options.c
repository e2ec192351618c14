/*
 * Reads torchrun's command line by the table in flags.c: environment defaults first, then the
 * flags up to the script; everything after the script belongs to the workers. Then checks what
 * only several flags together can tell. Pure but for the lookup that is passed in; one thread.
 */
#include <ctype.h>
#include <string.h>

#include "base/base.h"
#include "launch/command/options.h"

enum { NAME_BYTES = 64 };

static const tddp_launch_options defaults = {
    .nodes = 1,
    .node_rank = -1,
    .master_port = -1,
    .processes = {TDDP_LAUNCH_PROCESSES_NUMBER, 1},
    .backend = TDDP_LAUNCH_STATIC,
    .endpoint = {.port = -1},
    .conf = {.is_host = -1, .join_timeout = 600, .heartbeat_timeout = 5},
    .monitor_interval = 0.1,
    .shutdown_timeout = 30,
    .role = "default",
};

/* Flags of PyTorch's that a command line may bring along and that mean nothing here. */
static const char *const only_pytorch[] = {
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "event-log-handler",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "log-line-prefix-template",
    "logs-specs",
    "module",
    "numa-binding",
    "print-completion",
    "redirects",
    "run-path",
    "signals-to-handle",
    "start-method",
    "tee",
    "virtual-local-rank",
};

/* --- the environment ------------------------------------------------------------------------- */

static tddp_status from_variable(const tddp_launch_flag *flag, const char *name,
                                 tddp_launch_lookup lookup, tddp_launch_options *out)
{
    char variable[NAME_BYTES];
    (void)snprintf(variable, sizeof variable, "PET_%s", name);
    for (char *at = variable; *at != '\0'; at++) {
        *at = *at == '-' ? '_' : (char)toupper((unsigned char)*at);
    }
    const char *value = lookup(variable);
    if (!value || *value == '\0') {
        return TDDP_OK;
    }
    return tddp_launch_value_store(flag, variable, value, out);
}

static tddp_status from_environment(tddp_launch_lookup lookup, tddp_launch_options *out)
{
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        tddp_status status = TDDP_OK;
        if (strcmp(flag->name, "shutdown-timeout") == 0) {
            const char *value = lookup("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
            if (value && *value != '\0') {
                status =
                    tddp_launch_value_store(flag, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value, out);
            }
        }
        /* Some are for the command line alone: PET_E or PET_VERSION is too easily something else.
         */
        bool shared = flag->name[1] != '\0' &&
                      flag->offset != offsetof(tddp_launch_options, help) &&
                      flag->offset != offsetof(tddp_launch_options, version);
        if (status == TDDP_OK && shared) {
            status = from_variable(flag, flag->name, lookup, out);
        }
        if (status == TDDP_OK && flag->alias) {
            status = from_variable(flag, flag->alias, lookup, out);
        }
        if (status != TDDP_OK) {
            return status;
        }
    }
    return TDDP_OK;
}

/* --- the command line ------------------------------------------------------------------------ */

/* Copies the name of "--nproc_per_node=2" as "nproc-per-node"; false if it is longer than any. */
static bool read_name(const char *argument, char name[NAME_BYTES])
{
    size_t length = strcspn(argument + 2, "=");
    if (length >= NAME_BYTES) {
        return false;
    }
    for (size_t i = 0; i < length; i++) {
        name[i] = argument[2 + i] == '_' ? '-' : argument[2 + i];
    }
    name[length] = '\0';
    return true;
}

static const tddp_launch_flag *find_flag(const char *argument)
{
    char name[NAME_BYTES];
    bool is_long = argument[1] == '-';
    if (is_long && !read_name(argument, name)) {
        return NULL;
    }
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        if (is_long ? flag->name[1] != '\0' && (strcmp(flag->name, name) == 0 ||
                                                (flag->alias && strcmp(flag->alias, name) == 0))
                    : flag->letter && argument[1] == flag->letter && argument[2] == '\0') {
            return flag;
        }
    }
    return NULL;
}

static tddp_status unknown_flag(const char *argument)
{
    char name[NAME_BYTES];
    if (argument[1] != '-') {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "unknown flag %.64s; see torchrun --help",
                         argument);
    }
    if (!read_name(argument, name)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "unknown flag %.64s...; see torchrun --help",
                         argument);
    }
    for (size_t i = 0; i < sizeof only_pytorch / sizeof only_pytorch[0]; i++) {
        if (strcmp(only_pytorch[i], name) == 0) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "--%s is a flag of PyTorch's torchrun that this one does not have; "
                             "see torchrun --help",
                             name);
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "unknown flag --%s; did you mean --%s? see torchrun --help", name,
                     tddp_launch_flag_nearest(name));
}

/* Takes the flag at argv[*index] and its value; leaves *index at the last argument taken. */
static tddp_status take_flag(int argc, char **argv, int *index, tddp_launch_options *out)
{
    const char *argument = argv[*index];
    const tddp_launch_flag *flag = find_flag(argument);
    if (!flag) {
        return unknown_flag(argument);
    }
    char source[NAME_BYTES + 4];
    size_t length = argument[1] == '-' ? strcspn(argument, "=") : strlen(argument);
    (void)snprintf(source, sizeof source, "%.*s", (int)length, argument);
    const char *value = argument[length] == '=' ? argument + length + 1 : NULL;
    if (flag->kind == TDDP_LAUNCH_SWITCH) {
        if (value) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s takes no value, got \"%.64s\"", source,
                             value);
        }
        value = "1";
    } else if (!value) {
        value = *index + 1 < argc ? argv[*index + 1] : NULL;
        if (!value || (flag->kind != TDDP_LAUNCH_CODE && strncmp(value, "--", 2) == 0)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s needs a value: %s; see torchrun --help",
                             source, flag->value);
        }
        (*index)++;
    }
    return tddp_launch_value_store(flag, source, value, out);
}

/* --- what several flags tell together -------------------------------------------------------- */

static tddp_status check_several_nodes(const tddp_launch_options *options)
{
    bool endpoint = options->endpoint.host[0] != '\0';
    if (options->standalone) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--standalone is for one node, but --nnodes=%d; leave one of them out",
                         options->nodes);
    }
    if (options->backend == TDDP_LAUNCH_STATIC && options->node_rank < 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nnodes=%d needs --node-rank=N on each node, 0 to %d (or "
                         "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, which can do without)",
                         options->nodes, options->nodes - 1);
    }
    if (!endpoint && (options->backend == TDDP_LAUNCH_C10D || !options->master_addr)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--nnodes=%d needs the place where the nodes meet, the same on each: %s",
                         options->nodes,
                         options->backend == TDDP_LAUNCH_C10D
                             ? "--rdzv-endpoint=HOST:PORT"
                             : "--master-addr=HOST and --master-port=PORT");
    }
    if (options->endpoint.port == 0 || options->master_port == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "port 0: expected a port from 1 to 65535, since the other nodes must "
                         "know it");
    }
    return TDDP_OK;
}

static tddp_status check_together(const tddp_launch_options *options)
{
    if (!options->script && !options->code) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "no script given; expected torchrun [FLAGS] SCRIPT [ARGUMENTS]; see "
                         "torchrun --help");
    }
    if (options->code && options->no_ruby) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "-e is Ruby code and cannot go with --no-ruby");
    }
    if (options->node_rank >= options->nodes) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "--node-rank=%d: expected 0 to %d, since --nnodes=%d", options->node_rank,
                         options->nodes - 1, options->nodes);
    }
    return options->nodes > 1 ? check_several_nodes(options) : TDDP_OK;
}

tddp_status tddp_launch_options_parse(int argc, char **argv, tddp_launch_lookup lookup,
                                      tddp_launch_options *out)
{
    tddp_launch_options options = defaults;
    tddp_status status = from_environment(lookup, &options);
    int index = 1;
    /* Code stands where a script would: what follows is the workers', as with ruby -e. */
    for (; status == TDDP_OK && index < argc && !options.code; index++) {
        if (strcmp(argv[index], "--") == 0) {
            index++;
            break;
        }
        if (argv[index][0] != '-' || argv[index][1] == '\0') {
            break;
        }
        status = take_flag(argc, argv, &index, &options);
    }
    if (status != TDDP_OK) {
        return status;
    }
    if (!options.code && index < argc) {
        options.script = argv[index++];
    }
    options.arguments = argv + (index < argc ? index : argc);
    options.argument_count = index < argc ? argc - index : 0;
    if (!options.help && !options.version) {
        status = check_together(&options);
    }
    if (status == TDDP_OK) {
        *out = options;
    }
    return status;
}
