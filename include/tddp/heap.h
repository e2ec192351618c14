/**
 * @file heap.h
 * @brief The C library's heap in a process that takes and frees the same large tensors step by
 * step.
 *
 * By its defaults glibc maps large blocks for each call and gives free memory back to the system at
 * once, so a training step touches every page of its activations for the first time, again and
 * again. Any thread; nothing of this is needed for correctness.
 */
#ifndef TDDP_HEAP_H
#define TDDP_HEAP_H

#include <stdint.h>

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * From now on has the process keep the memory it frees. Returns 1 if it does, 0 if that is not
 * possible (another C library) or was decided by someone else: MALLOC_MMAP_THRESHOLD_ and the like
 * or GLIBC_TUNABLES are set, or TDDP_KEEP_MEMORY is 0.
 */
TDDP_API int tddp_heap_keep(void);

/** Bytes of the heap that are in use, those of mapped blocks included; -1 where that is unknown.
 *  Takes some microseconds. */
TDDP_API int64_t tddp_heap_in_use(void);

#ifdef __cplusplus
}
#endif

#endif
