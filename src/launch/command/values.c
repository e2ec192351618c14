/*
 * Turns the text of a value into its field, one function a kind; a list that does not fit is
 * refused. What a refusal expects comes from the table's row. Also the questions that others ask of
 * lists. One thread; reads the file that password_file names.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/base.h"
#include "base/scan_file.h"
#include "launch/command/flags.h"
#include "net/net.h"

enum { PART_BYTES = TDDP_LAUNCH_HOST_BYTES + 16, NAMED = 4, MAX_PORT = 65535 };

/* --- words and numbers ----------------------------------------------------------------------- */

/* The place of `value` among the words, or -1. */
static int find_word(const char *words, const char *value)
{
    char word[TDDP_LAUNCH_WORD_BYTES];
    for (int i = 0; tddp_launch_word(words, i, word); i++) {
        if (strcasecmp(word, value) == 0) {
            return i;
        }
    }
    return -1;
}

bool tddp_launch_read_action(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    (void)value;
    *(int *)field = 1;
    return true;
}

bool tddp_launch_read_switch(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    int found = find_word("0 1 false true f t no yes n y", value);
    *(int *)field = found % 2;
    return found >= 0;
}

bool tddp_launch_read_choice(const tddp_launch_flag *flag, const char *value, void *field)
{
    *(int *)field = find_word(flag->value, value);
    return *(int *)field >= 0;
}

bool tddp_launch_read_text(const tddp_launch_flag *flag, const char *value, void *field)
{
    *(const char **)field = value;
    return *value != '\0' && (flag->max == 0 || strlen(value) <= (size_t)flag->max);
}

bool tddp_launch_read_code(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)tddp_launch_read_text(flag, value, field);
    return true;
}

bool tddp_launch_read_number(const tddp_launch_flag *flag, const char *value, void *field)
{
    int64_t number = 0;
    bool right = tddp_parse_int(value, flag->min, flag->max, &number);
    *(int *)field = (int)number;
    return right;
}

bool tddp_launch_read_seconds(const tddp_launch_flag *flag, const char *value, void *field)
{
    char *end;
    *(double *)field = strtod(value, &end);
    /* strtod also takes "nan", "inf" and hexadecimal, which are mistakes here. */
    return end != value && value[strspn(value, "0123456789.eE+-")] == '\0' && *end == '\0' &&
           *(double *)field >= 0 && *(double *)field <= flag->max;
}

bool tddp_launch_read_processes(const tddp_launch_flag *flag, const char *value, void *field)
{
    int kind = find_word(flag->value, value);
    *(int *)field = -kind;
    return kind > 0 || tddp_launch_read_number(flag, value, field);
}

/* N or MIN:MAX, into two ints. */
bool tddp_launch_read_nodes(const tddp_launch_flag *flag, const char *value, void *field)
{
    int *out = field;
    char low[16];
    const char *colon = strchr(value, ':');
    (void)snprintf(low, sizeof low, "%.*s", (int)strcspn(value, ":"), value);
    return tddp_launch_read_number(flag, low, &out[0]) &&
           tddp_launch_read_number(flag, colon ? colon + 1 : value, &out[1]) && out[0] <= out[1];
}

/* --- places ---------------------------------------------------------------------------------- */

/* HOST, HOST:PORT, [V6] or [V6]:PORT; a text with several colons and no brackets is a bare V6. */
static bool read_endpoint(const char *text, tddp_launch_endpoint *out)
{
    bool bracketed = text[0] == '[';
    const char *host = text + bracketed;
    size_t length = strcspn(host, bracketed ? "]" : ":");
    if (!bracketed && host[length] == ':' && strchr(host + length + 1, ':')) {
        length = strlen(host);
    }
    const char *rest = host + length + (bracketed && host[length] == ']');
    int64_t port = -1;
    if (length == 0 || length >= sizeof out->host || rest != host + length + bracketed ||
        strcspn(host, "@[, ") < length || (*rest != '\0' && *rest != ':') ||
        (*rest == ':' && !tddp_parse_int(rest + 1, 0, MAX_PORT, &port))) {
        return false;
    }
    *out = (tddp_launch_endpoint){.port = (int)port};
    memcpy(out->host, host, length);
    return true;
}

void tddp_launch_endpoint_text(const tddp_launch_endpoint *endpoint, char *text, size_t size)
{
    (void)snprintf(text, size, strchr(endpoint->host, ':') ? "[%s]:%d" : "%s:%d", endpoint->host,
                   endpoint->port);
}

