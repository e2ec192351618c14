/*
 * Each rank adds a line to a list in the store and counts itself; the last one sets a key for which
 * all wait. So a rank reads all others' records by one request, and names none of them in it. Runs
 * on the thread that creates the group.
 *
 * Keys below the group's: `arrivals` grows by "+RANK RECORD\n" when a rank comes, and by "-RANK\n"
 * when it gives up; `arrived` counts those that have come and not given up; `complete` is there
 * once they were all. It may be there too early if one gave up meanwhile: the list is what counts.
 */
#include "group/arrivals.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    READ_MS = 1000,
    WAIT_SLICE_MS = 1000,
    PAUSE_MS = 50,     /* before the list is read again */
    LOOKS_A_SLICE = 4, /* for ranks of PyTorch's own */
    NAMES_SHOWN = 8,
    ADDRESS_BYTES = 200,
    LINE_BYTES = TDDP_PEER_RECORD_BYTES + 24,
};

int64_t tddp_group_missing_log_interval_ms = 10000;

static const tddp_slice list_key = {"arrivals", 8};
static const tddp_slice count_key = {"arrived", 7};
static const tddp_slice complete_key = {"complete", 8};

static tddp_wait time_left(int64_t deadline, const tddp_wait *wait)
{
    return (tddp_wait){tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
}

/* --- the list -------------------------------------------------------------------------------- */

/* Cuts the list into the records of the ranks that are there; the others' are empty. */
static void parse(char *text, tddp_blob *records, int world_size)
{
    char *end;
    while ((end = strchr(text, '\n'))) {
        *end = '\0';
        char *after = text;
        const bool came = *text == '+';
        const long rank = came || *text == '-' ? strtol(text + 1, &after, 10) : -1;
        if (after > text + 1 && rank >= 0 && rank < world_size) {
            records[rank] = came && *after == ' '
                                ? (tddp_blob){after + 1, (size_t)(end - after - 1)}
                                : (tddp_blob){0};
        }
        text = end + 1;
    }
}

/* Reads the list, which this rank is in: the call does not wait. `*list` is to be freed after the
 * records, which point into it. */
static tddp_status read_list(tddp_group *group, const tddp_wait *wait, tddp_blob *list,
                             tddp_blob **records, int *missing)
{
    *list = (tddp_blob){0};
    *records = tddp_alloc_array((size_t)group->world_size, sizeof **records);
    tddp_status status =
        *records ? tddp_store_get(group->store, list_key, wait, list) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(*records);
        return status;
    }
    parse(list->data, *records, group->world_size);
    *missing = 0;
    for (int rank = 0; rank < group->world_size; rank++) {
        *missing += !(*records)[rank].data;
    }
    return TDDP_OK;
}

/* --- who is missing -------------------------------------------------------------------------- */

/* Lists the missing ranks: "2", "1, 2, 4", "1, 2, ... (30 in all)", or "" if none is missing. */
static tddp_status missing_ranks(tddp_group *group, const tddp_wait *wait, char *text, size_t size)
{
    tddp_blob list;
    tddp_blob *records;
    int missing;
    text[0] = '\0';
    tddp_status status = read_list(group, wait, &list, &records, &missing);
    if (status) {
        return status;
    }
    size_t used = 0;
    int shown = 0;
    for (int rank = 0; rank < group->world_size && shown < NAMES_SHOWN && used < size; rank++) {
        if (!records[rank].data) {
            used += (size_t)snprintf(text + used, size - used, "%s%d", used ? ", " : "", rank);
            shown++;
        }
    }
    if (missing > shown && used < size) {
        (void)snprintf(text + used, size - used, ", ... (%d in all)", missing);
    }
    free(records);
    tddp_blob_free(&list);
    return TDDP_OK;
}

/* " at 10.0.0.1:29500"; "" where the store has no address. Returns `text`. */
static const char *store_address(const tddp_group *group, char text[ADDRESS_BYTES])
{
    const char *host = tddp_tcp_store_host(group->store);
    text[0] = '\0';
    if (host) {
        (void)snprintf(text, ADDRESS_BYTES, " at %.180s:%d", host,
                       tddp_tcp_store_port(group->store));
    }
    return text;
}

