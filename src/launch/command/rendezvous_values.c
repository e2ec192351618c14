/*
 * The values of --rdzv-endpoint and --rdzv-conf. Pure: no thread, no
 * global.
 */
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "launch/command/options.h"

/* --- endpoints ------------------------------------------------------------------------------- */

bool tddp_launch_endpoint_read(const char *text, tddp_launch_endpoint *out)
{
    tddp_launch_endpoint endpoint = {.port = -1};
    bool bracketed = text[0] == '[';
    const char *host = text + bracketed;
    const char *end = bracketed ? strchr(text, ']') : strchr(text, ':');
    if (bracketed && !end) {
        return false;
    }
    if (!end || (!bracketed && strchr(end + 1, ':'))) {
        end = text + strlen(text);
    }
    const char *rest = bracketed ? end + 1 : end;
    size_t length = (size_t)(end - host);
    int64_t port = -1;
    if (length == 0 || length >= sizeof endpoint.host || (*rest != '\0' && *rest != ':') ||
        (*rest == ':' && !tddp_parse_int(rest + 1, 0, 65535, &port))) {
        return false;
    }
    memcpy(endpoint.host, host, length);
    endpoint.port = (int)port;
    *out = endpoint;
    return true;
}

void tddp_launch_endpoint_text(const tddp_launch_endpoint *endpoint, char *text, size_t size)
{
    (void)snprintf(text, size, strchr(endpoint->host, ':') ? "[%s]:%d" : "%s:%d", endpoint->host,
                   endpoint->port);
}

tddp_status tddp_launch_endpoints_store(const char *source, const char *value,
                                        tddp_launch_options *out)
{
    tddp_launch_endpoint found[TDDP_LAUNCH_MAX_ENDPOINTS];
    char part[TDDP_LAUNCH_PART_BYTES];
    int count = 0;
    const char *at = value;
    if (strchr(value, '@')) { /* a password may stand before it, so the value is not shown */
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: there is an @ in it: expected HOST or HOST:PORT; name and password "
                         "for etcd stand in --rdzv-conf (username, password)",
                         source);
    }
    while (*at != '\0') { /* none at all: as if not given, which is PyTorch's default */
        bool more = count < TDDP_LAUNCH_MAX_ENDPOINTS;
        if (!more || !tddp_launch_list_next(&at, part) ||
            !tddp_launch_endpoint_read(part, &found[count])) {
            return tddp_launch_value_refuse(source, value,
                                            "HOST or HOST:PORT, the port from 0 to 65535, or up to "
                                            "7 of these with commas between them");
        }
        for (int i = 0; i < count; i++) {
            if (found[i].port == found[count].port &&
                strcasecmp(found[i].host, found[count].host) == 0) {
                return tddp_fail(TDDP_INVALID_ARGUMENT,
                                 "%s=%.256s: %s is there twice; expected different endpoints",
                                 source, value, part);
            }
        }
        count++;
    }
    memcpy(out->endpoints, found, (size_t)count * sizeof *found);
    out->endpoint_count = count;
    return TDDP_OK;
}

/* --- rendezvous settings --------------------------------------------------------------------- */

/* One KEY=VALUE of --rdzv-conf. */
typedef struct setting {
    const char *source; /* the flag or variable */
    const char *key;
    const char *value;
    bool after_password; /* a password stands before it */
} setting;

static bool read_bool(const char *text, int *out)
{
    static const char *const words[2][5] = {{"0", "false", "f", "no", "n"},
                                            {"1", "true", "t", "yes", "y"}};
    for (int value = 0; value < 2; value++) {
        for (int i = 0; i < 5; i++) {
            if (strcasecmp(text, words[value][i]) == 0) {
                *out = value;
                return true;
            }
        }
    }
    return false;
}

/* A key whose value is a number; false: it is none of these. */
static bool find_number(const char *key, tddp_launch_conf *conf, int **field)
{
    const struct {
        const char *key;
        int *field;
    } numbers[] = {
        {"join_timeout", &conf->join_timeout},
        {"timeout", &conf->join_timeout}, /* PyTorch's static rendezvous */
        {"last_call_timeout", &conf->last_call_timeout},
        {"close_timeout", &conf->close_timeout},
        {"report_interval", &conf->report_interval},
        {"read_timeout", &conf->read_timeout},
        {"heartbeat_timeout", &conf->heartbeat_timeout},
        {"keep_alive_interval", &conf->keep_alive_interval},
        {"keep_alive_max_attempt", &conf->keep_alive_max_attempt},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(key, numbers[i].key) == 0) {
            *field = numbers[i].field;
            return true;
        }
    }
    return false;
}

/* A key that only etcd has, whose value is a text; false: it is none of these. */
static bool find_text(const char *key, tddp_launch_etcd_conf *conf, char **field)
{
    const struct {
        const char *key;
        char *field;
    } texts[] = {
        {"cacert", conf->cacert},     {"cert", conf->cert},         {"key", conf->key},
        {"username", conf->username}, {"password", conf->password},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (strcmp(key, texts[i].key) == 0) {
            *field = texts[i].field;
            return true;
        }
    }
    return false;
}

