// Linear layers of which each rank has a part, and weights' gradients that are computed later,
// against libtorch's linear in one process.
#include <tddp/torch_linear.h>
#include <torch/csrc/autograd/autograd.h>

#include "model.h"

using namespace model_test;

namespace
{

const tddp_tensor *handle(const at::Tensor &tensor)
{
    return reinterpret_cast<const tddp_tensor *>(&tensor);
}

at::Tensor linear(tddp_group *group, tddp_linear_form form, int64_t sequence_dim,
                  const at::Tensor &input, const at::Tensor &weight, const at::Tensor &bias)
{
    tddp_linear_opts opts = TDDP_LINEAR_OPTS_INIT;
    opts.form = form;
    opts.group = group;
    opts.sequence_dim = sequence_dim;
    at::Tensor output;
    CHECK_OK(tddp_linear(handle(input), handle(weight), bias.defined() ? handle(bias) : nullptr,
                         &opts, reinterpret_cast<tddp_tensor *>(&output)));
    return output;
}

at::Tensor leaf(const at::Tensor &tensor)
{
    return tensor.detach().clone().requires_grad_();
}

// A column and a row layer.
struct Layers {
    at::Tensor up = spread({12, 5}, 1), up_bias = spread({12}, 2), down = spread({7, 12}, 3),
               down_bias = spread({7}, 4);

    std::vector<at::Tensor> all() const
    {
        return {up, up_bias, down, down_bias};
    }
    at::Tensor forward(tddp_group *group, int64_t sequence_dim, const at::Tensor &input) const
    {
        const at::Tensor hidden =
            linear(group, TDDP_LINEAR_COLUMN, sequence_dim, input, up, up_bias).tanh();
        return linear(group, TDDP_LINEAR_ROW, sequence_dim, hidden, down, down_bias);
    }
    // A loss that depends on each result; its gradients.
    static void backward(const at::Tensor &output, const at::Tensor &weights)
    {
        (output * weights).sum().backward();
    }
};

struct Part {
    int64_t rank, ranks;

    at::Tensor operator()(const at::Tensor &tensor, int64_t dim) const
    {
        const int64_t count = dim < 0 ? 0 : tensor.size(dim) / ranks;
        return dim < 0 ? tensor : tensor.narrow(dim, rank * count, count);
    }
};

void check_equals_one_process(tddp_group *group, at::IntArrayRef shape, int64_t sequence_dim)
{
    const Part part{tddp_group_rank(group), tddp_group_world_size(group)};
    Layers full, mine;
    for (at::Tensor *tensor : {&full.up, &full.up_bias, &full.down, &full.down_bias}) {
        tensor->requires_grad_();
    }
    mine.up = leaf(part(full.up, 0));
    mine.up_bias = leaf(part(full.up_bias, 0));
    mine.down = leaf(part(full.down, 1));
    mine.down_bias = leaf(full.down_bias);
    const at::Tensor complete = leaf(spread(shape, 5));
    const at::Tensor input = leaf(part(complete, sequence_dim));
    const at::Tensor expected =
        at::linear(at::linear(complete, full.up, full.up_bias).tanh(), full.down, full.down_bias);
    const at::Tensor weights = spread(expected.sizes(), 6);
    Layers::backward(expected, weights);

    const at::Tensor output = mine.forward(group, sequence_dim, input);
    check_close(output.detach(), part(expected.detach(), sequence_dim), 1e-12);
    tddp_weight_gradients *later = tddp_weight_gradients_create();
    CHECK_OK(tddp_weight_gradients_begin(later));
    Layers::backward(output, part(weights, sequence_dim));
    CHECK_OK(tddp_weight_gradients_end(later));
    check_close(input.grad(), part(complete.grad(), sequence_dim), 1e-12);
    CHECK(!mine.up.grad().defined() && !mine.down_bias.grad().defined());
    CHECK_OK(tddp_weight_gradients_run(later));
    tddp_weight_gradients_free(later);
    const int64_t dims[] = {0, 0, 1, -1};
    for (size_t i = 0; i < 4; i++) {
        check_close(mine.all()[i].grad(), part(full.all()[i].grad(), dims[i]), 1e-12);
    }
}

void all_shapes(int rank, int world_size, int port)
{
    tddp_group *group = join(rank, world_size, port);
    check_equals_one_process(group, {3, 5}, -1);
    check_equals_one_process(group, {2, 3, 5}, -1);
    check_equals_one_process(group, {12, 5}, 0);
    check_equals_one_process(group, {2, 12, 5}, 1);
    leave(group);
}

} // namespace

MULTI_TEST(one_rank_equals_one_process, 1, 60)
{
    all_shapes(rank, world_size, port);
}

MULTI_TEST(two_ranks_equal_one_process, 2, 60)
{
    all_shapes(rank, world_size, port);
}

MULTI_TEST(three_ranks_equal_one_process, 3, 60)
{
    all_shapes(rank, world_size, port);
}

TEST(misuse_of_linear_layers_fails)
{
    const at::Tensor input = spread({2, 5}, 1), weight = spread({3, 4}, 2);
    at::Tensor output;
    tddp_linear_opts opts = TDDP_LINEAR_OPTS_INIT;
    auto *into = reinterpret_cast<tddp_tensor *>(&output);
    CHECK_INT(tddp_linear(handle(input), handle(weight), nullptr, &opts, into),
              TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "input: expected [..., 4] for a weight of the shape");
    opts.size--;
    CHECK_INT(tddp_linear(handle(input), handle(weight), nullptr, &opts, into),
              TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "opts.size is");
    tddp_weight_gradients *one = tddp_weight_gradients_create();
    tddp_weight_gradients *other = tddp_weight_gradients_create();
    CHECK_OK(tddp_weight_gradients_begin(one));
    CHECK_INT(tddp_weight_gradients_end(other), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "another one began after it on this thread");
    CHECK_OK(tddp_weight_gradients_end(one));
    CHECK_INT(tddp_weight_gradients_end(one), TDDP_INVALID_ARGUMENT);
    tddp_weight_gradients_free(one);
    tddp_weight_gradients_free(other);
}