static void log_missing(tddp_group *group, const tddp_wait *wait, int64_t start)
{
    char missing[128];
    char address[ADDRESS_BYTES];
    if (missing_ranks(group, wait, missing, sizeof missing) == TDDP_OK && missing[0]) {
        tddp_log(TDDP_LOG_WARN, "group",
                 "rank %d of \"%s\" has waited %" PRId64 " s in the store%s for rank(s) %s of %d",
                 group->rank, group->name, (tddp_now_ns() - start) / TDDP_NS_PER_S,
                 store_address(group, address), missing, group->world_size);
    }
}

static tddp_status fail_missing(tddp_group *group, int64_t start, const char *reason)
{
    char missing[128];
    char address[ADDRESS_BYTES];
    tddp_wait wait = {READ_MS, NULL};
    if (missing_ranks(group, &wait, missing, sizeof missing) || !missing[0]) {
        return tddp_fail(TDDP_TIMEOUT, "rank %d of group \"%s\": %s", group->rank, group->name,
                         reason);
    }
    return tddp_fail(TDDP_TIMEOUT,
                     "rank %d of group \"%s\" waited %.1f s in vain for rank(s) %s of %d: start "
                     "them with the same store%s, name and world size",
                     group->rank, group->name, (double)(tddp_now_ns() - start) / 1e9, missing,
                     group->world_size, store_address(group, address));
}

/* --- ranks of PyTorch's own ------------------------------------------------------------------ */

/* Whether a process of PyTorch's gloo has begun to meet others as this rank, by the keys of its
 * default group: what 1.13 sets first, and what later versions do. */
static tddp_status has_pytorchs_keys(tddp_group *group, int rank, const tddp_wait *wait, bool *out)
{
    static const char *const formats[] = {"0/0/rank_%d", "0//cpu//0/%d"};
    tddp_status status = TDDP_OK;
    *out = false;
    for (size_t i = 0; i < sizeof formats / sizeof *formats && status == TDDP_OK && !*out; i++) {
        char text[48];
        int there = 0;
        const int length = snprintf(text, sizeof text, formats[i], rank);
        const tddp_slice key = {text, (size_t)length};
        status = tddp_store_check(group->membership, &key, 1, wait, &there);
        *out = there != 0;
    }
    return status;
}

/* Whether the rank has not come to this group. */
static tddp_status is_missing(tddp_group *group, int rank, const tddp_wait *wait, bool *out)
{
    tddp_blob list;
    tddp_blob *records;
    int missing;
    tddp_status status = read_list(group, wait, &list, &records, &missing);
    if (status == TDDP_OK) {
        *out = records[rank].size == 0;
        free(records);
        tddp_blob_free(&list);
    }
    return status;
}

/* Fails if one of the ranks, another one each turn, is a process of PyTorch's: it waits for this
 * one as long as this one for it. */
