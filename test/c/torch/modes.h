// Helpers of the tests with unused parameters and checkpointed segments.
#ifndef TDDP_TEST_TORCH_MODES_H
#define TDDP_TEST_TORCH_MODES_H

#include "model.h"

namespace modes_test
{

using namespace model_test;

inline tddp_ddp_opts with(int find_unused, int static_graph, int apart = 0)
{
    tddp_ddp_opts opts = small_buckets();
    opts.reducer.find_unused = find_unused;
    opts.reducer.static_graph = static_graph;
    opts.gradients_apart = apart;
    return opts;
}

// Passes outputs through the node that runs first in backward, as a wrapper does.
inline std::vector<at::Tensor> open(tddp_ddp *ddp, std::vector<at::Tensor> outputs)
{
    if (tddp_ddp_wants_outputs(ddp)) {
        CHECK_OK(tddp_ddp_outputs(ddp, handles(outputs).data(), outputs.size()));
    }
    return outputs;
}

inline at::Tensor open(tddp_ddp *ddp, const at::Tensor &output)
{
    return open(ddp, std::vector<at::Tensor>{output})[0];
}

// A loss whose gradient of parameter i is `factor` everywhere.
inline at::Tensor part(const Model &model, size_t i, double factor)
{
    return model.params[i].sum() * factor;
}

inline bool all_are(const at::Tensor &grad, double value)
{
    return grad.defined() && (grad - value).abs().max().item<double>() < 1e-12;
}

} // namespace modes_test

#endif
