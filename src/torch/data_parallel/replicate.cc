// A differentiable broadcast from one device to several of the same process: tensors go out in
// pieces, and one node of the graph a piece adds up the gradients that come back
// (replicate_node.cc). So the gradients of one piece can be on their way while backward goes on
// with what belongs to another. On the thread that runs forward.
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

// What one call makes.
class Replication
{
  public:
    Replication(Tensors tensors, std::vector<at::Device> devices, const tddp_replicate_opts &opts);
    // By device, then by tensor.
    const std::vector<Tensors> &make();

  private:
    at::Tensor shared(const at::Tensor &tensor) const;
    void send_all();
    void send_alone(size_t i);
    void send_some(const std::vector<size_t> &which, bool differentiable);
    void send_piece(const std::vector<size_t> &members, const std::vector<Form> &forms);
    void attach(const std::vector<size_t> &members, std::vector<Form> forms);

    const Tensors tensors_;
    const std::vector<at::Device> devices_;
    const at::Device home_;
    const size_t limit_;
    const bool grad_;
    std::vector<size_t> here_, away_; // devices that share memory, and those that have copies
    std::vector<at::Device> targets_; // of away_
    std::vector<Tensors> outputs_;
};

Replication::Replication(Tensors tensors, std::vector<at::Device> devices,
                         const tddp_replicate_opts &opts)
    : tensors_(std::move(tensors)), devices_(std::move(devices)), home_(tensors_[0].device()),
      limit_(opts.limit), grad_(!opts.detached && at::GradMode::is_enabled()),
      outputs_(devices_.size(), Tensors(tensors_.size()))
{
    for (size_t d = 0; d < devices_.size(); d++) {
        (devices_[d] == home_ && !opts.apart ? here_ : away_).push_back(d);
    }
    for (const size_t d : away_) {
        targets_.push_back(devices_[d]);
    }
}

const std::vector<Tensors> &Replication::make()
{
    for (const size_t d : here_) {
        for (size_t i = 0; i < tensors_.size(); i++) {
            outputs_[d][i] = shared(tensors_[i]);
        }
    }
    if (!away_.empty()) {
        send_all();
    }
    return outputs_;
}

at::Tensor Replication::shared(const at::Tensor &tensor) const
{
    if (!grad_) {
        return tensor.detach();
    }
    return tensor.layout() == at::kStrided ? tensor.view_as(tensor) : tensor.alias();
}

// Tensors that want gradients travel apart from others, so that a node has no output without.
void Replication::send_all()
{
    std::vector<size_t> plain, wanting;
    for (size_t i = 0; i < tensors_.size(); i++) {
        if (!travels_flat(tensors_[i])) {
            send_alone(i);
        } else {
            (grad_ && tensors_[i].requires_grad() ? wanting : plain).push_back(i);
        }
    }
    send_some(plain, false);
    send_some(wanting, true);
}

void Replication::send_alone(size_t i)
{
    const at::Tensor from = grad_ ? tensors_[i] : tensors_[i].detach();
    for (const size_t d : away_) {
        outputs_[d][i] = devices_[d] == home_ ? from.clone() : from.to(devices_[d]);
    }
}

void Replication::send_some(const std::vector<size_t> &which, bool differentiable)
{
    std::vector<Form> forms;
    for (const size_t i : which) {
        forms.emplace_back(tensors_[i]);
    }
    for (const std::vector<size_t> &piece : pieces_of(forms, limit_)) {
        std::vector<size_t> members;
        std::vector<Form> shapes;
        for (const size_t k : piece) {
            members.push_back(which[k]);
            shapes.push_back(forms[k]);
        }
        send_piece(members, shapes);
        if (differentiable) {
            attach(members, std::move(shapes));
        }
    }
}

void Replication::send_piece(const std::vector<size_t> &members, const std::vector<Form> &forms)
{
    const at::NoGradGuard no_grad;
    Tensors from;
    for (const size_t i : members) {
        from.push_back(tensors_[i]);
    }
    const at::Tensor flat = flatten(from, forms);
    const Tensors sent = send(flat, targets_, !flat.is_alias_of(from[0]));
    for (size_t k = 0; k < away_.size(); k++) {
        const Tensors parts = unflatten(sent[k], forms);
        for (size_t m = 0; m < members.size(); m++) {
            outputs_[away_[k]][members[m]] = parts[m];
        }
    }
}

void Replication::attach(const std::vector<size_t> &members, std::vector<Form> forms)
{
    torch::autograd::edge_list edges;
    for (const size_t i : members) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensors_[i]));
    }
    const NodePointer node = replicate_node(std::move(forms), home_, away_.size());
    node->set_next_edges(std::move(edges));
    for (const size_t d : away_) {
        for (const size_t i : members) {
            torch::autograd::create_gradient_edge(outputs_[d][i], node);
        }
    }
}

// As tensors there name it: "cuda" is one of them, and "cpu:0" the CPU.
at::Device device_named(const char *name)
{
    try {
        return at::empty({0}, at::TensorOptions().device(at::Device(std::string(name)))).device();
    } catch (const c10::Error &error) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "device \"%s\": expected one that is here, as \"cpu\" or "
                                "\"cuda:0\": %s",
                                name, error.what_without_backtrace()));
    }
}

Tensors checked(const tddp_tensor *const *tensors, size_t count, const char *home)
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
    const at::Device expected = home ? device_named(home) : all[0].device();
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