static tddp_status check_for_pytorch(tddp_group *group, int turn, const tddp_wait *wait)
{
    const int rank = turn % group->world_size;
    bool there = false;
    bool missing = false;
    if (!group->is_root || rank == group->rank || strcmp(group->name, "default_pg") != 0) {
        return TDDP_OK;
    }
    tddp_status status = has_pytorchs_keys(group, rank, wait, &there);
    if (status == TDDP_OK && there) {
        status = is_missing(group, rank, wait, &missing);
    }
    if (status == TDDP_OK && missing) {
        char address[ADDRESS_BYTES];
        status = tddp_fail(TDDP_MISMATCH,
                           "rank %d of group \"%s\" is a process of PyTorch, which has begun to "
                           "meet the others in the store%s in its own way: all ranks of a group "
                           "use torch-ddp; give PyTorch's processes a store of their own",
                           rank, group->name, store_address(group, address));
    }
    return status;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* Whether all have come at some moment. Waits in short slices: a TCP store serves one call at a
 * time, and other threads need it too. */
static tddp_status await_complete(tddp_group *group, const tddp_wait *wait, int64_t deadline,
                                  int64_t start, int64_t *next_log)
{
    for (int turn = 0;; turn += LOOKS_A_SLICE) {
        const int64_t slice = tddp_deadline_after_ms(WAIT_SLICE_MS);
        const tddp_wait part = time_left(slice < deadline ? slice : deadline, wait);
        tddp_status status = tddp_store_wait(group->store, &complete_key, 1, &part);
        if (status != TDDP_TIMEOUT) {
            return status;
        }
        const tddp_wait left = time_left(deadline, wait);
        int64_t count;
        if (left.timeout_ms == 0) {
            return fail_missing(group, start, tddp_error_message());
        }
        /* The last one may have ended before it could set the key. */
        status = tddp_store_add(group->store, count_key, 0, &left, &count);
        if (status || count >= group->world_size) {
            return status;
        }
        for (int i = 0; i < LOOKS_A_SLICE && status == TDDP_OK; i++) {
            status = check_for_pytorch(group, turn + i, &left);
        }
        if (status) {
            return status;
        }
        if (tddp_now_ns() >= *next_log) {
            log_missing(group, &left, start);
            *next_log += tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS;
        }
    }
}

/* Makes the table of ranks if all are in the list. */
static tddp_status read_peers(tddp_group *group, tddp_cancel *cancel, bool *all)
{
    /* Also where the deadline is just over. */
    const tddp_wait wait = {READ_MS, cancel};
    tddp_blob list;
    tddp_blob *records;
    int missing;
    tddp_status status = read_list(group, &wait, &list, &records, &missing);
    if (status) {
        return status;
    }
    *all = missing == 0;
    if (*all) {
        status = tddp_peers_create(records, group->world_size, &group->peers);
    }
    free(records);
    tddp_blob_free(&list);
    return status;
}

static tddp_status arrive(tddp_group *group, const tddp_wait *wait)
{
    char record[TDDP_PEER_RECORD_BYTES];
    char line[LINE_BYTES];
    int64_t count;
    tddp_status status = tddp_peers_describe_self(group->root_rank, record);
    if (status) {
        return status;
    }
    const int length = snprintf(line, sizeof line, "+%d %s\n", group->rank, record);
    status = tddp_store_append(group->store, list_key, (tddp_slice){line, (size_t)length}, wait);
    if (status == TDDP_OK) {
        status = tddp_store_add(group->store, count_key, 1, wait, &count);
        group->arrived = status == TDDP_OK;
    }
    if (status == TDDP_OK && count == group->world_size) {
        status = tddp_store_set(group->store, complete_key, (tddp_slice){"", 0}, wait);
    }
    return status;
}

tddp_status tddp_arrivals_exchange(tddp_group *group, const tddp_wait *wait, int64_t deadline)
{
    const int64_t start = tddp_now_ns();
    int64_t next_log = start + tddp_group_missing_log_interval_ms * TDDP_NS_PER_MS;
    const tddp_wait left = time_left(deadline, wait);
    bool all = false;
    tddp_status status = arrive(group, &left);
    while (status == TDDP_OK && !all) {
        status = await_complete(group, wait, deadline, start, &next_log);
        if (status == TDDP_OK) {
            status = read_peers(group, left.cancel, &all);
        }
        if (status == TDDP_OK && !all) {
            status = tddp_now_ns() < deadline ? tddp_net_sleep(tddp_deadline_after_ms(PAUSE_MS),
                                                               tddp_cancel_fd(left.cancel))
                                              : fail_missing(group, start, "ranks gave up");
        }
    }
    return status;
}

tddp_status tddp_arrivals_withdraw(tddp_group *group, const tddp_wait *wait)
{
    char line[24];
    int64_t count;
    int deleted;
    const int length = snprintf(line, sizeof line, "-%d\n", group->rank);
    tddp_status status =
        tddp_store_append(group->store, list_key, (tddp_slice){line, (size_t)length}, wait);
    if (status == TDDP_OK && group->arrived) {
        status = tddp_store_add(group->store, count_key, -1, wait, &count);
    }
    return status ? status : tddp_store_delete_key(group->store, complete_key, wait, &deleted);
}
