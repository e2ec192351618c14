/*
 * Connections that all ranks of a group make together once one of them needs them.
 *
 * A backend says while it is created how it connects (add()). Once it needs the connections it
 * checks whether they are there (check()), again after each event. The first check has all ranks
 * asked, by a function of the group's; each rank that hears of it connects (start()) on a thread of
 * its own, whatever its other threads are doing. Any thread.
 */
#ifndef TDDP_ON_DEMAND_H
#define TDDP_ON_DEMAND_H

#include <tddp/wait.h>

struct tddp_eventcount;
typedef struct tddp_on_demand tddp_on_demand;

/* Has all ranks of the group call tddp_on_demand_start() soon, this one too; does not wait. */
typedef void tddp_on_demand_ask(void *data);

/* Makes a backend's connections; blocks. Called once. The token of `wait` says that nobody waits
 * for them any longer; `given_up` that they must end even if other ranks are connecting to this
 * one. */
typedef tddp_status tddp_on_demand_connect(void *context, const tddp_wait *wait,
                                           tddp_cancel *given_up);

/* `timeout_ms`: how long connecting may take, on each rank. */
TDDP_NODISCARD tddp_status tddp_on_demand_create(int64_t timeout_ms, tddp_on_demand_ask *ask,
                                                 void *data, tddp_on_demand **out);

/* After tddp_on_demand_end(), or in a forked child. NULL is fine. */
void tddp_on_demand_free(tddp_on_demand *self);

/* --- for backends ---------------------------------------------------------------------------- */

/* While the backend's context is created. The context, and `events`, must live until
 * tddp_on_demand_end(). An event is counted there once check() returns something else. */
TDDP_NODISCARD tddp_status tddp_on_demand_add(tddp_on_demand *self, tddp_on_demand_connect *connect,
                                              void *context, struct tddp_eventcount *events);

/* Whether all that was added has connected, which the first call requests; does not wait.
 * TDDP_CANCELED, without a text: not yet. Errors: those of connecting; TDDP_TIMEOUT from the
 * deadline on; TDDP_GROUP_FAILED after tddp_on_demand_stop(). */
TDDP_NODISCARD tddp_status tddp_on_demand_check(tddp_on_demand *self, int64_t deadline);

/* Nobody waits any longer; ends connecting as far as no other rank is about to connect to this one.
 */
void tddp_on_demand_stop(tddp_on_demand *self);

/* --- for the group --------------------------------------------------------------------------- */

/* Another rank asks, or this one: connects, if that has not begun. Does not wait. */
void tddp_on_demand_start(tddp_on_demand *self);

/* The ranks cannot be asked. */
void tddp_on_demand_fail(tddp_on_demand *self, tddp_status status, const char *text);

/* Waits for what connects, at most so long: to the others this rank would seem lost. Then ends it.
 * Nobody calls tddp_on_demand_start() any more. NULL is fine. */
void tddp_on_demand_end(tddp_on_demand *self, int64_t timeout_ms);

#endif
