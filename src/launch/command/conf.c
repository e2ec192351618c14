/*
 * The value of --rdzv-conf, by a table from which the help is made too. A refusal names the key and
 * no value: it may be a password, or what stands after one. One thread; reads the file that
 * password_file names.
 */
#include <stddef.h>
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/command/options.h"

#define FIELD(name) offsetof(tddp_launch_conf, name)

enum { FILE_PART_BYTES = 512 };

const tddp_launch_conf_key tddp_launch_conf_keys[] = {
    {"join_timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(join_timeout), "SECONDS",
     "to wait for the other nodes; default 600"},
    {"timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(join_timeout), "SECONDS",
     "the same, as PyTorch's static rendezvous has it"},
    {"last_call_timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(last_call_timeout), "SECONDS",
     "to wait for more nodes than MIN; default 30"},
    {"heartbeat_timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(heartbeat_timeout), "SECONDS",
     "without a sign of life until a node counts as lost; default 30, with static "
     "never. PyTorch's is "
     "how long sending one may take"},
    {"keep_alive_interval", TDDP_LAUNCH_CONF_NUMBER, FIELD(keep_alive_interval), "SECONDS",
     "between two signs of life; default 5. If this or keep_alive_max_attempt is given, their "
     "product replaces heartbeat_timeout"},
    {"keep_alive_max_attempt", TDDP_LAUNCH_CONF_NUMBER, FIELD(keep_alive_max_attempt), "N",
     "signs of life missed until a node counts as lost; default 3"},
    {"read_timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(read_timeout), "SECONDS",
     "for an answer before the connection is made anew; default 60, and at most a quarter of "
     "heartbeat_timeout"},
    {"close_timeout", TDDP_LAUNCH_CONF_NUMBER, FIELD(close_timeout), "SECONDS",
     "for all nodes to read that the job has ended; default 3"},
    {"report_interval", TDDP_LAUNCH_CONF_NUMBER, FIELD(report_interval), "SECONDS",
     "between two lines about what is waited for; default 10"},
    {"is_host", TDDP_LAUNCH_CONF_BOOL, FIELD(is_host), "0|1",
     "whether this node hosts the rendezvous; default: the node with the endpoint's address does"},
    {"use_libuv", TDDP_LAUNCH_CONF_BOOL, FIELD(use_libuv), "0|1", "no effect"},
    {"store_type", TDDP_LAUNCH_CONF_CHOICE, FIELD(store_type), "tcp",
     "tcp only: nodes meet over the network, not in a file"},
    {"protocol", TDDP_LAUNCH_CONF_CHOICE, FIELD(etcd.https), "http|https", "of etcd; default http"},
    {"cacert", TDDP_LAUNCH_CONF_TEXT, FIELD(etcd.cacert), "FILE", "etcd's authority, in PEM"},
    {"cert", TDDP_LAUNCH_CONF_TEXT, FIELD(etcd.cert), "FILE", "this client's certificate, in PEM"},
    {"key", TDDP_LAUNCH_CONF_TEXT, FIELD(etcd.key), "FILE", "the certificate's key, in PEM"},
    {"username", TDDP_LAUNCH_CONF_TEXT, FIELD(etcd.username), "NAME", "at etcd"},
    {"password", TDDP_LAUNCH_CONF_PASSWORD, FIELD(etcd.password), "TEXT",
     "at etcd; better in a file, or the whole value in PET_RDZV_CONF"},
    {"password_file", TDDP_LAUNCH_CONF_FILE, FIELD(etcd.password), "FILE",
     "whose first line is the password"},
};

const size_t tddp_launch_conf_key_count =
    sizeof tddp_launch_conf_keys / sizeof tddp_launch_conf_keys[0];

static bool is_etcds(const tddp_launch_conf_key *key)
{
    return key->offset >= FIELD(etcd);
}

static const tddp_launch_conf_key *find_key(const char *name)
{
    for (size_t i = 0; i < tddp_launch_conf_key_count; i++) {
        if (strcmp(tddp_launch_conf_keys[i].name, name) == 0) {
            return &tddp_launch_conf_keys[i];
        }
    }
    return NULL;
}

static tddp_status refuse_part(const char *source, int number)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s: part %d of it is no KEY=VALUE: expected KEY=VALUE pairs with commas "
                     "between them, such as join_timeout=60,is_host=1; a value has no comma",
                     source, number);
}

