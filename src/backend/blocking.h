/*
 * Threads lent to calls that block for as long as a peer, a library or a device does: one for each
 * such call that is under way, and none for groups, messages and connections that merely exist. A
 * thread whose call has ended runs others, and ends itself after a second without one.
 *
 * No call waits for another one's thread: with a limit, receives that wait for a peer could keep
 * the sends that this peer waits for from being run.
 */
#ifndef TDDP_BLOCKING_H
#define TDDP_BLOCKING_H

#include <stdint.h>

#include <tddp/status.h>

/* Two pointers, of the caller's choice. The caller's memory until `run` is called. */
typedef struct tddp_blocking_call {
    void (*run)(void *context, void *data);
    void *context;
    void *data;
    struct tddp_blocking_call *next;
} tddp_blocking_call;

/* Reserves a thread for one call, so that nothing is begun that no thread could end. Errors:
 * TDDP_SYSTEM: no more threads. Caller: tddp_blocking_start() or tddp_blocking_release(). */
TDDP_NODISCARD tddp_status tddp_blocking_reserve(void);

/* A thread that was reserved is not needed. */
void tddp_blocking_release(void);

/* Has a thread that was reserved run the call. */
void tddp_blocking_start(tddp_blocking_call *call);

/* How long a thread waits for another call; only tests change it. */
extern int64_t tddp_blocking_idle_ms;

#endif
