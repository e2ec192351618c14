/*
 * The host's state, shared by host.c (start, stop), host_coordinator.c (the coordinator's thread)
 * and the backends' sides of it.
 */
#ifndef TDDP_LAUNCH_HOST_PARTS_H
#define TDDP_LAUNCH_HOST_PARTS_H

#include <pthread.h>

#include <tddp/store.h>

#include "launch/rendezvous/backend.h"
#include "launch/rendezvous/coordinator.h"
#include "launch/rendezvous/host.h"

struct tddp_launch_host {
    tddp_launch_host_opts opts;
    const tddp_launch_coordinator_backend *backend;
    void *state; /* the backend's */
    int64_t term;
    char where[TDDP_LAUNCH_HOST_BYTES + 32]; /* for texts */
    pthread_t thread;                        /* the coordinator's */
    tddp_cancel *cancel;                     /* ends its waits */
    /* `lock` covers all that follows. */
    pthread_mutex_t lock;
    bool stop;
    bool leads;
    bool over; /* the job has ended, and all know it */
};

/* The coordinator's thread. */
void *tddp_launch_host_coordinator(void *data);

/* Reads an event from its text. What is none is logged and leaves `event` as it was. Errors:
 * TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_host_read_event(const tddp_blob *text,
                                                       tddp_launch_event *event);

/* The time by which heartbeats and the job's own limits are measured. */
int64_t tddp_launch_host_now(const tddp_launch_host *host);

/* Another host leads now, or may. */
void tddp_launch_host_depose(tddp_launch_host *host);

/* How long a node may be silent, for the coordinator. */
int64_t tddp_launch_host_node_timeout_ms(const tddp_launch_host *host);

#endif
