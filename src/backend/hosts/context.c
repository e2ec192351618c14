/*
 * Making and ending a context. Made and ended on the thread that makes or ends the group; abort()
 * comes from any; scratch memory belongs to the operation that runs.
 *
 * Invariant: all ranks make their channels in the same order, the wide one first, so that a rank
 * that fails in one is missed in it by all that it has to tell.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/hosts/hosts.h"

enum { PREFIX_BYTES = 32 };

/* --- who is where ---------------------------------------------------------------------------- */

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

static tddp_status lay_out(tddp_hosts *self, const int *hosts)
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
        self->most = size > self->most ? size : self->most;
        self->carriers = host == 0 || size < self->carriers ? size : self->carriers;
    }
    self->host = self->host_of[self->rank];
    self->local_rank = self->local_of[self->rank];
    self->local_size = tddp_hosts_size_of(self, self->host);
    return TDDP_OK;
}

/* --- channels -------------------------------------------------------------------------------- */

static tddp_status open_channel(const tddp_hosts *self, const tddp_backend_opts *opts,
                                const char *prefix, int64_t deadline, tddp_cancel *cancel,
                                tddp_hosts_channel *channel)
{
    tddp_status status = tddp_prefix_store_create(prefix, opts->store, &channel->store);
    if (status) {
        return status;
    }
    tddp_wait left = {tddp_deadline_poll_ms(deadline), cancel};
    tddp_backend_opts wanted = *opts;
    wanted.store = channel->store;
    wanted.timeout_ms = left.timeout_ms > 0 ? left.timeout_ms : 1;
    wanted.same_host = 0;
    wanted.hosts = NULL;
    return self->between->create(&wanted, &left, &channel->context);
}

static tddp_status open_across(tddp_hosts *self, const tddp_backend_opts *opts, int64_t deadline,
                               tddp_cancel *cancel)
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
    (void)snprintf(prefix, sizeof prefix, "across/%d", self->local_rank);
    tddp_backend_opts wanted = *opts;
    wanted.rank = self->host;
    wanted.world_size = self->host_count;
    wanted.names = names;
    tddp_status status = open_channel(self, &wanted, prefix, deadline, cancel, &self->across);
    free(names);
    return status;
}

static void close_channel(const tddp_hosts *self, tddp_hosts_channel *channel)
{
    if (channel->context) {
        self->between->destroy(channel->context);
    }
    tddp_store_release(channel->store);
    *channel = (tddp_hosts_channel){0};
}

/* --- life ------------------------------------------------------------------------------------ */

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
    tddp_status status = lay_out(self, opts->hosts);
    if (status == TDDP_OK) {
        status = open_channel(self, opts, "wide", deadline, cancel, &self->wide);
    }
    if (status == TDDP_OK && tddp_hosts_carries(self)) {
        status = open_across(self, opts, deadline, cancel);
    }
    if (status) {
        tddp_hosts_destroy(self);
        return status;
    }
    tddp_log(TDDP_LOG_DEBUG, "hosts",
             "rank %d is number %d of %d on host %d of %d, %s between them by %d ranks of each",
             self->rank, self->local_rank, self->local_size, self->host, self->host_count,
             between->name, self->carriers);
    *out = self;
    return TDDP_OK;
}

void tddp_hosts_abort(tddp_hosts *self)
{
    tddp_shm_abort(self->shm);
    if (self->across.context) {
        self->between->abort(self->across.context);
    }
    self->between->abort(self->wide.context);
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
    close_channel(self, &self->across);
    close_channel(self, &self->wide);
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
