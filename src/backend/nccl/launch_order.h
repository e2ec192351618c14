/*
 * The order of launches on each device, one for all groups of the process: that in which their
 * operations were called. NCCL forbids another one on each rank: a device may carry out kernels one
 * after the other, and two ranks that begin with different ones wait for each other for ever.
 */
#ifndef TDDP_NCCL_LAUNCH_ORDER_H
#define TDDP_NCCL_LAUNCH_ORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tddp/status.h>

enum { TDDP_NCCL_MAX_DEVICES = 64 };

typedef struct tddp_nccl_turn tddp_nccl_turn;

/* Takes the last place on a device. Freed with tddp_nccl_turn_end(), whether it came or not. Any
 * thread. Errors: TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_nccl_turn_take(int device, tddp_nccl_turn **out);

/* Whether nothing is before it. */
bool tddp_nccl_turn_has_come(const tddp_nccl_turn *turn);

/* Waits until nothing is before it, or the flag is set, or it is that time. Errors: TDDP_TIMEOUT,
 * TDDP_GROUP_FAILED. */
TDDP_NODISCARD tddp_status tddp_nccl_turn_await(tddp_nccl_turn *turn, const atomic_bool *aborted,
                                                int64_t deadline_ns);

/* Lets the next one go on; only once is needed, further calls do nothing. */
void tddp_nccl_turn_pass(tddp_nccl_turn *turn);

/* Passes it, if that has not been done, and frees it. */
void tddp_nccl_turn_end(tddp_nccl_turn *turn);

/* Has those that wait look at their flags. */
void tddp_nccl_turns_wake(void);

#endif
