// The differentiable broadcast to several devices. All devices are the CPU; with `apart` tensors
// and gradients are copied as for another device.
#include <ATen/ATen.h>
#include <tddp/torch_parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "model.h"

using namespace model_test;
using Tensors = std::vector<at::Tensor>;

namespace
{

struct How {
    bool apart = true;
    bool detached = false;
    size_t limit = 0; // 0: the default
};

tddp_status replicate(const Tensors &tensors, const std::vector<const char *> &devices,
                      const How &how, std::vector<Tensors> &outputs)
{
    tddp_replicate_opts opts = TDDP_REPLICATE_OPTS_INIT;
    opts.apart = how.apart;
    opts.detached = how.detached;
    opts.limit = how.limit ? how.limit : opts.limit;
    std::vector<const tddp_tensor *> from;
    for (const at::Tensor &tensor : tensors) {
        from.push_back(reinterpret_cast<const tddp_tensor *>(&tensor));
    }
    outputs.assign(devices.size(), Tensors(tensors.size()));
    std::vector<tddp_tensor *> into;
    for (Tensors &device : outputs) {
        for (at::Tensor &tensor : device) {
            into.push_back(reinterpret_cast<tddp_tensor *>(&tensor));
        }
    }
    return tddp_replicate(from.data(), from.size(), devices.data(), devices.size(), &opts,
                          into.data());
}

std::vector<Tensors> replicas(const Tensors &tensors, size_t devices, const How &how = {})
{
    std::vector<Tensors> outputs;
    CHECK_OK(replicate(tensors, std::vector<const char *>(devices, "cpu"), how, outputs));
    return outputs;
}

// Alternating dtypes, odd sizes, one without elements, one without dimensions, one transposed, one
// with gaps.
Tensors mixed(bool wanting)
{
    Tensors all{spread({17, 5}, 1, at::kFloat),
                spread({3}, 2, at::kDouble),
                spread({4, 7}, 3, at::kFloat).t(),
                at::zeros({0, 3}, at::kFloat),
                spread({1}, 4, at::kDouble).squeeze(0),
                spread({6, 10}, 5, at::kFloat).slice(1, 0, 10, 3),
                spread({2, 3, 4, 5}, 6, at::kFloat).contiguous(at::MemoryFormat::ChannelsLast),
                spread({33}, 7, at::kHalf),
                spread({5}, 8, at::kDouble).mul(at::complex(at::ones({}), at::ones({}))),
                spread({40, 40}, 9, at::kFloat)};
    for (at::Tensor &tensor : all) {
        tensor = tensor.detach().set_requires_grad(wanting);
    }
    return all;
}

at::Tensor number_of(const at::Tensor &tensor)
{
    return (tensor.is_complex() ? at::view_as_real(tensor) : tensor).to(at::kDouble).pow(3).sum();
}

at::Tensor loss_of(const std::vector<Tensors> &all)
{
    at::Tensor loss = at::zeros({}, at::kDouble);
    double weight = 1;
    for (const Tensors &tensors : all) {
        for (const at::Tensor &tensor : tensors) {
            loss = loss + number_of(tensor) * (weight += 0.5);
        }
    }
    return loss;
}

// The expected gradients: of the same loss without replication.
Tensors expected_gradients(const Tensors &tensors, size_t devices)
{
    return torch::autograd::grad({loss_of(std::vector<Tensors>(devices, tensors))}, tensors);
}

bool share(const at::Tensor &one, const at::Tensor &other)
{
    return one.is_alias_of(other);
}

} // namespace

TEST(values_layouts_and_gradients_of_any_dtype_and_size)
{
    const Tensors tensors = mixed(true);
    for (const size_t limit : {1, 100, 1000, 1 << 20}) {
        for (size_t devices = 1; devices <= 4; devices++) {
            for (const bool apart : {false, true}) {
                const auto made = replicas(tensors, devices, {apart, false, limit});
                for (const Tensors &device : made) {
                    for (size_t i = 0; i < tensors.size(); i++) {
                        CHECK(device[i].equal(tensors[i]) && device[i].requires_grad());
                        CHECK(device[i].scalar_type() == tensors[i].scalar_type());
                        CHECK(!device[i].is_leaf());
                        if (tensors[i].is_non_overlapping_and_dense()) {
                            CHECK(device[i].strides() == tensors[i].strides());
                        }
                    }
                }
                const Tensors expected = expected_gradients(tensors, devices);
                const Tensors got = torch::autograd::grad({loss_of(made)}, tensors);
                for (size_t i = 0; i < tensors.size(); i++) {
                    CHECK(got[i].sizes() == expected[i].sizes());
                    CHECK(got[i].scalar_type() == expected[i].scalar_type());
                    CHECK(at::allclose(got[i], expected[i], 2e-3, 1e-5));
                }
            }
        }
    }
}

TEST(copies_on_the_same_device_only_if_requested)
{
    const Tensors tensors = mixed(true);
    const auto shared = replicas(tensors, 2, {false});
    const auto copied = replicas(tensors, 2);
    for (size_t i = 0; i < tensors.size(); i++) {
        if (tensors[i].numel() == 0) {
            continue;
        }
        CHECK(share(shared[0][i], tensors[i]) && share(shared[1][i], tensors[i]));
        CHECK(!share(copied[0][i], tensors[i]) && !share(copied[1][i], tensors[i]));
        CHECK(!share(copied[0][i], copied[1][i]));
    }
}

