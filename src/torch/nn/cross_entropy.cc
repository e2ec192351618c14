// The gradient of a cross entropy whose classes the ranks divide: see <tddp/torch_nn.h>. The shares
// of the exponentials in their sum, which are the softmax, are all that backward needs; with
// create_graph they have a history of their own, so that gradients have gradients of any order. On
// the threads that run backward.
#include <memory>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scatter_add.h>
#include <tddp/torch_collectives.h>
#include <tddp/torch_nn.h>

#include "torch/autograd/node.h"
#include "torch/autograd/saved.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

// The ranks that divide the classes.
struct Ranks {
    Ranks(tddp_group *of, tddp_blocking_region how) : group(tddp_group_retain(of)), region(how) {}
    ~Ranks()
    {
        tddp_group_release_async(group);
    }
    Ranks(const Ranks &) = delete;
    Ranks &operator=(const Ranks &) = delete;

    tddp_group *const group;
    const tddp_blocking_region region;
};

at::Tensor map(const Ranks &of, tddp_map map, const at::Tensor &input)
{
    tddp_collective_opts opts = TDDP_COLLECTIVE_OPTS_INIT;
    opts.map = map;
    opts.gradient = TDDP_MAP_ALL_REDUCE;
    opts.blocking_region = opts.backward_blocking_region = of.region;
    at::Tensor output;
    check(tddp_collective(of.group, reinterpret_cast<const tddp_tensor *>(&input), &opts,
                          reinterpret_cast<tddp_tensor *>(&output)));
    return output;
}

// The shares as a function of the logits. Each rank's part of them is its own, so is the gradient.
class SharesNode final : public torch::autograd::Node
{
  public:
    SharesNode(std::shared_ptr<const Ranks> of, torch::autograd::edge_list edges)
        : Node(std::move(edges)), of_(std::move(of))
    {
    }
    void save(const at::Tensor &shares)
    {
        shares_ = Saved(shares, true);
    }
    variable_list apply(variable_list &&gradients) override
    {
        if (!gradients[0].defined()) {
            return variable_list(1);
        }
        const at::Tensor shares = shares_.unpack(pointer_to(*this));
        const at::Tensor mean =
            map(*of_, TDDP_MAP_ALL_REDUCE, gradients[0].mul(shares).sum(-1, true));
        return {gradients[0].sub(mean).mul(shares)};
    }
    void release_variables() override
    {
        shares_.reset_data();
    }
    std::string name() const override
    {
        return "SharesBackward";
    }

  private:
    const std::shared_ptr<const Ranks> of_;
    Saved shares_;
};

class CrossEntropyNode final : public torch::autograd::Node
{
  public:
    CrossEntropyNode(std::shared_ptr<const Ranks> of, const at::Tensor &logits,
                     const at::Tensor &shares, const at::Tensor &places, const at::Tensor &ones)
        : of_(std::move(of)), shares_(shares, false), places_(places, false), ones_(ones, false)
    {
        set_next_edges({torch::autograd::impl::gradient_edge(logits)});
    }
    variable_list apply(variable_list &&gradients) override
    {
        if (!gradients[0].defined()) {
            return variable_list(1);
        }
        if (at::GradMode::is_enabled()) {
            // The same on all ranks, and each uses it for its own classes.
            const at::Tensor outer = map(*of_, TDDP_MAP_IDENTITY, gradients[0]);
            return {less_targets(shares_with_history()).mul(outer.unsqueeze(-1))};
        }
        return {less_targets(shares_.unpack()).mul_(gradients[0].unsqueeze(-1))};
    }
    void release_variables() override
    {
        shares_.reset_data();
        places_.reset_data();
        ones_.reset_data();
    }
    std::string name() const override
    {
        return "CrossEntropyBackward";
    }

  private:
    at::Tensor less_targets(const at::Tensor &shares)
    {
        return shares.scatter_add(-1, places_.unpack().unsqueeze(-1),
                                  ones_.unpack().neg().unsqueeze(-1));
    }
    at::Tensor shares_with_history()
    {
        at::Tensor shares = shares_.unpack().detach();
        shares.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
        const NodePointer node =
            make_node<SharesNode>(of_, torch::autograd::edge_list{next_edge(0)});
        torch::autograd::create_gradient_edge(shares, node);
        static_cast<SharesNode &>(*node).save(shares);
        return shares;
    }

    const std::shared_ptr<const Ranks> of_;
    Saved shares_;
    Saved places_;
    Saved ones_;
};

} // namespace

} // namespace tddp_torch

tddp_status tddp_cross_entropy_graph(tddp_group *group, const tddp_tensor *logits,
                                     const tddp_tensor *shares, const tddp_tensor *places,
                                     const tddp_tensor *ones, tddp_blocking_region backward_region,
                                     tddp_tensor *losses)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &from = tensor_of(logits);
        at::Tensor &result = *reinterpret_cast<at::Tensor *>(losses);
        if (!from.defined() || !from.requires_grad() || from.dim() != 2) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "logits: expected [rows, classes] that require a gradient"));
        }
        if (!result.defined() || result.requires_grad() || result.dim() != 1 ||
            result.size(0) != from.size(0) || tensor_of(shares).sizes() != from.sizes()) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "losses, shares: expected a loss without a history for each of "
                                    "%lld rows, and shares of the logits' shape",
                                    static_cast<long long>(from.size(0))));
        }
        torch::autograd::create_gradient_edge(
            result,
            make_node<CrossEntropyNode>(std::make_shared<const Ranks>(group, backward_region), from,
                                        tensor_of(shares), tensor_of(places), tensor_of(ones)));
    });
}
