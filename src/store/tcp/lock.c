/*
 * The fair lock of a store's connection: a caller that waits for a key in short slices would
 * otherwise acquire it again before any other thread wakes. Acquiring has a deadline and a cancel
 * token. Any thread. Invariant: while a thread waits, the lock is held; the holder passes it to the
 * first.
 */
#include "store/tcp/tcp.h"

typedef struct lock_waiter {
    tddp_waiter base;
    bool granted;
} lock_waiter;

tddp_status tddp_tcp_lock_acquire(tddp_tcp_lock *lock, const tddp_store_call *call)
{
    lock_waiter self = {.granted = false};
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock->mutex);
    if (lock->held) {
        status = tddp_waiter_wait(&self.base, &lock->waiters, &lock->mutex, call);
        status = self.granted ? TDDP_OK : status; /* also at the last moment */
    }
    lock->held = true;
    pthread_mutex_unlock(&lock->mutex);
    return status;
}

void tddp_tcp_lock_release(tddp_tcp_lock *lock)
{
    pthread_mutex_lock(&lock->mutex);
    lock_waiter *first = (lock_waiter *)lock->waiters;
    lock->held = first != NULL;
    if (first) {
        lock->waiters = first->base.next;
        first->granted = true;
        tddp_waiter_wake(&first->base);
    }
    pthread_mutex_unlock(&lock->mutex);
}
