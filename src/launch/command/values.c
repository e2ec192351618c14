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

static bool read_int(const tddp_launch_flag *flag, const char *value, int *out)
{
    int64_t number;
    if (!tddp_parse_int(value, flag->min, flag->max, &number)) {
        return false;
    }
    *out = (int)number;
    return true;
}

static bool read_choice(const char *words, const char *value, int *out)
{
    int found = find_word(words, value);
    *out = found < 0 ? *out : found;
    return found >= 0;
}

static bool read_switch(const char *value, int *out)
{
    int found = find_word("0 1 false true f t no yes n y", value);
    *out = found < 0 ? *out : found % 2;
    return found >= 0;
}

static bool read_seconds(const tddp_launch_flag *flag, const char *value, double *out)
{
    char *end;
    /* strtod also takes "nan", "inf" and hexadecimal, which are mistakes here. */
    bool plain = value[0] != '\0' && strspn(value, "0123456789.eE+-") == strlen(value);
    double seconds = plain ? strtod(value, &end) : -1;
    if (!(seconds >= 0 && seconds <= flag->max) || *end != '\0') {
        return false;
    }
    *out = seconds;
    return true;
}

static bool read_processes(const tddp_launch_flag *flag, const char *value,
                           tddp_launch_process_count *out)
{
    int kind = find_word(flag->value, value);
    if (kind > 0) { /* the first of the words stands for the number */
        *out = (tddp_launch_process_count){(tddp_launch_processes)kind, 0};
        return true;
    }
    out->kind = TDDP_LAUNCH_PROCESSES_NUMBER;
    return read_int(flag, value, &out->number);
}

