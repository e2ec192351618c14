// Fused steps compared with the formulas in libtorch's operations: all dtypes, groups, layouts,
// undefined and sparse gradients, on one thread and on several.
#include <map>

#include <ATen/ATen.h>
#include <tddp/torch_optim.h>

#include "model.h"

using namespace model_test;

namespace
{

const std::vector<std::vector<int64_t>> shapes{{17, 5}, {1}, {257}, {3, 41, 7}, {131, 1009}, {0}};

tddp_tensor *handle(const at::Tensor &tensor)
{
    return reinterpret_cast<tddp_tensor *>(const_cast<at::Tensor *>(&tensor));
}

// The gradient of parameter i in a step, cached for several settings.
const at::Tensor &gradient(size_t i, int step)
{
    static std::map<std::pair<size_t, int>, at::Tensor> made;
    at::Tensor &it = made[{i, step}];
    if (!it.defined()) {
        it = spread(shapes[i], static_cast<int>(i) + 13 * step).mul(0.1);
    }
    return it;
}

struct Set {
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> state[TDDP_OPTIM_STATES];

    explicit Set(at::ScalarType dtype)
    {
        int seed = 1;
        for (const auto &shape : shapes) {
            params.push_back(spread(shape, seed++, dtype).requires_grad_());
            for (auto &tensors : state) {
                tensors.push_back(at::zeros(shape, dtype));
            }
        }
    }
    void give_gradients(int step) const
    {
        for (size_t i = 0; i < params.size(); i++) {
            params[i].mutable_grad() = gradient(i, step).to(params[i].scalar_type(), false, true);
        }
    }
    std::vector<tddp_optim_slot> slots(int64_t step, size_t states) const
    {
        std::vector<tddp_optim_slot> all;
        for (size_t i = 0; i < params.size(); i++) {
            tddp_optim_slot slot{};
            slot.param = handle(params[i]);
            for (size_t s = 0; s < states; s++) {
                slot.state[s] = handle(state[s][i]);
            }
            slot.step = step;
            slot.group = i % 2;
            all.push_back(slot);
        }
        return all;
    }
};

// The formulas, term by term.
void sgd_by_hand(const tddp_sgd_settings &s, const at::Tensor &param, at::Tensor &buffer,
                 bool first)
{
    const at::NoGradGuard no_grad;
    at::Tensor change = param.grad().clone();
    if (s.weight_decay != 0) {
        change.add_(param, s.weight_decay);
    }
    if (s.momentum != 0) {
        buffer = first ? change.clone() : buffer.mul(s.momentum).add(change, 1 - s.dampening);
        change = s.nesterov ? change.add(buffer, s.momentum) : buffer;
    }
    param.add_(change, -s.lr);
}

void adam_by_hand(const tddp_adam_settings &s, const at::Tensor &param, at::Tensor &average,
                  at::Tensor &square, at::Tensor &largest, int step)
{
    const at::NoGradGuard no_grad;
    at::Tensor grad = param.grad().clone();
    if (s.decoupled) {
        param.mul_(1 - s.lr * s.weight_decay);
    } else if (s.weight_decay != 0) {
        grad.add_(param, s.weight_decay);
    }
    average.mul_(s.beta1).add_(grad, 1 - s.beta1);
    square.mul_(s.beta2).addcmul_(grad, grad, 1 - s.beta2);
    largest = at::maximum(largest, square);
    const at::Tensor top = s.amsgrad ? largest : square;
    const double first = 1 - std::pow(s.beta1, step), second = 1 - std::pow(s.beta2, step);
    param.addcdiv_(average, top.sqrt().div(std::sqrt(second)).add(s.eps), -s.lr / first);
}

double tolerance(at::ScalarType dtype)
{
    return dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-6 : 4e-2;
}

void compare(const Set &got, const Set &expected, at::ScalarType dtype)
{
    for (size_t i = 0; i < got.params.size(); i++) {
        if (got.params[i].numel() > 0) {
            check_close(got.params[i].detach(), expected.params[i].detach(), tolerance(dtype));
        }
    }
}

const at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

void sgd_equals(const tddp_sgd_settings (&settings)[2], int threads)
{
    at::set_num_threads(threads);
    for (const at::ScalarType dtype : dtypes) {
        const Set got(dtype);
        Set expected(dtype);
        for (int step = 1; step <= 10; step++) {
            got.give_gradients(step);
            expected.give_gradients(step);
            const auto slots = got.slots(step, 1);
            CHECK_OK(tddp_sgd_step(settings, 2, slots.data(), slots.size()));
            for (size_t i = 0; i < expected.params.size(); i++) {
                sgd_by_hand(settings[i % 2], expected.params[i], expected.state[0][i], step == 1);
            }
        }
        compare(got, expected, dtype);
        CHECK(!got.params[0].detach().equal(Set(dtype).params[0].detach()));
    }
}

void adam_equals(const tddp_adam_settings (&settings)[2], int threads)
{
    at::set_num_threads(threads);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        const Set got(dtype);
        Set expected(dtype);
        for (int step = 1; step <= 10; step++) {
            got.give_gradients(step);
            expected.give_gradients(step);
            const auto slots = got.slots(step, 3);
            CHECK_OK(tddp_adam_step(settings, 2, slots.data(), slots.size()));
            for (size_t i = 0; i < expected.params.size(); i++) {
                adam_by_hand(settings[i % 2], expected.params[i], expected.state[0][i],
                             expected.state[1][i], expected.state[2][i], step);
            }
        }
        compare(got, expected, dtype);
    }
}

