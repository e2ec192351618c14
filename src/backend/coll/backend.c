/*
 * The backend over a transport: its table, and how ranks connect. create() and destroy() run on the
 * threads that create and destroy the group, abort() on any.
 *
 * Ranks meet (tddp/meeting.h) with the transport's name and address, connect, and then each says
 * hello to all others: a rank that ended before another had connected to it would look unreachable,
 * and its notice would arrive before a receive of it is posted.
 *
 * Invariant: a rank that fails while ranks connect says why in the meeting, and by its notice; so
 * that all fail, and name it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/coll/coll.h"

enum {
    CHECK_MS = 300,        /* between two checks whether the ranks that are waited for live */
    REASON_MS = 200,       /* for the reason of a lost rank */
    TOKEN_MS = 20,         /* between two looks at a token */
    CLOSE_MS = 2000,       /* for what the kernel still has to deliver when a group ends, */
    FAILED_CLOSE_MS = 100, /* and after a failure, for which others may wait */
};

typedef struct transport_backend {
    tddp_backend_v1 table; /* first: its address is this one's */
    const tddp_transport_ops *transport;
} transport_backend;

/* --- connecting ------------------------------------------------------------------------------ */

/* What a rank gives: the name of its transport, with a NUL, and its address. */
static tddp_status give(const tddp_coll *coll, tddp_meeting *meeting, tddp_slice address,
                        const tddp_wait *wait)
{
    const char *name = coll->transport->name;
    tddp_bytes record = {0};
    tddp_status status = tddp_bytes_append(&record, name, strlen(name) + 1);
    status = status ? status : tddp_bytes_append(&record, address.data, address.size);
    status =
        status ? status : tddp_meeting_give(meeting, (tddp_slice){record.data, record.size}, wait);
    tddp_bytes_free(&record);
    return status;
}

/* The addresses in the records of all, which are of the same transport. */
static tddp_status take(const tddp_coll *coll, const tddp_meeting *meeting, tddp_slice *addresses)
{
    const char *name = coll->transport->name;
    const size_t bytes = strlen(name) + 1;
    for (int rank = 0; rank < coll->size; rank++) {
        const tddp_slice record = tddp_meeting_records(meeting)[rank];
        if (record.size < bytes || memcmp(record.data, name, bytes) != 0) {
            return tddp_fail(TDDP_MISMATCH,
                             "rank %d uses %.*s between hosts, rank %d uses %s: TDDP_HOSTS, and "
                             "what is installed, must be the same on all ranks",
                             tddp_coll_rank_name(coll, rank),
                             (int)strnlen(record.data, record.size < 32 ? record.size : 32),
                             record.data, tddp_coll_rank_name(coll, coll->rank), name);
        }
        addresses[rank] = (tddp_slice){record.data + bytes, record.size - bytes};
    }
    return TDDP_OK;
}

/* What an error that is about one rank means while ranks connect, with what that rank has said. */
static tddp_status fail_with(const tddp_coll *coll, tddp_meeting *meeting, int peer,
                             tddp_status status)
{
    char text[1024];
    const int name = tddp_coll_rank_name(coll, peer);
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (status == TDDP_CANCELED) {
        return tddp_fail(status, "interrupted while connecting to rank %d", name);
    }
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status,
                         "no connection to rank %d in the time given: is it alive, and can its "
                         "address be reached from here?",
                         name);
    }
    const char *reason = tddp_meeting_await_failure(meeting, peer, REASON_MS);
    return tddp_fail(status, "cannot connect to rank %d (%s): %s", name, text,
                     reason ? reason : "has it ended, or does a firewall stand between?");
}

/* Tests the hellos that are left; `missing` says whose have not arrived. Returns how many are left,
 * or sets `*peer`, whose status and text is the reason. */
static size_t test_hellos(tddp_coll *coll, int *peer, tddp_status *status,
                          char missing[TDDP_MEETING_TEXT_BYTES])
{
    size_t left = 0;
    missing[0] = '\0';
    if (coll->transport->progress) {
        coll->transport->progress(coll->context);
    }
    for (int i = 0; i < 2 * coll->size && *status == TDDP_OK; i++) {
        void **hello = &coll->peers[i / 2].hellos[i % 2];
        int complete = 0;
        if (*hello) {
            *status = coll->transport->test(coll->context, *hello, &complete, NULL);
            *peer = *status ? i / 2 : *peer;
        }
        if (*hello && i % 2 == 0 && !complete) {
            tddp_add_text(missing, TDDP_MEETING_TEXT_BYTES, "%srank %d", *missing ? ", " : "",
                          tddp_coll_rank_name(coll, i / 2));
        }
        if (complete && *status == TDDP_OK) {
            tddp_coll_release(coll, hello);
        }
        left += *hello != NULL;
    }
    return left;
}

