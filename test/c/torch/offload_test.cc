// Activation offload with real autograd. Where host memory counts as a device's saved tensors are
// copied; else nothing is, and backward works through the same hooks.
#include <functional>
#include <thread>

#include <tddp/torch_checkpoint.h>
#include <tddp/torch_offload.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "model.h"

using namespace model_test;

namespace
{

// What is computed within is saved on the CPU.
template <typename Body> at::Tensor on_cpu(const Body &body, int pin_memory = 0)
{
    CHECK_OK(tddp_save_on_cpu_begin(pin_memory));
    const at::Tensor result = body();
    tddp_save_on_cpu_end();
    return result;
}

// Where nothing counts as a device's memory, nothing waits on the CPU.
void check_waiting(size_t tensors, size_t bytes)
{
    const tddp_saved_on_cpu now = tddp_saved_on_cpu_now();
    CHECK_INT(now.tensors, stands_in() ? tensors : 0);
    CHECK_INT(now.bytes, stands_in() ? bytes : 0);
}

std::string error_of(const std::function<void()> &body)
{
    try {
        body();
    } catch (const std::exception &error) {
        return error.what();
    }
    return "nothing was thrown";
}

struct Net {
    at::Tensor weight = spread({3, 5}, 1).requires_grad_();
    at::Tensor bias = spread({3}, 2).requires_grad_();
    at::Tensor input = spread({4, 5}, 3).requires_grad_();

    at::Tensor forward() const
    {
        return at::linear(input * 2.0, weight, bias).tanh();
    }
    std::vector<at::Tensor> gradients() const
    {
        return {weight.grad(), bias.grad(), input.grad()};
    }
};

std::vector<at::Tensor> expected_gradients()
{
    Net net;
    net.forward().sum().backward();
    return net.gradients();
}

void check_gradients(const Net &net, double factor = 1.0)
{
    const std::vector<at::Tensor> expected = expected_gradients();
    const std::vector<at::Tensor> got = net.gradients();
    for (size_t i = 0; i < expected.size(); i++) {
        check_close(got[i], expected[i] * factor, 1e-12);
    }
}

} // namespace

// The linear layer's input and the result of tanh are moved, each 12 or 20 doubles; its weight,
// which it saves as a view, is not.
TEST(activations_wait_on_the_cpu_and_parameters_do_not)
{
    at::set_num_threads(1);
    (void)expected_gradients(); // a backward before the engine is replaced
    for (const int pin_memory : {0, 1}) {
        Net net;
        const at::Tensor output = on_cpu([&] { return net.forward(); }, pin_memory);
        check_waiting(2, (20 + 12) * sizeof(double));
        const at::Tensor outside = output.exp(); // saves its result
        check_waiting(2, (20 + 12) * sizeof(double));
        output.sum().backward();
        check_waiting(0, 0);
        check_gradients(net);
    }
}

TEST(what_is_never_passed_is_freed_with_its_graph)
{
    {
        const at::Tensor output = on_cpu([] { return Net().forward(); });
        check_waiting(2, (20 + 12) * sizeof(double));
    }
    check_waiting(0, 0);
}

TEST(a_copy_is_not_modified_and_the_tensor_itself_may_not_be)
{
    const at::Tensor input = spread({6}, 1).requires_grad_();
    at::Tensor output;
    const at::Tensor sum = on_cpu([&] {
        output = input.exp();
        return output.sum();
    });
    const at::Tensor before = output.detach().clone();
    {
        const at::NoGradGuard no_grad;
        output.zero_();
    }
    if (stands_in()) {
        sum.backward();
        check_close(input.grad(), before, 1e-12);
    } else {
        CHECK_CONTAINS(error_of([&] { sum.backward(); }).c_str(),
                       "modified by an inplace operation: it is at version 1, expected version 0");
    }
}

