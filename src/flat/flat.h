/*
 * Flat buffers: the assignment of parameters to buffers, and their memory. Public part:
 * <tddp/flat.h>.
 *
 *     plan.c         assigns parameters to buffers
 *     layout.c       offsets and slices in the buffers' memory
 *     memory.c       reference-counted memory, on the CPU and on devices
 *     numbers.c      small numbers that ranks exchange
 *     verify.c       compares the parameters over the ranks
 *
 * Independent of tensors, and of the operations on the buffers.
 */
#ifndef TDDP_FLAT_FLAT_H
#define TDDP_FLAT_FLAT_H

#include <tddp/cuda.h>
#include <tddp/flat.h>
#include <tddp/group.h>

#include "base/base.h"

/* --- plan.c ---------------------------------------------------------------------------------- */

/* The buffer number of sparse parameters. */
#define TDDP_FLAT_NO_BUFFER ((size_t)-1)

size_t tddp_param_bytes(const tddp_param *param);

/*
 * Assigns parameters to buffers the way PyTorch's compute_bucket_assignment_by_size does: in the
 * order given, one open buffer per dtype and device, closed once it holds at least the current
 * limit; each dtype and device walks through `limits` on its own and the last limit repeats; the
 * result is ordered by smallest parameter number. Writes to `buffer_of[count]` each parameter's
 * buffer (TDDP_FLAT_NO_BUFFER for sparse ones) and to `*buffer_count` their number. Pure: no group,
 * no memory kept. Errors: TDDP_INVALID_ARGUMENT, TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_flat_plan(const tddp_param *params, size_t count,
                                          const size_t *limits, size_t limit_count,
                                          size_t *buffer_of, size_t *buffer_count);

/* The same, but visits the parameters in the order given by `order[count]` and numbers the buffers
 * by their last parameter in that order: the buffer that is complete first has number 0. */
TDDP_NODISCARD tddp_status tddp_flat_plan_in_order(const tddp_param *params, const int64_t *order,
                                                   size_t count, const size_t *limits,
                                                   size_t limit_count, size_t *buffer_of,
                                                   size_t *buffer_count);

/* --- layout.c -------------------------------------------------------------------------------- */

enum { TDDP_FLAT_ALIGNMENT = 64 }; /* of each slice, in bytes */

typedef struct tddp_flat_buffer {
    tddp_buffer buffer; /* with the padding, as real numbers */
    size_t bytes;       /* of the slices, without the padding */
    size_t slice_count;
    tddp_flat_slice *slices; /* by increasing offset; owned by the layout */
} tddp_flat_buffer;

typedef struct tddp_flat_layout {
    size_t *buffer_of; /* by parameter */
    char **addresses;  /* by parameter: in `memory`; NULL if sparse */
    size_t buffer_count;
    tddp_flat_buffer *buffers;
    tddp_flat_slice *slices; /* of all buffers */
    tddp_flat_memory *memory;
} tddp_flat_layout;

/* Allocates zeroed memory for a plan: from the group, and on devices from the table. Within a
 * buffer slices are in `order`; NULL: the parameters' order. Owns `buffer_of`, also on failure.
 * `params` are borrowed for the call, their dims as long as the layout lives. Caller:
 * tddp_flat_layout_free(). Errors: TDDP_OUT_OF_MEMORY, those of tddp_group_memory_create() and of
 * the table. */
TDDP_NODISCARD tddp_status tddp_flat_layout_make(tddp_group *group,
                                                 const tddp_device_memory_ops *device,
                                                 const tddp_param *params, const int64_t *order,
                                                 size_t count, size_t *buffer_of,
                                                 size_t buffer_count, tddp_flat_layout *out);
/* Releases the memory too. A layout that is all zero is allowed. */
void tddp_flat_layout_free(tddp_flat_layout *layout);

/* --- memory.c -------------------------------------------------------------------------------- */

/* Allocates memory for buffers whose device and dtype are set, and whose `count` is their bytes.
 * Sets their addresses and counts. */
TDDP_NODISCARD tddp_status tddp_flat_memory_make(tddp_group *group,
                                                 const tddp_device_memory_ops *ops,
                                                 tddp_flat_buffer *buffers, size_t count,
                                                 tddp_flat_memory **out);

/* On a device both queue work on the thread's current stream. */
TDDP_NODISCARD tddp_status tddp_flat_memory_zero(const tddp_flat_memory *memory,
                                                 const tddp_buffer *buffer);
TDDP_NODISCARD tddp_status tddp_flat_memory_copy(const tddp_flat_memory *memory,
                                                 const tddp_param *param, void *into,
                                                 const void *from);

/* --- numbers.c ------------------------------------------------------------------------------- */

typedef struct tddp_flat_numbers {
    tddp_buffer buffer;    /* for operations; the host reads and writes the same memory */
    const tddp_cuda *cuda; /* NULL: plain memory */
} tddp_flat_numbers;

/* Zeros, where the group's operations take them: on the device of the first parameter that is on
 * one, if the group takes no memory of the CPU. Caller: tddp_flat_numbers_free(), also of NULL,
 * once no operation uses them. Errors: TDDP_UNSUPPORTED: there is no such parameter; CUDA's. */
TDDP_NODISCARD tddp_status tddp_flat_numbers_make(const tddp_group *group, const tddp_param *params,
                                                  size_t param_count, tddp_dtype dtype,
                                                  size_t count, tddp_flat_numbers **out);
void tddp_flat_numbers_free(void *numbers);

/* --- verify.c -------------------------------------------------------------------------------- */

/* Compares parameters and the text of the options over the ranks. A difference is TDDP_MISMATCH,
 * with the same text on every rank. `unit` names a part of a model, in which the parameters' names
 * are compared as well; NULL: a model, whose parameters may have other names elsewhere. Waits twice
 * if the ranks differ. */
TDDP_NODISCARD tddp_status tddp_flat_verify(tddp_group *group, const char *unit,
                                            const tddp_param *params, size_t count,
                                            const char *options, const tddp_wait *wait);

#endif