static tddp_status refuse_key(const char *source, const char *name)
{
    char known[512] = "";
    size_t used = 0;
    for (size_t i = 0; i < tddp_launch_conf_key_count && used < sizeof known; i++) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "",
                                 tddp_launch_conf_keys[i].name);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: unknown key %s; expected one of %s", source, name,
                     known);
}

static bool read_bool(const char *text, int *out)
{
    static const char *const words[] = {"0", "false", "f", "no", "n", "1", "true", "t", "yes", "y"};
    for (int i = 0; i < 10; i++) {
        if (strcasecmp(text, words[i]) == 0) {
            *out = i >= 5;
            return true;
        }
    }
    return false;
}

static bool read_choice(const char *choices, const char *value, int *out)
{
    size_t length = strlen(value);
    *out = 0;
    for (const char *at = choices; *at != '\0'; (*out)++) {
        size_t choice = strcspn(at, "|");
        if (choice == length && memcmp(at, value, length) == 0) {
            return true;
        }
        at += choice + (at[choice] == '|');
    }
    return false;
}

static bool read_text(const char *value, const char *refused, char *out)
{
    size_t length = strlen(value);
    bool fits = length < TDDP_LAUNCH_HOST_BYTES && strpbrk(value, refused) == NULL;
    memcpy(out, value, fits ? length + 1 : 0);
    return fits;
}

static bool read_file(const char *path, char *out)
{
    char line[FILE_PART_BYTES];
    return tddp_scan_file(path, "%511[^\r\n]", line) && read_text(line, "", out);
}

/* Whether the value is one that the key may have; then it is stored. `expected`: what it may be. */
static bool store_value(const tddp_launch_flag *flag, const tddp_launch_conf_key *key,
                        const char *value, tddp_launch_conf *out, char expected[64])
{
    void *field = (char *)out + key->offset;
    int64_t number;
    (void)snprintf(expected, 64, "%s", key->value);
    switch (key->kind) {
    case TDDP_LAUNCH_CONF_NUMBER:
        (void)snprintf(expected, 64, "a number from %d to %d", (int)flag->min, (int)flag->max);
        if (!tddp_parse_int(value, flag->min, flag->max, &number)) {
            return false;
        }
        *(int *)field = (int)number;
        return true;
    case TDDP_LAUNCH_CONF_BOOL:
        return read_bool(value, field);
    case TDDP_LAUNCH_CONF_CHOICE:
        return read_choice(key->value, value, field);
    case TDDP_LAUNCH_CONF_FILE:
        (void)snprintf(expected, 64, "a file whose first line has 1 to %d bytes",
                       TDDP_LAUNCH_HOST_BYTES - 1);
        return read_file(value, field);
    case TDDP_LAUNCH_CONF_TEXT:
    case TDDP_LAUNCH_CONF_PASSWORD:
        break;
    }
    bool password = key->kind == TDDP_LAUNCH_CONF_PASSWORD;
    (void)snprintf(expected, 64, "at most %d bytes%s", TDDP_LAUNCH_HOST_BYTES - 1,
                   password ? "" : " without an =, and commas between settings");
    return read_text(value, password ? "" : "=", field);
}

/* `number` counts the parts. */
static tddp_status store_part(const tddp_launch_flag *flag, const char *source, char *part,
                              int number, bool after_password, tddp_launch_conf *out)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    char expected[64];
    char *equals = strchr(part, '=');
    if (!equals) {
        return refuse_part(source, number);
    }
    *equals = '\0';
    const tddp_launch_conf_key *key = find_key(part);
    if (!key) {
        /* What stands after a password may be a part of it, with a comma in it. */
        bool shown = !after_password && part[strspn(part, plain)] == '\0';
        return shown ? refuse_key(source, part) : refuse_part(source, number);
    }
    if (!out->etcd_key && is_etcds(key)) {
        out->etcd_key = key->name;
    }
    if (!store_value(flag, key, equals + 1, out, expected)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: %s: expected %s", source, part, expected);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_conf_store(const tddp_launch_flag *flag, const char *source,
                                   const char *value, tddp_launch_conf *out)
{
    tddp_launch_conf conf = *out;
    char part[TDDP_LAUNCH_PART_BYTES];
    bool after_password = false;
    int number = 0;
    for (const char *at = value; *at != '\0';) {
        number++;
        if (!tddp_launch_list_next(&at, part)) {
            return refuse_part(source, number);
        }
        bool password = strncmp(part, "password=", 9) == 0;
        tddp_status status = part[0] != '\0'
                                 ? store_part(flag, source, part, number, after_password, &conf)
                                 : TDDP_OK;
        if (status != TDDP_OK) {
            return status;
        }
        after_password |= password;
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
