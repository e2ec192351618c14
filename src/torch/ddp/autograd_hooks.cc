// The hook of each parameter's gradient accumulator. It runs after the gradient is accumulated, on
// the autograd thread that did so, and lives as long as the accumulator.
#include <torch/csrc/autograd/function_hook.h>

#include "torch/autograd/deferred.h"
#include "torch/ddp/core.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

class ReadyHook final : public torch::autograd::FunctionPostHook
{
  public:
    ReadyHook(std::shared_ptr<Core> core, size_t index) : core_(std::move(core)), index_(index) {}
    variable_list operator()(const variable_list &outputs, const variable_list &inputs) override
    {
        const Deferred *deferred = Deferred::current();
        if (deferred && deferred->leads_to(core_->params()[index_].tensor)) {
            return outputs; // the rest of the gradient comes later, from another backward
        }
        const bool defined = !inputs.empty() && inputs[0].defined();
        if (core_->expects(index_, defined)) {
            core_->move_to_bucket(index_);
            for (const auto &later : later_) {
                const std::shared_ptr<Core> core = later.first.lock();
                if (core && core->armed()) {
                    core->move_to_bucket(later.second);
                }
            }
            core_->mark_ready(index_);
        } else if (defined && core_->is_late() && !other_wrapper_prepared()) {
            core_->warn_late(index_);
        }
        return outputs;
    }
    // A model may be wrapped twice: the later wrapper's hook must copy the gradient before this
    // one's bucket is reduced in place.
    void precedes(ReadyHook &later)
    {
        later_.emplace_back(later.core_, later.index_);
        later.earlier_.emplace_back(core_);
    }

  private:
    // Whether the gradient may belong to a forward through another wrapper.
    bool other_wrapper_prepared() const
    {
        for (const auto &later : later_) {
            const std::shared_ptr<Core> core = later.first.lock();
            if (core && core->prepared()) {
                return true;
            }
        }
        for (const auto &earlier : earlier_) {
            const std::shared_ptr<Core> core = earlier.lock();
            if (core && core->prepared()) {
                return true;
            }
        }
        return false;
    }

    std::shared_ptr<Core> core_;
    size_t index_;
    std::vector<std::pair<std::weak_ptr<Core>, size_t>> later_;
    std::vector<std::weak_ptr<Core>> earlier_;
};

} // namespace

std::vector<Hooked> add_hooks(const std::shared_ptr<Core> &core)
{
    const std::vector<Param> &params = core->params();
    std::vector<Hooked> hooks;
    std::vector<NodePointer> accumulators;
    hooks.reserve(params.size());
    for (size_t i = 0; i < params.size(); i++) {
        NodePointer accumulator = torch::autograd::impl::grad_accumulator(params[i].tensor);
        auto added = std::make_unique<ReadyHook>(core, i);
        for (const auto &hook : accumulator->post_hooks()) {
            if (auto *earlier = dynamic_cast<ReadyHook *>(hook.get())) {
                earlier->precedes(*added);
            }
        }
        const uintptr_t key = accumulator->add_post_hook(std::move(added));
        accumulators.push_back(accumulator);
        hooks.push_back({std::move(accumulator), key});
    }
    core->set_accumulators(accumulators);
    return hooks;
}

} // namespace tddp_torch
