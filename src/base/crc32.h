/*
 * The two halves of CRC-32: crc32.c has the tables and the public function, crc32_fold.c what some
 * processors do faster.
 */
#ifndef TDDP_BASE_CRC32_H
#define TDDP_BASE_CRC32_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TDDP_BASE_CRC32_STRIDE = 64, TDDP_BASE_CRC32_REST = 16 };

/* Whether this processor can fold. */
bool tddp_base_crc32_folds(void);

/*
 * Folds `size` bytes, a multiple of 64 and not 0, that follow those which left the register at
 * `state`: taking the 16 bytes of `out` into a register of 0 leaves what taking them all would.
 */
void tddp_base_crc32_fold(uint32_t state, const unsigned char *data, size_t size,
                          unsigned char out[TDDP_BASE_CRC32_REST]);

#endif
