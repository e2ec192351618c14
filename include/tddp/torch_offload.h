/**
 * @file torch_offload.h
 * @brief Activation offload: what forward saves for backward waits in the CPU's memory
 * (libtddp_torch).
 */
#ifndef TDDP_TORCH_OFFLOAD_H
#define TDDP_TORCH_OFFLOAD_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Until tddp_save_on_cpu_end(), what operations of this thread save for backward is copied to the
 * CPU's memory, and freed on its device as soon as nothing else uses it; backward copies it back
 * when it needs it. These remain where they are: tensors on the CPU; floating-point leaves, such as
 * parameters, and views of them; the parameters of <tddp/torch_fsdp.h>, whose memory comes and
 * goes. Begin and end may be nested: the innermost one counts.
 *
 * `pin_memory`: into page-locked memory, so that the host need not wait for the copies.
 *
 * The first call replaces autograd's engine for the process by one that differs in this alone:
 * libtorch has no other place for such hooks without Python. Errors: TDDP_UNSUPPORTED (the engine
 * is not libtorch's own, because Python's is loaded), TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_save_on_cpu_begin(int pin_memory);
/** Ends the innermost tddp_save_on_cpu_begin() of this thread. */
TDDP_API void tddp_save_on_cpu_end(void);

/** What waits in the CPU's memory now, of all threads. */
typedef struct tddp_saved_on_cpu {
    size_t tensors;
    size_t bytes;
} tddp_saved_on_cpu;
/** The counts of this moment. */
TDDP_API tddp_saved_on_cpu tddp_saved_on_cpu_now(void);

#ifdef __cplusplus
}
#endif

#endif
