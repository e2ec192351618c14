// Loops of our own, shared out over libtorch's threads.
#ifndef TDDP_TORCH_PARALLEL_H
#define TDDP_TORCH_PARALLEL_H

#include <cstdint>
#include <functional>

namespace tddp_torch
{

// As many elements as one piece of work has at most: small enough to spread, and to stay in a
// core's own cache from one pass to the next.
constexpr int64_t piece_elements = 16384;

// Calls body(first, last) for parts of 0 to `count`, on several threads if libtorch has them here.
void in_parallel(int64_t count, const std::function<void(int64_t first, int64_t last)> &body);

} // namespace tddp_torch

#endif
