/*
 * Values that are lists with commas between their parts: local ranks, streams by local rank,
 * filters, signals; those of the rendezvous are in endpoints.c and conf.c. Each becomes a field of
 * fixed size; a list that does not fit is refused. Also the questions that others ask of them.
 * Pure: no thread, no global.
 */
#include <string.h>

#include "base/base.h"
#include "launch/command/options.h"
#include "launch/command/signal_names.h"

bool tddp_launch_list_next(const char **at, char part[TDDP_LAUNCH_PART_BYTES])
{
    size_t length = strcspn(*at, ",");
    const char *from = *at;
    *at += length + ((*at)[length] == ',');
    while (length > 0 && *from == ' ') {
        from++;
        length--;
    }
    while (length > 0 && from[length - 1] == ' ') {
        length--;
    }
    if (length >= TDDP_LAUNCH_PART_BYTES) {
        return false;
    }
    memcpy(part, from, length);
    part[length] = '\0';
    return true;
}

/* --- local ranks ----------------------------------------------------------------------------- */

static tddp_status too_many(const char *source, const char *value)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "%s=%.64s...: expected at most %d local ranks", source,
                     value, TDDP_LAUNCH_MAX_LISTED);
}

static tddp_status twice(const char *source, const char *value, int64_t rank)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "%s=%.256s: local rank %lld is there twice; expected each at most once",
                     source, value, (long long)rank);
}

/* One part of a map: "0:3". */
static bool read_pair(char *part, int64_t *rank, int64_t *streams)
{
    char *colon = strchr(part, ':');
    if (!colon) {
        return false;
    }
    *colon = '\0';
    return tddp_parse_int(part, 0, TDDP_LAUNCH_MAX_LOCAL - 1, rank) &&
           tddp_parse_int(colon + 1, 0, 3, streams);
}

static tddp_status store_streams(const char *source, const char *value, tddp_launch_streams *out)
{
    static const char expected[] =
        "0 (none), 1 (standard output), 2 (standard error) or 3 (both), or local ranks with one of "
        "these each, such as 0:1,1:3";
    tddp_launch_streams made = {0};
    int64_t rank;
    int64_t streams;
    char part[TDDP_LAUNCH_PART_BYTES];
    if (tddp_parse_int(value, 0, 3, &streams)) {
        made.all = (int)streams;
        *out = made;
        return TDDP_OK;
    }
    const char *at = value;
    do {
        if (!tddp_launch_list_next(&at, part) || !read_pair(part, &rank, &streams)) {
            return tddp_launch_value_refuse(source, value, expected);
        }
        if (made.count == TDDP_LAUNCH_MAX_LISTED) {
            return too_many(source, value);
        }
        int place = made.count++;
        for (; place > 0 && made.listed[place - 1].local_rank >= rank; place--) {
            if (made.listed[place - 1].local_rank == rank) {
                return twice(source, value, rank);
            }
            made.listed[place] = made.listed[place - 1];
        }
        made.listed[place].local_rank = (int16_t)rank;
        made.listed[place].streams = (int16_t)streams;
    } while (*at != '\0');
    *out = made;
    return TDDP_OK;
}

static tddp_status store_ranks(const char *source, const char *value, tddp_launch_ranks *out)
{
    tddp_launch_ranks made = {0};
    char part[TDDP_LAUNCH_PART_BYTES];
    int64_t rank;
    const char *at = value;
    while (*at != '\0') { /* none at all: as if not given, which is PyTorch's default */
        if (!tddp_launch_list_next(&at, part) ||
            !tddp_parse_int(part, 0, TDDP_LAUNCH_MAX_LOCAL - 1, &rank)) {
            return tddp_launch_value_refuse(source, value,
                                            "local ranks with commas between them, such as 0,1,2");
        }
        if (made.count == TDDP_LAUNCH_MAX_LISTED) {
            return too_many(source, value);
        }
        int place = made.count++;
        for (; place > 0 && made.listed[place - 1] >= rank; place--) {
            if (made.listed[place - 1] == rank) {
                return twice(source, value, rank);
            }
            made.listed[place] = made.listed[place - 1];
        }
        made.listed[place] = (int16_t)rank;
    }
    *out = made;
    return TDDP_OK;
}

