// Collectives with a gradient, which is a collective as well: see <tddp/torch_collectives.h>. Runs,
// and waits in the host's blocking region, on the threads that run forward and backward; on a GPU
// the latter are autograd's.
#include <memory>
#include <numeric>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <tddp/torch_collectives.h>
#include <torch/csrc/autograd/custom_function.h>

#include "torch/tensor/blocking_ops.h"

namespace tddp_torch
{

namespace
{

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char *const names[TDDP_MAP_COUNT] = {
    "identity",   "slice",  "all_reduce",     "reduce",  "broadcast",
    "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"};

// Rows that go to each rank, and come from it.
struct Rows {
    std::vector<int64_t> sends;
    std::vector<int64_t> receives;
};

// A function: both maps, and what they have in common.
struct Collective : torch::CustomClassHolder {
    Collective(tddp_group *of, const tddp_collective_opts &opts)
        : group(tddp_group_retain(of)), rank(tddp_group_rank(of)),
          ranks(tddp_group_world_size(of)), maps{opts.map, opts.gradient}, root(opts.root),
          scale(opts.scale), region(opts.blocking_region),
          backward_region(opts.backward_blocking_region)
    {
        const auto count = static_cast<size_t>(ranks);
        if (opts.sends && opts.receives) {
            rows.sends.assign(opts.sends, opts.sends + count);
            rows.receives.assign(opts.receives, opts.receives + count);
        }
    }
    ~Collective() override
    {
        tddp_group_release_async(group);
    }
    Collective(const Collective &) = delete;
    Collective &operator=(const Collective &) = delete;

    tddp_group *group;
    int rank;
    int ranks;
    tddp_map maps[2];
    int root;
    double scale;
    tddp_blocking_region region;
    tddp_blocking_region backward_region;
    Rows rows; // empty: equal parts
};
using CollectivePointer = c10::intrusive_ptr<Collective>;

/* --- arguments ------------------------------------------------------------------------------- */

[[noreturn]] void refuse(const std::string &text)
{
    throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "%s", text.c_str()));
}

std::string shape_of(const at::Tensor &tensor)
{
    std::string text = "[";
    for (int64_t i = 0; i < tensor.dim(); i++) {
        text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
    }
    return text + "]";
}

bool has_parts(tddp_map map)
{
    return map == TDDP_MAP_SLICE || map == TDDP_MAP_REDUCE_SCATTER || map == TDDP_MAP_SCATTER;
}

bool has_rows(tddp_map map)
{
    return has_parts(map) || map == TDDP_MAP_ALL_GATHER || map == TDDP_MAP_GATHER ||
           map == TDDP_MAP_ALL_TO_ALL;
}

void check_rows(const Collective &of, tddp_map map, const std::vector<int64_t> &sends,
                const at::Tensor &input)
{
    if (has_rows(map) && input.dim() == 0) {
        refuse(std::string(names[map]) + ": a tensor without dimensions has no parts");
    }
    const bool divides = has_parts(map) || (map == TDDP_MAP_ALL_TO_ALL && sends.empty());
    if (divides && input.size(0) % of.ranks != 0) {
        refuse(std::string(names[map]) + ": the first dimension of " + shape_of(input) +
               " is not divisible by " + std::to_string(of.ranks) + ", the number of ranks");
    }
    if (map == TDDP_MAP_ALL_TO_ALL && !sends.empty()) {
        const int64_t sum = std::accumulate(sends.begin(), sends.end(), int64_t{0});
        if (sum != input.size(0)) {
            refuse("all_to_all: the parts have " + std::to_string(sum) + " rows, " +
                   shape_of(input) + " has " + std::to_string(input.size(0)));
        }
    }
}

void check_opts(tddp_group *group, const at::Tensor &input, const tddp_collective_opts &opts)
{
    if (opts.size != sizeof opts) {
        refuse("opts.size is " + std::to_string(opts.size) + ", expected " +
               std::to_string(sizeof opts));
    }
    for (const tddp_map map : {opts.map, opts.gradient}) {
        if (!tddp_map_name(map)) {
            refuse("no map has the number " + std::to_string(map));
        }
    }
    if (opts.root < 0 || opts.root >= tddp_group_world_size(group)) {
        refuse("root " + std::to_string(opts.root) + ": expected 0 to " +
               std::to_string(tddp_group_world_size(group) - 1));
    }
    if (!input.defined()) {
        refuse("the tensor is undefined");
    }
    if (opts.scale != 1 && !input.is_floating_point() && !input.is_complex()) {
        refuse("a mean of integers: expected a floating-point tensor");
    }
    for (const int64_t *list : {opts.sends, opts.receives}) {
        for (int rank = 0; list && rank < tddp_group_world_size(group); rank++) {
            if (list[rank] < 0) {
                refuse("all_to_all: " + std::to_string(list[rank]) + " rows for rank " +
                       std::to_string(rank));
            }
        }
    }
}

