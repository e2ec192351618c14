// Parallel loops on libtorch's threads. at::parallel_for is a template that runs in parallel only
// if its user is compiled with the same threading library as libtorch; TensorIterator is compiled
// into libtorch, so it always uses libtorch's threads.
#include <numeric>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include "torch/tensor/parallel.h"

namespace tddp_torch
{

void parallel_for(int64_t count, const std::function<void(int64_t first, int64_t last)> &body)
{
    if (count <= 1 || at::get_num_threads() == 1 || at::in_parallel_region()) {
        body(0, count);
        return;
    }
    const at::NoGradGuard no_grad;
    std::vector<int64_t> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    const at::Tensor all = at::from_blob(numbers.data(), {count}, at::kLong);
    auto iterator = at::TensorIterator::borrowing_nullary_op(all);
    iterator.for_each(
        [&](char **data, const int64_t *, int64_t number) {
            const int64_t first = *reinterpret_cast<const int64_t *>(data[0]);
            body(first, first + number);
        },
        1);
}

} // namespace tddp_torch