int tddp_launch_streams_of(const tddp_launch_streams *streams, int local_rank)
{
    for (int i = 0; i < streams->count; i++) {
        if (streams->listed[i].local_rank == local_rank) {
            return streams->listed[i].streams;
        }
    }
    return streams->all;
}

bool tddp_launch_ranks_has(const tddp_launch_ranks *ranks, int local_rank)
{
    for (int i = 0; i < ranks->count; i++) {
        if (ranks->listed[i] == local_rank) {
            return true;
        }
    }
    return ranks->count == 0;
}

/* --- filters --------------------------------------------------------------------------------- */

/* Texts between single commas, the spaces around them taken away; ",," is a comma of the text. */
static tddp_status store_filters(const char *source, const char *value, tddp_launch_filters *out)
{
    tddp_launch_filters made = {0};
    size_t size = 0;
    const char *at = strcmp(value, "[]") == 0 ? "" : value; /* PyTorch's way to write none */
    while (*at != '\0') {
        size_t begin = size;
        at += strspn(at, " ");
        for (; *at != '\0' && (*at != ',' || at[1] == ','); at++) {
            if (size + 1 >= sizeof made.texts) {
                return tddp_fail(TDDP_INVALID_ARGUMENT,
                                 "%s=%.64s...: expected texts of less than %d bytes together",
                                 source, value, TDDP_LAUNCH_FILTERS_BYTES);
            }
            made.texts[size++] = *at;
            at += *at == ',';
        }
        at += *at == ',';
        while (size > begin && made.texts[size - 1] == ' ') {
            size--;
        }
        if (size > begin) {
            made.texts[size++] = '\0';
            made.count++;
        }
    }
    *out = made;
    return TDDP_OK;
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

/* --- signals --------------------------------------------------------------------------------- */

static tddp_status store_signals(const char *source, const char *value, tddp_launch_options *out)
{
    int found[TDDP_LAUNCH_MAX_SIGNALS];
    int count = 0;
    char part[TDDP_LAUNCH_PART_BYTES];
    const char *at = value;
    do {
        int number = tddp_launch_list_next(&at, part) ? tddp_launch_signal_number(part) : 0;
        if (number <= 0) {
            return tddp_launch_value_refuse(source, value,
                                            "names of signals with commas between them, such as "
                                            "SIGTERM,SIGUSR1");
        }
        if (!tddp_launch_signal_can_be_handled(number)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "%s=%.256s: %s cannot be handled; expected signals that ask a program "
                             "to end, such as SIGTERM or SIGUSR1",
                             source, value, part);
        }
        bool again = false;
        for (int i = 0; i < count; i++) {
            again = again || found[i] == number;
        }
        if (!again && count < TDDP_LAUNCH_MAX_SIGNALS) {
            found[count++] = number;
        }
    } while (*at != '\0');
    memcpy(out->signals, found, (size_t)count * sizeof *found);
    out->signal_count = count;
    return TDDP_OK;
}

tddp_status tddp_launch_list_store(const tddp_launch_flag *flag, const char *source,
                                   const char *value, tddp_launch_options *out)
{
    void *field = (char *)out + flag->offset;
    switch (flag->kind) {
    case TDDP_LAUNCH_KIND_ENDPOINTS:
        return tddp_launch_endpoints_store(source, value, out);
    case TDDP_LAUNCH_KIND_CONF:
        return tddp_launch_conf_store(flag, source, value, field);
    case TDDP_LAUNCH_KIND_STREAMS:
        return store_streams(source, value, field);
    case TDDP_LAUNCH_KIND_RANKS:
        return store_ranks(source, value, field);
    case TDDP_LAUNCH_KIND_FILTERS:
        return store_filters(source, value, field);
    default:
        return store_signals(source, value, out);
    }
}