/* --- maps ------------------------------------------------------------------------------------ */

at::Tensor with_rows(const at::Tensor &like, int64_t rows)
{
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[0] = rows;
    return at::empty(sizes, like.options());
}

// The parts of a tensor, one for each rank; of equal size if `rows` is empty.
std::vector<tddp_buffer> parts_of(const at::Tensor &tensor, const std::vector<int64_t> &rows,
                                  int ranks)
{
    const tddp_buffer full = buffer_of(tensor);
    const size_t row = tensor.size(0) > 0 ? full.count / static_cast<size_t>(tensor.size(0)) : 0;
    std::vector<tddp_buffer> parts(static_cast<size_t>(ranks), full);
    size_t at = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        parts[i].count = row * static_cast<size_t>(rows.empty() ? tensor.size(0) / ranks : rows[i]);
        parts[i].data = parts[i].count > 0
                            ? static_cast<char *>(full.data) + at * tddp_dtype_size(full.dtype)
                            : nullptr;
        at += parts[i].count;
    }
    return parts;
}

// How long a map waits for the other ranks within its call before it waits in the host's region.
constexpr int64_t INLINE_US = 20;

// Runs one map.
class Exchange
{
  public:
    Exchange(const Collective &of, tddp_map map, const Rows &rows, const at::Tensor &input)
        : of_(of), map_(map), rows_(rows), input_(input), is_root_(of.rank == of.root)
    {
        args_.root = of.root;
        args_.inline_us = INLINE_US;
    }

    at::Tensor run(tddp_blocking_region region)
    {
        if (map_ == TDDP_MAP_SLICE) {
            const int64_t rows = input_.size(0) / of_.ranks;
            return input_.narrow(0, of_.rank * rows, rows).clone();
        }
        const at::Tensor output = prepare();
        args_.inputs = sends_.empty() ? nullptr : sends_.data();
        args_.input_count = sends_.size();
        args_.outputs = receives_.empty() ? nullptr : receives_.data();
        args_.output_count = receives_.size();
        tddp_work *work = submit(of_.group, args_, region);
        // On a GPU the calling thread's stream has to wait in any case.
        const bool is_done = is_on_cpu(output) && tddp_work_completed(work);
        wait_for(work, {output, input_}, is_done ? nullptr : region, nullptr);
        return map_ == TDDP_MAP_REDUCE && !is_root_ ? at::zeros_like(output) : output;
    }

  private:
    at::Tensor prepare();
    at::Tensor in_place(tddp_op_kind kind);
    // Of every rank's tensor, or of parts: `rows` in all.
    at::Tensor apart(tddp_op_kind kind, int64_t rows);

    const Collective &of_;
    const tddp_map map_;
    const Rows &rows_;
    const at::Tensor input_; // contiguous
    const bool is_root_;
    tddp_op_args args_ = TDDP_OP_ARGS_INIT;
    std::vector<tddp_buffer> sends_;
    std::vector<tddp_buffer> receives_;
};

at::Tensor Exchange::in_place(tddp_op_kind kind)
{
    const bool reads = kind != TDDP_OP_BROADCAST || is_root_;
    const at::Tensor output = reads ? input_.clone() : at::empty_like(input_);
    args_.kind = kind;
    args_.output = buffer_of(output);
    return output;
}

at::Tensor Exchange::apart(tddp_op_kind kind, int64_t rows)
{
    const at::Tensor output = with_rows(input_, rows);
    args_.kind = kind;
    args_.input = buffer_of(input_);
    args_.output = buffer_of(output);
    return output;
}

