/*
 * Reads torchrun's command line by the table in flags.c: environment defaults first, then the
 * flags up to the script; everything after the script belongs to the workers. Checks of several
 * flags together are in resolve.c. Pure but for the lookup that is passed in; one thread.
 */
#include <ctype.h>
#include <signal.h>
#include <string.h>

#include "base/base.h"
#include "launch/command/options.h"

enum { NAME_BYTES = 64, OTHERS_BYTES = 512 };

static const tddp_launch_options defaults = {
    .min_nodes = 1,
    .max_nodes = 1,
    .node_rank = -1,
    .health = {.port = -1},
    .master_port = -1,
    .processes = {TDDP_LAUNCH_PROCESSES_NUMBER, 0},
    .backend = TDDP_LAUNCH_STATIC,
    .conf = {.is_host = -1,
             .join_timeout = 600,
             .last_call_timeout = 30,
             .close_timeout = 3,
             .report_interval = 10,
             .read_timeout = 60,
             .heartbeat_timeout = -1,
             .keep_alive_interval = -1,
             .keep_alive_max_attempt = -1},
    .monitor_interval = 0.1,
    .shutdown_timeout = 30,
    .signals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT},
    .signal_count = 4,
    .role = "default",
};

/* --- the environment ------------------------------------------------------------------------- */

static tddp_status from_variable(const tddp_launch_flag *flag, const char *variable,
                                 tddp_launch_lookup lookup, tddp_launch_options *out)
{
    const char *value = lookup(variable);
    if (!value || *value == '\0') {
        return TDDP_OK;
    }
    return tddp_launch_value_store(flag, variable, value, out);
}

static tddp_status from_pet(const tddp_launch_flag *flag, const char *name,
                            tddp_launch_lookup lookup, tddp_launch_options *out)
{
    char variable[NAME_BYTES];
    (void)snprintf(variable, sizeof variable, "PET_%s", name);
    for (char *at = variable; *at != '\0'; at++) {
        *at = *at == '-' ? '_' : (char)toupper((unsigned char)*at);
    }
    return from_variable(flag, variable, lookup, out);
}

static tddp_status from_environment(tddp_launch_lookup lookup, tddp_launch_options *out)
{
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        if (flag->here_only) {
            continue;
        }
        tddp_status status =
            flag->variable ? from_variable(flag, flag->variable, lookup, out) : TDDP_OK;
        if (status == TDDP_OK) {
            status = from_pet(flag, flag->name, lookup, out);
        }
        if (status == TDDP_OK && flag->alias) {
            status = from_pet(flag, flag->alias, lookup, out);
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

/* "-r", "-r3" and "-r=3" are the same flag; code only ever stands apart. */
static bool is_letter(const tddp_launch_flag *flag, const char *argument)
{
    bool joined = flag->kind != TDDP_LAUNCH_KIND_SWITCH && flag->kind != TDDP_LAUNCH_KIND_CODE;
    return flag->letter && argument[1] == flag->letter && (argument[2] == '\0' || joined);
}

/* Whether this long flag, or its other name, begins with `name`; `*whole`: or is it. */
static bool begins_with(const tddp_launch_flag *flag, const char *name, bool *whole)
{
    const char *const names[] = {flag->name, flag->alias};
    size_t length = strlen(name);
    bool begins = false;
    *whole = false;
    for (int i = 0; i < 2 && tddp_launch_flag_is_long(flag); i++) {
        if (names[i] && strncmp(names[i], name, length) == 0) {
            begins = true;
            *whole |= names[i][length] == '\0';
        }
    }
    return begins;
}

/* The flag with this name, or the only one that begins with it, as Python's argparse has it. With
 * several `others` has their names. */
static const tddp_launch_flag *find_long(const char *name, char others[OTHERS_BYTES])
{
    const tddp_launch_flag *found = NULL;
    size_t size = 0;
    int count = 0;
    for (size_t i = 0; i < tddp_launch_flag_count && *name != '\0'; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        bool whole;
        if (!begins_with(flag, name, &whole)) {
            continue;
        }
        if (whole) {
            return flag;
        }
        found = flag;
        count++;
        if (size < OTHERS_BYTES) {
            size += (size_t)snprintf(others + size, OTHERS_BYTES - size, "%s--%s", size ? ", " : "",
                                     flag->name);
        }
    }
    if (count == 1) {
        others[0] = '\0';
    }
    return count == 1 ? found : NULL;
}

static const tddp_launch_flag *find_flag(const char *argument, char others[OTHERS_BYTES])
{
    char name[NAME_BYTES];
    others[0] = '\0';
    if (argument[1] == '-') {
        return read_name(argument, name) ? find_long(name, others) : NULL;
    }
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        if (is_letter(&tddp_launch_flags[i], argument)) {
            return &tddp_launch_flags[i];
        }
    }
    return NULL;
}

static tddp_status unknown_flag(const char *argument, const char *others)
{
    static const char advice[] = "flags of the script stand after it; see torchrun --help";
    char name[NAME_BYTES];
    if (argument[1] != '-' || !read_name(argument, name)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "unknown flag %.64s%s; %s", argument,
                         strlen(argument) > 64 ? "..." : "", advice);
    }
    if (others[0] != '\0') {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "--%s may be one of %s; expected one of them", name,
                         others);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT, "unknown flag --%s; %s", name, advice);
}

/* The value within the argument itself, or NULL; `*length` is that of the flag before it. */
static const char *joined_value(const char *argument, size_t *length)
{
    bool is_long = argument[1] == '-';
    *length = is_long ? strcspn(argument, "=") : strlen(argument) < 2 ? 1 : 2;
    const char *value = argument + *length;
    if (*value == '=') {
        return value + 1;
    }
    return *value == '\0' ? NULL : value;
}

/* Takes the flag at argv[*index] and its value; leaves *index at the last argument taken. */
static tddp_status take_flag(int argc, char **argv, int *index, tddp_launch_options *out)
{
    const char *argument = argv[*index];
    char others[OTHERS_BYTES];
    const tddp_launch_flag *flag = find_flag(argument, others);
    if (!flag) {
        return unknown_flag(argument, others);
    }
    char source[NAME_BYTES + 4];
    size_t length;
    const char *value = joined_value(argument, &length);
    (void)snprintf(source, sizeof source, "%.*s", (int)length, argument);
    if (flag->kind == TDDP_LAUNCH_KIND_SWITCH) {
        if (value) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s takes no value, got \"%.64s\"", source,
                             value);
        }
        value = "1";
    } else if (!value) {
        value = *index + 1 < argc ? argv[*index + 1] : NULL;
        if (!value || (flag->kind != TDDP_LAUNCH_KIND_CODE && strncmp(value, "--", 2) == 0)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s needs a value: %s; see torchrun --help",
                             source, flag->value);
        }
        (*index)++;
    }
    tddp_status status = tddp_launch_value_store(flag, source, value, out);
    if (flag->kind == TDDP_LAUNCH_KIND_CONF) {
        tddp_launch_conf_hide_password(argv[*index] + (value - argv[*index]));
    }
    return status;
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
    if (!options.help && !options.version && !options.print_completion) {
        status = tddp_launch_options_resolve(&options);
    }
    if (status == TDDP_OK) {
        *out = options;
    }
    return status;
}
