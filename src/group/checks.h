/*
 * Argument checks, for the files that submit operations. An error text names the operation, the
 * argument and what was expected. No check accesses a buffer's memory.
 */
#ifndef TDDP_GROUP_CHECKS_H
#define TDDP_GROUP_CHECKS_H

#include "group/group.h"

/* Checks that the group is not NULL, and not made before a fork. `what` names the call. */
TDDP_NODISCARD tddp_status tddp_group_check_usable(const tddp_group *group, const char *what);

/* The first check of each call: whether this process may use the group, and its backend supports
 * the operation. */
TDDP_NODISCARD tddp_status tddp_group_check_call(const tddp_group *group, tddp_op_kind kind);

/* Checks one buffer: dtype, size, address, device. */
TDDP_NODISCARD tddp_status tddp_group_check_buffer(const tddp_group *group, tddp_op_kind kind,
                                                   const char *name, const tddp_buffer *buffer);

/* Checks that the group's backend can reduce such memory in this way. */
TDDP_NODISCARD tddp_status tddp_group_check_reduction(const tddp_group *group, tddp_reduce_op op,
                                                      const tddp_buffer *buffer);

/* Checks that two buffers of an operation have the same dtype and device. */
TDDP_NODISCARD tddp_status tddp_group_check_same_type(tddp_op_kind kind, const char *name,
                                                      const tddp_buffer *buffer,
                                                      const char *other_name,
                                                      const tddp_buffer *other);

TDDP_NODISCARD tddp_status tddp_group_check_root(const tddp_group *group, tddp_op_kind kind,
                                                 int root);

/* Checks `count` buffers: of one dtype and device, and together no larger than memory. */
TDDP_NODISCARD tddp_status tddp_group_check_list(const tddp_group *group, tddp_op_kind kind,
                                                 const char *name, const tddp_buffer *list,
                                                 size_t count);

/* The same, with one buffer for each rank. */
TDDP_NODISCARD tddp_status tddp_group_check_parts(const tddp_group *group, tddp_op_kind kind,
                                                  const char *name, const tddp_buffer *parts,
                                                  size_t count);

/* Checks a buffer and a list of parts: of one dtype and device, part `local` as large as the
 * buffer. The buffer may share memory with no other part, and with that one only if they are the
 * same. */
TDDP_NODISCARD tddp_status tddp_group_check_piece(const tddp_group *group, tddp_op_kind kind,
                                                  const char *piece_name, const tddp_buffer *piece,
                                                  const char *parts_name, const tddp_buffer *parts,
                                                  int local);

/* Checks an exchange's inputs and outputs: of one dtype and device, this rank's parts of one size.
 * Only these two may be the same memory. */
TDDP_NODISCARD tddp_status tddp_group_check_exchange(const tddp_group *group, tddp_op_kind kind,
                                                     const tddp_buffer *inputs,
                                                     const tddp_buffer *outputs);

/* Checks that no two of these share memory. */
TDDP_NODISCARD tddp_status tddp_group_check_disjoint(tddp_op_kind kind, const char *name,
                                                     const tddp_buffer *list, size_t count);

/* Whether two buffers share memory. */
bool tddp_group_overlap(const tddp_buffer *a, const tddp_buffer *b);

#endif
