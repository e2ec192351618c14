/*
 * Creates and shuts down process groups. Any thread.
 *
 * Order of a shutdown: the group accepts no more operations, those under way finish or are aborted,
 * no thread executes its queue any more, the backend's connections close, and the store records
 * that this rank has left. A second caller waits for the first. At last a process that hosts the
 * store waits until the other ranks have left too. A forked child never takes the lock, which a
 * thread of the parent may have held.
 */
#include <stdlib.h>
#include <string.h>

#include <tddp/cuda.h>

#include "base/options.h"
#include "backend/on_demand.h"
#include "backend/shm/shm.h"
#include "group/checks.h"
#include "group/failure_detector/detector.h"

enum {
    MAX_WORLD_SIZE = 1 << 16,
    /* At its end, for connections that other ranks have asked for. */
    CONNECT_MS = 5000,
};

static tddp_status check_opts(const tddp_group_opts *opts)
{
    if (!opts->store) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "store is NULL: expected the store that all ranks "
                                                "of the group share");
    }
    if (!opts->backend) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "backend is NULL: expected a name such as \"gloo\"");
    }
    if (opts->world_size < 1 || opts->world_size > MAX_WORLD_SIZE) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "world_size %d: expected 1 to %d", opts->world_size,
                         MAX_WORLD_SIZE);
    }
    if (opts->rank < 0 || opts->rank >= opts->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "rank %d: expected 0 to %d, the world size is %d",
                         opts->rank, opts->world_size - 1, opts->world_size);
    }
    if (opts->name && !opts->name[0]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "the group's name is empty: expected some text, "
                                                "or NULL for \"default_pg\"");
    }
    return TDDP_OK;
}

static tddp_status init_locks(tddp_group *group)
{
    tddp_status status = tddp_cond_init(&group->idle);
    if (status == TDDP_OK) {
        pthread_mutex_init(&group->mutex, NULL);
        pthread_mutex_init(&group->p2p.order, NULL);
        pthread_mutex_init(&group->device.mutex, NULL);
    }
    return status;
}

static tddp_status allocate(const tddp_group_opts *opts, tddp_group **out)
{
    tddp_group *group = tddp_alloc(sizeof *group);
    if (!group) {
        return TDDP_OUT_OF_MEMORY;
    }
    group->name = tddp_copy_string(opts->name ? opts->name : "default_pg");
    tddp_status status = group->name ? init_locks(group) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(group->name);
        free(group);
        return status;
    }
    tddp_observed_init(&group->observed, opts->world_size);
    atomic_init(&group->references, 1);
    group->pid = tddp_process_id();
    group->rank = opts->rank;
    group->world_size = opts->world_size;
    group->is_root = !opts->parent;
    group->root_rank = opts->parent ? opts->parent->root_rank : opts->rank;
    atomic_init(&group->timeout_ms,
                opts->timeout_ms > 0 ? opts->timeout_ms : TDDP_GROUP_DEFAULT_TIMEOUT_MS);
    *out = group;
    return TDDP_OK;
}

/* Frees a group that no thread uses any more. */
static void free_group(tddp_group *group)
{
    tddp_recorder_close(group->recorder);
    tddp_detector_release(group->detector);
    tddp_peers_release(group->peers);
    tddp_store_release(group->store);
    tddp_store_release(group->membership);
    tddp_shm_fabric_release(group->fabric);
    tddp_on_demand_free(group->on_demand);
    tddp_engine_release(group->engine);
    tddp_observed_free(&group->observed, group->pid != tddp_process_id());
    if (group->pid == tddp_process_id()) {
        pthread_cond_destroy(&group->idle);
        pthread_mutex_destroy(&group->mutex);
        pthread_mutex_destroy(&group->p2p.order);
        pthread_mutex_destroy(&group->device.mutex);
    }
    free(group->failure_text);
    free(group->leave_reason);
    free(group->backend_name);
    free(group->carrier);
    free(group->name);
    free(group);
}

/* A hint is a number among the GPUs of a host, of which this process may see fewer: only its own,
 * for instance. */
