// Linear layers of which each rank has a part: see <tddp/torch_linear.h>. Runs, and waits in the
// host's blocking region, on the threads that run forward and backward; on a GPU the latter are
// autograd's. Within a node the sequence dimension is the first one: the ranks' parts of it are
// contiguous.
#include <memory>
#include <sstream>
#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <tddp/torch_collectives.h>
#include <tddp/torch_linear.h>

#include "torch/autograd/deferred.h"
#include "torch/autograd/node.h"
#include "torch/autograd/saved.h"
#include "torch/nn/linear_gradients.h"
#include "torch/tensor/blocking_ops.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::variable_list;

// The numbers of a node's next edges, and of the gradients that it returns.
enum { INPUT, WEIGHT, BIAS };

// How long a collective waits for the other ranks within its call before it waits in the host's
// region.
constexpr int64_t INLINE_US = 20;

/* --- how a layer is divided ------------------------------------------------------------------ */

struct Division {
    explicit Division(const tddp_linear_opts &opts)
        : group(opts.group && tddp_group_world_size(opts.group) > 1 ? tddp_group_retain(opts.group)
                                                                    : nullptr),
          form(group ? opts.form : TDDP_LINEAR_PLAIN),
          sequence_dim(form == TDDP_LINEAR_PLAIN ? TDDP_LINEAR_NO_SEQUENCE : opts.sequence_dim),
          backward_region(opts.backward_blocking_region)
    {
    }
    ~Division()
    {
        tddp_group_release_async(group);
    }
    Division(const Division &) = delete;
    Division &operator=(const Division &) = delete;

    bool has_sequence() const
    {
        return sequence_dim != TDDP_LINEAR_NO_SEQUENCE;
    }
    bool is(tddp_linear_form one, bool with_sequence) const
    {
        return form == one && has_sequence() == with_sequence;
    }
    // Between the tensors' dimensions and those within a node.
    at::Tensor turn(const at::Tensor &tensor) const
    {
        return sequence_dim > 0 ? tensor.transpose(0, sequence_dim) : tensor;
    }

    tddp_group *const group; // NULL: plain
    const tddp_linear_form form;
    const int64_t sequence_dim;
    const tddp_blocking_region backward_region;
};

/* --- collectives ----------------------------------------------------------------------------- */

// A collective under way, and its result.
class Exchange
{
  public:
    // all_reduce works in place. `input` is contiguous.
    Exchange(const Division &of, tddp_op_kind kind, const at::Tensor &input, int64_t inline_us,
             tddp_blocking_region region)
        : output_(input)
    {
        tddp_op_args args = TDDP_OP_ARGS_INIT;
        args.kind = kind;
        args.inline_us = inline_us;
        if (kind != TDDP_OP_ALL_REDUCE) {
            const int64_t ranks = tddp_group_world_size(of.group);
            std::vector<int64_t> sizes = input.sizes().vec();
            sizes[0] = kind == TDDP_OP_ALL_GATHER ? sizes[0] * ranks : sizes[0] / ranks;
            output_ = at::empty(sizes, input.options());
            args.input = buffer_of(input);
        }
        args.output = buffer_of(output_);
        tddp_work *work = submit(of.group, args, region);
        is_done_ = is_on_cpu(output_) && tddp_work_completed(work);
        operation_ = std::make_unique<Operation>(work, std::vector<at::Tensor>{output_, input});
    }
    at::Tensor wait(tddp_blocking_region region)
    {
        operation_->wait(is_done_ ? nullptr : region, nullptr);
        return output_;
    }

  private:
    at::Tensor output_;
    std::unique_ptr<Operation> operation_;
    bool is_done_ = false;
};

at::Tensor exchange(const Division &of, tddp_op_kind kind, const at::Tensor &input,
                    tddp_blocking_region region)
{
    return Exchange(of, kind, input.contiguous(), INLINE_US, region).wait(region);
}

// The same with a gradient, for create_graph.
at::Tensor map(const Division &of, tddp_map map, tddp_map gradient, const at::Tensor &input)
{
    tddp_collective_opts opts = TDDP_COLLECTIVE_OPTS_INIT;
    opts.map = map;
    opts.gradient = gradient;
    opts.blocking_region = opts.backward_blocking_region = of.backward_region;
    at::Tensor output;
    check(tddp_collective(of.group, reinterpret_cast<const tddp_tensor *>(&input), &opts,
                          reinterpret_cast<tddp_tensor *>(&output)));
    return output;
}