bool tddp_launch_read_host(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    tddp_launch_endpoint found;
    bool right = read_endpoint(value, &found) && found.port < 0;
    memcpy(field, found.host, right ? sizeof found.host : 0);
    return right;
}

/* PORT or ADDRESS:PORT, the address a numeric one. */
bool tddp_launch_read_listener(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    int64_t port;
    tddp_net_address address;
    tddp_launch_endpoint *out = field;
    if (tddp_parse_int(value, 0, MAX_PORT, &port)) {
        *out = (tddp_launch_endpoint){.port = (int)port};
        return true;
    }
    return read_endpoint(value, out) && out->port >= 0 &&
           tddp_net_parse(out->host, out->port, &address);
}

/* --- lists ----------------------------------------------------------------------------------- */

/* Copies the part at *at without the spaces around it and steps over its comma; false if it is
 * longer than any that makes sense. */
static bool next_part(const char **at, char part[PART_BYTES])
{
    const char *from = *at + strspn(*at, " ");
    size_t length = strcspn(from, ",");
    *at = from + length + (from[length] == ',');
    while (length > 0 && from[length - 1] == ' ') {
        length--;
    }
    (void)snprintf(part, PART_BYTES, "%.*s", (int)length, from);
    return length < PART_BYTES;
}

bool tddp_launch_read_endpoints(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    tddp_launch_options *out = field;
    char part[PART_BYTES];
    out->endpoint_count = 0;
    for (const char *at = value; *at != '\0';) {
        if (out->endpoint_count == TDDP_LAUNCH_MAX_ENDPOINTS || !next_part(&at, part) ||
            !read_endpoint(part, &out->endpoints[out->endpoint_count])) {
            return false;
        }
        out->endpoint_count++;
    }
    return true;
}

/* RANK:STREAMS,... or RANK,..., each local rank at most once; or the streams of all. */
bool tddp_launch_read_by_rank(const tddp_launch_flag *flag, const char *value, void *field)
{
    tddp_launch_by_rank *out = field;
    bool streams = flag->max > 0;
    char part[PART_BYTES];
    int64_t rank;
    int number = 1;
    memset(out, 0, sizeof *out);
    if (streams && tddp_launch_read_number(flag, value, &number)) {
        memset(out->of, number, sizeof out->of);
        out->given = number != 0;
        return true;
    }
    for (const char *at = value; *at != '\0'; out->given = true) {
        bool right = next_part(&at, part);
        char *colon = part + strcspn(part, ":");
        right &= !streams || (*colon && tddp_launch_read_number(flag, colon + 1, &number));
        *colon = streams ? '\0' : *colon;
        if (!right || !tddp_parse_int(part, 0, TDDP_LAUNCH_MAX_LOCAL - 1, &rank) ||
            out->of[rank] != 0) {
            return false;
        }
        out->of[rank] = (unsigned char)(number | NAMED);
        out->highest = rank > out->highest ? (int)rank : out->highest;
    }
    return true;
}

/* Texts between single commas, the spaces around them taken away; ",," is a comma of the text. */
bool tddp_launch_read_filters(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    tddp_launch_filters *out = field;
    size_t size = 0;
    out->count = 0;
    const char *at = strcmp(value, "[]") == 0 ? "" : value; /* PyTorch's way to write none */
    while (*at != '\0') {
        size_t begin = size;
        at += strspn(at, " ");
        for (; *at != '\0' && (*at != ',' || at[1] == ','); at++) {
            if (size + 1 >= sizeof out->texts) {
                return false;
            }
            out->texts[size++] = *at;
            at += *at == ',';
        }
        at += *at == ',';
        while (size > begin && out->texts[size - 1] == ' ') {
            size--;
        }
        if (size > begin) {
            out->texts[size++] = '\0';
            out->count++;
        }
    }
    return true;
}

bool tddp_launch_filters_match(const tddp_launch_filters *filters, const char *line, size_t size)
{
    const char *text = filters->texts;
    for (int i = 0; i < filters->count; i++) {
        size_t length = strlen(text);
        if (memmem(line, size, text, length)) {
            return true;
        }
        text += length + 1;
    }
    return false;
}

/* The number of "SIGTERM", "TERM", "term" or "15"; 0 if there is no such signal, or none that can
 * be waited for: SIGCHLD, SIGCONT and SIGPIPE are torchrun's own, the others its own faults. */
