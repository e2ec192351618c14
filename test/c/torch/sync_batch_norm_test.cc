// Batch normalization over ranks, compared with libtorch's on the full batch in one process.
#include <atomic>

#include <unistd.h>

#include <ATen/ATen.h>
#include <tddp/torch_nn.h>
#include <torch/csrc/autograd/autograd.h>

#include "model.h"

using namespace model_test;

namespace
{

const tddp_tensor *handle(const at::Tensor &tensor)
{
    return reinterpret_cast<const tddp_tensor *>(&tensor);
}

// Weight, bias and running statistics of one layer.
struct Norm {
    at::Tensor weight, bias, mean, variance;

    Norm(int64_t channels, at::ScalarType dtype, bool affine = true)
        : mean(at::zeros({channels}, dtype)), variance(at::ones({channels}, dtype))
    {
        if (affine) {
            weight = spread({channels}, 3, dtype).add(1.5).requires_grad_();
            bias = spread({channels}, 4, dtype).requires_grad_();
        }
    }
    tddp_sync_batch_norm_opts opts() const
    {
        tddp_sync_batch_norm_opts opts = TDDP_SYNC_BATCH_NORM_OPTS_INIT;
        opts.weight = handle(weight);
        opts.bias = handle(bias);
        opts.running_mean = handle(mean);
        opts.running_var = handle(variance);
        return opts;
    }
    at::Tensor over_ranks(tddp_group *group, const at::Tensor &input) const
    {
        const tddp_sync_batch_norm_opts given = opts();
        at::Tensor output;
        CHECK_OK(tddp_sync_batch_norm(group, handle(input), &given,
                                      reinterpret_cast<tddp_tensor *>(&output)));
        return output;
    }
    at::Tensor alone(const at::Tensor &input) const
    {
        return at::batch_norm(input, weight, bias, mean, variance, true, 0.1, 1e-5, false);
    }
};

// The number of samples of each rank; the last of three has none.
int64_t share(int rank, int world_size)
{
    return world_size == 3 && rank == 2 ? 0 : 2 * rank + 3;
}

void check_equals_full_batch(tddp_group *group, const std::vector<int64_t> &rest,
                             at::ScalarType dtype, bool affine, bool by_channel = false)
{
    const int rank = tddp_group_rank(group), world_size = tddp_group_world_size(group);
    int64_t begin = 0, all = 0;
    for (int other = 0; other < world_size; other++) {
        begin += other < rank ? share(other, world_size) : 0;
        all += share(other, world_size);
    }
    std::vector<int64_t> shape{all};
    shape.insert(shape.end(), rest.begin(), rest.end());
    at::Tensor reference = spread(shape, 1, dtype).add(7).requires_grad_();
    const at::Tensor weights = spread(shape, 2, dtype);
    const int64_t mine = share(rank, world_size);
    at::Tensor part = reference.detach().narrow(0, begin, mine).clone();
    part = (by_channel ? part.contiguous(at::MemoryFormat::ChannelsLast) : part).requires_grad_();
    const Norm together(rest[0], dtype, affine), alone(rest[0], dtype, affine);
    at::Tensor output, expected;
    for (int step = 0; step < 3; step++) {
        output = together.over_ranks(group, part);
        expected = alone.alone(reference);
    }
    (output * weights.narrow(0, begin, mine)).sum().backward();
    (expected * weights).sum().backward();
    const double within = dtype == at::kDouble ? 1e-12 : 2e-5;
    const auto near = [&](const at::Tensor &got, const at::Tensor &wanted) {
        if (wanted.numel() > 0) {
            const double size = 1 + wanted.abs().max().item().toDouble();
            CHECK_DOUBLE((got - wanted).abs().max().item().toDouble() / size, 0, within);
        }
    };
    CHECK(output.sizes() == part.sizes());
    near(output.detach(), expected.detach().narrow(0, begin, mine));
    near(part.grad(), reference.grad().narrow(0, begin, mine));
    near(together.mean, alone.mean);
    near(together.variance, alone.variance);
    if (affine) {
        const at::Tensor both = at::stack({together.weight.grad(), together.bias.grad()});
        tddp_buffer buffer{};
        CHECK_OK(tddp_tensor_buffer(handle(both), &buffer));
        CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 1, nullptr));
        near(both[0], alone.weight.grad());
        near(both[1], alone.bias.grad());
    }
}

void all_shapes(int rank, int world_size, int port)
{
    tddp_group *group = join(rank, world_size, port);
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
        for (const bool affine : {true, false}) {
            check_equals_full_batch(group, {5}, dtype, affine);
            check_equals_full_batch(group, {3, 7}, dtype, affine);
            check_equals_full_batch(group, {5, 3, 5}, dtype, affine);
            check_equals_full_batch(group, {1, 2, 3, 2}, dtype, affine);
        }
        check_equals_full_batch(group, {5, 3, 5}, dtype, true, true);
    }
    at::set_num_threads(3);
    check_equals_full_batch(group, {5, 83, 51}, at::kDouble, true);
    leave(group);
}

std::atomic<int> waits_through;

tddp_status count_waits(tddp_status (*body)(void *data, const tddp_wait *wait), void *data)
{
    waits_through++;
    return body(data, nullptr);
}

