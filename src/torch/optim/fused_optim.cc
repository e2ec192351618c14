// Fused optimizer steps over all parameters. Parameters whose gradient and state have their layout
// are processed by fused_kernels.cc, in chunks distributed over libtorch's threads; the others by
// libtorch's operations, with the same formula. Called by the training thread. All slots are
// checked before the first one is changed. The caller owns the state and counts the steps.
#include <algorithm>
#include <cmath>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <tddp/torch_optim.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/optim/fused_kernels.h"
#include "torch/tensor/parallel.h"
#include "torch/tensor/dense.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

// A checked slot.
struct Item {
    at::Tensor param;
    at::Tensor grad;
    at::Tensor state[TDDP_OPTIM_STATES];
    FusedTask task;
    FusedLoop loop = nullptr; // NULL: libtorch's operations
    const tddp_optim_slot *slot = nullptr;
};

[[noreturn]] void fail_slot(tddp_status status, size_t index, const std::string &fault)
{
    throw Failure(tddp_fail(status, "parameter number %zu of the step: %s", index, fault.c_str()));
}

// The part that all optimizers share; `states` is the number of state tensors of the formula.
Item make_item(const tddp_optim_slot &slot, size_t index, size_t states)
{
    Item item;
    item.slot = &slot;
    item.param = tensor_of(slot.param);
    item.grad = item.param.grad();
    bool plain = is_dense_on_cpu(item.param) && has_layout_of(item.grad, item.param);
    for (size_t i = 0; i < states; i++) {
        if (!slot.state[i] || !tensor_of(slot.state[i]).defined()) {
            fail_slot(TDDP_INVALID_ARGUMENT, index, "its state is missing");
        }
        const at::Tensor &state = item.state[i] = tensor_of(slot.state[i]);
        if (state.sizes() != item.param.sizes()) {
            fail_slot(TDDP_INVALID_ARGUMENT, index,
                      "its state has another shape: expected that of the parameter; was it loaded "
                      "from another model?");
        }
        plain = plain && has_layout_of(state, item.param);
        item.task.state[i] = plain ? state.data_ptr() : nullptr;
    }
    if (plain) {
        item.task.param = item.param.data_ptr();
        item.task.grad = item.grad.data_ptr();
        item.task.count = item.param.numel();
    }
    return item;
}

bool is_plain(const Item &item)
{
    return item.task.grad != nullptr || item.grad.numel() == 0;
}

// Whether a parameter occurs more than once: its steps must then run in sequence.
bool repeats(const std::vector<Item> &items)
{
    std::vector<const void *> memory;
    for (const Item &item : items) {
        memory.push_back(item.task.param);
    }
    std::sort(memory.begin(), memory.end());
    return std::adjacent_find(memory.begin(), memory.end()) != memory.end();
}

struct Chunk {
    const Item *item;
    int64_t begin;
};

void run_parallel(const std::vector<Item> &items)
{
    std::vector<Chunk> chunks;
    for (const Item &item : items) {
        for (int64_t begin = 0; begin < item.task.count; begin += grain_size) {
            chunks.push_back({&item, begin});
        }
    }
    parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const Chunk &chunk = chunks[static_cast<size_t>(i)];
            const FusedTask &task = chunk.item->task;
            chunk.item->loop(task, chunk.begin, std::min(chunk.begin + grain_size, task.count));
        }
    });
}

// Steps all items that have a kernel.
void run_loops(const std::vector<Item> &items)
{
    int64_t elements = 0;
    for (const Item &item : items) {
        elements += item.task.count;
    }
    if (elements > 2 * grain_size && at::get_num_threads() > 1 && !repeats(items)) {
        run_parallel(items);
    } else {
        for (const Item &item : items) {
            item.loop(item.task, 0, item.task.count);
        }
    }
    for (const Item &item : items) {
        torch::autograd::impl::bump_version(item.param);
    }
}

void check_group(const tddp_optim_slot &slot, size_t index, size_t group_count)
{
    if (slot.group >= group_count) {
        fail_slot(TDDP_INVALID_ARGUMENT, index,
                  "group " + std::to_string(slot.group) + ": there are " +
                      std::to_string(group_count));
    }
}

// Checks all slots, then steps them. `prepare` makes an item; `by_operations` steps one without a
// kernel.
template <typename Prepare, typename ByOperations>
void step(const tddp_optim_slot *slots, size_t count, size_t group_count, const Prepare &prepare,
          const ByOperations &by_operations)
{
    const at::NoGradGuard no_grad;
    std::vector<Item> loops, others;
    loops.reserve(count);
    for (size_t i = 0; i < count; i++) {
        check_group(slots[i], i, group_count);
        if (!tddp_has_gradient(slots[i].param)) {
            continue;
        }
        Item item = prepare(slots[i], i);
        (item.loop ? loops : others).push_back(std::move(item));
    }
    for (const Item &item : others) {
        by_operations(item);
    }
    run_loops(loops);
}

/* --- SGD ------------------------------------------------------------------------------------- */