static int device_of(const tddp_group_opts *opts)
{
    const tddp_cuda *cuda;
    int count = 0;
    if (opts->device_index < 0 || opts->device_bound || tddp_cuda_get(&cuda) ||
        cuda->cudaGetDeviceCount(&count) || count == 0) {
        return opts->device_index;
    }
    return opts->device_index % count;
}

/* Waits for the parent's queue: its ranks split it at the same place among its operations. */
static tddp_status await_split(tddp_group *parent, const tddp_wait *wait)
{
    int64_t deadline = tddp_wait_deadline(wait, atomic_load(&parent->timeout_ms));
    tddp_cancel *cancel = tddp_wait_cancel(wait);
    pthread_mutex_lock(&parent->mutex);
    bool done = tddp_group_await_queue(parent, deadline, cancel);
    pthread_mutex_unlock(&parent->mutex);
    if (done) {
        return TDDP_OK;
    }
    bool interrupted = cancel && tddp_cancel_triggered(cancel);
    return tddp_fail(interrupted ? TDDP_CANCELED : TDDP_TIMEOUT,
                     "operations of group \"%s\", from which others make one, are still queued",
                     parent->name);
}

tddp_status tddp_group_decline(tddp_group *parent, const tddp_wait *wait)
{
    tddp_status status = tddp_group_check_usable(parent, "split");
    if (status || !tddp_group_splits(parent)) {
        return status;
    }
    int64_t deadline = tddp_wait_deadline(wait, atomic_load(&parent->timeout_ms));
    status = tddp_group_begin_in_flight(parent, "split");
    if (status) {
        return status;
    }
    status = await_split(parent, wait);
    tddp_wait left = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
    status = status ? status : tddp_group_backends_decline(parent, &left);
    tddp_group_end_in_flight(parent, false);
    return status;
}

/* A group shares memory, and the thread that polls it, with those made from it. */
static tddp_status open_shared(tddp_group *group, tddp_group *parent)
{
    if (!parent || parent->pid != tddp_process_id()) {
        tddp_status status = tddp_engine_create(&group->engine);
        return status || parent ? status : tddp_shm_fabric_create(&group->fabric);
    }
    group->engine = tddp_engine_retain(parent->engine);
    pthread_mutex_lock(&parent->mutex);
    group->fabric = tddp_shm_fabric_retain(parent->fabric);
    pthread_mutex_unlock(&parent->mutex);
    return TDDP_OK;
}

static void close_fabric(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    tddp_shm_fabric *fabric = group->fabric;
    group->fabric = NULL;
    pthread_mutex_unlock(&group->mutex);
    tddp_shm_fabric_release(fabric);
}

/* Opens the backends, with the contexts of the parent that they split, which stay meanwhile. */
static tddp_status open_backends(tddp_group *group, tddp_group *parent,
                                 const tddp_backend_opts *wanted, const tddp_wait *wait)
{
    tddp_status status = TDDP_OK;
    if (parent) {
        status = tddp_group_begin_in_flight(parent, "split");
        if (status) {
            return status;
        }
        status = await_split(parent, wait);
    }
    status = status ? status : tddp_group_backends_open(group, parent, wanted, wait);
    if (parent) {
        tddp_group_end_in_flight(parent, false);
    }
    return status;
}

/* So that one thread sleeps for all groups that are made from one another. */
static tddp_eventcount *shared_events(const tddp_group *group)
{
    tddp_eventcount *events = tddp_shm_fabric_events(group->fabric);
    return events ? events : tddp_engine_events(group->engine);
}