tddp_optim_slot slot_of(const at::Tensor &param, const at::Tensor *state = nullptr,
                        int64_t step = 1)
{
    tddp_optim_slot slot{};
    slot.param = handle(param);
    for (size_t i = 0; state && i < 2; i++) {
        slot.state[i] = handle(state[i]);
    }
    slot.step = step;
    return slot;
}

} // namespace

TEST(sgd_equals_its_formula)
{
    for (int threads : {1, 3}) {
        sgd_equals({{0.1, 0, 0, 0, 0}, {0.05, 0, 0, 0.02, 0}}, threads);
        sgd_equals({{0.1, 0.9, 0, 0, 0}, {0.05, 0.8, 0.1, 0.02, 0}}, threads);
        sgd_equals({{0.1, 0.9, 0, 0.01, 1}, {0.05, 0.5, 0, 0, 1}}, threads);
    }
}

TEST(adam_equals_its_formula)
{
    for (int threads : {1, 3}) {
        adam_equals({{1e-2, 0.9, 0.999, 1e-8, 0, 0, 0}, {1e-3, 0.8, 0.99, 1e-6, 0.1, 0, 0}},
                    threads);
        adam_equals({{1e-2, 0.9, 0.999, 1e-8, 0, 1, 0}, {1e-3, 0.8, 0.99, 1e-6, 0.1, 1, 0}},
                    threads);
        adam_equals({{1e-2, 0.9, 0.999, 1e-8, 0.01, 0, 1}, {1e-2, 0.9, 0.9, 1e-8, 0.1, 1, 1}},
                    threads);
    }
}

TEST(half_precision_is_computed_in_float)
{
    // One step from values at which rounding in between would show: 1 + 0.0004 * 0.5 in float16.
    at::Tensor param = at::full({33}, 1.0, at::kHalf).requires_grad_();
    param.mutable_grad() = at::full({33}, -0.5, at::kHalf);
    const at::Tensor state[2] = {at::zeros({33}, at::kHalf), at::zeros({33}, at::kHalf)};
    const tddp_adam_settings adam{0.25, 0.9, 0.999, 1e-8, 0, 0, 0};
    tddp_optim_slot slot = slot_of(param, state);
    CHECK_OK(tddp_adam_step(&adam, 1, &slot, 1));
    CHECK(param.detach().equal(at::full({33}, 1.25, at::kHalf)));
    // 0.001 * 0.25 is below what float16 keeps of 1 - 0.999 if that were rounded before.
    CHECK(state[1].equal(at::full({33}, 0.00025, at::kHalf)));
}

TEST(several_threads_give_the_same_result)
{
    std::vector<at::Tensor> results;
    for (int threads : {1, 3}) {
        at::set_num_threads(threads);
        const Set set(at::kFloat);
        const tddp_sgd_settings settings[2] = {{0.1, 0.9, 0, 0.01, 1}, {0.2, 0.9, 0, 0, 0}};
        for (int step = 1; step <= 3; step++) {
            set.give_gradients(step);
            const auto slots = set.slots(step, 1);
            CHECK_OK(tddp_sgd_step(settings, 2, slots.data(), slots.size()));
        }
        results.push_back(set.params[4].detach());
    }
    CHECK(results[0].equal(results[1]));
}