/* --- the node -------------------------------------------------------------------------------- */

// The gradient of such a matrix is computed as its transpose: libtorch does so, and the bits of the
// two products differ on some processors.
bool is_column_major(const at::Tensor &input)
{
    return input.dim() == 2 && input.stride(0) == 1 && input.stride(1) == input.size(0);
}

class LinearNode final : public torch::autograd::Node
{
  public:
    LinearNode(std::shared_ptr<const Division> of, const at::Tensor &input,
               const at::Tensor &gathered, const at::Tensor &weight, const at::Tensor &bias)
        : of_(std::move(of)), column_major_(is_column_major(input))
    {
        torch::autograd::edge_list edges;
        for (const at::Tensor &tensor : {input, weight, bias}) {
            edges.push_back(tensor.defined() && tensor.requires_grad()
                                ? torch::autograd::impl::gradient_edge(tensor)
                                : torch::autograd::Edge());
        }
        set_next_edges(std::move(edges));
        if (should_compute_output(WEIGHT)) {
            input_ = Saved(gathered.defined() ? gathered : input, false);
        }
        if (should_compute_output(INPUT)) {
            weight_ = Saved(weight, false);
        }
    }
    variable_list apply(variable_list &&gradients) override
    {
        if (!gradients[0].defined()) {
            return variable_list(3);
        }
        return at::GradMode::is_enabled() ? with_graph(gradients[0]) : without_graph(gradients[0]);
    }
    void release_variables() override
    {
        input_.reset_data();
        weight_.reset_data();
    }
    std::string name() const override
    {
        return "LinearBackward";
    }

  private:
    variable_list without_graph(const at::Tensor &gradient);
    variable_list with_graph(const at::Tensor &gradient);
    void compute_or_defer(variable_list &results, const at::Tensor &gradient);
    torch::autograd::edge_list deferrable() const;
    at::Tensor input_within() const;
    at::Tensor part_of(const at::Tensor &gathered) const;

    const std::shared_ptr<const Division> of_;
    const bool column_major_; // the input
    Saved input_; // in the column form with a sequence dimension: gathered, within the node
    Saved weight_;
};

at::Tensor LinearNode::input_within() const
{
    const at::Tensor input = input_.unpack();
    return of_->form == TDDP_LINEAR_ROW ? of_->turn(input) : input;
}

// The next edges to the weight and the bias, those that don't lead to a leaf left out.
torch::autograd::edge_list LinearNode::deferrable() const
{
    torch::autograd::edge_list edges(2);
    for (const uint32_t number : {WEIGHT, BIAS}) {
        const torch::autograd::Edge &edge = next_edge(number);
        if (dynamic_cast<torch::autograd::AccumulateGrad *>(edge.function.get())) {
            edges[number - WEIGHT] = edge;
        }
    }
    return edges;
}

// The weight's and the bias's gradient, from that of the result in all rows of this rank's part.
void LinearNode::compute_or_defer(variable_list &results, const at::Tensor &gradient)
{
    const bool weight = task_should_compute_output(WEIGHT);
    const bool bias = task_should_compute_output(BIAS);
    if (!weight && !bias) {
        return;
    }
    const at::Tensor gradient_rows = rows_of(gradient);
    const at::Tensor input_rows = weight ? rows_of(input_within()) : at::Tensor();
    Deferred *later = Deferred::current();
    torch::autograd::edge_list edges(2);
    // Not in a backward for selected tensors, whose accumulators don't run.
    if (later && torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
        edges = deferrable();
    }
    if (bias && !edges[1].is_valid()) {
        results[BIAS] = bias_gradient(gradient_rows);
    }
    if (weight && !edges[0].is_valid()) {
        results[WEIGHT] = weight_gradient(gradient_rows, input_rows);
    }
    if (edges[0].is_valid() || edges[1].is_valid()) {
        defer_weight_gradients(*later, std::move(edges), gradient_rows, input_rows);
    }
}

