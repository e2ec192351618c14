/*
 * Turns the text of one flag's value into its field, one function a kind; lists are lists.c's. The
 * text of a refusal names where the value came from (flag or variable), the value, and what was
 * expected. Pure: no thread, no global.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/command/options.h"
#include "net/net.h"

tddp_status tddp_launch_value_refuse(const char *source, const char *value, const char *expected)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%.256s: expected %s", source, value, expected);
}

static tddp_status store_switch(const char *source, const char *value, bool *out)
{
    if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0) {
        return tddp_launch_value_refuse(source, value, "0 or 1");
    }
    *out = value[0] == '1';
    return TDDP_OK;
}

static tddp_status store_number(const tddp_launch_flag *flag, const char *source, const char *value,
                                int *out)
{
    int64_t number;
    if (!tddp_parse_int(value, flag->min, flag->max, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%.64s: expected a number from %lld to %lld",
                         source, value, (long long)flag->min, (long long)flag->max);
    }
    *out = (int)number;
    return TDDP_OK;
}

static tddp_status store_seconds(const tddp_launch_flag *flag, const char *source,
                                 const char *value, double *out)
{
    char *end;
    /* strtod also takes "nan", "inf" and hexadecimal, which are mistakes here. */
    bool plain = value[0] != '\0' && strspn(value, "0123456789.eE+-") == strlen(value);
    double seconds = plain ? strtod(value, &end) : 0;
    if (!plain || *end != '\0' || !(seconds >= 0 && seconds <= (double)flag->max)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%.64s: expected seconds from 0 to %lld", source,
                         value, (long long)flag->max);
    }
    *out = seconds;
    return TDDP_OK;
}

/* N or MIN:MAX. */
static tddp_status store_nodes(const tddp_launch_flag *flag, const char *source, const char *value,
                               tddp_launch_options *out)
{
    char low_text[16] = "";
    const char *colon = strchr(value, ':');
    size_t length = colon ? (size_t)(colon - value) : strlen(value);
    int64_t low = 0;
    int64_t high = 0;
    if (length < sizeof low_text) {
        memcpy(low_text, value, length);
    }
    bool right = tddp_parse_int(low_text, flag->min, flag->max, &low);
    if (right && colon) {
        right = tddp_parse_int(colon + 1, low, flag->max, &high);
    }
    if (!right) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s=%.64s: expected a number of nodes from %lld to %lld, or MIN:MAX",
                         source, value, (long long)flag->min, (long long)flag->max);
    }
    out->min_nodes = (int)low;
    out->max_nodes = (int)(colon ? high : low);
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
        {"xpu", TDDP_LAUNCH_PROCESSES_XPU},
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
                         "%s=%.64s: expected a number from %lld to %lld, auto, cpu or gpu", source,
                         value, (long long)flag->min, (long long)flag->max);
    }
    *out = (tddp_launch_process_count){TDDP_LAUNCH_PROCESSES_NUMBER, (int)number};
    return TDDP_OK;
}

/* The place of `value` among the words of `choices`, or -1. */
static int find_choice(const char *choices, const char *value)
{
    size_t wanted = strlen(value);
    int index = 0;
    for (const char *at = choices; *at != '\0'; index++) {
        size_t length = strcspn(at, " ");
        if (length == wanted && memcmp(at, value, length) == 0) {
            return index;
        }
        at += length + strspn(at + length, " ");
    }
    return -1;
}

/* "a", "a or b", "a, b or c". */
static tddp_status refuse_choice(const tddp_launch_flag *flag, const char *source,
                                 const char *value)
{
    char expected[256] = "";
    size_t size = 0;
    for (const char *at = flag->choices; *at != '\0' && size < sizeof expected;) {
        size_t length = strcspn(at, " ");
        const char *next = at + length + strspn(at + length, " ");
        bool last = *next == '\0';
        const char *before = at == flag->choices ? "" : last ? " or " : ", ";
        size += (size_t)snprintf(expected + size, sizeof expected - size, "%s%.*s", before,
                                 (int)length, at);
        at = next;
    }
    /* A value that PyTorch knows deserves a reason: the flag's help has it. */
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%.64s: expected %s%s%s%s", source, value, expected,
                     strchr(flag->choices, ' ') ? "" : " (",
                     strchr(flag->choices, ' ') ? "" : flag->help,
                     strchr(flag->choices, ' ') ? "" : ")");
}