TEST(parameters_without_a_gradient_are_skipped)
{
    const Set set(at::kFloat);
    set.give_gradients(1);
    set.params[2].mutable_grad().reset();
    const at::Tensor before = set.params[2].detach().clone();
    const tddp_sgd_settings settings[2] = {{0.1, 0, 0, 0.5, 0}, {0.1, 0, 0, 0.5, 0}};
    const auto slots = set.slots(1, 0);
    CHECK_OK(tddp_sgd_step(settings, 2, slots.data(), slots.size()));
    CHECK(set.params[2].detach().equal(before));
    CHECK_INT(tddp_has_gradient(handle(set.params[2])), 0);
    CHECK_INT(tddp_has_gradient(handle(set.params[1])), 1);
}

TEST(versions_increase_and_gradients_are_unchanged)
{
    const Set set(at::kFloat);
    set.give_gradients(1);
    const at::Tensor gradient = set.params[0].grad().clone();
    const int64_t version = set.params[0]._version();
    const at::Tensor product = set.params[0] * set.params[0];
    const tddp_sgd_settings settings[2] = {{0.1, 0.9, 0, 0.5, 0}, {0.1, 0.9, 0, 0.5, 0}};
    const auto slots = set.slots(1, 1);
    CHECK_OK(tddp_sgd_step(settings, 2, slots.data(), slots.size()));
    CHECK(set.params[0]._version() > version);
    CHECK(set.params[0].grad().equal(gradient));
    CHECK(set.params[0].requires_grad() && set.params[0].is_leaf());
    CHECK(failing_backward(product.sum()).find("modified by an inplace operation") !=
          std::string::npos);
}

TEST(other_memory_layouts_and_dtypes)
{
    const tddp_sgd_settings sgd{0.1, 0.9, 0, 0.01, 1};
    const tddp_adam_settings adam{0.1, 0.9, 0.99, 1e-8, 0.01, 0, 0};
    const auto check = [&](const at::Tensor &param, const at::Tensor &grad, double within) {
        for (const bool is_adam : {false, true}) {
            at::Tensor got = param.detach().clone().as_strided_(param.sizes(), param.strides());
            got.copy_(param.detach());
            got.requires_grad_();
            got.mutable_grad() = grad;
            at::Tensor expected = param.detach().clone().contiguous().requires_grad_();
            expected.mutable_grad() = grad.contiguous();
            const at::Tensor mine[2] = {at::zeros_like(param), at::zeros_like(param)};
            at::Tensor theirs[3] = {at::zeros_like(expected), at::zeros_like(expected),
                                    at::zeros_like(expected)};
            for (int step = 1; step <= 3; step++) {
                const tddp_optim_slot slot = slot_of(got, mine, step);
                if (is_adam) {
                    CHECK_OK(tddp_adam_step(&adam, 1, &slot, 1));
                    adam_by_hand(adam, expected, theirs[0], theirs[1], theirs[2], step);
                } else {
                    CHECK_OK(tddp_sgd_step(&sgd, 1, &slot, 1));
                    sgd_by_hand(sgd, expected, theirs[0], step == 1);
                }
            }
            CHECK_DOUBLE((got.detach() - expected.detach()).abs().max().item<double>(), 0, within);
        }
    };
    const at::Tensor square = spread({6, 6}, 3);
    check(square, spread({6, 6}, 4).t(), 1e-13);     // a gradient transposed
    check(square.t(), spread({6, 6}, 4).t(), 1e-13); // both transposed
    check(spread({2, 3, 4, 5}, 1).contiguous(at::MemoryFormat::ChannelsLast), // contiguous state
          spread({2, 3, 4, 5}, 2), 1e-13);
    check(square, at::full({1, 6}, 0.5, at::kDouble).expand({6, 6}), 1e-13); // one row for all
}