variable_list LinearNode::without_graph(const at::Tensor &outer)
{
    const Division &of = *of_;
    variable_list results(3);
    at::Tensor gradient = of.turn(outer);
    if (of.is(TDDP_LINEAR_ROW, true)) {
        gradient = exchange(of, TDDP_OP_ALL_GATHER, gradient, of.backward_region);
    }
    std::unique_ptr<Exchange> sum;
    if (task_should_compute_output(INPUT)) {
        const at::Tensor weight = weight_.unpack();
        std::vector<int64_t> sizes = gradient.sizes().vec();
        sizes.back() = weight.size(1);
        const at::Tensor rows = rows_of(gradient);
        const bool transposed = column_major_ && of.form != TDDP_LINEAR_COLUMN;
        at::Tensor result =
            (transposed ? weight.t().mm(rows.t()).t() : rows.mm(weight)).view(sizes);
        if (of.form == TDDP_LINEAR_COLUMN) {
            // Left to the group's thread or the device while the rest is computed. Two ranks on two
            // cores, where that thread has no core to itself, take as long if they wait first.
            sum = std::make_unique<Exchange>(
                of, of.has_sequence() ? TDDP_OP_REDUCE_SCATTER : TDDP_OP_ALL_REDUCE, result, 0,
                of.backward_region);
        } else {
            results[INPUT] = of.turn(result);
        }
    }
    compute_or_defer(results, gradient);
    if (sum) {
        results[INPUT] = of.turn(sum->wait(of.backward_region));
    }
    return results;
}

// This rank's part of a gathered input, with the history of the input.
at::Tensor LinearNode::part_of(const at::Tensor &gathered) const
{
    const int64_t rows = gathered.size(0) / tddp_group_world_size(of_->group);
    at::Tensor part = gathered.narrow(0, tddp_group_rank(of_->group) * rows, rows).detach();
    part = of_->turn(part).detach();
    if (should_compute_output(INPUT)) {
        torch::autograd::impl::set_gradient_edge(part, next_edge(INPUT));
    }
    return of_->turn(part);
}

// With create_graph: the same by operations that have gradients.
variable_list LinearNode::with_graph(const at::Tensor &outer)
{
    const Division &of = *of_;
    variable_list results(3);
    const at::Tensor local = of.turn(outer);
    at::Tensor gradient = local;
    if (of.form == TDDP_LINEAR_ROW) {
        gradient = of.has_sequence() ? map(of, TDDP_MAP_ALL_GATHER, TDDP_MAP_REDUCE_SCATTER, local)
                                     : map(of, TDDP_MAP_IDENTITY, TDDP_MAP_ALL_REDUCE, local);
    }
    if (task_should_compute_output(INPUT)) {
        at::Tensor result = gradient.matmul(weight_.unpack());
        if (of.form == TDDP_LINEAR_COLUMN) {
            result = of.has_sequence()
                         ? map(of, TDDP_MAP_REDUCE_SCATTER, TDDP_MAP_ALL_GATHER, result)
                         : map(of, TDDP_MAP_ALL_REDUCE, TDDP_MAP_IDENTITY, result);
        }
        results[INPUT] = of.turn(result);
    }
    if (task_should_compute_output(WEIGHT)) {
        at::Tensor input = input_within();
        if (of.form == TDDP_LINEAR_COLUMN) {
            input = of.has_sequence()
                        ? map(of, TDDP_MAP_ALL_GATHER, TDDP_MAP_REDUCE_SCATTER, part_of(input))
                        : map(of, TDDP_MAP_IDENTITY, TDDP_MAP_ALL_REDUCE, input);
        }
        results[WEIGHT] = weight_gradient(rows_of(gradient), rows_of(input));
    }
    if (task_should_compute_output(BIAS)) {
        const at::Tensor result = bias_gradient(rows_of(local));
        results[BIAS] = of.is(TDDP_LINEAR_ROW, true)
                            ? map(of, TDDP_MAP_ALL_REDUCE, TDDP_MAP_IDENTITY, result)
                            : result;
    }
    return results;
}

/* --- forward --------------------------------------------------------------------------------- */

[[noreturn]] void refuse(const std::string &text)
{
    throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "%s", text.c_str()));
}

std::string shape_of(const at::Tensor &tensor)
{
    std::ostringstream text;
    text << tensor.sizes();
    return text.str();
}

