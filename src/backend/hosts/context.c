/*
 * Creates and destroys a context: the map of ranks to hosts, scratch memory. Runs on the thread
 * that creates or destroys the group; abort() on any. Scratch memory belongs to the running
 * operation.
 */
#include <stdlib.h>

#include "backend/hosts/hosts.h"

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

/* --- life cycle ------------------------------------------------------------------------------ */

bool tddp_hosts_can_use(const tddp_backend_v1 *between)
{
    bool all = between->post && between->finish && between->probe && between->drop &&
               between->events && between->traits & TDDP_BACKEND_RESUMES && !between->resumes &&
               between->op_count >= TDDP_OP_COUNT;
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
    tddp_shm_p2p_add_foreign(shm);
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    pthread_mutex_init(&self->lock, NULL);
    tddp_status status = set_layout(self, opts->hosts);
    if (status == TDDP_OK) {
        status = tddp_hosts_connect(self, opts, wait);
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
    if (self->on_demand) {
        tddp_on_demand_stop(self->on_demand);
    }
    pthread_mutex_lock(&self->lock);
    self->aborted = true;
    tddp_inner_abort(&self->global_comm.inner);
    pthread_mutex_unlock(&self->lock);
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
    tddp_hosts_disconnect(self);
    tddp_hosts_free_arrivals(self);
    free_scratch(self);
    tddp_shm_destroy(self->shm);
    pthread_mutex_destroy(&self->lock);
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