at::Tensor Exchange::prepare()
{
    const int64_t rows = input_.dim() > 0 ? input_.size(0) : 0;
    at::Tensor output;
    switch (map_) {
    case TDDP_MAP_REDUCE:
        return in_place(TDDP_OP_REDUCE);
    case TDDP_MAP_BROADCAST:
        return in_place(TDDP_OP_BROADCAST);
    case TDDP_MAP_ALL_GATHER:
        return apart(TDDP_OP_ALL_GATHER, rows * of_.ranks);
    case TDDP_MAP_REDUCE_SCATTER:
        return apart(TDDP_OP_REDUCE_SCATTER, rows / of_.ranks);
    case TDDP_MAP_GATHER:
        output = apart(TDDP_OP_GATHER, rows * of_.ranks);
        if (is_root_) {
            receives_ = parts_of(output, {}, of_.ranks);
        } else {
            output.zero_();
        }
        return output;
    case TDDP_MAP_SCATTER:
        output = apart(TDDP_OP_SCATTER, rows / of_.ranks);
        if (is_root_) {
            sends_ = parts_of(input_, {}, of_.ranks);
        }
        return output;
    case TDDP_MAP_ALL_TO_ALL:
        output = apart(TDDP_OP_ALL_TO_ALL, rows_.receives.empty()
                                               ? rows
                                               : std::accumulate(rows_.receives.begin(),
                                                                 rows_.receives.end(), int64_t{0}));
        sends_ = parts_of(input_, rows_.sends, of_.ranks);
        receives_ = parts_of(output, rows_.receives, of_.ranks);
        return output;
    default:
        return in_place(TDDP_OP_ALL_REDUCE);
    }
}

/* --- the function ---------------------------------------------------------------------------- */

class CollectiveFunction : public torch::autograd::Function<CollectiveFunction>
{
  public:
    // `transposed`: the second map, whose gradient is the first one's.
    static at::Tensor forward(AutogradContext *context, const at::Tensor &input,
                              CollectivePointer of, bool transposed, bool in_backward)
    {
        const Collective &it = *of;
        const tddp_map map = it.maps[transposed];
        const Rows rows = transposed ? Rows{it.rows.receives, it.rows.sends} : it.rows;
        const tddp_blocking_region region = in_backward ? it.backward_region : it.region;
        context->saved_data["transposed"] = transposed;
        context->saved_data["of"] =
            c10::IValue::make_capsule(c10::intrusive_ptr<torch::CustomClassHolder>(of));
        check_rows(it, map, rows.sends, input);
        if (map == TDDP_MAP_IDENTITY) {
            return it.scale == 1 ? input : input.mul(it.scale);
        }
        const at::Tensor output = Exchange(it, map, rows, input.contiguous()).run(region);
        return it.scale == 1 ? output : output.mul_(it.scale);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients)
    {
        const bool transposed = context->saved_data["transposed"].toBool();
        const auto of = context->saved_data["of"].toCapsule();
        return {apply(gradients[0], c10::static_intrusive_pointer_cast<Collective>(of), !transposed,
                      true),
                {},
                {},
                {}};
    }
};

// A gradient's hook, in the graph of its tensor.
class GradientAverage
{
  public:
    GradientAverage(tddp_group *of, double divisor, tddp_blocking_region region)
        : group_(tddp_group_retain(of), tddp_group_release_async), divisor_(divisor),
          region_(region)
    {
    }

    // Other nodes may still read the gradient: it stays as it is.
    at::Tensor operator()(const at::Tensor &gradient) const
    {
        if (gradient.requires_grad()) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "a gradient that is averaged over the ranks requires a "
                                    "gradient itself: averages are not differentiable, so call "
                                    "backward without create_graph, or remove the hook"));
        }
        const at::Tensor sum = gradient.clone(at::MemoryFormat::Contiguous);
        all_reduce_blocking(group_.get(), sum, TDDP_REDUCE_SUM, region_, nullptr);
        return sum.div_(divisor_);
    }

  private:
    std::shared_ptr<tddp_group> group_;
    double divisor_;
    tddp_blocking_region region_;
};

} // namespace

} // namespace tddp_torch

const char *tddp_map_name(tddp_map map)
{
    return static_cast<unsigned>(map) < TDDP_MAP_COUNT ? tddp_torch::names[map] : nullptr;
}

tddp_status tddp_collective(tddp_group *group, const tddp_tensor *input,
                            const tddp_collective_opts *opts, tddp_tensor *output)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &tensor = tensor_of(input);
        check_opts(group, tensor, *opts);
        const at::Tensor result = CollectiveFunction::apply(
            tensor, c10::make_intrusive<Collective>(group, *opts), false, false);
        *reinterpret_cast<at::Tensor *>(output) = result;
    });
}

tddp_status tddp_average_gradient(tddp_group *group, const tddp_tensor *leaf, double divisor,
                                  tddp_blocking_region backward_region, uint32_t *number)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &tensor = tensor_of(leaf);
        if (!tensor.defined() || !tensor.requires_grad()) {
            refuse("expected a tensor that requires a gradient");
        }
        *number = tensor.register_hook(GradientAverage(group, divisor, backward_region));
    });
}
