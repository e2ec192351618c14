/*
 * Turns the text of one flag's value into its field, one function a kind. The text of a refusal
 * names where the value came from (flag or variable), the value, and what was expected. Pure: no
 * thread, no global.
 */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "launch/command/options.h"

static tddp_status refuse(const char *source, const char *value, const char *expected)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%s: expected %s", source, value, expected);
}

static tddp_status store_switch(const char *source, const char *value, bool *out)
{
    if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0) {
        return refuse(source, value, "0 or 1");
    }
    *out = value[0] == '1';
    return TDDP_OK;
}

static tddp_status store_number(const tddp_launch_flag *flag, const char *source, const char *value,
                                int *out)
{
    int64_t number;
    if (!tddp_parse_int(value, flag->min, flag->max, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%s: expected a number from %lld to %lld",
                         source, value, (long long)flag->min, (long long)flag->max);
    }
    *out = (int)number;
    return TDDP_OK;
}

static tddp_status store_seconds(const tddp_launch_flag *flag, const char *source,
                                 const char *value, double *out)
{
    char *end;
    /* strtod also takes "nan", "inf" and hexadecimal, which nobody means. */
    bool plain = value[0] != '\0' && strspn(value, "0123456789.eE+-") == strlen(value);
    double seconds = plain ? strtod(value, &end) : 0;
    if (!plain || *end != '\0' || !(seconds >= 0 && seconds <= (double)flag->max)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%s: expected seconds from 0 to %lld", source,
                         value, (long long)flag->max);
    }
    *out = seconds;
    return TDDP_OK;
}

static tddp_status store_nodes(const tddp_launch_flag *flag, const char *source, const char *value,
                               int *out)
{
    char low_text[16];
    const char *colon = strchr(value, ':');
    size_t low_length = colon ? (size_t)(colon - value) : 0;
    if (!colon) {
        return store_number(flag, source, value, out);
    }
    int64_t low;
    int64_t high;
    if (low_length >= sizeof low_text) {
        return refuse(source, value, "a number of nodes");
    }
    memcpy(low_text, value, low_length);
    low_text[low_length] = '\0';
    if (!tddp_parse_int(low_text, flag->min, flag->max, &low) ||
        !tddp_parse_int(colon + 1, low, flag->max, &high)) {
        return refuse(source, value, "a number of nodes");
    }
    if (low != high) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s=%s: a number of nodes that changes while the job runs is not "
                         "supported; expected one number, such as %lld",
                         source, value, (long long)high);
    }
    *out = (int)high;
    return TDDP_OK;
}

static tddp_status store_processes(const tddp_launch_flag *flag, const char *source,
                                   const char *value, tddp_launch_process_count *out)
{
    static const struct {
        const char *name;
        tddp_launch_processes kind;
    } names[] = {
        {"auto", TDDP_LAUNCH_PROCESSES_AUTO},
        {"cpu", TDDP_LAUNCH_PROCESSES_CPU},
        {"gpu", TDDP_LAUNCH_PROCESSES_GPU},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(value, names[i].name) == 0) {
            *out = (tddp_launch_process_count){names[i].kind, 0};
            return TDDP_OK;
        }
    }
    int64_t number;
    if (!tddp_parse_int(value, flag->min, flag->max, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s=%s: expected a number from %lld to %lld, auto, cpu or gpu", source,
                         value, (long long)flag->min, (long long)flag->max);
    }
    *out = (tddp_launch_process_count){TDDP_LAUNCH_PROCESSES_NUMBER, (int)number};
    return TDDP_OK;
}

static tddp_status store_backend(const char *source, const char *value,
                                 tddp_launch_rendezvous_kind *out)
{
    if (strcmp(value, "static") == 0) {
        *out = TDDP_LAUNCH_STATIC;
    } else if (strcmp(value, "c10d") == 0) {
        *out = TDDP_LAUNCH_C10D;
    } else {
        return refuse(source, value, "static or c10d");
    }
    return TDDP_OK;
}