static tddp_status connect_backends(tddp_group *group, const tddp_group_opts *opts,
                                    const tddp_wait *wait, int64_t deadline, int same_host,
                                    const char *address)
{
    int *hosts = tddp_peers_hosts(group->peers);
    if (!hosts) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_backend_opts wanted = {
        .size = sizeof wanted,
        .rank = opts->rank,
        .world_size = opts->world_size,
        .store = group->store,
        .timeout_ms = tddp_deadline_poll_ms(deadline),
        .device_index = device_of(opts),
        .device_bound = opts->device_bound && opts->device_index >= 0,
        .same_host = same_host,
        .group = group->name,
        .address = address,
        .hosts = hosts,
        .fabric = group->fabric,
        .on_demand = group->on_demand,
        .observer = {tddp_observed_add, &group->observed},
        .events = shared_events(group),
    };
    tddp_wait left = {wanted.timeout_ms, tddp_wait_cancel(wait)};
    const bool splits =
        opts->split && opts->parent && tddp_group_splits(opts->parent) &&
        memcmp(opts->parent->requested, group->requested, sizeof group->requested) == 0;
    tddp_status status = open_backends(group, splits ? opts->parent : NULL, &wanted, &left);
    free(hosts);
    if (status) {
        return tddp_fail(status, "backend %s of group \"%s\", rank %d of %d: %s",
                         group->backend_name, group->name, group->rank, group->world_size,
                         tddp_error_message());
    }
    return TDDP_OK;
}

tddp_status tddp_group_set_leave_reason(tddp_group *group, const char *reason)
{
    const bool any = reason && *reason;
    char *copy = any ? tddp_copy_string(reason) : NULL;
    if (any && !copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&group->mutex);
    char *before = group->leave_reason;
    group->leave_reason = copy;
    pthread_mutex_unlock(&group->mutex);
    free(before);
    return TDDP_OK;
}

static void stop_detector(tddp_group *group)
{
    pthread_mutex_lock(&group->mutex);
    char *reason = group->leave_reason;
    group->leave_reason = NULL;
    pthread_mutex_unlock(&group->mutex);
    tddp_detector_remove_group(group, reason);
    free(reason);
    tddp_on_demand_end(group->on_demand, CONNECT_MS);
}

static tddp_status start_watching(tddp_group *group, tddp_group *parent)
{
    tddp_status status = tddp_recorder_create(group);
    if (status == TDDP_OK) {
        status = tddp_detector_add_group(group, parent);
    }
    if (status == TDDP_OK) {
        status = tddp_watchdog_add(group);
        if (status == TDDP_OK) {
            status = tddp_group_events(group) ? tddp_engine_add(group) : TDDP_OK;
        }
        if (status) {
            tddp_watchdog_remove(group);
            stop_detector(group);
        }
    }
    return status;
}

static tddp_status start(tddp_group *group, const tddp_group_opts *opts, const tddp_wait *wait)
{
    int64_t deadline = tddp_wait_deadline(wait, atomic_load(&group->timeout_ms));
    int same_host = 0;
    char *address = NULL;
    tddp_status status = tddp_group_backends_find(group, opts->backend);
    if (status == TDDP_OK) {
        status = tddp_group_join(group, opts->store, tddp_wait_cancel(wait), deadline, &same_host,
                                 &address);
    }
    if (status == TDDP_OK) {
        status = open_shared(group, opts->parent);
    }
    if (status == TDDP_OK) {
        status = tddp_on_demand_create(atomic_load(&group->timeout_ms),
                                       tddp_detector_ask_to_connect, group, &group->on_demand);
    }
    if (status == TDDP_OK) {
        status = connect_backends(group, opts, wait, deadline, same_host, address);
    }
    free(address);
    if (status == TDDP_OK) {
        status = start_watching(group, opts->parent);
        if (status) {
            tddp_group_backends_close(group);
        }
    }
    return status;
}

void tddp_group_opts_init(tddp_group_opts *opts, size_t size)
{
    const tddp_group_opts defaults = TDDP_GROUP_OPTS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, opts, size);
}

static tddp_status create(const tddp_group_opts *opts, const tddp_wait *wait, tddp_group **out)
{
    tddp_group *group;
    tddp_status status;
    status = allocate(opts, &group);
    if (status) {
        return status;
    }
    status = start(group, opts, wait);
    if (status) {
        char *text = tddp_copy_string(tddp_error_message());
        tddp_detector_report_create_failure(group, opts->parent, status,
                                            text ? text : tddp_status_text(status));
        tddp_group_leave(group);
        free_group(group);
        if (text) {
            (void)tddp_fail(status, "%s", text);
        }
        free(text);
        return status;
    }
    tddp_recorder_register(group->recorder);
    *out = group;
    return TDDP_OK;
}

