/**
 * @file torch_rng.h
 * @brief The state of libtorch's random number generator, for checkpoints (libtddp_torch).
 *
 * The generator is the CPU's default one, which dropout, randn and others use. Any thread, under
 * the generator's lock. The format is libtorch's: a state is valid for the same version of
 * libtorch.
 */
#ifndef TDDP_TORCH_RNG_H
#define TDDP_TORCH_RNG_H

#include <stddef.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Copies the state to `out`, which has `room` bytes, and sets `*size` to its bytes. With a `room`
 * of 0 it only sets `*size`, and `out` may be NULL. Errors: TDDP_INVALID_ARGUMENT (a `room` that is
 * too small, but not 0; the text names both).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_rng_state(void *out, size_t room, size_t *size);

/**
 * Sets a state that tddp_rng_state() returned, on this machine or another.
 * Errors: TDDP_INVALID_ARGUMENT (not a state of this libtorch; the generator is unchanged).
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_set_rng_state(const void *state, size_t size);

#ifdef __cplusplus
}
#endif

#endif
