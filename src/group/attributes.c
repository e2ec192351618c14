/*
 * A group's attributes: its rank, size, names, peers, store, timeout, whether it is closed, and
 * whether this process may use it. Any thread.
 */
#include <inttypes.h>

#include "group/checks.h"

tddp_status tddp_group_check_usable(const tddp_group *group, const char *what)
{
    if (!group) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s: group is NULL", what);
    }
    if (group->pid != tddp_process_id()) {
        return tddp_fail(TDDP_FORKED,
                         "%s: group \"%s\" was made by process %d, this is its child %d: make a "
                         "group of its own here",
                         what, group->name, (int)group->pid, (int)tddp_process_id());
    }
    return TDDP_OK;
}

int tddp_group_rank(const tddp_group *group)
{
    return group->rank;
}

int tddp_group_world_size(const tddp_group *group)
{
    return group->world_size;
}

const char *tddp_group_name(const tddp_group *group)
{
    return group->name;
}

const char *tddp_group_backend(const tddp_group *group)
{
    return group->backend_name;
}

const char *tddp_group_carrier(const tddp_group *group)
{
    return group->carrier;
}

int tddp_group_closed(const tddp_group *group)
{
    if (group->pid != tddp_process_id()) {
        return 1;
    }
    tddp_group *mutable_group = (tddp_group *)group;
    pthread_mutex_lock(&mutable_group->mutex);
    int is_closed = group->state != TDDP_GROUP_OPEN;
    pthread_mutex_unlock(&mutable_group->mutex);
    return is_closed;
}

tddp_status tddp_group_peer(const tddp_group *group, int rank, tddp_peer *out)
{
    if (!group || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s is NULL", group ? "out" : "group");
    }
    if (rank < 0 || rank >= group->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "rank %d: expected 0 to %d", rank,
                         group->world_size - 1);
    }
    const tddp_peer_entry *entry = &group->peers->entries[rank];
    *out = (tddp_peer){entry->host, entry->host_id, entry->pid, entry->root_rank};
    return TDDP_OK;
}

tddp_status tddp_group_peer_ended(const tddp_group *group, int rank, int *out)
{
    tddp_peer peer;
    tddp_status status = tddp_group_peer(group, rank, &peer);
    if (status == TDDP_OK && !out) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "out is NULL");
    }
    if (status == TDDP_OK) {
        *out = tddp_peers_check_liveness(group->peers, group->rank, rank) == TDDP_PEER_ENDED;
    }
    return status;
}

int64_t tddp_group_timeout(const tddp_group *group)
{
    return atomic_load(&group->timeout_ms);
}

tddp_status tddp_group_set_timeout(tddp_group *group, int64_t timeout_ms)
{
    if (!group || timeout_ms <= 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         group ? "timeout %" PRId64 " ms: expected more than 0"
                               : "group is NULL (timeout %" PRId64 " ms)",
                         timeout_ms);
    }
    atomic_store(&group->timeout_ms, timeout_ms);
    return TDDP_OK;
}

tddp_store *tddp_group_store(tddp_group *group)
{
    if (group->pid != tddp_process_id()) {
        return NULL;
    }
    pthread_mutex_lock(&group->mutex);
    tddp_store *store = group->store ? tddp_store_retain(group->store) : NULL;
    pthread_mutex_unlock(&group->mutex);
    return store;
}
