/*
 * Threads that wait for each other, with a deadline and a cancel token. Any thread.
 */
#include <poll.h>

#include "net/net.h"
#include "store/store_impl.h"

tddp_status tddp_waiter_wait(tddp_waiter *self, tddp_waiter **list, pthread_mutex_t *mutex,
                             const tddp_store_call *call)
{
    tddp_waiter **link = list;
    tddp_status status = tddp_cancel_create(&self->event);
    if (status) {
        return status;
    }
    while (*link) {
        link = &(*link)->next;
    }
    *link = self;
    (void)pthread_mutex_unlock(mutex);
    status = tddp_net_poll(tddp_cancel_fd(self->event), POLLIN, call->deadline_ns,
                           tddp_store_call_cancel_fd(call));
    (void)pthread_mutex_lock(mutex);
    for (link = list; *link && *link != self; link = &(*link)->next) {
    }
    if (*link) {
        *link = self->next;
    }
    tddp_cancel_free(self->event);
    return status;
}

void tddp_waiter_wake(const tddp_waiter *waiter)
{
    tddp_cancel_trigger(waiter->event);
}
