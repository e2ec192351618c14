// Parallel loops on libtorch's threads.
#ifndef TDDP_TORCH_PARALLEL_H
#define TDDP_TORCH_PARALLEL_H

#include <cstdint>
#include <functional>

namespace tddp_torch
{

// The maximum number of elements of a chunk: small enough to distribute, and to stay in a core's
// private cache between passes.
constexpr int64_t grain_size = 16384;

// Calls body(first, last) for subranges of [0, count), on several threads if libtorch has them.
void parallel_for(int64_t count, const std::function<void(int64_t first, int64_t last)> &body);

} // namespace tddp_torch

#endif
