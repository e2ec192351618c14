/*
 * The host's start and end. The agent's rendezvous thread enters start, stop and over; the
 * coordinator's thread is host_coordinator.c's. Invariant: that thread ends before the backend's
 * state is freed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/host_parts.h"

int64_t tddp_launch_host_now(const tddp_launch_host *host)
{
    return host->opts.now ? host->opts.now() : tddp_now_ns();
}

int64_t tddp_launch_host_term(const tddp_launch_host *host)
{
    return host->term;
}

void tddp_launch_job_text(const tddp_launch_options *options, char text[TDDP_LAUNCH_JOB_BYTES])
{
    char most[16] = "";
    if (options->max_nodes > options->min_nodes) {
        (void)snprintf(most, sizeof most, ":%d", options->max_nodes);
    }
    (void)snprintf(text, TDDP_LAUNCH_JOB_BYTES,
                   "--nnodes=%d%s --max-restarts=%d --rdzv-conf=heartbeat_timeout=%d",
                   options->min_nodes, most, options->max_restarts,
                   tddp_launch_silence_s(&options->conf));
}

int64_t tddp_launch_host_node_timeout_ms(const tddp_launch_host *host)
{
    const tddp_launch_times *times = &host->opts.times;
    return times->silence_ms - times->margin_ms -
           (host->backend->survives ? tddp_launch_node_lease_s(times) * 1000 : 0);
}

static void free_host(tddp_launch_host *host)
{
    host->backend->stop(host);
    tddp_cancel_free(host->cancel);
    (void)pthread_mutex_destroy(&host->lock);
    free(host);
}

tddp_status tddp_launch_host_start(const tddp_launch_host_opts *opts, tddp_launch_host **out)
{
    tddp_launch_host *host = tddp_alloc(sizeof *host);
    if (!host) {
        return TDDP_OUT_OF_MEMORY;
    }
    host->opts = *opts;
    host->leads = true;
    host->backend = opts->options->backend == TDDP_LAUNCH_ETCD ? &tddp_launch_etcd_coordinator
                                                               : &tddp_launch_c10d_coordinator;
    if (pthread_mutex_init(&host->lock, NULL) != 0) {
        free(host);
        return tddp_fail(TDDP_SYSTEM, "the rendezvous cannot be hosted: no lock can be made");
    }
    tddp_status status = tddp_cancel_create(&host->cancel);
    status = status == TDDP_OK ? host->backend->start(host) : status;
    status = status == TDDP_OK ? tddp_thread_start(&host->thread, "torchrun-host",
                                                   tddp_launch_host_coordinator, host)
                               : status;
    if (status != TDDP_OK) {
        char *reason = tddp_copy_string(tddp_error_message());
        free_host(host);
        status = reason ? tddp_fail(status, "%s", reason) : TDDP_OUT_OF_MEMORY;
        free(reason);
        return status;
    }
    *out = host;
    return TDDP_OK;
}

bool tddp_launch_host_over(const tddp_launch_host *host)
{
    tddp_launch_host *mutable = (tddp_launch_host *)(uintptr_t)host; /* for its lock alone */
    pthread_mutex_lock(&mutable->lock);
    bool over = host->over || !host->leads;
    pthread_mutex_unlock(&mutable->lock);
    return over;
}

void tddp_launch_host_depose(tddp_launch_host *host)
{
    pthread_mutex_lock(&host->lock);
    host->leads = false;
    pthread_mutex_unlock(&host->lock);
}

void tddp_launch_host_stop(tddp_launch_host *host)
{
    if (!host) {
        return;
    }
    pthread_mutex_lock(&host->lock);
    host->stop = true;
    tddp_cancel_trigger(host->cancel);
    pthread_mutex_unlock(&host->lock);
    (void)pthread_join(host->thread, NULL);
    free_host(host);
}
