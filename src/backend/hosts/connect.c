/*
 * The communicators between hosts: the leaders' are made with the context, the global one when it
 * is first needed, on a thread of on_demand's beside the operations.
 *
 * Invariant: no rank connects in the global communicator before all ranks have come to do so. Who
 * waits for them notices one that ends, as each rank watches those of its host and a leader its
 * communicator, and reports what it sees to both.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/meeting.h>

#include "backend/hosts/hosts.h"

enum {
    PREFIX_BYTES = 32,
    CHECK_MS = 200, /* between two looks at the other ranks while they come */
};

static tddp_status open_comm(const tddp_hosts *self, const tddp_backend_opts *opts,
                             const char *prefix, int64_t deadline, tddp_cancel *cancel,
                             tddp_hosts_comm *comm)
{
    tddp_inner *inner = &comm->inner;
    tddp_status status = tddp_prefix_store_create(prefix, opts->store, &inner->store);
    if (status) {
        return status;
    }
    tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
    tddp_backend_opts comm_opts = *opts;
    comm_opts.store = inner->store;
    comm_opts.timeout_ms = left.timeout_ms > 0 ? left.timeout_ms : 1;
    comm_opts.same_host = 0;
    comm_opts.hosts = NULL;
    comm_opts.backend = self->between;
    comm_opts.events = tddp_shm_events(self->shm, self->local_rank);
    status = self->between->create(&comm_opts, &left, &inner->context);
    inner->backend = status ? NULL : self->between;
    return status;
}

static tddp_status open_leader_comm(tddp_hosts *self, const tddp_backend_opts *opts,
                                    int64_t deadline, tddp_cancel *cancel)
{
    int *names = tddp_alloc_array((size_t)self->host_count, sizeof *names);
    if (!names) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int host = 0; host < self->host_count; host++) {
        int rank = tddp_hosts_member(self, host, self->local_rank);
        names[host] = opts->names ? opts->names[rank] : rank;
    }
    char prefix[PREFIX_BYTES];
    (void)snprintf(prefix, sizeof prefix, "leaders/%d", self->local_rank);
    tddp_backend_opts comm_opts = *opts;
    comm_opts.rank = self->host;
    comm_opts.world_size = self->host_count;
    comm_opts.names = names;
    tddp_status status =
        open_comm(self, &comm_opts, prefix, deadline, cancel, &self->comms[TDDP_HOSTS_LEADERS]);
    free(names);
    return status;
}

/* --- the global one -------------------------------------------------------------------------- */

/* That all ranks this one can see are alive and in the group. */
static tddp_status check_ranks(void *context)
{
    tddp_hosts *self = context;
    const tddp_inner *leaders = &self->comms[TDDP_HOSTS_LEADERS].inner;
    tddp_status status = TDDP_OK;
    for (int local = 0; local < self->local_size && status == TDDP_OK; local++) {
        if (local != self->local_rank) {
            status = tddp_shm_check_peer(self->shm, local);
        }
    }
    if (status == TDDP_OK && leaders->backend && leaders->backend->check_peer) {
        status = leaders->backend->check_peer(leaders->context, -1);
    }
    return status;
}

/* Returns once all ranks are about to connect. */
static tddp_status await_all(tddp_hosts *self, tddp_store *store, int64_t deadline,
                             tddp_cancel *cancel)
{
    const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
    tddp_meeting *meeting;
    const tddp_meeting_opts opts = {.store = store,
                                    .name = "global",
                                    .rank = self->rank,
                                    .world_size = self->world_size,
                                    .sender = TDDP_MEETING_ALL,
                                    .names = self->names,
                                    .check = check_ranks,
                                    .data = self,
                                    .check_ms = CHECK_MS};
    tddp_status status = tddp_meeting_open(&opts, &meeting);
    if (status) {
        return status;
    }
    status = tddp_meeting_give(meeting, (tddp_slice){"", 0}, &left);
    status = status ? status : tddp_meeting_await(meeting, &left);
    tddp_meeting_close(meeting);
    return status;
}

