// Functions whose backward is the caller's, with real autograd.
#include <functional>

#include <tddp/torch_function.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "model.h"

using namespace model_test;

namespace
{

tddp_tensor *handle(at::Tensor &tensor)
{
    return reinterpret_cast<tddp_tensor *>(&tensor);
}

// y = x * x * factor
struct Square {
    double factor = 2;
    int runs = 0;
    int freed = 0;
    bool fails = false;
    bool wrong_shape = false;

    static tddp_status backward(void *state, const tddp_function_backward *call)
    {
        auto *self = static_cast<Square *>(state);
        self->runs++;
        if (self->fails) {
            return tddp_fail(TDDP_INTERNAL, "the square fell over");
        }
        CHECK_INT(call->saved_count, 3);
        CHECK_INT(call->grad_count, 1);
        CHECK_INT(call->result_count, 2);
        CHECK(call->saved[0] == nullptr);
        const at::Tensor &x = *reinterpret_cast<const at::Tensor *>(call->saved[1]);
        const at::Tensor &y = *reinterpret_cast<const at::Tensor *>(call->saved[2]);
        CHECK(y.requires_grad());
        const at::Tensor &grad = *reinterpret_cast<const at::Tensor *>(call->grads[0]);
        at::Tensor result = grad * x * (2 * self->factor);
        if (self->wrong_shape) {
            result = result.sum();
        }
        return tddp_tensor_assign(call->result[1], handle(result));
    }
    static void free(void *state)
    {
        static_cast<Square *>(state)->freed++;
    }
    // Its first argument is not a tensor.
    tddp_status apply(at::Tensor x, at::Tensor &output)
    {
        static const tddp_function_ops ops = {sizeof ops, backward, free};
        at::Tensor y;
        {
            const at::NoGradGuard no_grad;
            y = x * x * factor;
        }
        output = y;
        tddp_tensor *inputs[] = {nullptr, handle(x)};
        tddp_tensor *outputs[] = {handle(output)};
        tddp_tensor *saved[] = {nullptr, handle(x), handle(y)};
        tddp_function_forward forward{};
        forward.size = sizeof forward;
        forward.name = "Square";
        forward.inputs = inputs;
        forward.input_count = 2;
        forward.outputs = outputs;
        forward.output_count = 1;
        forward.saved = saved;
        forward.saved_count = 3;
        return tddp_function_apply(&forward, &ops, this);
    }
    at::Tensor operator()(const at::Tensor &x)
    {
        at::Tensor output;
        CHECK_OK(apply(x, output));
        return output;
    }
};

std::string text_of(const std::function<void()> &body)
{
    try {
        body();
    } catch (const std::exception &error) {
        return error.what();
    }
    return "nothing was thrown";
}

} // namespace

TEST(a_function_has_the_gradient_of_its_backward)
{
    Square square;
    const at::Tensor x = spread({2, 3}, 1).requires_grad_();
    const at::Tensor y = square(x);
    CHECK_TEXT(y.grad_fn()->name().c_str(), "SquareBackward");
    CHECK_INT(square.freed, 0);
    y.sum().backward();
    CHECK_INT(square.runs, 1);
    CHECK_INT(square.freed, 1);
    check_close(x.grad(), x.detach() * 4.0, 1e-12);
    CHECK_CONTAINS(text_of([&] { y.sum().backward(); }).c_str(),
                   "backward through Square a second time");
    {
        const at::Tensor unused = square(x);
    }
    CHECK_INT(square.freed, 2);
}

TEST(a_function_has_second_derivatives)
{
    Square square;
    const at::Tensor x = spread({2, 3}, 1).requires_grad_();
    const auto first = torch::autograd::grad({square(x).sum()}, {x}, {}, true, true);
    const auto second = torch::autograd::grad({first[0].pow(2).sum()}, {x});
    check_close(second[0], x.detach() * 32.0, 1e-12);
}

TEST(without_grad_a_function_has_no_history)
{
    Square square;
    CHECK(!square(spread({2}, 1)).requires_grad());
    const at::Tensor x = spread({2}, 1).requires_grad_();
    {
        const at::NoGradGuard no_grad;
        CHECK(!square(x).requires_grad());
    }
    CHECK_INT(square.freed, 2);
}

TEST(misuse_of_a_function_fails)
{
    Square square;
    at::Tensor x = spread({2}, 1).requires_grad_() * 1.0;
    at::Tensor y = square(x);
    square.fails = true;
    CHECK_CONTAINS(text_of([&] { y.sum().backward(); }).c_str(), "the square fell over");
    square.fails = false;
    square.wrong_shape = true;
    CHECK_CONTAINS(text_of([&] { square(x).sum().backward(); }).c_str(),
                   "for argument 1 of the shape [], expected the argument's, [2]");
    square.wrong_shape = false;
    y = square(x);
    x.zero_();
    CHECK_CONTAINS(text_of([&] { y.sum().backward(); }).c_str(),
                   "modified by an inplace operation");
    const int freed = square.freed;
    at::Tensor output;
    CHECK_STATUS(square.apply(at::empty({2}, at::kMeta).requires_grad_(), output),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "output 0 of Square is on meta");
    CHECK_INT(square.freed, freed); // the caller's
    CHECK_STATUS(tddp_function_apply(nullptr, nullptr, nullptr), TDDP_INVALID_ARGUMENT);
}
