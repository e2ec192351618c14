/*
 * The operations on a map of values, with the same semantics for every implementation of stores.
 */
#ifndef TDDP_STORE_VALUES_H
#define TDDP_STORE_VALUES_H

#include "store/map.h"

TDDP_NODISCARD tddp_status tddp_store_values_set(tddp_store_map *map, tddp_slice key,
                                                 tddp_slice value);
TDDP_NODISCARD tddp_status tddp_store_values_append(tddp_store_map *map, tddp_slice key,
                                                    tddp_slice value);

/* Room for the decimal text of any counter. */
enum { TDDP_STORE_NUMBER_BYTES = 24 };

/* The counter after adding, without storing it. TDDP_STORE: the value is not a number. */
TDDP_NODISCARD tddp_status tddp_store_values_sum(const tddp_store_map *map, tddp_slice key,
                                                 int64_t delta, int64_t *out);

/* Writes the decimal text of a counter and returns it as a slice. */
tddp_slice tddp_store_number(int64_t number, char text[TDDP_STORE_NUMBER_BYTES]);

/* What compare_set answers, and whether `desired` is to be stored. Borrowed from its arguments. */
tddp_slice tddp_store_values_compare(const tddp_store_map *map, tddp_slice key, tddp_slice expected,
                                     tddp_slice desired, bool *store);

#endif
