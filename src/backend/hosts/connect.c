/*
 * The communicators between hosts: the leaders' are made with the context, the global one when it
 * is first needed, on a thread of on_demand's beside the operations.
 *
 * Invariant: a rank that waits in the global one for others to connect notices one that ends, as
 * each rank watches those of its host and a leader its communicator, and reports what it sees to
 * both.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/hosts.h"

enum { PREFIX_BYTES = 32 };

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

/* With a connection of its own to the store, since it waits there. */
static tddp_status open_global(void *context, const tddp_wait *wait, tddp_cancel *given_up)
{
    tddp_hosts *self = context;
    tddp_backend_opts opts = self->opts;
    tddp_hosts_comm made = {0};
    (void)given_up; /* the backend closes connections that others are making without harm */
    tddp_status status = tddp_store_clone(self->opts.store, wait, &opts.store);
    if (status == TDDP_OK) {
        status = open_comm(self, &opts, "global", tddp_wait_deadline(wait, 0),
                           tddp_wait_cancel(wait), &made);
        /* The connection ends here, unless the backend needs it further. */
        tddp_store_release(made.inner.store);
        made.inner.store = NULL;
        tddp_store_release(opts.store);
    }
    if (status) {
        tddp_inner_close(&made.inner);
        return tddp_hosts_report_if_fatal(self, status);
    }
    publish(self, &made);
    return TDDP_OK;
}

/* What open_global() needs later. */
static tddp_status copy_opts(tddp_hosts *self, const tddp_backend_opts *opts)
{
    const size_t count = (size_t)self->world_size;
    int *names = opts->names ? tddp_alloc_array(count, sizeof *names) : NULL;
    self->opts = (tddp_backend_opts){
        .size = sizeof(tddp_backend_opts),
        .rank = self->rank,
        .world_size = self->world_size,
        .store = tddp_store_retain(opts->store),
        .device_index = -1,
        .group = tddp_copy_string(opts->group),
        .address = opts->address ? tddp_copy_string(opts->address) : NULL,
        .names = names,
        .check = check_ranks,
        .check_data = self,
        .observer = opts->observer,
    };
    if (!self->opts.group || (opts->address && !self->opts.address) || (opts->names && !names)) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (names) {
        memcpy(names, opts->names, count * sizeof *names);
    }
    return TDDP_OK;
}

/* --- both ------------------------------------------------------------------------------------ */

tddp_status tddp_hosts_connect(tddp_hosts *self, const tddp_backend_opts *opts,
                               const tddp_wait *wait)
{
    const int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    tddp_status status = copy_opts(self, opts);
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
    tddp_store_release(self->opts.store);
    free((char *)self->opts.group);
    free((char *)self->opts.address);
    free((int *)self->opts.names);
}
