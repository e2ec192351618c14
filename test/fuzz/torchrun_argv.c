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

static char *environment;

/* Every variable has the value of the first line, so that their parsers are reached too. */
static char *lookup(const char *name)
{
    (void)name;
    return environment;
}

/* What is in lists is within bounds. */
static bool lists_make_sense(const tddp_launch_options *options)
{
    const tddp_launch_by_rank *lists[] = {&options->redirects, &options->tee,
                                          &options->local_ranks_filter};
    for (int m = 0; m < 3; m++) {
        for (int i = 0; i < TDDP_LAUNCH_MAX_LOCAL; i++) {
            int streams = lists[m]->of[i]; /* with a bit for a rank that was named */
            if (streams > 7 || (streams > 0 && !lists[m]->given)) {
                return false;
            }
        }
        if (lists[m]->highest < 0 || lists[m]->highest >= TDDP_LAUNCH_MAX_LOCAL) {
            return false;
        }
    }
    for (int i = 0; i < options->signal_count; i++) {
        if (options->signals[i] <= 0 || options->signals[i] == 9) {
            return false;
        }
    }
    /* A text of its own matches a filter that has one. */
    return options->out_filters.count == 0 ||
           tddp_launch_filters_match(&options->out_filters, options->out_filters.texts,
                                     strlen(options->out_filters.texts));
}

static bool nodes_make_sense(const tddp_launch_options *options)
{
    if (options->min_nodes < 1 || options->min_nodes > options->max_nodes ||
        options->node_rank >= options->max_nodes || options->endpoint_count < 0 ||
        options->endpoint_count > TDDP_LAUNCH_MAX_ENDPOINTS ||
        (options->max_nodes > 1 && options->endpoint_count == 0)) {
        return false;
    }
    for (int i = 0; i < options->endpoint_count; i++) {
        const tddp_launch_endpoint *endpoint = &options->endpoints[i];
        if (endpoint->host[0] == '\0' || endpoint->port < (options->max_nodes > 1) ||
            endpoint->port > 65535) {
            return false;
        }
    }
    return true;
}

static bool makes_sense(const tddp_launch_options *options, int argc)
{
    int programs = (options->script != NULL) + (options->code != NULL) + (options->module != NULL) +
                   options->check;
    if (options->argument_count < 0 || options->argument_count >= argc ||
        options->arguments[options->argument_count] != NULL || strlen(options->role) == 0 ||
        !lists_make_sense(options)) {
        return false;
    }
    if (options->help || options->version || options->print_completion >= 0) {
        return true;
    }
    /* Either is right, but nothing may be read beyond its end. */
    (void)tddp_launch_options_check_local(options, 1);
    return programs == 1 && options->numa_binding <= TDDP_LAUNCH_BINDING_CORES &&
           nodes_make_sense(options);
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
        if (!makes_sense(&options, argc)) {
            abort();
        }
    } else if (tddp_error_message()[0] == '\0') {
        abort();
    }
    free(text);
    return 0;
}