tddp_status interrupt(tddp_status (*)(void *data, const tddp_wait *wait), void *)
{
    return tddp_fail(TDDP_CANCELED, "a signal came");
}

} // namespace

MULTI_TEST(one_rank_equals_the_full_batch, 1, 60)
{
    all_shapes(rank, world_size, port);
}

MULTI_TEST(two_ranks_equal_the_full_batch, 2, 60)
{
    all_shapes(rank, world_size, port);
}

MULTI_TEST(three_ranks_of_which_one_has_an_empty_batch, 3, 90)
{
    all_shapes(rank, world_size, port);
}

MULTI_TEST(ranks_are_bitwise_equal, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    const Norm norm(4, at::kFloat);
    norm.over_ranks(group, spread({3 + rank, 4}, rank, at::kFloat));
    const at::Tensor mine = at::stack({norm.mean, norm.variance});
    const at::Tensor all = at::empty({world_size, 2, 4});
    tddp_buffer from{}, to{};
    CHECK_OK(tddp_tensor_buffer(handle(mine), &from));
    CHECK_OK(tddp_tensor_buffer(handle(all), &to));
    CHECK_OK(tddp_all_gather(group, from, to, nullptr));
    CHECK(all[0].equal(all[1]) && all[0].equal(all[2]));
    leave(group);
}

MULTI_TEST(without_gradients_there_is_no_graph, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    const Norm norm(4, at::kFloat);
    const int64_t version = norm.mean._version();
    at::Tensor output;
    {
        const at::NoGradGuard no_grad;
        output = norm.over_ranks(group, spread({3, 4}, rank, at::kFloat));
    }
    CHECK(!output.requires_grad() && !output.grad_fn());
    // The buffers' versions are unchanged, as in libtorch.
    CHECK_INT(norm.mean._version(), version);
    output = norm.over_ranks(group, spread({3, 4}, rank, at::kFloat));
    CHECK(output.requires_grad());
    leave(group);
    output.reset(); // releases the graph's reference to the group
}

MULTI_TEST(waits_use_the_hosts_blocking_region, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    const Norm norm(4, at::kFloat);
    tddp_sync_batch_norm_opts opts = norm.opts();
    opts.blocking_region = opts.backward_blocking_region = count_waits;
    at::Tensor input = spread({3, 4}, rank, at::kFloat).requires_grad_(), output;
    CHECK_OK(tddp_sync_batch_norm(group, handle(input), &opts,
                                  reinterpret_cast<tddp_tensor *>(&output)));
    CHECK_INT(waits_through.load(), 1);
    output.pow(2).sum().backward();
    CHECK_INT(waits_through.load(), 2);
    enum { INTERRUPTED }; // an event
    // After an interrupted wait the operation is pending, and the handle is unchanged.
    at::Tensor other;
    if (rank == 0) {
        opts.blocking_region = interrupt;
        CHECK_STATUS(tddp_sync_batch_norm(group, handle(input), &opts,
                                          reinterpret_cast<tddp_tensor *>(&other)),
                     TDDP_CANCELED);
        CHECK_CONTAINS(tddp_error_message(), "interrupted while the ranks exchanged their "
                                             "batches' statistics");
        CHECK(!other.defined());
        check_signal(INTERRUPTED);
    } else {
        CHECK_AWAIT(INTERRUPTED, 1);
        CHECK_OK(tddp_sync_batch_norm(group, handle(input), &opts,
                                      reinterpret_cast<tddp_tensor *>(&other)));
    }
    leave(group);
}

MULTI_TEST(invalid_inputs, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    const Norm norm(4, at::kFloat);
    const tddp_sync_batch_norm_opts opts = norm.opts();
    const auto refused = [&](const at::Tensor &input, const char *text) {
        at::Tensor output;
        CHECK_STATUS(tddp_sync_batch_norm(group, handle(input), &opts,
                                          reinterpret_cast<tddp_tensor *>(&output)),
                     TDDP_INVALID_ARGUMENT);
        CHECK_CONTAINS(tddp_error_message(), text);
        CHECK(!output.defined());
    };
    refused(at::ones({4}), "at least 2 dimensions");
    refused(at::ones({2, 4}, at::kHalf), "dtype Half: expected float32 or float64");
    refused(at::ones({2, 4}, at::kDouble), "input of dtype Double, but weight of dtype Float");
    refused(at::ones({2, 5}), "the input has 5 channels, but weight has 4 elements");
    // All ranks together have one value per channel: an error on each.
    refused(at::ones({rank, 4}), "expected more than 1 value per channel over all ranks when "
                                 "training, got 1");
    CHECK(norm.mean.equal(at::zeros({4})));
    // One value on each rank is enough.
    at::Tensor input = spread({1, 4}, rank, at::kFloat).requires_grad_();
    const at::Tensor output = norm.over_ranks(group, input);
    const std::vector<at::Tensor> first =
        torch::autograd::grad({output.sum()}, {input}, {}, true, false);
    CHECK(first[0].defined());
    try {
        torch::autograd::grad({output.sum()}, {input}, {}, true, true);
        CHECK(false);
    } catch (const std::exception &error) {
        CHECK_CONTAINS(error.what(), "SyncBatchNorm has no second derivative");
    }
    leave(group);
}
