/*
 * Creates and destroys a context: the map of ranks to hosts, the communicators, scratch memory.
 * Runs on the thread that creates or destroys the group; abort() on any. Scratch memory belongs to
 * the running operation.
 *
 * Invariant: all ranks create their communicators in the same order, the global one first. So the
 * ranks that wait in a communicator for a rank that failed are exactly those that it must tell.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/hosts.h"

enum { PREFIX_BYTES = 32 };

/* --- ranks and hosts ------------------------------------------------------------------------- */

static tddp_status allocate_lists(tddp_hosts *self)
{
    size_t ranks = (size_t)self->world_size;
    self->host_of = tddp_alloc_array(ranks, sizeof *self->host_of);
    self->local_of = tddp_alloc_array(ranks, sizeof *self->local_of);
    self->members = tddp_alloc_array(ranks, sizeof *self->members);
    self->starts = tddp_alloc_array(ranks + 1, sizeof *self->starts);
    bool all = self->host_of && self->local_of && self->members && self->starts;
    return all ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

static tddp_status set_layout(tddp_hosts *self, const int *hosts)
{
    tddp_status status = allocate_lists(self);
    if (status) {
        return status;
    }
    int placed = 0;
    for (int host = 0; placed < self->world_size && host < self->world_size; host++) {
        self->starts[host] = placed;
        for (int rank = 0; rank < self->world_size; rank++) {
            if (hosts[rank] == host) {
                self->host_of[rank] = host;
                self->local_of[rank] = placed - self->starts[host];
                self->members[placed++] = rank;
            }
        }
        self->starts[host + 1] = placed;
        self->host_count = host + 1;
        int size = tddp_hosts_size_of(self, host);
        self->max_local_size = size > self->max_local_size ? size : self->max_local_size;
        self->leaders = host == 0 || size < self->leaders ? size : self->leaders;
    }
    self->host = self->host_of[self->rank];
    self->local_rank = self->local_of[self->rank];
    self->local_size = tddp_hosts_size_of(self, self->host);
    return TDDP_OK;
}

/* --- communicators --------------------------------------------------------------------------- */

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
    tddp_status status = open_comm(self, &comm_opts, prefix, deadline, cancel, &self->leader_comm);
    free(names);
    return status;
}

/* --- life cycle ------------------------------------------------------------------------------ */

bool tddp_hosts_can_use(const tddp_backend_v1 *between)
{
    bool all = between->post && between->finish && between->op_count >= TDDP_OP_COUNT;
    for (int kind = 0; all && kind < TDDP_OP_COUNT; kind++) {
        all = tddp_op_is_p2p((tddp_op_kind)kind) || between->run[kind];
    }
    return all && between->device_types == 1u << TDDP_CPU;
}

tddp_status tddp_hosts_create(const tddp_backend_v1 *between, tddp_shm *shm,
                              const tddp_backend_opts *opts, const tddp_wait *wait,
                              tddp_hosts **out)
{
    tddp_hosts *self = tddp_alloc(sizeof *self);
    if (!self) {
        tddp_shm_destroy(shm);
        return TDDP_OUT_OF_MEMORY;
    }
    self->between = between;
    self->shm = shm;
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    tddp_status status = set_layout(self, opts->hosts);
    if (status == TDDP_OK) {
        status = open_comm(self, opts, "global", deadline, cancel, &self->global_comm);
    }
    if (status == TDDP_OK && tddp_hosts_is_leader(self)) {
        status = open_leader_comm(self, opts, deadline, cancel);
    }
    if (status) {
        tddp_hosts_destroy(self);
        return status;
    }
    tddp_log(
        TDDP_LOG_DEBUG, "hosts",
        "rank %d is local rank %d of %d on host %d of %d; %s between hosts, %d leaders on each",
        self->rank, self->local_rank, self->local_size, self->host, self->host_count, between->name,
        self->leaders);
    *out = self;
    return TDDP_OK;
}

void tddp_hosts_abort(tddp_hosts *self)
{
    tddp_shm_abort(self->shm);
    tddp_inner_abort(&self->leader_comm.inner);
    tddp_inner_abort(&self->global_comm.inner);
}

static void free_scratch(tddp_hosts *self)
{
    if (self->scratch_is_shared) {
        tddp_shm_deallocate(self->scratch);
    } else {
        free(self->scratch);
    }
    self->scratch = NULL;
    self->scratch_bytes = 0;
    self->scratch_is_shared = false;
}

void tddp_hosts_destroy(tddp_hosts *self)
{
    tddp_inner_close(&self->leader_comm.inner);
    tddp_inner_close(&self->global_comm.inner);
    free_scratch(self);
    tddp_shm_destroy(self->shm);
    free(self->host_of);
    free(self->local_of);
    free(self->members);
    free(self->starts);
    free(self);
}

/* --- scratch memory -------------------------------------------------------------------------- */

tddp_status tddp_hosts_scratch(tddp_hosts *self, size_t bytes, void **out)
{
    enum { LINE = 64 };
    if (bytes > self->scratch_bytes) {
        free_scratch(self);
        tddp_status status =
            tddp_shm_allocate(self->shm, bytes, &self->scratch, &self->scratch_data);
        self->scratch_is_shared = status == TDDP_OK;
        if (status == TDDP_UNAVAILABLE) {
            /* It goes through staging then. */
            self->scratch = tddp_alloc(bytes + LINE);
            if (!self->scratch) {
                return TDDP_OUT_OF_MEMORY;
            }
            size_t over = (uintptr_t)self->scratch % LINE;
            self->scratch_data = (char *)self->scratch + (over ? LINE - over : 0);
        } else if (status) {
            self->scratch = NULL;
            return status;
        }
        self->scratch_bytes = bytes;
    }
    *out = self->scratch_data;
    return TDDP_OK;
}
