/*
 * The order of launches on each device: lists of turns. Process-wide, since the order is. One lock
 * guards all of it; one condition tells of all that changes.
 *
 * Invariant: a turn is in its device's list until it has passed. In a forked child the parent's
 * turns are nobody's, and the lists begin empty.
 */
#include "backend/nccl/launch_order.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/nccl/failures.h"
#include "base/base.h"

struct tddp_nccl_turn {
    pid_t pid; /* of the process whose lists have it */
    int device;
    bool passed;
    tddp_nccl_turn *next;
    tddp_nccl_turn *previous;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pid_t owner; /* of the lists */
static struct {
    tddp_nccl_turn *head;
    tddp_nccl_turn *tail;
} lists[TDDP_NCCL_MAX_DEVICES];

/* With the lock held. */
static tddp_status make_lists(void)
{
    if (owner == getpid()) {
        return TDDP_OK;
    }
    tddp_status status = tddp_cond_init(&changed);
    if (status == TDDP_OK) {
        memset(lists, 0, sizeof lists);
        owner = getpid();
    }
    return status;
}

tddp_status tddp_nccl_turn_take(int device, tddp_nccl_turn **out)
{
    tddp_nccl_turn *made = calloc(1, sizeof *made);
    if (!made) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    pthread_mutex_lock(&lock);
    tddp_status status = make_lists();
    if (status == TDDP_OK) {
        made->pid = owner;
        made->device = device;
        made->previous = lists[device].tail;
        if (made->previous) {
            made->previous->next = made;
        } else {
            lists[device].head = made;
        }
        lists[device].tail = made;
    }
    pthread_mutex_unlock(&lock);
    if (status) {
        free(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

bool tddp_nccl_turn_has_come(const tddp_nccl_turn *turn)
{
    pthread_mutex_lock(&lock);
    const bool come = turn->passed || !turn->previous;
    pthread_mutex_unlock(&lock);
    return come;
}

tddp_status tddp_nccl_turn_await(tddp_nccl_turn *turn, const atomic_bool *aborted,
                                 int64_t deadline_ns)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    while (turn->previous && !turn->passed && status == TDDP_OK) {
        if (atomic_load(aborted)) {
            status = tddp_nccl_fail_aborted("waiting for a turn on the device");
        } else if (!tddp_cond_wait_until(&changed, &lock, deadline_ns) &&
                   tddp_now_ns() >= deadline_ns) {
            status = tddp_fail(TDDP_TIMEOUT,
                               "not launched in the time given: an operation called before it on "
                               "cuda:%d, perhaps of another group, still waits for other ranks",
                               turn->device);
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* With the lock held. */
static void pass(tddp_nccl_turn *turn)
{
    if (turn->passed || turn->pid != getpid()) {
        return;
    }
    turn->passed = true;
    if (turn->previous) {
        turn->previous->next = turn->next;
    } else {
        lists[turn->device].head = turn->next;
    }
    if (turn->next) {
        turn->next->previous = turn->previous;
    } else {
        lists[turn->device].tail = turn->previous;
    }
    turn->previous = NULL;
    pthread_cond_broadcast(&changed);
}

void tddp_nccl_turn_pass(tddp_nccl_turn *turn)
{
    pthread_mutex_lock(&lock);
    pass(turn);
    pthread_mutex_unlock(&lock);
}

void tddp_nccl_turn_end(tddp_nccl_turn *turn)
{
    tddp_nccl_turn_pass(turn);
    free(turn);
}

void tddp_nccl_turns_wake(void)
{
    pthread_mutex_lock(&lock);
    if (owner == getpid()) {
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}
