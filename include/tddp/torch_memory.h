/**
 * @file torch_memory.h
 * @brief How much memory libtorch's tensors take (libtddp_torch).
 *
 * On the CPU libtorch counts nothing itself: tddp_track_tensors() has its allocator report to
 * <tddp/memory_stats.h>, where the memory of groups is counted too. On a GPU libtorch's caching
 * allocator has counts of its own. Memory that is in no tensor's storage, such as a workspace
 * within an operation, and tensors over the memory of others (a mapped file) are not counted.
 */
#ifndef TDDP_TORCH_MEMORY_H
#define TDDP_TORCH_MEMORY_H

#include <tddp/memory_stats.h>
#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * From now on each tensor on the CPU is counted; those that there are already are not. Further
 * calls do nothing. Any thread, but not beside one that installs an allocator of its own. Errors:
 * TDDP_UNSUPPORTED (an allocator of a higher priority is installed), TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_track_tensors(void);

/** libtorch's counts of a GPU, bytes as tensors have them, rounded up by its allocator. Any thread.
 *  Errors: TDDP_UNSUPPORTED (this libtorch has no CUDA), TDDP_INTERNAL (no such device). */
TDDP_API TDDP_NODISCARD tddp_status tddp_device_memory_stats(int32_t device,
                                                             tddp_memory_stats *out);
/** The peak is what is allocated now. Any thread. Errors: as above. */
TDDP_API TDDP_NODISCARD tddp_status tddp_device_memory_reset_peak(int32_t device);
/** Returns to the driver what libtorch's allocator keeps of all GPUs for later tensors; nothing in
 * a build without CUDA. Any thread. Errors: TDDP_INTERNAL. */
TDDP_API TDDP_NODISCARD tddp_status tddp_device_memory_empty_cache(void);

#ifdef __cplusplus
}
#endif

#endif
