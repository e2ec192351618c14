/*
 * Line prefixes from a template in the form of Python's string.Template, as PyTorch has it. Pure
 * but for the two environment variables about colours.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/output/prefix.h"

static const char default_template[] = "[${role_name}${local_rank}]:";

static bool is_letter(char letter)
{
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || letter == '_';
}

/* Length of the name at `text`, as Python has names. */
static size_t name_length(const char *text)
{
    size_t length = 0;
    if (is_letter(text[0])) {
        while (is_letter(text[length]) || (text[length] >= '0' && text[length] <= '9')) {
            length++;
        }
    }
    return length;
}

static bool is_name(const char *name, size_t length, const char *wanted)
{
    return strlen(wanted) == length && strncmp(name, wanted, length) == 0;
}

/* What a macro stands for, or NULL. */
static const char *look_up(const tddp_launch_prefix_values *values, const char *name, size_t length,
                           char number[16])
{
    if (is_name(name, length, "role_name")) {
        return values->role_name;
    }
    if (is_name(name, length, "hostname")) {
        return values->hostname;
    }
    bool local = is_name(name, length, "local_rank");
    if (!local && !is_name(name, length, "rank")) {
        return NULL;
    }
    (void)snprintf(number, 16, "%d", local ? values->local_rank : values->rank);
    return number;
}

/* Takes what begins with the dollar at `at`; returns how long it is in the template. */
static size_t fill_one(const char *at, const tddp_launch_prefix_values *values, tddp_bytes *text,
                       tddp_status *status)
{
    char number[16];
    bool braced = at[1] == '{';
    const char *name = at + 1 + braced;
    size_t length = name_length(name);
    bool whole = length > 0 && (!braced || name[length] == '}');
    const char *value = whole ? look_up(values, name, length, number) : NULL;
    if (value) {
        *status = tddp_bytes_append(text, value, strlen(value));
        return 1 + length + 2 * (size_t)braced;
    }
    *status = tddp_bytes_append(text, "$", 1);
    return at[1] == '$' ? 2 : 1;
}

char *tddp_launch_prefix_fill(const char *template, const tddp_launch_prefix_values *values)
{
    tddp_bytes text = {0};
    tddp_status status = TDDP_OK;
    const char *at = template ? template : default_template;
    while (*at != '\0' && status == TDDP_OK) {
        size_t plain = strcspn(at, "$");
        if (plain > 0) {
            status = tddp_bytes_append(&text, at, plain);
            at += plain;
        } else {
            at += fill_one(at, values, &text, &status);
        }
    }
    if (status == TDDP_OK) {
        status = tddp_bytes_append(&text, "", 1);
    }
    if (status != TDDP_OK) {
        tddp_bytes_free(&text);
        return NULL;
    }
    return text.data;
}

char *tddp_launch_prefix_color(const char *prefix, int local_rank)
{
    /* Neither red, which stands for errors, nor black and white, which may be the background. */
    static const int colors[] = {36, 33, 32, 35, 34, 96, 93, 92, 95, 94};
    int color = colors[(size_t)local_rank % (sizeof colors / sizeof colors[0])];
    return tddp_format("\033[%dm%s\033[0m", color, prefix);
}

bool tddp_launch_prefix_colors(void)
{
    const char *unwanted = getenv("NO_COLOR");
    const char *kind = getenv("TERM");
    return !(unwanted && *unwanted != '\0') && !(kind && strcmp(kind, "dumb") == 0);
}