tddp_status tddp_group_create(const tddp_group_opts *opts, const tddp_wait *wait, tddp_group **out)
{
    tddp_group_opts all = TDDP_GROUP_OPTS_INIT;
    tddp_status status = tddp_opts_read("TDDP_GROUP_OPTS_INIT", opts,
                                        TDDP_OPTS_UNTIL(tddp_group_opts, split), &all, sizeof all);
    status = status ? status : check_opts(&all);
    if (status == TDDP_OK && !out) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "out is NULL");
    }
    return status ? status : create(&all, wait, out);
}

/* `host_wait`: how long the store's host waits for the others; NULL: not at all. */
static tddp_status shut_down(tddp_group *group, int64_t drain_ms, const tddp_wait *host_wait)
{
    if (!group || group->pid != tddp_process_id()) {
        return group ? tddp_fail(TDDP_FORKED, "group \"%s\" was made before a fork", group->name)
                     : TDDP_OK;
    }
    if (tddp_group_on_progress_thread(group)) {
        tddp_log(TDDP_LOG_ERROR, "group",
                 "\"%s\" cannot be shut down from a callback of its own work", group->name);
        return TDDP_OK;
    }
    int64_t deadline = tddp_deadline_after_ms(drain_ms);
    pthread_mutex_lock(&group->mutex);
    bool first = group->state == TDDP_GROUP_OPEN;
    if (first) {
        group->state = TDDP_GROUP_DRAINING;
    }
    while (!first && group->state != TDDP_GROUP_ENDED) {
        pthread_cond_wait(&group->idle, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
    if (!first) {
        return TDDP_OK;
    }
    int64_t incarnation = group->incarnation;
    tddp_group_progress_stop(group, deadline);
    stop_detector(group);
    tddp_group_backends_close(group);
    close_fabric(group);
    tddp_group_leave(group);
    pthread_mutex_lock(&group->mutex);
    group->state = TDDP_GROUP_ENDED;
    tddp_store *store = group->store;
    tddp_store *membership = group->membership;
    group->store = NULL;
    group->membership = NULL;
    pthread_cond_broadcast(&group->idle);
    pthread_mutex_unlock(&group->mutex);
    /* The group's remaining references, a model's for instance, must not keep the store's server
     * alive. */
    tddp_store_release(store);
    tddp_status status = TDDP_OK;
    if (host_wait && group->is_root) {
        status = tddp_group_wait_for_leave(membership, group->world_size, incarnation, host_wait);
    }
    tddp_store_release(membership);
    return status;
}

void tddp_group_shutdown(tddp_group *group, int64_t drain_ms)
{
    (void)!shut_down(group, drain_ms, NULL);
}

tddp_status tddp_group_shutdown_host(tddp_group *group, int64_t drain_ms, const tddp_wait *wait)
{
    static const tddp_wait by_default = {-1, NULL};
    return shut_down(group, drain_ms, wait ? wait : &by_default);
}

tddp_group *tddp_group_retain(tddp_group *group)
{
    if (group) {
        atomic_fetch_add(&group->references, 1);
    }
    return group;
}

void tddp_group_end(tddp_group *group)
{
    const bool own = tddp_group_on_progress_thread(group); /* which goes on to use it: it stays */
    tddp_group_shutdown(group, 0);
    if (!own) {
        free_group(group);
    }
}

void tddp_group_release(tddp_group *group)
{
    if (group && atomic_fetch_sub(&group->references, 1) == 1) {
        tddp_group_end(group);
    }
}

void tddp_group_release_async(tddp_group *group)
{
    if (!group || atomic_fetch_sub(&group->references, 1) != 1) {
        return;
    }
    bool over = group->pid != tddp_process_id() || group->state == TDDP_GROUP_ENDED;
    if (over || !tddp_group_reap(group)) {
        tddp_group_end(group);
    }
}