/* HOST, HOST:PORT, [V6] or [V6]:PORT; a text with several colons and no brackets is a bare V6. */
static tddp_status store_endpoint(const char *source, const char *value, tddp_launch_endpoint *out)
{
    static const char expected[] = "HOST or HOST:PORT, the port from 0 to 65535";
    tddp_launch_endpoint endpoint = {.port = -1};
    bool bracketed = value[0] == '[';
    const char *host = value + bracketed;
    const char *end = bracketed ? strchr(value, ']') : strchr(value, ':');
    if (bracketed && !end) {
        return refuse(source, value, expected);
    }
    if (!end || (!bracketed && strchr(end + 1, ':'))) {
        end = value + strlen(value);
    }
    const char *rest = bracketed ? end + 1 : end;
    size_t length = (size_t)(end - host);
    int64_t port = -1;
    if (length == 0 || length >= sizeof endpoint.host || (*rest != '\0' && *rest != ':') ||
        (*rest == ':' && !tddp_parse_int(rest + 1, 0, 65535, &port))) {
        return refuse(source, value, expected);
    }
    memcpy(endpoint.host, host, length);
    endpoint.port = (int)port;
    *out = endpoint;
    return TDDP_OK;
}

static bool store_conf_pair(const char *key, const char *value, tddp_launch_conf *out)
{
    int64_t number;
    if (strcmp(key, "is_host") == 0) {
        bool yes = strcmp(value, "1") == 0 || strcasecmp(value, "true") == 0;
        bool no = strcmp(value, "0") == 0 || strcasecmp(value, "false") == 0;
        out->is_host = yes;
        return yes || no;
    }
    int *field = strcmp(key, "join_timeout") == 0        ? &out->join_timeout
                 : strcmp(key, "heartbeat_timeout") == 0 ? &out->heartbeat_timeout
                                                         : NULL;
    if (!field || !tddp_parse_int(value, 1, 86400, &number)) {
        return false;
    }
    *field = (int)number;
    return true;
}

static tddp_status store_conf(const char *source, const char *value, tddp_launch_conf *out)
{
    tddp_launch_conf conf = *out;
    for (const char *at = value; *at != '\0';) {
        char pair[128];
        size_t length = strcspn(at, ",");
        if (length < sizeof pair) {
            memcpy(pair, at, length);
            pair[length] = '\0';
        }
        char *equals = length < sizeof pair ? strchr(pair, '=') : NULL;
        if (equals) {
            *equals = '\0';
        }
        if (!equals || !store_conf_pair(pair, equals + 1, &conf)) {
            return refuse(source, value,
                          "KEY=VALUE pairs with commas between them, the keys being join_timeout "
                          "and heartbeat_timeout (seconds from 1 to 86400) and is_host (0 or 1)");
        }
        at += length + (at[length] == ',');
    }
    *out = conf;
    return TDDP_OK;
}

tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                    const char *value, tddp_launch_options *out)
{
    void *field = (char *)out + flag->offset;
    switch (flag->kind) {
    case TDDP_LAUNCH_SWITCH:
        return store_switch(source, value, field);
    case TDDP_LAUNCH_TEXT:
        if (*value == '\0') {
            return refuse(source, value, flag->value);
        }
        *(const char **)field = value;
        return TDDP_OK;
    case TDDP_LAUNCH_CODE:
        *(const char **)field = value;
        return TDDP_OK;
    case TDDP_LAUNCH_NUMBER:
        return store_number(flag, source, value, field);
    case TDDP_LAUNCH_SECONDS:
        return store_seconds(flag, source, value, field);
    case TDDP_LAUNCH_NODES:
        return store_nodes(flag, source, value, field);
    case TDDP_LAUNCH_PROCESSES:
        return store_processes(flag, source, value, field);
    case TDDP_LAUNCH_BACKEND:
        return store_backend(source, value, field);
    case TDDP_LAUNCH_ENDPOINT:
        return store_endpoint(source, value, field);
    case TDDP_LAUNCH_CONF:
        return store_conf(source, value, field);
    }
    return tddp_fail(TDDP_INTERNAL, "%s: a flag of no kind", source);
}