static tddp_status store_choice(const tddp_launch_flag *flag, const char *source, const char *value,
                                int *out)
{
    int index = find_choice(flag->choices, value);
    if (index < 0 && strcmp(value, "etcd-v2") == 0 && strcmp(flag->name, "rdzv-backend") == 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s=etcd-v2: etcd has no API of version 2 any more; expected etcd, which "
                         "uses version 3",
                         source);
    }
    if (index < 0) {
        return refuse_choice(flag, source, value);
    }
    *out = index;
    return TDDP_OK;
}

static tddp_status store_word(const tddp_launch_flag *flag, const char *source, const char *value,
                              const char **out)
{
    if (find_choice(flag->choices, value) < 0) {
        return refuse_choice(flag, source, value);
    }
    *out = value;
    return TDDP_OK;
}

/* An address or a name; several colons are an IPv6 address's. */
static tddp_status store_address(const char *source, const char *value, const char **out)
{
    const char *colon = strchr(value, ':');
    bool has_port = colon && !strchr(colon + 1, ':');
    if (*value == '\0' || strlen(value) >= TDDP_LAUNCH_HOST_BYTES || has_port ||
        strpbrk(value, "[], ")) {
        return tddp_launch_value_refuse(source, value,
                                        "an address or a host's name, without brackets or a port");
    }
    *out = value;
    return TDDP_OK;
}

/* PORT or ADDRESS:PORT. */
static tddp_status store_listener(const char *source, const char *value, tddp_launch_endpoint *out)
{
    int64_t port;
    tddp_net_address address;
    tddp_launch_endpoint found = {.port = -1};
    if (tddp_parse_int(value, 0, 65535, &port)) {
        found.port = (int)port;
    } else if (!tddp_launch_endpoint_read(value, &found) || found.port < 0 ||
               !tddp_net_parse(found.host, found.port, &address)) {
        return tddp_launch_value_refuse(source, value,
                                        "a port from 0 to 65535, with a numeric address before it "
                                        "if others than this host are to reach it: 0.0.0.0:8080");
    }
    *out = found;
    return TDDP_OK;
}

tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                    const char *value, tddp_launch_options *out)
{
    void *field = (char *)out + flag->offset;
    switch (flag->kind) {
    case TDDP_LAUNCH_KIND_SWITCH:
        return store_switch(source, value, field);
    case TDDP_LAUNCH_KIND_TEXT:
        if (*value == '\0') {
            return tddp_launch_value_refuse(source, value, flag->value);
        }
        *(const char **)field = value;
        return TDDP_OK;
    case TDDP_LAUNCH_KIND_CODE:
        *(const char **)field = value;
        return TDDP_OK;
    case TDDP_LAUNCH_KIND_WORD:
        return store_word(flag, source, value, field);
    case TDDP_LAUNCH_KIND_CHOICE:
        return store_choice(flag, source, value, field);
    case TDDP_LAUNCH_KIND_ADDRESS:
        return store_address(source, value, field);
    case TDDP_LAUNCH_KIND_LISTENER:
        return store_listener(source, value, field);
    case TDDP_LAUNCH_KIND_NUMBER:
        return store_number(flag, source, value, field);
    case TDDP_LAUNCH_KIND_SECONDS:
        return store_seconds(flag, source, value, field);
    case TDDP_LAUNCH_KIND_NODES:
        return store_nodes(flag, source, value, out);
    case TDDP_LAUNCH_KIND_PROCESSES:
        return store_processes(flag, source, value, field);
    case TDDP_LAUNCH_KIND_ENDPOINTS:
    case TDDP_LAUNCH_KIND_CONF:
    case TDDP_LAUNCH_KIND_STREAMS:
    case TDDP_LAUNCH_KIND_RANKS:
    case TDDP_LAUNCH_KIND_FILTERS:
    case TDDP_LAUNCH_KIND_SIGNALS:
        return tddp_launch_list_store(flag, source, value, out);
    }
    return tddp_fail(TDDP_INTERNAL, "%s: a flag of no kind", source);
}