static tddp_status await_hellos(tddp_coll *coll, const tddp_backend_opts *opts,
                                const tddp_wait *wait, int *peer)
{
    const int64_t deadline = tddp_deadline_after_ms(wait->timeout_ms);
    int64_t check_at = tddp_deadline_after_ms(CHECK_MS);
    char missing[TDDP_MEETING_TEXT_BYTES];
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(coll->events);
        tddp_status status = TDDP_OK;
        if (test_hellos(coll, peer, &status, missing) == 0 || status) {
            return status;
        }
        if (wait->cancel && tddp_cancel_triggered(wait->cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted while all ranks connect");
        }
        if (tddp_now_ns() >= deadline) {
            return tddp_fail(TDDP_TIMEOUT,
                             "these have not connected to all others in the time given: %s",
                             missing);
        }
        if (opts->check && tddp_now_ns() >= check_at) {
            status = opts->check(opts->check_data);
            if (status) {
                return status;
            }
            check_at = tddp_deadline_after_ms(CHECK_MS);
        }
        tddp_coll_arm(coll);
        tddp_eventcount_wait(coll->events, seen, 0, TOKEN_MS * TDDP_NS_PER_MS);
    }
}

static tddp_status send_hellos(tddp_coll *coll, int *peer)
{
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < coll->size && status == TDDP_OK; rank++) {
        void **hellos = coll->peers[rank].hellos;
        if (rank != coll->rank) {
            status = coll->transport->recv(coll->context, rank, HELLO_TAG, NULL, 0, &hellos[0]);
            status =
                status ? status
                       : coll->transport->send(coll->context, rank, HELLO_TAG, NULL, 0, &hellos[1]);
            *peer = status ? rank : *peer;
        }
    }
    return status;
}

static tddp_status connect_all(tddp_coll *coll, const tddp_backend_opts *opts, int64_t deadline,
                               tddp_cancel *cancel, tddp_meeting *meeting)
{
    int peer = -1;
    tddp_slice address = {0};
    tddp_slice *addresses = tddp_alloc_array((size_t)coll->size, sizeof *addresses);
    tddp_status status = addresses ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    status = status ? status : coll->transport->open(opts, &coll->context, &address);
    tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
    status = status ? status : give(coll, meeting, address, &left);
    left.timeout_ms = tddp_deadline_poll_ms(deadline);
    status = status ? status : tddp_meeting_await(meeting, &left);
    status = status ? status : take(coll, meeting, addresses);
    left.timeout_ms = tddp_deadline_poll_ms(deadline);
    status = status ? status : coll->transport->connect(coll->context, addresses, &left, &peer);
    status = status ? status : tddp_coll_begin(coll);
    left.timeout_ms = tddp_deadline_poll_ms(deadline);
    status = status ? status : send_hellos(coll, &peer);
    status = status ? status : await_hellos(coll, opts, &left, &peer);
    free(addresses);
    return status && peer >= 0 ? fail_with(coll, meeting, peer, status) : status;
}

static tddp_meeting_opts meeting_of(const tddp_backend_opts *opts)
{
    return (tddp_meeting_opts){.store = opts->store,
                               .name = "transport",
                               .rank = opts->rank,
                               .world_size = opts->world_size,
                               .sender = TDDP_MEETING_ALL,
                               .names = opts->names,
                               .check = opts->check,
                               .data = opts->check_data,
                               .check_ms = CHECK_MS};
}

void tddp_transport_refuse(const tddp_backend_opts *opts, const char *reason)
{
    const tddp_meeting_opts meeting_opts = meeting_of(opts);
    tddp_meeting_fail(&meeting_opts, reason);
}

static tddp_status meet(tddp_coll *coll, const tddp_backend_opts *opts, const tddp_wait *wait)
{
    const tddp_meeting_opts meeting_opts = meeting_of(opts);
    tddp_meeting *meeting;
    tddp_status status = tddp_meeting_open(&meeting_opts, &meeting);
    if (status) {
        return status;
    }
    status = connect_all(coll, opts, tddp_wait_deadline(wait, opts->timeout_ms),
                         tddp_wait_cancel(wait), meeting);
    tddp_meeting_close(meeting);
    if (status) {
        char text[4096];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        tddp_coll_send_notice(coll, status, text);
        tddp_meeting_fail(&meeting_opts, text);
        return tddp_fail(status, "%s", text);
    }
    return TDDP_OK;
}

