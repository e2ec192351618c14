/*
 * --health-check-port: answers HTTP requests, whatever they ask for, with the job's state, on the
 * loop: 200, or 503 once the job has failed. A loop that does not turn gives no answer, which a
 * probe's time limit tells.
 */
#ifndef TDDP_LAUNCH_HEALTH_H
#define TDDP_LAUNCH_HEALTH_H

#include "launch/loop/loop.h"

typedef struct tddp_launch_health tddp_launch_health;

/* The state as JSON: free(), NULL if memory is short; `*healthy`: the job has not failed. */
typedef char *tddp_launch_health_view(void *data, bool *healthy);

/* Listens on a numeric address; `*port` 0: a free one, which it becomes. `loop` is borrowed until
 * the end. Errors: TDDP_ADDRESS_IN_USE, TDDP_SYSTEM, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_health_open(tddp_launch_loop *loop, const char *host,
                                                   int *port, tddp_launch_health_view *view,
                                                   void *data, tddp_launch_health **out);

/* Closes all connections. NULL is fine. */
void tddp_launch_health_close(tddp_launch_health *health);

#endif
