/**
 * @file memory_stats.h
 * @brief Counts the bytes of tensors and of groups' memory that a process holds on the CPU.
 *
 * Groups count what they allocate for callers (<tddp/group.h>) by themselves. Other owners of
 * tensors call tddp_memory_allocated() and tddp_memory_freed(). Counts are of the bytes that were
 * asked for. Any thread; a forked child continues with its parent's counts, as it has a copy of its
 * parent's memory.
 */
#ifndef TDDP_MEMORY_STATS_H
#define TDDP_MEMORY_STATS_H

#include <stddef.h>
#include <stdint.h>

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What was counted. */
typedef struct tddp_memory_stats {
    uint64_t current_bytes; /**< that are allocated and not freed */
    uint64_t peak_bytes;    /**< the most that there were at once, since the last reset */
    uint64_t allocations;   /**< ever made, freed ones included */
} tddp_memory_stats;

/** The counts so far. While other threads allocate, each is right for a moment of its own. */
TDDP_API tddp_memory_stats tddp_memory_stats_get(void);

/** The peak is what is allocated now. */
TDDP_API void tddp_memory_reset_peak(void);

/** Counts an allocation. */
TDDP_API void tddp_memory_allocated(size_t bytes);
/** Counts the end of an allocation of this size. */
TDDP_API void tddp_memory_freed(size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