/* --- the table ------------------------------------------------------------------------------- */

static void destroy(void *context)
{
    tddp_coll *coll = context;
    const tddp_transport_ops *transport = coll->transport;
    void *beneath = coll->context;
    tddp_eventcount *own_events = coll->owns_events ? coll->events : NULL;
    if (beneath) {
        tddp_coll_send_notice(coll, TDDP_OK, "");
        transport->close(beneath, atomic_load(&coll->aborted) ? 0 : CLOSE_MS);
    }
    tddp_coll_destroy(coll);
    if (beneath) {
        transport->destroy(beneath);
    }
    tddp_eventcount_free(own_events);
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    tddp_coll *coll = NULL;
    tddp_backend_opts own = *opts;
    tddp_status status = opts->events ? TDDP_OK : tddp_eventcount_create(&own.events);
    if (status) {
        return status;
    }
    const tddp_coll_opts coll_opts = {
        .transport = ((const transport_backend *)(const void *)opts->backend)->transport,
        .events = own.events,
        .rank = opts->rank,
        .world_size = opts->world_size,
        .names = opts->names,
        .observer = opts->observer};
    status = tddp_coll_create(&coll_opts, &coll);
    if (status) {
        tddp_eventcount_free(opts->events ? NULL : own.events);
        return status;
    }
    coll->owns_events = !opts->events;
    status = opts->world_size > 1 ? meet(coll, &own, wait) : TDDP_OK;
    if (status) {
        char text[4096];
        (void)snprintf(text, sizeof text, "%s", tddp_error_message());
        destroy(coll);
        return tddp_fail(status, "%s", text);
    }
    *context = coll;
    return TDDP_OK;
}

static void abort_group(void *context)
{
    tddp_coll *coll = context;
    tddp_coll_send_notice(coll, TDDP_GROUP_FAILED,
                          "its group was destroyed while operations were under way");
    const bool first = !atomic_exchange(&coll->aborted, true);
    if (coll->context) {
        coll->transport->close(coll->context, first ? FAILED_CLOSE_MS : 0);
    }
    tddp_eventcount_notify(coll->events);
}

static tddp_status run(void *context, const tddp_op *op)
{
    return tddp_coll_run(context, op);
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    return tddp_coll_post(context, op, request);
}

static tddp_status finish(void *context, void *request, int *source)
{
    return tddp_coll_finish(context, request, source);
}

static tddp_status probe(void *context, void *request, int *source)
{
    return tddp_coll_probe(context, request, source);
}

static void report_failure(void *context, tddp_status status, const char *text)
{
    tddp_coll_send_notice(context, status, text);
}

static tddp_status check_peer(void *context, int rank)
{
    return rank < 0 ? tddp_coll_check(context, TDDP_ANY_SOURCE, UINT64_MAX)
                    : tddp_coll_check(context, rank, 0);
}

static struct tddp_eventcount *events(void *context)
{
    return ((tddp_coll *)context)->events;
}

const tddp_backend_v1 *tddp_transport_backend(const tddp_transport_ops *ops)
{
    if (!ops || ops->size < sizeof *ops || !ops->name || !ops->open || !ops->connect ||
        !ops->send || !ops->recv || !ops->test || !ops->release || !ops->close || !ops->destroy) {
        (void)tddp_fail(TDDP_INVALID_ARGUMENT, "transport: expected a name, and all functions of "
                                               "tddp_transport_ops but progress, arm and failed");
        return NULL;
    }
    transport_backend *self = tddp_alloc(sizeof *self);
    if (!self) {
        return NULL;
    }
    self->transport = ops;
    self->table = (tddp_backend_v1){.abi = TDDP_BACKEND_ABI,
                                    .size = sizeof self->table,
                                    .name = ops->name,
                                    .device_types = 1u << TDDP_CPU,
                                    .create = create,
                                    .abort = abort_group,
                                    .destroy = destroy,
                                    .post = post,
                                    .finish = finish,
                                    .traits = TDDP_BACKEND_RESUMES | ops->traits,
                                    .report_failure = report_failure,
                                    .events = events,
                                    .check_peer = check_peer,
                                    .probe = probe,
                                    .drop = tddp_coll_drop,
                                    .op_count = TDDP_OP_COUNT};
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        self->table.run[kind] = tddp_op_is_p2p((tddp_op_kind)kind) ? NULL : run;
    }
    return &self->table;
}