Item prepare_sgd(const tddp_sgd_settings &settings, const tddp_optim_slot &slot, size_t index)
{
    const bool momentum = settings.momentum != 0;
    Item item = make_item(slot, index, momentum ? 1 : 0);
    if (item.grad.layout() != at::kStrided && settings.weight_decay != 0) {
        fail_slot(
            TDDP_UNSUPPORTED, index,
            "weight_decay changes all of it, but its gradient is sparse: set weight_decay to 0 "
            "in the group of such parameters");
    }
    item.task.lr = settings.lr;
    item.task.decay = settings.weight_decay;
    item.task.momentum = settings.momentum;
    item.task.undamped = 1 - settings.dampening;
    item.task.nesterov = settings.nesterov != 0;
    item.task.first = slot.step <= 1;
    item.loop = is_plain(item) ? sgd_loop(item.param.scalar_type(), momentum) : nullptr;
    return item;
}

void sgd_by_operations(const Item &item)
{
    const FusedTask &task = item.task;
    at::Tensor change = task.decay != 0 ? item.grad.add(item.param, task.decay) : item.grad;
    if (task.momentum != 0) {
        const at::Tensor &buffer = item.state[0];
        if (task.first) {
            buffer.zero_().add_(change);
        } else {
            buffer.mul_(task.momentum).add_(change, task.undamped);
        }
        // In this order, because the gradient may be sparse and the buffer dense.
        change = task.nesterov ? buffer.mul(task.momentum).add_(change) : buffer;
    }
    item.param.add_(change, -task.lr);
}

/* --- Adam and AdamW -------------------------------------------------------------------------- */

Item prepare_adam(const tddp_adam_settings &settings, const tddp_optim_slot &slot, size_t index)
{
    const char *name = settings.decoupled ? "AdamW" : "Adam";
    if (tddp_has_sparse_gradient(slot.param)) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "%s does not support sparse gradients, please consider SparseAdam "
                                "instead (parameter number %zu of the step)",
                                name, index));
    }
    if (slot.step < 1) {
        fail_slot(TDDP_INVALID_ARGUMENT, index,
                  "step " + std::to_string(slot.step) + ": expected 1 or more");
    }
    Item item = make_item(slot, index, settings.amsgrad ? 3 : 2);
    const double number = static_cast<double>(slot.step);
    item.task.lr = settings.lr / (1 - std::pow(settings.beta1, number));
    item.task.root = std::sqrt(1 - std::pow(settings.beta2, number));
    item.task.beta1 = settings.beta1;
    item.task.beta2 = settings.beta2;
    item.task.eps = settings.eps;
    if (settings.decoupled) {
        item.task.shrink = 1 - settings.lr * settings.weight_decay;
    } else {
        item.task.decay = settings.weight_decay;
    }
    item.loop =
        is_plain(item) ? adam_loop(item.param.scalar_type(), settings.amsgrad != 0) : nullptr;
    return item;
}

void adam_by_operations(const Item &item)
{
    const FusedTask &task = item.task;
    if (task.shrink != 1) {
        item.param.mul_(task.shrink);
    }
    const at::Tensor change = task.decay != 0 ? item.grad.add(item.param, task.decay) : item.grad;
    item.state[0].mul_(task.beta1).add_(change, 1 - task.beta1);
    item.state[1].mul_(task.beta2).addcmul_(change, change, 1 - task.beta2);
    at::Tensor top = item.state[1];
    if (item.state[2].defined()) {
        top = item.state[2].copy_(at::maximum(item.state[2], top));
    }
    item.param.addcdiv_(item.state[0], top.sqrt().div_(task.root).add_(task.eps), -task.lr);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_sgd_step(const tddp_sgd_settings *settings, size_t group_count,
                          const tddp_optim_slot *slots, size_t count)
{
    using namespace tddp_torch;
    return guard([&] {
        step(
            slots, count, group_count,
            [&](const tddp_optim_slot &slot, size_t index) {
                return prepare_sgd(settings[slot.group], slot, index);
            },
            sgd_by_operations);
    });
}

tddp_status tddp_adam_step(const tddp_adam_settings *settings, size_t group_count,
                           const tddp_optim_slot *slots, size_t count)
{
    using namespace tddp_torch;
    return guard([&] {
        step(
            slots, count, group_count,
            [&](const tddp_optim_slot &slot, size_t index) {
                return prepare_adam(settings[slot.group], slot, index);
            },
            adam_by_operations);
    });
}

int tddp_has_gradient(const tddp_tensor *param)
{
    const at::Tensor &tensor = tddp_torch::tensor_of(param);
    return tensor.defined() && tensor.unsafeGetTensorImpl()->grad().defined();
}

int tddp_has_sparse_gradient(const tddp_tensor *param)
{
    return tddp_has_gradient(param) &&
           tddp_torch::tensor_of(param).unsafeGetTensorImpl()->grad().layout() != at::kStrided;
}

tddp_status tddp_zero_gradients(const tddp_tensor *const *params, size_t count, int set_to_none)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < count; i++) {
            if (!tddp_has_gradient(params[i])) {
                continue;
            }
            at::Tensor &grad = tensor_of(params[i]).mutable_grad();
            if (set_to_none) {
                grad.reset();
                continue;
            }
            if (grad.requires_grad()) {
                grad.detach_();
            }
            grad.zero_();
        }
    });
}
