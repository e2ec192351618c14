/*
 * The host's state, shared by host.c (start, stop, the election's thread) and host_coordinator.c
 * (the coordinator's thread).
 */
#ifndef TDDP_LAUNCH_HOST_PARTS_H
#define TDDP_LAUNCH_HOST_PARTS_H

#include <tddp/store.h>

#include "launch/rendezvous/coordinator.h"
#include "launch/rendezvous/election.h"
#include "launch/rendezvous/host.h"

struct tddp_launch_host {
    tddp_launch_host_opts opts;
    tddp_store_server *server;
    const char *address; /* the server's */
    int port;
    char where[TDDP_LAUNCH_HOST_BYTES + 16]; /* the endpoint, for texts */
    pthread_t coordinator_thread;
    pthread_t election_thread;
    tddp_cancel *coordinator_cancel;
    tddp_cancel *election_cancel;
    /* `lock` covers all that follows. */
    pthread_mutex_t lock;
    bool stop_coordinator;
    bool stop_election;
    bool hand_over; /* at the stop */
    bool leads;     /* until `until_ns`, as the leader of `term` */
    int term;
    int64_t until_ns;
    bool over;         /* the job has ended, and all know it */
    char *end_message; /* the end, for the other endpoints; NULL before */
};

/* The coordinator's thread. */
void *tddp_launch_host_coordinator(void *data);

/* The time by which leases, heartbeats and the job's own limits are measured. */
int64_t tddp_launch_host_now(const tddp_launch_host *host);

/* Whether this host leads now; of which term. */
bool tddp_launch_host_leads(tddp_launch_host *host, int *term);

#endif
