/* The ranks of a group that have come to make it, as the store knows them. */
#ifndef TDDP_GROUP_ARRIVALS_H
#define TDDP_GROUP_ARRIVALS_H

#include "group/group.h"

/* Tells the others of this rank, and waits until all ranks have come: group->peers. Meanwhile log
 * lines name those that are missing, and TDDP_TIMEOUT does. */
TDDP_NODISCARD tddp_status tddp_arrivals_exchange(tddp_group *group, const tddp_wait *wait,
                                                  int64_t deadline);

/* This rank has come, but does not wait any longer. */
TDDP_NODISCARD tddp_status tddp_arrivals_withdraw(tddp_group *group, const tddp_wait *wait);

#endif