TEST(sparse_gradients)
{
    at::Tensor param = spread({5, 3}, 1).requires_grad_();
    const at::Tensor before = param.detach().clone();
    const at::Tensor rows = at::tensor(std::vector<int64_t>{1, 3, 1}).view({1, 3});
    const at::Tensor sparse = at::sparse_coo_tensor(rows, at::ones({3, 3}, at::kDouble), {5, 3});
    param.mutable_grad() = sparse;
    CHECK_INT(tddp_has_sparse_gradient(handle(param)), 1);
    tddp_optim_slot slot = slot_of(param);
    tddp_sgd_settings sgd{0.5, 0, 0, 0, 0};
    CHECK_OK(tddp_sgd_step(&sgd, 1, &slot, 1));
    check_close(param.detach(), before - 0.5 * sparse.to_dense(), 1e-14);
    // With momentum and Nesterov: as with the dense gradient.
    const at::Tensor buffer[2] = {at::zeros({5, 3}, at::kDouble), at::zeros({5, 3}, at::kDouble)};
    at::Tensor dense = param.detach().clone().requires_grad_(), theirs;
    dense.mutable_grad() = sparse.to_dense();
    sgd.momentum = 0.9;
    sgd.nesterov = 1;
    for (int step = 1; step <= 3; step++) {
        slot = slot_of(param, buffer, step);
        CHECK_OK(tddp_sgd_step(&sgd, 1, &slot, 1));
        sgd_by_hand(sgd, dense, theirs, step == 1);
    }
    check_close(param.detach(), dense.detach(), 1e-14);
    // An error before any change.
    const at::Tensor kept = param.detach().clone();
    sgd.weight_decay = 0.1;
    CHECK_STATUS(tddp_sgd_step(&sgd, 1, &slot, 1), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "its gradient is sparse: set weight_decay to 0");
    tddp_adam_settings adam{0.1, 0.9, 0.99, 1e-8, 0, 0, 0};
    CHECK_STATUS(tddp_adam_step(&adam, 1, &slot, 1), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "Adam does not support sparse gradients");
    CHECK(param.detach().equal(kept));
}

TEST(a_repeated_parameter_is_stepped_twice)
{
    at::set_num_threads(3);
    const at::Tensor param = at::ones({100000}, at::kFloat).requires_grad_();
    param.mutable_grad() = at::ones({100000}, at::kFloat);
    const tddp_optim_slot slots[2] = {slot_of(param), slot_of(param)};
    const tddp_sgd_settings sgd{0.25, 0, 0, 0, 0};
    CHECK_OK(tddp_sgd_step(&sgd, 1, slots, 2));
    CHECK(param.detach().equal(at::full({100000}, 0.5f)));
}

TEST(invalid_slots_are_refused_before_any_change)
{
    const Set set(at::kFloat);
    set.give_gradients(1);
    const at::Tensor before = set.params[0].detach().clone();
    const tddp_sgd_settings settings[2] = {{0.1, 0.9, 0, 0, 0}, {0.1, 0.9, 0, 0, 0}};
    auto slots = set.slots(1, 1);
    slots[3].state[0] = handle(set.state[0][2]);
    CHECK_STATUS(tddp_sgd_step(settings, 2, slots.data(), slots.size()), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "parameter number 3 of the step: its state has another "
                                         "shape");
    slots[3].state[0] = nullptr;
    CHECK_STATUS(tddp_sgd_step(settings, 2, slots.data(), slots.size()), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "its state is missing");
    slots = set.slots(1, 1);
    CHECK_STATUS(tddp_sgd_step(settings, 1, slots.data(), slots.size()), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "group 1: there are 1");
    const tddp_adam_settings adam[2] = {};
    slots = set.slots(0, 3);
    CHECK_STATUS(tddp_adam_step(adam, 2, slots.data(), slots.size()), TDDP_INVALID_ARGUMENT);
    CHECK(set.params[0].detach().equal(before));
    CHECK_OK(tddp_sgd_step(settings, 2, nullptr, 0));
}

TEST(gradients_are_reset_or_zeroed)
{
    const Set set(at::kFloat);
    set.give_gradients(1);
    std::vector<const tddp_tensor *> params;
    for (const at::Tensor &param : set.params) {
        params.push_back(handle(param));
    }
    set.params[1].mutable_grad() = set.params[1] * 2; // with a history
    const at::Tensor held = set.params[0].grad();
    CHECK_OK(tddp_zero_gradients(params.data(), params.size(), 0));
    CHECK(held.equal(at::zeros_like(held)) && set.params[0].grad().is_same(held));
    CHECK(!set.params[1].grad().requires_grad());
    CHECK_OK(tddp_zero_gradients(params.data(), params.size(), 1));
    for (const at::Tensor &param : set.params) {
        CHECK(!param.grad().defined());
    }
    CHECK_OK(tddp_zero_gradients(params.data(), params.size(), 0));
    CHECK(held.defined());
}
