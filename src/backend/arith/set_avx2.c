/* The set for AVX2 and F16C. */
#ifdef __x86_64__
#define SET tddp_arith_avx2
#include "backend/arith/kernels.h"
#endif
