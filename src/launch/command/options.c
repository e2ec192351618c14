/*
 * Reads torchrun's command line by the table in flags.c: environment defaults first, then the
 * flags up to the script; everything after the script belongs to the workers. Checks of several
 * flags together are in resolve.c. Pure but for the lookup that is passed in; one thread.
 */
#include <ctype.h>
#include <signal.h>
#include <string.h>

#include "base/base.h"
#include "launch/command/flags.h"

enum { OTHERS_BYTES = 512 };

static const char password[] = "password=";

static const tddp_launch_options defaults = {
    .min_nodes = 1,
    .max_nodes = 1,
    .node_rank = -1,
    .health = {.port = -1},
    .master_port = -1,
    .print_completion = -1,
    .conf = {.is_host = -1,
             .join_timeout = 600,
             .last_call_timeout = 30,
             .close_timeout = 3,
             .report_interval = 10,
             .read_timeout = 60,
             .heartbeat_timeout = -1},
    .shutdown_timeout = 30,
    .signals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT},
    .signal_count = 4,
    .role = "default",
};

/* --- the environment ------------------------------------------------------------------------- */

static tddp_status from_variable(const tddp_launch_flag *flag, const char *name,
                                 tddp_launch_lookup *lookup, tddp_launch_options *out)
{
    char variable[TDDP_LAUNCH_WORD_BYTES + 4];
    (void)snprintf(variable, sizeof variable, "%s%s", isupper((unsigned char)*name) ? "" : "PET_",
                   name);
    for (char *at = variable; *at != '\0'; at++) {
        *at = *at == '-' ? '_' : (char)toupper((unsigned char)*at);
    }
    const char *value = lookup(variable);
    return value && *value != '\0' ? tddp_launch_value_store(flag, variable, value, out) : TDDP_OK;
}

static tddp_status from_environment(tddp_launch_lookup *lookup, tddp_launch_options *out)
{
    char name[TDDP_LAUNCH_WORD_BYTES];
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        for (int j = 0; tddp_launch_word(flag->names, j, name) && status == TDDP_OK; j++) {
            if (name[1] != '\0' && flag->read != tddp_launch_read_action) {
                status = from_variable(flag, name, lookup, out);
            }
        }
    }
    return status;
}

/* --- the command line ------------------------------------------------------------------------ */

/* The flag with this name, or the only one that begins with it, as Python's argparse has it. With
 * several `others` has their names. */
static const tddp_launch_flag *find_flag(const char *name, bool is_long, char others[OTHERS_BYTES])
{
    const tddp_launch_flag *found = NULL;
    char word[TDDP_LAUNCH_WORD_BYTES];
    size_t length = strlen(name);
    int count = 0;
    for (size_t i = 0; i < tddp_launch_flag_count && length > 0; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        for (int j = 0; tddp_launch_word(flag->names, j, word); j++) {
            if (is_long == (word[1] == '\0') || isupper((unsigned char)*word)) {
                continue;
            }
            if (strcmp(word, name) == 0) {
                others[0] = '\0';
                return flag;
            }
            if (is_long && strncmp(word, name, length) == 0 && found != flag) {
                found = flag;
                tddp_add_text(others, OTHERS_BYTES, "%s--%s", count++ > 0 ? ", " : "", word);
            }
        }
    }
    return count == 1 ? found : NULL;
}

/* Takes the flag at argv[*index] and its value; leaves *index at the last argument taken.
 * --nproc_per_node=2 is --nproc-per-node=2; -r3, -r=3 and -r 3 are the same; code only ever stands
 * apart. */
static tddp_status take_flag(char **argv, int *index, tddp_launch_options *out)
{
    char source[TDDP_LAUNCH_WORD_BYTES];
    char name[TDDP_LAUNCH_WORD_BYTES];
    char others[OTHERS_BYTES] = "";
    char *argument = argv[*index];
    bool is_long = argument[1] == '-';
    size_t length = is_long ? strcspn(argument, "=") : 2;
    char *value = argument[length] == '\0' ? NULL : argument + length + (argument[length] == '=');
    (void)snprintf(source, sizeof source, "%.*s", (int)length, argument);
    (void)snprintf(name, sizeof name, "%s", source + 1 + is_long);
    for (char *at = name; *at != '\0'; at++) {
        *at = *at == '_' ? '-' : *at;
    }
    const tddp_launch_flag *flag = length < sizeof source ? find_flag(name, is_long, others) : NULL;
    if (!flag && others[0] != '\0') {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s may be one of %s; expected one of them", source,
                         others);
    }
    bool stands_apart = flag && (!flag->value || flag->read == tddp_launch_read_code);
    if (!flag || (!is_long && value && stands_apart)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "unknown flag %.*s; flags of the script stand after it; see torchrun "
                         "--help",
                         is_long ? (int)length : (int)strlen(argument), argument);
    }
    if (!flag->value) {
        return value ? tddp_fail(TDDP_INVALID_ARGUMENT, "%s takes no value, got \"%.64s\"", source,
                                 value)
                     : tddp_launch_value_store(flag, source, "1", out);
    }
    if (!value) {
        value = argv[++*index]; /* NULL at their end */
        if (!value || (flag->read != tddp_launch_read_code && strncmp(value, "--", 2) == 0)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s needs a value: %s; see torchrun --help",
                             source, flag->value);
        }
    }
    tddp_status status = tddp_launch_value_store(flag, source, value, out);
    if (!flag->read && (value = strstr(value, password))) {
        /* The command line is for all users of the machine to see. What follows may be the
         * password's too, with a comma in it; no shorter text remains. */
        value += sizeof password - 1;
        memset(value, '*', strlen(value));
    }
    return status;
}

tddp_status tddp_launch_options_parse(int argc, char **argv, tddp_launch_lookup *lookup,
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
        status = take_flag(argv, &index, &options);
    }
    if (status != TDDP_OK) {
        return status;
    }
    if (!options.code && index < argc) {
        options.script = argv[index++];
    }
    options.arguments = argv + index;
    options.argument_count = argc - index;
    if (!options.help && !options.version && options.print_completion < 0) {
        status = tddp_launch_options_resolve(&options);
    }
    if (status == TDDP_OK) {
        *out = options;
    }
    return status;
}
