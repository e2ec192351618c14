/*
 * A context's life, and the backend table for several hosts. create() and destroy() run on the
 * thread that creates or destroys the group; abort() and reports of failures on any. Scratch memory
 * belongs to the running operation.
 *
 * Invariant: after a failure the ranks of this host and of its communicators are told why, in the
 * text of the stage that failed, before anything is closed.
 */
#include <stdio.h>
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
    self->send_parts = tddp_alloc_array(2 * ranks, sizeof *self->send_parts);
    self->recv_parts = self->send_parts ? self->send_parts + ranks : NULL;
    bool all = self->host_of && self->local_of && self->members && self->starts && self->send_parts;
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
    bool all = between->post && between->finish && between->probe && between->discard &&
               between->events && between->op_count >= TDDP_OP_COUNT;
    for (int kind = 0; all && kind < TDDP_OP_COUNT; kind++) {
        all = tddp_op_is_p2p((tddp_op_kind)kind) || between->run[kind];
    }
    return all && between->device_types == 1u << TDDP_CPU;
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

static void destroy(void *context)
{
    tddp_hosts *self = context;
    tddp_hosts_disconnect(self);
    tddp_hosts_free_arrivals(self);
    free_scratch(self);
    tddp_inner_close(&self->comms[TDDP_HOSTS_LOCAL].inner);
    pthread_mutex_destroy(&self->lock);
    free(self->host_of);
    free(self->local_of);
    free(self->members);
    free(self->starts);
    free(self->send_parts);
    free(self->program.stages);
    free(self);
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
    self->comms[TDDP_HOSTS_LOCAL].inner =
        (tddp_inner){.backend = tddp_shm_backend(), .context = shm};
    tddp_shm_p2p_add_foreign(shm);
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    pthread_mutex_init(&self->lock, NULL);
    tddp_status status = set_layout(self, opts->hosts);
    if (status == TDDP_OK) {
        status = tddp_hosts_connect(self, opts, wait);
    }
    if (status) {
        destroy(self);
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

/* --- scratch memory -------------------------------------------------------------------------- */

tddp_status tddp_hosts_scratch(tddp_hosts *self, size_t bytes)
{
    enum { LINE = 64 };
    if (!tddp_hosts_is_leader(self) || bytes <= self->scratch_bytes) {
        return TDDP_OK;
    }
    free_scratch(self);
    tddp_status status = tddp_shm_allocate(self->shm, bytes, &self->scratch, &self->scratch_data);
    self->scratch_is_shared = status == TDDP_OK;
    if (status == TDDP_UNAVAILABLE) {
        /* It goes through staging then. */
        self->scratch = tddp_alloc(bytes + LINE);
        const size_t over = (uintptr_t)self->scratch % LINE;
        self->scratch_data = (char *)self->scratch + (over ? LINE - over : 0);
        status = self->scratch ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    } else if (status) {
        self->scratch = NULL;
    }
    self->scratch_bytes = status ? 0 : bytes;
    return status;
}

/* --- failures -------------------------------------------------------------------------------- */

tddp_status tddp_hosts_report_if_fatal(tddp_hosts *self, tddp_status status)
{
    char text[2048];
    if (!tddp_shm_is_fatal(status) || atomic_exchange(&self->failure_reported, true)) {
        return status;
    }
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    pthread_mutex_lock(&self->lock);
    for (int i = 0; i < TDDP_HOSTS_COMMS; i++) {
        tddp_inner_report_failure(&self->comms[i].inner, status, text);
    }
    pthread_mutex_unlock(&self->lock);
    return tddp_fail(status, "%s", text);
}

static void abort_all(void *context)
{
    tddp_hosts *self = context;
    tddp_inner_abort(&self->comms[TDDP_HOSTS_LOCAL].inner);
    tddp_inner_abort(&self->comms[TDDP_HOSTS_LEADERS].inner);
    if (self->on_demand) {
        tddp_on_demand_stop(self->on_demand);
    }
    pthread_mutex_lock(&self->lock);
    self->aborted = true;
    tddp_inner_abort(&self->comms[TDDP_HOSTS_GLOBAL].inner);
    pthread_mutex_unlock(&self->lock);
}

/* --- the table ------------------------------------------------------------------------------- */

static tddp_status allocate(void *context, size_t bytes, void **handle, void **data)
{
    tddp_hosts *self = context;
    return tddp_shm_allocate(self->shm, bytes, handle, data);
}

static tddp_eventcount *events(void *context)
{
    const tddp_hosts *self = context;
    return tddp_shm_events(self->shm, self->local_rank);
}

const tddp_backend_v1 *tddp_hosts_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "hosts",
        .device_types = 1u << TDDP_CPU,
        .abort = abort_all,
        .destroy = destroy,
        .post = tddp_hosts_post,
        .finish = tddp_hosts_finish,
        .allocate = allocate,
        .deallocate = tddp_shm_deallocate,
        .events = events,
        .op_count = TDDP_OP_COUNT,
        .run = {[TDDP_OP_ALL_REDUCE] = tddp_hosts_run,
                [TDDP_OP_BROADCAST] = tddp_hosts_run,
                [TDDP_OP_BARRIER] = tddp_hosts_run,
                [TDDP_OP_ALL_GATHER] = tddp_hosts_run,
                [TDDP_OP_REDUCE_SCATTER] = tddp_hosts_run,
                [TDDP_OP_REDUCE] = tddp_hosts_run,
                [TDDP_OP_GATHER] = tddp_hosts_run,
                [TDDP_OP_SCATTER] = tddp_hosts_run,
                [TDDP_OP_ALL_TO_ALL] = tddp_hosts_run},
    };
    return &backend;
}
