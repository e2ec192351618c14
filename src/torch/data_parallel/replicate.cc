// A differentiable broadcast from one device to several devices of the process. Tensors are copied
// in chunks, and for each chunk one node of the graph sums the gradients (replicate_node.cc), so
// that the gradients of one chunk are copied while backward computes those of another. On the
// thread that runs forward.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <tddp/torch_parallel.h>

#include "torch/data_parallel/replicate.h"
#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

using Tensors = std::vector<at::Tensor>;

// One call of tddp_replicate().
class Replication
{
  public:
    Replication(Tensors tensors, std::vector<at::Device> devices, const tddp_replicate_opts &opts);
    // By device, then by tensor.
    const std::vector<Tensors> &make();

  private:
    at::Tensor alias_of(const at::Tensor &tensor) const;
    void copy_all();
    void copy_unflattened(size_t i);
    void copy_flattened(const std::vector<size_t> &indices, bool differentiable);
    void copy_chunk(const std::vector<size_t> &members, const std::vector<TensorLayout> &layouts);
    void attach_node(const std::vector<size_t> &members, std::vector<TensorLayout> layouts);

    const Tensors tensors_;
    const std::vector<at::Device> devices_;
    const at::Device source_;
    const size_t limit_;
    const bool grad_;
    std::vector<size_t> local_, remote_; // devices that share memory, and those that get copies
    std::vector<at::Device> targets_;    // those of remote_
    std::vector<Tensors> outputs_;
};

Replication::Replication(Tensors tensors, std::vector<at::Device> devices,
                         const tddp_replicate_opts &opts)
    : tensors_(std::move(tensors)), devices_(std::move(devices)), source_(tensors_[0].device()),
      limit_(opts.limit), grad_(!opts.detached && at::GradMode::is_enabled()),
      outputs_(devices_.size(), Tensors(tensors_.size()))
{
    for (size_t d = 0; d < devices_.size(); d++) {
        (devices_[d] == source_ && !opts.apart ? local_ : remote_).push_back(d);
    }
    for (const size_t d : remote_) {
        targets_.push_back(devices_[d]);
    }
}

const std::vector<Tensors> &Replication::make()
{
    for (const size_t d : local_) {
        for (size_t i = 0; i < tensors_.size(); i++) {
            outputs_[d][i] = alias_of(tensors_[i]);
        }
    }
    if (!remote_.empty()) {
        copy_all();
    }
    return outputs_;
}

at::Tensor Replication::alias_of(const at::Tensor &tensor) const
{
    if (!grad_) {
        return tensor.detach();
    }
    return tensor.layout() == at::kStrided ? tensor.view_as(tensor) : tensor.alias();
}

// Tensors that require grad and others are in separate chunks, so that all outputs of a node
// require grad.
void Replication::copy_all()
{
    std::vector<size_t> without_grad, with_grad;
    for (size_t i = 0; i < tensors_.size(); i++) {
        if (!can_flatten(tensors_[i])) {
            copy_unflattened(i);
        } else {
            (grad_ && tensors_[i].requires_grad() ? with_grad : without_grad).push_back(i);
        }
    }
    copy_flattened(without_grad, false);
    copy_flattened(with_grad, true);
}

void Replication::copy_unflattened(size_t i)
{
    const at::Tensor from = grad_ ? tensors_[i] : tensors_[i].detach();
    for (const size_t d : remote_) {
        outputs_[d][i] = devices_[d] == source_ ? from.clone() : from.to(devices_[d]);
    }
}

void Replication::copy_flattened(const std::vector<size_t> &indices, bool differentiable)
{
    std::vector<TensorLayout> layouts;
    for (const size_t i : indices) {
        layouts.emplace_back(tensors_[i]);
    }
    for (const std::vector<size_t> &chunk : group_into_chunks(layouts, limit_)) {
        std::vector<size_t> members;
        std::vector<TensorLayout> shapes;
        for (const size_t k : chunk) {
            members.push_back(indices[k]);
            shapes.push_back(layouts[k]);
        }
        copy_chunk(members, shapes);
        if (differentiable) {
            attach_node(members, std::move(shapes));
        }
    }
}

void Replication::copy_chunk(const std::vector<size_t> &members,
                             const std::vector<TensorLayout> &layouts)
{
    const at::NoGradGuard no_grad;
    Tensors from;
    for (const size_t i : members) {
        from.push_back(tensors_[i]);
    }
    const at::Tensor flat = flatten(from, layouts);
    const Tensors copies = broadcast_flat(flat, targets_, !flat.is_alias_of(from[0]));
    for (size_t k = 0; k < remote_.size(); k++) {
        const Tensors parts = unflatten(copies[k], layouts);
        for (size_t m = 0; m < members.size(); m++) {
            outputs_[remote_[k]][members[m]] = parts[m];
        }
    }
}

void Replication::attach_node(const std::vector<size_t> &members, std::vector<TensorLayout> layouts)
{
    torch::autograd::edge_list edges;
    for (const size_t i : members) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensors_[i]));
    }
    const NodePointer node = replicate_node(std::move(layouts), source_, remote_.size());
    node->set_next_edges(std::move(edges));
    for (const size_t d : remote_) {
        for (const size_t i : members) {
            torch::autograd::create_gradient_edge(outputs_[d][i], node);
        }
    }
}

// Resolves a name: "cuda" is the current GPU, and "cpu:0" the CPU.
at::Device device_named(const char *name)
{
    try {
        return at::empty({0}, at::TensorOptions().device(at::Device(std::string(name)))).device();
    } catch (const c10::Error &error) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "device \"%s\": expected an available one, such as \"cpu\" or "
                                "\"cuda:0\": %s",
                                name, error.what_without_backtrace()));
    }
}

Tensors checked(const tddp_tensor *const *tensors, size_t count, const char *source)
{
    Tensors all;
    for (size_t i = 0; i < count; i++) {
        all.push_back(tensor_of(tensors[i]));
        if (!all[i].defined()) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "tensors[%zu] is undefined", i));
        }
    }
    if (all.empty()) {
        return all;
    }
    const at::Device expected = source ? device_named(source) : all[0].device();
    for (size_t i = 0; i < count; i++) {
        if (all[i].device() != expected) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "tensors[%zu] is on %s: expected all of them on %s", i,
                                    all[i].device().str().c_str(), expected.str().c_str()));
        }
    }
    return all;
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_replicate(const tddp_tensor *const *tensors, size_t count,
                           const char *const *devices, size_t device_count,
                           const tddp_replicate_opts *opts, tddp_tensor *const *outputs)
{
    using namespace tddp_torch;
    return guard([&] {
        if (opts->size != sizeof *opts) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "opts.size is %zu, expected %zu",
                                    opts->size, sizeof *opts));
        }
        Tensors all = checked(tensors, count, opts->home);
        std::vector<at::Device> places;
        for (size_t d = 0; d < device_count; d++) {
            places.push_back(device_named(devices[d]));
        }
        if (all.empty() || places.empty()) {
            return;
        }
        Replication replication(std::move(all), std::move(places), *opts);
        const std::vector<Tensors> &made = replication.make();
        for (size_t d = 0; d < device_count; d++) {
            for (size_t i = 0; i < count; i++) {
                *reinterpret_cast<at::Tensor *>(outputs[d * count + i]) = made[d][i];
            }
        }
    });
}
