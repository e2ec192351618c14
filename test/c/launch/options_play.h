/* Command lines as one text, and what torchrun makes of them. For one test file each. */
#ifndef TDDP_TEST_OPTIONS_PLAY_H
#define TDDP_TEST_OPTIONS_PLAY_H

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "launch/command/options.h"

/* One variable that the lookup knows, "NAME=value". */
static const char *variable;

static inline char *lookup(const char *name)
{
    size_t length = strlen(name);
    return variable && strncmp(variable, name, length) == 0 && variable[length] == '='
               ? (char *)variable + length + 1
               : NULL;
}

static tddp_launch_options got;

/* Parses a command line that is split at its spaces. */
static inline tddp_status parse(const char *line)
{
    static char text[1024];
    static char *argv[64];
    int argc = 0;
    snprintf(text, sizeof text, "torchrun %s", line);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    return tddp_launch_options_parse(argc, argv, lookup, &got);
}

static inline void refused(const char *line, const char *text)
{
    CHECK_STATUS(parse(line), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), text);
}

#endif