static tddp_backend_opts global_opts(tddp_hosts *self, tddp_store *store)
{
    return (tddp_backend_opts){
        .size = sizeof(tddp_backend_opts),
        .rank = self->rank,
        .world_size = self->world_size,
        .store = store,
        .device_index = -1,
        .group = self->group,
        .address = self->address,
        .names = self->names,
        .check = check_ranks,
        .check_data = self,
        .observer = self->observer,
    };
}

/* From now on operations and abort() find it. */
static void publish(tddp_hosts *self, const tddp_hosts_comm *made)
{
    pthread_mutex_lock(&self->lock);
    self->comms[TDDP_HOSTS_GLOBAL] = *made;
    if (self->aborted) {
        tddp_inner_abort(&self->comms[TDDP_HOSTS_GLOBAL].inner);
    }
    tddp_hosts_post_queued(self);
    pthread_mutex_unlock(&self->lock);
}

/* With a connection of its own to the store, since it waits there. Once all have come it goes on
 * also if this rank's group is aborted, for connecting takes a moment then: closed sockets to which
 * others are just connecting end their processes by an exception on Gloo's thread (2022 versions).
 */
static tddp_status open_global(void *context, const tddp_wait *wait, tddp_cancel *given_up)
{
    tddp_hosts *self = context;
    const int64_t deadline = tddp_wait_deadline(wait, 0);
    tddp_hosts_comm made = {0};
    tddp_store *store;
    tddp_status status = tddp_store_clone(self->store, wait, &store);
    if (status == TDDP_OK) {
        status = await_all(self, store, deadline, tddp_wait_cancel(wait));
        if (status == TDDP_OK) {
            const tddp_backend_opts opts = global_opts(self, store);
            status = open_comm(self, &opts, "global", deadline, given_up, &made);
        }
        /* The connection ends here, unless the backend needs it further. */
        tddp_store_release(made.inner.store);
        made.inner.store = NULL;
        tddp_store_release(store);
    }
    if (status) {
        tddp_inner_close(&made.inner);
        return tddp_hosts_report_if_fatal(self, status);
    }
    publish(self, &made);
    return TDDP_OK;
}

/* What open_global() needs later. */
static tddp_status keep_opts(tddp_hosts *self, const tddp_backend_opts *opts)
{
    const size_t count = (size_t)self->world_size;
    self->store = tddp_store_retain(opts->store);
    self->observer = opts->observer;
    self->group = tddp_copy_string(opts->group);
    self->address = opts->address ? tddp_copy_string(opts->address) : NULL;
    self->names = opts->names ? tddp_alloc_array(count, sizeof *self->names) : NULL;
    if (!self->group || (opts->address && !self->address) || (opts->names && !self->names)) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (self->names) {
        memcpy(self->names, opts->names, count * sizeof *self->names);
    }
    return TDDP_OK;
}

/* --- both ------------------------------------------------------------------------------------ */

tddp_status tddp_hosts_connect(tddp_hosts *self, const tddp_backend_opts *opts,
                               const tddp_wait *wait)
{
    const int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    tddp_status status = keep_opts(self, opts);
    if (status == TDDP_OK && tddp_hosts_is_leader(self)) {
        status = open_leader_comm(self, opts, deadline, cancel);
    }
    if (status == TDDP_OK && opts->on_demand) {
        status = tddp_on_demand_add(opts->on_demand, open_global, self,
                                    tddp_shm_events(self->shm, self->local_rank));
        self->on_demand = status ? NULL : opts->on_demand;
    } else if (status == TDDP_OK) {
        const tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
        status = open_global(self, &left, cancel);
    }
    return status;
}

void tddp_hosts_disconnect(tddp_hosts *self)
{
    tddp_inner_close(&self->comms[TDDP_HOSTS_LEADERS].inner);
    tddp_inner_close(&self->comms[TDDP_HOSTS_GLOBAL].inner);
    tddp_store_release(self->store);
    free(self->group);
    free(self->address);
    free(self->names);
}
