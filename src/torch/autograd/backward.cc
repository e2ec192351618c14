// Backward from several tensors at once: see <tddp/torch_backward.h>. On the thread that calls it.
#include <torch/csrc/autograd/autograd.h>

#include <tddp/torch_backward.h>

#include "torch/tensor/shim.h"

tddp_status tddp_backward(const tddp_tensor *const *roots, const tddp_tensor *const *grads,
                          size_t count)
{
    using namespace tddp_torch;
    return guard([&] {
        torch::autograd::variable_list from;
        torch::autograd::variable_list with;
        for (size_t i = 0; i < count; i++) {
            from.push_back(tensor_of(roots[i]));
            with.push_back(tensor_of(grads[i]));
        }
        torch::autograd::backward(from, with);
    });
}

void tddp_tensor_reset(tddp_tensor *tensor)
{
    reinterpret_cast<at::Tensor *>(tensor)->reset();
}
