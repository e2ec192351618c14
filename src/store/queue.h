/*
 * Queues in a map. Not for several threads at once. The map's bytes count the values too. An
 * allocation that fails leaves everything as it was.
 */
#ifndef TDDP_STORE_QUEUE_H
#define TDDP_STORE_QUEUE_H

#include "store/map.h"

TDDP_NODISCARD tddp_status tddp_store_queues_push(tddp_store_map *queues, tddp_slice key,
                                                  tddp_slice value);

/* The oldest value, which stays; false if there is none. */
bool tddp_store_queues_first(const tddp_store_map *queues, tddp_slice key, tddp_slice *out);

/* Removes the oldest value, which there is. */
void tddp_store_queues_drop(tddp_store_map *queues, tddp_slice key);

uint64_t tddp_store_queues_length(const tddp_store_map *queues, tddp_slice key);
void tddp_store_queues_clear(tddp_store_map *queues);

#endif
