/*
 * Ends calls of NCCL's that block beyond their operation's deadline, as the first operation of a
 * kind may that has to wait for other ranks: aborts their communicator. A thread for each context,
 * started with the first such call, which looks from time to time and sleeps while there is nothing
 * to look at.
 */
#ifndef TDDP_NCCL_OVERDUE_H
#define TDDP_NCCL_OVERDUE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <tddp/status.h>

typedef struct tddp_nccl_overdue {
    /* Aborts what is overdue; whether anything is to be looked at again. */
    bool (*look)(void *data);
    void *data;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t wake;
    bool ending;
    atomic_bool started;
    atomic_bool asleep;
} tddp_nccl_overdue;

TDDP_NODISCARD tddp_status tddp_nccl_overdue_init(tddp_nccl_overdue *self, bool (*look)(void *data),
                                                  void *data);

/* After a call has begun, that is, once look() would find it. */
void tddp_nccl_overdue_watch(tddp_nccl_overdue *self);

void tddp_nccl_overdue_stop(tddp_nccl_overdue *self);

#endif
