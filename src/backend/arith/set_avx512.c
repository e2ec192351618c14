/* The set for AVX-512: F, BW, VL and DQ, which every server processor with 512-bit vectors has. */
#ifdef __x86_64__
#define SET tddp_arith_avx512
#include "backend/arith/kernels.h"
#endif