/* A part of the value that may be shown: mistakes in it must not print a password. What stands
 * after one may be a part of it, with a comma in it; what is no plain word may have another
 * setting in it. */
static const char *shown(const char *text, bool after_password)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    return after_password || text[strspn(text, plain)] != '\0' ? "..." : text;
}

/* `given->key` is one that is known. */
static tddp_status refuse_setting(const setting *given, const char *expected)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s=%s: expected %s", given->source, given->key,
                     shown(given->value, given->after_password), expected);
}

/* One of few words. */
static tddp_status store_word(const setting *given, tddp_launch_conf *out)
{
    int ignored; /* our store has one kind of event loop */
    const char *key = given->key;
    bool is_host = strcmp(key, "is_host") == 0;
    if (is_host || strcmp(key, "use_libuv") == 0) {
        return read_bool(given->value, is_host ? &out->is_host : &ignored)
                   ? TDDP_OK
                   : refuse_setting(given, "0 or 1");
    }
    if (strcmp(key, "store_type") == 0) {
        return strcmp(given->value, "tcp") == 0
                   ? TDDP_OK
                   : refuse_setting(given, "tcp; nodes meet over the network here, not in a file");
    }
    if (strcmp(key, "protocol") == 0) {
        out->etcd.https = strcmp(given->value, "https") == 0;
        return out->etcd.https || strcmp(given->value, "http") == 0
                   ? TDDP_OK
                   : refuse_setting(given, "http or https");
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s: unknown key %s; expected join_timeout, last_call_timeout, "
                     "heartbeat_timeout, read_timeout, close_timeout, keep_alive_interval, "
                     "keep_alive_max_attempt, report_interval, is_host, store_type or use_libuv, "
                     "and for etcd protocol, cacert, cert, key, username or password",
                     given->source, shown(key, given->after_password));
}

static tddp_status store_setting(const tddp_launch_flag *flag, const setting *given,
                                 tddp_launch_conf *out)
{
    int *number;
    char *text;
    int64_t read;
    const char *key = given->key;
    bool is_text = find_text(key, &out->etcd, &text);
    if (!out->etcd_key[0] && (is_text || strcmp(key, "protocol") == 0)) {
        (void)snprintf(out->etcd_key, sizeof out->etcd_key, "%.15s", key);
    }
    if (is_text && strlen(given->value) >= TDDP_LAUNCH_HOST_BYTES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s: expected at most %d bytes", given->source,
                         key, TDDP_LAUNCH_HOST_BYTES - 1);
    }
    if (is_text && text != out->etcd.password && strchr(given->value, '=')) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: %s has an = in its value: expected commas between settings",
                         given->source, key);
    }
    if (is_text) {
        memcpy(text, given->value, strlen(given->value) + 1);
        return TDDP_OK;
    }
    if (!find_number(key, out, &number)) {
        return store_word(given, out);
    }
    if (!tddp_parse_int(given->value, flag->min, flag->max, &read)) {
        char expected[64];
        (void)snprintf(expected, sizeof expected, "a number from %lld to %lld",
                       (long long)flag->min, (long long)flag->max);
        return refuse_setting(given, expected);
    }
    *number = (int)read;
    return TDDP_OK;
}

void tddp_launch_conf_hide_password(char *value)
{
    static const char key[] = "password=";
    for (char *at = value; at; at = strchr(at, ',')) {
        at += *at == ',';
        at += strspn(at, " ");
        if (strncmp(at, key, sizeof key - 1) == 0) {
            at += sizeof key - 1;
            /* All that follows, since a comma may be the password's; no shorter text remains. */
            memset(at, '*', strlen(at));
        }
    }
}

static tddp_status refuse_part(const char *source, int number)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s: part %d of it is no KEY=VALUE: expected KEY=VALUE pairs with commas "
                     "between them, such as join_timeout=60,is_host=1; a value has no comma",
                     source, number);
}

tddp_status tddp_launch_conf_store(const tddp_launch_flag *flag, const char *source,
                                   const char *value, tddp_launch_conf *out)
{
    tddp_launch_conf conf = *out;
    char part[TDDP_LAUNCH_PART_BYTES];
    bool after_password = false;
    int number = 0;
    for (const char *at = value; *at != '\0';) {
        bool fits = tddp_launch_list_next(&at, part);
        char *equals = fits ? strchr(part, '=') : NULL;
        number++;
        if (fits && part[0] == '\0') {
            continue;
        }
        if (!equals) {
            return refuse_part(source, number);
        }
        *equals = '\0';
        const setting given = {source, part, equals + 1, after_password};
        tddp_status status = store_setting(flag, &given, &conf);
        if (status != TDDP_OK) {
            return status;
        }
        after_password |= strcmp(part, "password") == 0;
    }
    int64_t product = (int64_t)conf.keep_alive_interval * conf.keep_alive_max_attempt;
    if (product > flag->max) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: keep_alive_interval=%d times keep_alive_max_attempt=%d is %lld s "
                         "until a node counts as lost: expected at most %lld s",
                         source, conf.keep_alive_interval, conf.keep_alive_max_attempt,
                         (long long)product, (long long)flag->max);
    }
    *out = conf;
    return TDDP_OK;
}
