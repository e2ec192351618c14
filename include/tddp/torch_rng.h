/**
 * @file torch_rng.h
 * @brief The state of libtorch's random numbers, for checkpoints (libtddp_torch).
 *
 * It is that of the default generator of the CPU, from which dropout, randn and the like draw. Any
 * thread; the generator's own lock is held meanwhile. The bytes are libtorch's: they go back into a
 * libtorch of the same version.
 */
#ifndef TDDP_TORCH_RNG_H
#define TDDP_TORCH_RNG_H

#include <stddef.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Copies the state into `out` if it has the room, and says in `*size` how many bytes it takes; with
 * a `room` of 0 it only says that, and `out` may be NULL.
 * Errors: TDDP_INVALID_ARGUMENT (a `room` that is too small, but not 0; the text names both).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_rng_state(void *out, size_t room, size_t *size);

/**
 * Goes on from a state that tddp_rng_state() gave, on this machine or another.
 * Errors: TDDP_INVALID_ARGUMENT (no state of this libtorch's; the generator is as it was).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_set_rng_state(const void *state, size_t size);

#ifdef __cplusplus
}
#endif

#endif