TEST(small_tensors_share_an_aligned_chunk)
{
    Tensors tensors;
    for (int i = 1; i <= 5; i++) {
        tensors.push_back(spread({i}, i, at::kFloat));
    }
    const auto made = replicas(tensors, 1);
    for (size_t i = 1; i < tensors.size(); i++) {
        CHECK(share(made[0][i], made[0][0]));
        CHECK_INT(reinterpret_cast<uintptr_t>(made[0][i].data_ptr()) % 64, 0);
    }
    const auto alone = replicas(tensors, 1, {true, false, 5});
    CHECK(!share(alone[0][1], alone[0][0]));
}

TEST(copies_in_a_chunk_have_separate_versions)
{
    const Tensors tensors{spread({3}, 1).requires_grad_(), spread({4}, 2).requires_grad_()};
    const auto made = replicas(tensors, 1);
    const at::Tensor loss = made[0][0].pow(2).sum();
    {
        const at::NoGradGuard no_grad;
        made[0][1].add_(1);
    }
    loss.backward();
    check_close(tensors[0].grad(), tensors[0] * 2, 1e-12);
}

TEST(frozen_tensors_have_no_graph)
{
    Tensors tensors = mixed(true);
    tensors[0].set_requires_grad(false);
    tensors[4].set_requires_grad(false);
    for (const bool apart : {false, true}) {
        const auto made = replicas(tensors, 2, {apart});
        for (size_t i = 0; i < tensors.size(); i++) {
            CHECK_INT(made[1][i].requires_grad(), i != 0 && i != 4);
        }
        loss_of(made).backward();
        CHECK(!tensors[0].grad().defined() && !tensors[4].grad().defined());
        CHECK(tensors[1].grad().defined());
    }
}

TEST(without_grad)
{
    const Tensors tensors = mixed(true);
    for (const bool apart : {false, true}) {
        for (const auto &device : replicas(tensors, 2, {apart, true})) {
            for (size_t i = 0; i < tensors.size(); i++) {
                CHECK(!device[i].requires_grad() && device[i].equal(tensors[i]));
            }
        }
        const at::NoGradGuard no_grad;
        CHECK(!replicas(tensors, 2, {apart})[1][0].requires_grad());
    }
    const Tensors integers{at::arange(7), at::ones({3}, at::kBool), at::arange(5, at::kInt)};
    const auto made = replicas(integers, 3);
    for (size_t i = 0; i < integers.size(); i++) {
        CHECK(made[2][i].equal(integers[i]));
    }
}

TEST(in_inference_mode)
{
    const c10::InferenceMode inference;
    const Tensors tensors{spread({3}, 1), spread({4}, 2)};
    const auto made = replicas(tensors, 2);
    CHECK(made[1][1].equal(tensors[1]) && made[1][1].is_inference());
}

TEST(undefined_gradients_of_some_or_all_devices)
{
    const Tensors tensors{spread({3}, 1).requires_grad_(), spread({4}, 2).requires_grad_(),
                          spread({5}, 3).requires_grad_()};
    const auto made = replicas(tensors, 3);
    (made[0][0].sum() + made[2][0].sum() * 2 + made[1][1].sum() * 3).backward();
    check_close(tensors[0].grad(), at::full({3}, 3.0, at::kDouble), 1e-12);
    check_close(tensors[1].grad(), at::full({4}, 3.0, at::kDouble), 1e-12);
    CHECK(!tensors[2].grad().defined());
}

TEST(a_repeated_tensor)
{
    const at::Tensor tied = spread({6}, 1).requires_grad_();
    const auto made = replicas({tied, tied}, 2);
    (made[0][0].sum() + made[0][1].sum() * 2 + made[1][1].sum() * 4).backward();
    check_close(tied.grad(), at::full({6}, 7.0, at::kDouble), 1e-12);
}

TEST(backward_twice_and_through_nonleaves)
{
    const at::Tensor leaf = spread({6}, 1).requires_grad_();
    const auto made = replicas({leaf * 3}, 2);
    const at::Tensor loss = (made[0][0] + made[1][0]).sum();
    loss.backward({}, true);
    loss.backward();
    check_close(leaf.grad(), at::full({6}, 12.0, at::kDouble), 1e-12);
}

TEST(a_second_derivative)
{
    const Tensors tensors{spread({6}, 1).requires_grad_(), spread({2, 3}, 2).requires_grad_()};
    const auto made = replicas(tensors, 2);
    const Tensors first = torch::autograd::grad({loss_of(made)}, tensors, {}, c10::nullopt, true);
    const auto plain =
        torch::autograd::grad({loss_of({tensors, tensors})}, tensors, {}, c10::nullopt, true);
    const Tensors got = torch::autograd::grad({first[0].pow(2).sum()}, {tensors[0]});
    const Tensors expected = torch::autograd::grad({plain[0].pow(2).sum()}, {tensors[0]});
    check_close(got[0], expected[0], 1e-12);
}