static int signal_number(const char *text)
{
    static const int refused[] = {SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGPIPE, SIGILL,
                                  SIGTRAP, SIGABRT, SIGBUS,  SIGFPE,  SIGSEGV, SIGSYS};
    const char *name = strncasecmp(text, "SIG", 3) == 0 ? text + 3 : text;
    int64_t number = 0;
    bool numeric = tddp_parse_int(text, 1, NSIG - 1, &number);
    for (int i = 1; i < NSIG && !numeric; i++) {
        const char *known = sigabbrev_np(i);
        number = known && strcasecmp(known, name) == 0 ? i : number;
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        number = number == refused[i] ? 0 : number;
    }
    return number > 0 && sigabbrev_np((int)number) ? (int)number : 0;
}

bool tddp_launch_read_signals(const tddp_launch_flag *flag, const char *value, void *field)
{
    (void)flag;
    tddp_launch_options *out = field;
    char part[PART_BYTES];
    const char *at = value;
    out->signal_count = 0;
    do {
        int number = next_part(&at, part) ? signal_number(part) : 0;
        if (number == 0 || out->signal_count == TDDP_LAUNCH_MAX_SIGNALS) {
            return false;
        }
        out->signals[out->signal_count++] = number;
    } while (*at != '\0');
    return true;
}

/* --- settings -------------------------------------------------------------------------------- */

/* Only a password may have a "=": elsewhere it stands behind a mistake. */
bool tddp_launch_read_copy(const tddp_launch_flag *flag, const char *value, void *field)
{
    bool right = strlen(value) < TDDP_LAUNCH_HOST_BYTES &&
                 (!strchr(value, '=') || strncmp(flag->names, "password", 8) == 0);
    memcpy(field, value, right ? strlen(value) + 1 : 0);
    return right;
}

bool tddp_launch_read_first_line(const tddp_launch_flag *flag, const char *value, void *field)
{
    char line[2 * TDDP_LAUNCH_HOST_BYTES];
    return tddp_scan_file(value, "%511[^\r\n]", line) && tddp_launch_read_copy(flag, line, field);
}

/* --- all ------------------------------------------------------------------------------------- */

/* Of a list of settings no value is shown: it may be a password, or stand after one. */
static tddp_status refuse(const tddp_launch_flag *flag, const char *source, const char *value)
{
    char range[48] = "";
    bool shown = value && !strchr(value, '@');
    if (flag->max > 0) {
        (void)snprintf(range, sizeof range, ", from %d to %d%s", flag->min, flag->max,
                       flag->read == tddp_launch_read_text ? " bytes" : "");
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s%s%.256s: expected %s%s; see torchrun --help",
                     source, shown ? "=" : "", shown ? value : "",
                     flag->value ? flag->value : "0|1", range);
}

static tddp_status store_setting(const char *source, char *part, bool key_shown,
                                 tddp_launch_options *out)
{
    char name[2 * TDDP_LAUNCH_WORD_BYTES];
    char *equals = strchr(part, '=');
    for (size_t i = 0; equals && i < tddp_launch_conf_key_count; i++) {
        const tddp_launch_flag *key = &tddp_launch_conf_keys[i];
        if (strncmp(part, key->names, (size_t)(equals - part)) != 0 ||
            key->names[equals - part] != '\0') {
            continue;
        }
        if (key->offset >= offsetof(tddp_launch_options, conf.etcd) && !out->conf.etcd_key) {
            out->conf.etcd_key = key->names;
        }
        (void)snprintf(name, sizeof name, "%s: %s", source, key->names);
        return key->read(key, equals + 1, (char *)out + key->offset) ? TDDP_OK
                                                                     : refuse(key, name, NULL);
    }
    bool named = equals && key_shown;
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s: %s%.*s; expected KEY=VALUE,... without a comma in a value; the keys are "
                     "in torchrun --help",
                     source, named ? "unknown key " : "what has no known key",
                     named ? (int)(equals - part) : 0, part);
}

static tddp_status store_settings(const tddp_launch_flag *flag, const char *source,
                                  const char *value, tddp_launch_options *out)
{
    /* What is no key may be a part of a password, with a comma in it or badly written. */
    bool key_shown = !strstr(value, "pass");
    char part[PART_BYTES];
    for (const char *at = value; *at != '\0';) {
        if (!next_part(&at, part)) {
            return refuse(flag, source, NULL);
        }
        tddp_status status = *part ? store_setting(source, part, key_shown, out) : TDDP_OK;
        if (status != TDDP_OK) {
            return status;
        }
    }
    return TDDP_OK;
}

tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                    const char *value, tddp_launch_options *out)
{
    if (!flag->read) {
        return store_settings(flag, source, value, out);
    }
    return flag->read(flag, value, (char *)out + flag->offset) ? TDDP_OK
                                                               : refuse(flag, source, value);
}