void check_tensors(const at::Tensor &input, const at::Tensor &weight, const at::Tensor &bias)
{
    if (!input.defined() || !weight.defined()) {
        refuse("an undefined tensor: expected an input and a weight");
    }
    if (weight.dim() != 2) {
        refuse("weight: expected [out, features], got the shape " + shape_of(weight));
    }
    if (input.dim() == 0 || input.size(-1) != weight.size(1)) {
        refuse("input: expected [..., " + std::to_string(weight.size(1)) +
               "] for a weight of the shape " + shape_of(weight) + ", got the shape " +
               shape_of(input));
    }
    if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
        refuse("bias: expected [" + std::to_string(weight.size(0)) +
               "] for a weight of the shape " + shape_of(weight) + ", got the shape " +
               shape_of(bias));
    }
    if (!input.is_floating_point()) {
        refuse(std::string("input: expected a floating-point tensor, got the dtype ") +
               c10::toString(input.scalar_type()));
    }
    for (const at::Tensor *other : {&weight, &bias}) {
        if (other->defined() &&
            (other->scalar_type() != input.scalar_type() || other->device() != input.device())) {
            std::ostringstream text;
            text << (other == &weight ? "weight" : "bias") << ": expected the input's dtype and "
                 << "device, " << input.scalar_type() << " on " << input.device() << ", got "
                 << other->scalar_type() << " on " << other->device();
            refuse(text.str());
        }
    }
}

void check_sequence(const Division &of, const at::Tensor &input)
{
    if (!of.has_sequence()) {
        return;
    }
    const int64_t dim = of.sequence_dim;
    if (dim < 0 || dim >= input.dim() - 1) {
        refuse("sequence dimension " + std::to_string(dim) +
               ": expected one before the last of a tensor of the shape " + shape_of(input));
    }
    const int ranks = tddp_group_world_size(of.group);
    if (of.form == TDDP_LINEAR_ROW && input.size(dim) % ranks != 0) {
        refuse("dimension " + std::to_string(dim) + " of " + shape_of(input) +
               ", the sequence, is not divisible by " + std::to_string(ranks) +
               ", the number of ranks");
    }
}

// Batches that do not lie one after the other are one matrix to libtorch if the weight has a
// gradient, which it does not see below autograd: the bits of several products differ on some
// processors.
at::Tensor product(const at::Tensor &input, const at::Tensor &weight, const at::Tensor &bias)
{
    if (input.dim() < 3 || input.is_contiguous() || !weight.requires_grad() ||
        !at::GradMode::is_enabled()) {
        return at::linear(input, weight, bias);
    }
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes.back() = weight.size(0);
    const at::Tensor rows = input.reshape({-1, input.size(-1)});
    const at::Tensor output = at::linear(rows, weight).view(sizes);
    return bias.defined() ? output.add_(bias) : output;
}

at::Tensor forward(const Division &of, const at::Tensor &input, const at::Tensor &weight,
                   const at::Tensor &bias, tddp_blocking_region region, at::Tensor &gathered)
{
    const at::AutoDispatchBelowADInplaceOrView guard; // the results are no views of each other
    at::Tensor within = of.turn(input);
    if (of.is(TDDP_LINEAR_COLUMN, true)) {
        within = gathered = exchange(of, TDDP_OP_ALL_GATHER, within, region);
    }
    if (of.form != TDDP_LINEAR_ROW) {
        return of.turn(product(within, weight, bias));
    }
    const at::Tensor sum =
        exchange(of, of.has_sequence() ? TDDP_OP_REDUCE_SCATTER : TDDP_OP_ALL_REDUCE,
                 product(within, weight, at::Tensor()), region);
    return of.turn(bias.defined() ? sum.add_(bias) : sum);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_linear(const tddp_tensor *input, const tddp_tensor *weight,
                        const tddp_tensor *bias, const tddp_linear_opts *opts, tddp_tensor *output)
{
    using namespace tddp_torch;
    return guard([&] {
        if (opts->size != sizeof *opts || opts->form > TDDP_LINEAR_ROW) {
            refuse("opts.size is " + std::to_string(opts->size) + ", opts.form " +
                   std::to_string(opts->form) + ": expected " + std::to_string(sizeof *opts) +
                   " and at most " + std::to_string(TDDP_LINEAR_ROW));
        }
        const at::Tensor &x = tensor_of(input);
        const at::Tensor &w = tensor_of(weight);
        const at::Tensor b = bias ? tensor_of(bias) : at::Tensor();
        const auto of = std::make_shared<const Division>(*opts);
        check_tensors(x, w, b);
        check_sequence(*of, x);
        at::Tensor gathered;
        at::Tensor result = forward(*of, x, w, b, opts->blocking_region, gathered);
        const bool required =
            x.requires_grad() || w.requires_grad() || (b.defined() && b.requires_grad());
        if (required && at::GradMode::is_enabled()) {
            torch::autograd::create_gradient_edge(result,
                                                  make_node<LinearNode>(of, x, gathered, w, b));
        }
        *reinterpret_cast<at::Tensor *>(output) = result;
    });
}