TEST(sparse_gradients)
{
    const Tensors tensors{spread({8, 2}, 1).requires_grad_(), spread({3}, 2).requires_grad_()};
    const at::Tensor rows = at::tensor({1, 5, 1}, at::kLong);
    const auto made = replicas(tensors, 3);
    at::Tensor loss = made[0][0].sum() * 0.5;
    for (size_t d = 1; d < 3; d++) {
        loss = loss + at::embedding(made[d][0], rows, -1, false, true).sum() + made[d][1].sum();
    }
    loss.backward();
    const at::Tensor expected = at::full({8, 2}, 0.5, at::kDouble);
    expected.select(0, 1).fill_(4.5);
    expected.select(0, 5).fill_(2.5);
    check_close(tensors[0].grad(), expected, 1e-12);
    check_close(tensors[1].grad(), at::full({3}, 2.0, at::kDouble), 1e-12);
}

TEST(only_requested_gradients_are_computed)
{
    const Tensors tensors = mixed(true);
    const auto made = replicas(tensors, 2);
    const Tensors got = torch::autograd::grad({loss_of(made)}, {tensors[1]});
    check_close(got[0], expected_gradients(tensors, 2)[1], 1e-12);
}

TEST(a_tensor_changed_before_backward)
{
    const at::Tensor tensor = spread({6}, 1).clone().requires_grad_();
    const auto change = [&](bool apart) {
        const auto made = replicas({tensor}, 1, {apart});
        const at::Tensor loss = made[0][0].pow(2).sum();
        const at::NoGradGuard no_grad;
        tensor.add_(1);
        return loss;
    };
    CHECK_CONTAINS(failing_backward(change(false)).c_str(), "modified by an inplace operation");
    CHECK_TEXT(failing_backward(change(true)).c_str(), "backward did not fail");
    // An alias has the tensor's new values.
    const auto made = replicas({tensor}, 1, {false});
    {
        const at::NoGradGuard no_grad;
        tensor.add_(1);
    }
    tensor.mutable_grad().reset();
    made[0][0].pow(2).sum().backward();
    check_close(tensor.grad(), tensor * 2, 1e-12);
}

TEST(invalid_arguments)
{
    const Tensors tensors{spread({3}, 1), at::empty({3}, at::kMeta)};
    std::vector<Tensors> outputs;
    CHECK_STATUS(replicate({at::Tensor()}, {"cpu"}, {}, outputs), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "tensors[0] is undefined");
    CHECK_STATUS(replicate(tensors, {"cpu"}, {}, outputs), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "tensors[1] is on meta: expected all of them on cpu");
    CHECK_STATUS(replicate({tensors[0]}, {"cpu", "gpu"}, {}, outputs), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "device \"gpu\": expected an available one");
    CHECK(!outputs[0][0].defined());
    tddp_replicate_opts opts = TDDP_REPLICATE_OPTS_INIT;
    opts.home = "meta";
    const tddp_tensor *from = reinterpret_cast<const tddp_tensor *>(&tensors[0]);
    at::Tensor output;
    tddp_tensor *into = reinterpret_cast<tddp_tensor *>(&output);
    const char *device = "cpu";
    CHECK_STATUS(tddp_replicate(&from, 1, &device, 1, &opts, &into), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "tensors[0] is on cpu: expected all of them on meta");
    opts.size = 1;
    CHECK_STATUS(tddp_replicate(nullptr, 0, nullptr, 0, &opts, nullptr), TDDP_INVALID_ARGUMENT);
    opts.size = sizeof opts;
    CHECK_OK(tddp_replicate(nullptr, 0, nullptr, 0, &opts, nullptr));
}

// To a device of another type, without its memory (meta).
TEST(to_another_device)
{
    const Tensors tensors = mixed(true);
    std::vector<Tensors> outputs;
    CHECK_OK(replicate(tensors, {"meta", "cpu:0", "meta"}, {false}, outputs));
    for (size_t i = 0; i < tensors.size(); i++) {
        CHECK(outputs[0][i].is_meta() && outputs[2][i].is_meta() && outputs[1][i].is_cpu());
        CHECK(outputs[2][i].sizes() == tensors[i].sizes() && outputs[2][i].requires_grad());
        CHECK(share(outputs[1][i], tensors[i]));
    }
}

// Autograd may use a node's output as a parameter's gradient, and accumulate into it later.
TEST(gradients_have_their_own_memory)
{
    const Tensors tensors{spread({6}, 1).clone().requires_grad_(),
                          spread({6}, 2).clone().requires_grad_()};
    const auto made = replicas(tensors, 1, {true, false, 1});
    for (int step = 1; step <= 2; step++) {
        (made[0][0] + made[0][1]).backward(at::ones({6}, at::kDouble), true);
        check_close(tensors[0].grad(), at::full({6}, step, at::kDouble), 1e-12);
        check_close(tensors[1].grad(), at::full({6}, step, at::kDouble), 1e-12);
        CHECK(!share(tensors[0].grad(), tensors[1].grad()));
    }
}
