/*
 * Checks of arguments, for the files that queue operations. All of them set the text; it names the
 * operation, the argument and what was expected. None of them touches the memory of a buffer.
 */
#ifndef TDDP_GROUP_CHECKS_H
#define TDDP_GROUP_CHECKS_H

#include "group/group.h"

/* Whether there is a group, and this process may use it. `what` names the call. */
TDDP_NODISCARD tddp_status tddp_group_check_usable(const tddp_group *group, const char *what);

/* The first of each call: whether this process may use the group, and its backend knows the
 * operation. */
TDDP_NODISCARD tddp_status tddp_group_check_call(const tddp_group *group, tddp_op_kind kind);

/* One buffer: dtype, size, address, device. */
TDDP_NODISCARD tddp_status tddp_group_check_buffer(const tddp_group *group, tddp_op_kind kind,
                                                   const char *name, const tddp_buffer *buffer);

/* Whether what carries the group can reduce such memory in this way. */
TDDP_NODISCARD tddp_status tddp_group_check_reduction(const tddp_group *group, tddp_reduce_op op,
                                                      const tddp_buffer *buffer);

/* Two buffers of one operation: the same dtype, the same device. */
TDDP_NODISCARD tddp_status tddp_group_check_same_type(tddp_op_kind kind, const char *name,
                                                      const tddp_buffer *buffer,
                                                      const char *other_name,
                                                      const tddp_buffer *other);

TDDP_NODISCARD tddp_status tddp_group_check_root(const tddp_group *group, tddp_op_kind kind,
                                                 int root);

/* `count` buffers that are alike and together no more than memory can hold. */
TDDP_NODISCARD tddp_status tddp_group_check_list(const tddp_group *group, tddp_op_kind kind,
                                                 const char *name, const tddp_buffer *list,
                                                 size_t count);

/* As above, one for each rank. */
TDDP_NODISCARD tddp_status tddp_group_check_parts(const tddp_group *group, tddp_op_kind kind,
                                                  const char *name, const tddp_buffer *parts,
                                                  size_t count);

/* A piece and parts that go together: alike, part `own` of the size of the piece. Where one of them
 * is written to, they may share memory only as that part and the piece. */
TDDP_NODISCARD tddp_status tddp_group_check_piece(const tddp_group *group, tddp_op_kind kind,
                                                  const char *piece_name, const tddp_buffer *piece,
                                                  const char *parts_name, const tddp_buffer *parts,
                                                  int own);

/* What goes to the ranks and what comes from them: alike, the own parts of one size. Only these two
 * may be the same memory. */
TDDP_NODISCARD tddp_status tddp_group_check_exchange(const tddp_group *group, tddp_op_kind kind,
                                                     const tddp_buffer *inputs,
                                                     const tddp_buffer *outputs);

/* No two of these share memory. */
TDDP_NODISCARD tddp_status tddp_group_check_disjoint(tddp_op_kind kind, const char *name,
                                                     const tddp_buffer *list, size_t count);

/* Whether two buffers share memory. */
bool tddp_group_overlap(const tddp_buffer *a, const tddp_buffer *b);

#endif