/* N or MIN:MAX, into two ints. */
static bool read_nodes(const tddp_launch_flag *flag, const char *value, int *out)
{
    char low[16];
    const char *colon = strchr(value, ':');
    (void)snprintf(low, sizeof low, "%.*s", (int)strcspn(value, ":"), value);
    return read_int(flag, low, &out[0]) && read_int(flag, colon ? colon + 1 : value, &out[1]) &&
           out[0] <= out[1];
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

static bool read_host(const char *value, char *out)
{
    tddp_launch_endpoint found;
    if (!read_endpoint(value, &found) || found.port >= 0) {
        return false;
    }
    memcpy(out, found.host, sizeof found.host);
    return true;
}

/* PORT or ADDRESS:PORT, the address a numeric one. */
static bool read_listener(const char *value, tddp_launch_endpoint *out)
{
    int64_t port;
    tddp_net_address address;
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

static bool read_endpoints(const char *value, tddp_launch_options *out)
{
    char part[PART_BYTES];
    out->endpoint_count = 0;
    for (const char *at = value; *at != '\0';) {
        tddp_launch_endpoint *found = &out->endpoints[out->endpoint_count];
        if (out->endpoint_count == TDDP_LAUNCH_MAX_ENDPOINTS || !next_part(&at, part) ||
            !read_endpoint(part, found)) {
            return false;
        }
        for (tddp_launch_endpoint *other = out->endpoints; other < found; other++) {
            if (found->port == other->port && strcasecmp(found->host, other->host) == 0) {
                return false;
            }
        }
        out->endpoint_count++;
    }
    return true;
}

/* RANK:STREAMS,... or RANK,..., each local rank at most once; or the streams of all. */
static bool read_by_rank(const char *value, bool streams, tddp_launch_by_rank *out)
{
    char part[PART_BYTES];
    int64_t rank;
    int64_t number = 1;
    memset(out, 0, sizeof *out);
    if (streams && tddp_parse_int(value, 0, 3, &number)) {
        memset(out->of, (int)number, sizeof out->of);
        out->given = number != 0;
        return true;
    }
    for (const char *at = value; *at != '\0'; out->given = true) {
        bool right = next_part(&at, part);
        char *colon = streams ? strchr(part, ':') : NULL;
        if (!right || (streams && (!colon || !tddp_parse_int(colon + 1, 0, 3, &number)))) {
            return false;
        }
        if (colon) {
            *colon = '\0';
        }
        if (!tddp_parse_int(part, 0, TDDP_LAUNCH_MAX_LOCAL - 1, &rank) || out->of[rank] != 0) {
            return false;
        }
        out->of[rank] = (unsigned char)(number | NAMED);
        out->highest = rank > out->highest ? (int)rank : out->highest;
    }
    return true;
}

int tddp_launch_streams_of(const tddp_launch_by_rank *streams, int local_rank)
{
    return streams->of[local_rank] & ~NAMED;
}

bool tddp_launch_ranks_has(const tddp_launch_by_rank *ranks, int local_rank)
{
    return !ranks->given || ranks->of[local_rank] != 0;
}

/* Texts between single commas, the spaces around them taken away; ",," is a comma of the text. */
static bool read_filters(const char *value, tddp_launch_filters *out)
{
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
 * be waited for: SIGCHLD and SIGCONT are torchrun's own, the others its own faults. */
static int signal_number(const char *text)
{
    static const int refused[] = {SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGILL, SIGTRAP,
                                  SIGABRT, SIGBUS,  SIGFPE,  SIGSEGV, SIGSYS};
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

static bool read_signals(const char *value, tddp_launch_options *out)
{
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

/* --- --rdzv-conf ----------------------------------------------------------------------------- */

static bool copy_text(const char *value, const char *refused, char *out)
{
    size_t length = strlen(value);
    bool fits = length < TDDP_LAUNCH_HOST_BYTES && strpbrk(value, refused) == NULL;
    memcpy(out, value, fits ? length + 1 : 0);
    return fits;
}

static bool read_password_file(const char *path, char *out)
{
    char line[2 * TDDP_LAUNCH_HOST_BYTES];
    return tddp_scan_file(path, "%511[^\r\n]", line) && copy_text(line, "", out);
}

static bool read_value(const tddp_launch_flag *flag, const char *value, tddp_launch_options *out)
{
    void *field = (char *)out + flag->offset;
    switch (flag->kind) {
    case TDDP_LAUNCH_KIND_ACTION:
    case TDDP_LAUNCH_KIND_SWITCH:
        return read_switch(value, field);
    case TDDP_LAUNCH_KIND_TEXT:
    case TDDP_LAUNCH_KIND_CODE:
        *(const char **)field = value;
        return *value != '\0' || flag->kind == TDDP_LAUNCH_KIND_CODE;
    case TDDP_LAUNCH_KIND_CHOICE:
        return read_choice(flag->value, value, field);
    case TDDP_LAUNCH_KIND_NUMBER:
        return read_int(flag, value, field);
    case TDDP_LAUNCH_KIND_SECONDS:
        return read_seconds(flag, value, field);
    case TDDP_LAUNCH_KIND_NODES:
        return read_nodes(flag, value, field);
    case TDDP_LAUNCH_KIND_PROCESSES:
        return read_processes(flag, value, field);
    case TDDP_LAUNCH_KIND_HOST:
        return read_host(value, field);
    case TDDP_LAUNCH_KIND_LISTENER:
        return read_listener(value, field);
    case TDDP_LAUNCH_KIND_ENDPOINTS:
        return read_endpoints(value, out);
    case TDDP_LAUNCH_KIND_STREAMS:
    case TDDP_LAUNCH_KIND_RANKS:
        return read_by_rank(value, flag->kind == TDDP_LAUNCH_KIND_STREAMS, field);
    case TDDP_LAUNCH_KIND_FILTERS:
        return read_filters(value, field);
    case TDDP_LAUNCH_KIND_SIGNALS:
        return read_signals(value, out);
    case TDDP_LAUNCH_KIND_CONF_TEXT:
        return copy_text(value, "=", field);
    case TDDP_LAUNCH_KIND_PASSWORD:
        return copy_text(value, "", field);
    case TDDP_LAUNCH_KIND_PASSWORD_FILE:
        return read_password_file(value, field);
    case TDDP_LAUNCH_KIND_CONF:
        break;
    }
    return false;
}

/* Of a list of settings no value is shown: it may be a password, or stand after one. */
static tddp_status refuse(const tddp_launch_flag *flag, const char *source, const char *value)
{
    char range[48] = "";
    bool shown = value && !strchr(value, '@');
    if (flag->max > 0) {
        (void)snprintf(range, sizeof range, ", from %d to %d", flag->min, flag->max);
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
        return read_value(key, equals + 1, out) ? TDDP_OK : refuse(key, name, NULL);
    }
    bool named = equals && key_shown;
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s: %s%.*s; expected KEY=VALUE,... without a comma in a value; the keys are "
                     "in torchrun --help",
                     source, named ? "unknown key " : "what has no known key",
                     named ? (int)(equals - part) : 0, part);
}

static tddp_status store_conf(const tddp_launch_flag *flag, const char *source, const char *value,
                              tddp_launch_options *out)
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
    if (flag->kind == TDDP_LAUNCH_KIND_CONF) {
        return store_conf(flag, source, value, out);
    }
    return read_value(flag, value, out) ? TDDP_OK : refuse(flag, source, value);
}