TEST(backward_may_come_twice_and_have_a_gradient_of_its_own)
{
    Net net;
    const at::Tensor loss = on_cpu([&] { return net.forward().sum(); });
    loss.backward({}, true);
    loss.backward();
    check_gradients(net, 2.0);
    check_waiting(0, 0);
    // The second derivative of x^3.
    const at::Tensor x = spread({5}, 4).requires_grad_();
    const at::Tensor cube = on_cpu([&] { return (x * 1.0).pow(3).sum(); });
    const at::Tensor first = torch::autograd::grad({cube}, {x}, {}, true, true)[0];
    const at::Tensor second = torch::autograd::grad({first.sum()}, {x})[0];
    check_close(first.detach(), x.detach().pow(2) * 3.0, 1e-12);
    check_close(second, x.detach() * 6.0, 1e-12);
}

TEST(blocks_are_nested_and_of_one_thread)
{
    Net net;
    Net other;
    const at::Tensor output = on_cpu([&] {
        const at::Tensor inner = on_cpu([&] { return net.forward(); }, 1);
        const at::Tensor outer = inner.exp();
        check_waiting(3, (20 + 12 + 12) * sizeof(double));
        std::thread([&] { (void)other.forward(); }).join();
        const at::Tensor elsewhere = [&] {
            at::Tensor made;
            std::thread([&] { made = other.forward(); }).join();
            return made;
        }();
        check_waiting(3, (20 + 12 + 12) * sizeof(double));
        elsewhere.sum().backward();
        return outer;
    });
    output.sum().backward();
    check_gradients(other);
    check_waiting(0, 0);
}

// Its backward runs another one within, of as many levels as are left.
struct Nested : torch::autograd::Function<Nested> {
    static at::Tensor forward(torch::autograd::AutogradContext *context, const at::Tensor &input,
                              int64_t levels)
    {
        context->saved_data["levels"] = levels;
        return input.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                   torch::autograd::variable_list gradients)
    {
        const int64_t levels = context->saved_data["levels"].toInt();
        if (levels == 0) {
            return {gradients[0], {}};
        }
        const at::AutoGradMode enabled(true);
        const at::Tensor leaf = at::ones_like(gradients[0]).requires_grad_();
        (apply(leaf, levels - 1) * gradients[0]).sum().backward();
        return {leaf.grad(), {}};
    }
};

// From a depth on an engine takes threads of its own, which it has although the first backward of
// the process was that of libtorch's.
TEST(backward_may_be_nested_deeply)
{
    (void)expected_gradients();
    Net net;
    on_cpu([&] { return net.forward(); }).sum().backward();
    const at::Tensor input = spread({4}, 1).requires_grad_();
    Nested::apply(input, 100).sum().backward();
    check_close(input.grad(), at::ones_like(input), 1e-12);
}

// A checkpointed segment keeps its inputs alone.
TEST(inputs_of_segments_wait_on_the_cpu)
{
    Net net;
    static const auto again = [](void *state, tddp_tensor *const *inputs, size_t,
                                 tddp_tensor *const *outputs, size_t) {
        const auto &of = *static_cast<const Net *>(state);
        const auto &input = *reinterpret_cast<const at::Tensor *>(inputs[0]);
        const at::Tensor output = at::linear(input, of.weight, of.bias).tanh();
        return tddp_tensor_assign(outputs[0], reinterpret_cast<const tddp_tensor *>(&output));
    };
    const tddp_checkpoint_ops ops = {sizeof ops, again, nullptr};
    const at::Tensor output = on_cpu([&] {
        at::Tensor hidden = net.input * 2.0;
        auto *in = reinterpret_cast<tddp_tensor *>(&hidden);
        tddp_checkpoint *checkpoint = nullptr;
        CHECK_OK(tddp_checkpoint_begin(&in, 1, 0, &ops, &net, &checkpoint));
        at::Tensor made;
        {
            const at::NoGradGuard no_grad;
            made = at::linear(hidden, net.weight, net.bias).tanh();
        }
        auto *out = reinterpret_cast<tddp_tensor *>(&made);
        CHECK_OK(tddp_checkpoint_outputs(checkpoint, &out, 1));
        tddp_checkpoint_free(checkpoint);
        return made;
    });
    check_waiting(1, 20 * sizeof(double));
    output.sum().backward();
    check_gradients(net);
    check_waiting(0, 0);
}
