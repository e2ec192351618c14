/*
 * Calls that use a group's backend, and the group's end, which waits for them. Any thread that has
 * a reference to the group.
 *
 * Invariant: the backend's context is there while a call holds the group or an operation has no
 * outcome. Those who call count themselves, then look at the state; a shutdown changes the state,
 * then looks at the count: so one of the two sees the other, without a lock on the way of each
 * operation. A call that may wait for other ranks within the backend counts as an operation under
 * way instead (tddp_group_begin_in_flight()), which a shutdown aborts.
 */
#include "group/group.h"

tddp_status tddp_group_check_open(tddp_group *group, const char *call)
{
    if (group->failure) {
        return tddp_group_fail_unstarted(group, call);
    }
    return group->state == TDDP_GROUP_OPEN ? TDDP_OK : tddp_group_fail_destroyed(group);
}

tddp_status tddp_group_fail_destroyed(const tddp_group *group)
{
    return tddp_fail(TDDP_GROUP_CLOSED, "group \"%s\" is destroyed", group->name);
}

tddp_status tddp_group_hold(tddp_group *group, const char *call)
{
    atomic_fetch_add(&group->holders, 1);
    if (atomic_load(&group->state) == TDDP_GROUP_OPEN) {
        return TDDP_OK;
    }
    tddp_group_let_go(group);
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, call);
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_let_go(tddp_group *group)
{
    if (atomic_fetch_sub(&group->holders, 1) == 1 &&
        atomic_load(&group->state) != TDDP_GROUP_OPEN) {
        pthread_mutex_lock(&group->mutex);
        pthread_cond_broadcast(&group->idle);
        pthread_mutex_unlock(&group->mutex);
    }
}

tddp_status tddp_group_begin_in_flight(tddp_group *group, const char *call)
{
    pthread_mutex_lock(&group->mutex);
    tddp_status status = tddp_group_check_open(group, call);
    group->in_flight += status == TDDP_OK;
    pthread_mutex_unlock(&group->mutex);
    return status;
}

void tddp_group_end_in_flight(tddp_group *group, bool completed)
{
    pthread_mutex_lock(&group->mutex);
    if (completed) {
        atomic_fetch_sub(&group->in_flight_completing, 1);
    }
    if (--group->in_flight == 0) {
        pthread_cond_broadcast(&group->idle);
    }
    pthread_mutex_unlock(&group->mutex);
}
