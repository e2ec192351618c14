/* The set for every processor of the architecture: SSE2 of x86-64, NEON of AArch64. */
#define SET tddp_arith_baseline
#include "backend/arith/kernels.h"
