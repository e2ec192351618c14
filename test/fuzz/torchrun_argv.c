/*
 * torchrun's command line from arbitrary bytes: each line of the input is an argument. Whatever
 * they are, the parser answers with options that make sense or with a text, and reads nothing
 * beyond them.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/status.h>

#include "launch/command/options.h"

enum { MOST_ARGUMENTS = 64 };

static const char *environment;

/* Every variable has the value of the first line, so that their parsers are reached too. */
static const char *lookup(const char *name)
{
    (void)name;
    return environment;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    char *argv[MOST_ARGUMENTS + 2] = {"torchrun"};
    int argc = 1;
    if (!text) {
        return 0;
    }
    memcpy(text, data, size);
    text[size] = '\0';
    environment = NULL;
    char *at = text;
    if (size > 0 && *at == '=') {
        char *end = strchr(at, '\n');
        environment = at + 1;
        at = end ? end + 1 : text + size;
        if (end) {
            *end = '\0';
        }
    }
    while (at < text + size && argc <= MOST_ARGUMENTS) {
        argv[argc++] = at;
        at += strcspn(at, "\n");
        *at++ = '\0';
    }
    argv[argc] = NULL;
    tddp_launch_options options;
    if (tddp_launch_options_parse(argc, argv, lookup, &options) == TDDP_OK) {
        bool runs = !options.help && !options.version && !options.print_completion;
        if (options.max_nodes < 1 || options.argument_count < 0 || options.argument_count >= argc ||
            strlen(options.role) == 0 || options.arguments[options.argument_count] != NULL ||
            (runs && options.node_rank >= options.max_nodes) ||
            (runs && !options.script && !options.code && !options.module && !options.check)) {
            abort();
        }
    } else if (tddp_error_message()[0] == '\0') {
        abort();
    }
    free(text);
    return 0;
}
