// Unused parameters and static graphs with real autograd, and the outputs of forward.
#include <torch/csrc/autograd/function.h>

#include <atomic>

#include <tddp/log.h>

#include "modes.h"

using namespace modes_test;

static void leave_out(int rank, int world_size, int port, int apart, int skip)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp_opts opts = with(1, 0, apart);
    opts.reducer.skip_unused = skip;
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(!tddp_ddp_wants_outputs(ddp));
    for (int step = 0; step < 4; step++) {
        run_forward(ddp, 1);
        CHECK(tddp_ddp_wants_outputs(ddp));
        // All ranks use parameter 0, only rank 0 uses 2, and no rank the others.
        at::Tensor loss = part(model, 0, rank + 1.0);
        if (rank == 0) {
            loss = loss + part(model, 2, 6.0);
        }
        open(ddp, loss).backward();
        CHECK(all_are(model.params[0].grad(), (world_size + 1) / 2.0));
        CHECK(all_are(model.params[2].grad(), 6.0 / world_size));
        for (const size_t i : {1, 3, 4, 5}) {
            CHECK(!model.params[i].grad().defined());
        }
        model.forget_grad();
    }
    // An unused parameter keeps its gradient, bitwise; a used one accumulates.
    for (const at::Tensor &param : model.params) {
        param.mutable_grad() = at::full_like(param, 0.1);
    }
    for (int step = 1; step < 4; step++) {
        run_forward(ddp, 1);
        open(ddp, part(model, rank == 0 ? 1 : 0, world_size)).backward();
        CHECK(all_are(model.params[1].grad(), 0.1 + step));
        CHECK(all_are(model.params[0].grad(), 0.1 + step * (world_size - 1)));
        CHECK(model.params[4].grad().equal(at::full_like(model.params[4], 0.1)));
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(parameters_that_no_rank_uses_keep_their_gradients, 3, 60)
{
    leave_out(rank, world_size, port, 0, 0);
}

MULTI_TEST(unused_parameters_with_separate_gradients, 2, 60)
{
    leave_out(rank, world_size, port, 1, 0);
}

MULTI_TEST(unused_parameters_with_skipped_buckets, 2, 60)
{
    leave_out(rank, world_size, port, 0, 1);
}

MULTI_TEST(unused_parameters_on_one_rank, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    run_forward(ddp, 1);
    open(ddp, part(model, 3, 2.0)).backward();
    CHECK(all_are(model.params[3].grad(), 2.0));
    CHECK(!model.params[0].grad().defined());
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(unused_outputs_use_no_parameters, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    run_forward(ddp, 1);
    auto outputs = open(ddp, {part(model, 0, 1.0) + part(model, 1, 4.0), part(model, 1, 8.0),
                              part(model, 2, 3.0) * part(model, 3, 1.0), at::arange(3)});
    (rank == 0 ? outputs[0] : outputs[1]).backward();
    CHECK(all_are(model.params[0].grad(), 0.5));
    CHECK(all_are(model.params[1].grad(), 6.0));
    for (const size_t i : {2, 3, 4, 5}) {
        CHECK(!model.params[i].grad().defined());
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_rank_that_uses_no_parameter_participates, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 3; step++) {
        const at::Tensor input = spread({4, 5}, step).requires_grad_();
        run_forward(ddp, 1);
        open(ddp, rank ? input.sum() : input.sum() + part(model, 2, 4.0)).backward();
        CHECK(all_are(input.grad(), 1.0));
        CHECK(all_are(model.params[2].grad(), 2.0));
        CHECK(!model.params[0].grad().defined());
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_forward_without_backward_launches_nothing, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int i = 0; i < 3; i++) {
        run_forward(ddp, 1);
        open(ddp, part(model, 0, 1.0));
    }
    CHECK_INT(tddp_reducer_rounds(tddp_ddp_reducer(ddp)), 0);
    // Two forwards of one loss: the parameters of both are used.
    run_forward(ddp, 1);
    const at::Tensor first = open(ddp, part(model, 0, 1.0));
    run_forward(ddp, 1);
    const at::Tensor second = open(ddp, part(model, 1, rank + 1.0));
    (first + second).backward();
    CHECK(all_are(model.params[0].grad(), 1.0));
    CHECK(all_are(model.params[1].grad(), 1.5));
    CHECK(!model.params[2].grad().defined());
    // The loss may also depend on a parameter directly, if backward reaches it after the outputs.
    model.forget_grad();
    run_forward(ddp, 1);
    at::Tensor output = open(ddp, part(model, 0, 1.0));
    (output + part(model, 5, 3.0 * rank)).backward();
    CHECK(all_are(model.params[5].grad(), 1.5));
    CHECK(!model.params[2].grad().defined());
    run_forward(ddp, 1);
    const at::Tensor direct = part(model, 5, 1.0);
    output = open(ddp, part(model, 0, 1.0));
    CHECK_CONTAINS(failing_backward(output + direct).c_str(), "\"l3.bias\" got a gradient");
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(gradients_accumulated_before_are_averaged_if_now_unused, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 2; step++) {
        run_forward(ddp, 0);
        CHECK(!tddp_ddp_wants_outputs(ddp));
        open(ddp, part(model, 4, 2.0 * rank)).backward();
        CHECK(all_are(model.params[4].grad(), 2.0 * rank));
        run_forward(ddp, 1);
        open(ddp, part(model, 1, 1.0)).backward();
        CHECK(all_are(model.params[4].grad(), 1.0));
        CHECK(all_are(model.params[1].grad(), 1.0));
        CHECK(!model.params[0].grad().defined());
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(outputs_may_be_modified_in_place, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model alone(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    const auto outputs_of = [](const Model &of) {
        const at::Tensor sum = of.params[0] + 1.0;
        return std::vector<at::Tensor>{sum, (of.params[2] * 2.0).t(), of.params[4] * 3.0,
                                       of.params[1].to(at::kFloat), of.params[3]};
    };
    const auto loss_of = [](std::vector<at::Tensor> outputs) {
        outputs[0].mul_(5.0);
        outputs[1].add_(outputs[1].detach()).select(0, 1).zero_();
        outputs[2] = outputs[2].pow(2);
        outputs[2].squeeze_();
        return outputs[0].sum() + outputs[1].sum() + outputs[2].sum() +
               outputs[3].mul_(2.F).sum().to(at::kDouble) + outputs[4].mul(2.0).sum();
    };
    run_forward(ddp, 1);
    std::vector<at::Tensor> outputs = open(ddp, outputs_of(model));
    CHECK(outputs[0].grad_fn() == outputs[3].grad_fn());
    CHECK(!outputs[0].is_view() && outputs[4].sizes() == model.params[3].sizes());
    loss_of(outputs).backward();
    loss_of(outputs_of(alone)).backward();
    for (const size_t i : {0, 1, 2, 3, 4}) {
        check_close(model.params[i].grad(), alone.params[i].grad(), 1e-7);
    }
    CHECK(model.params[3].equal(alone.params[3]));
    // Autograd detects an in-place change of a saved tensor, as without the wrapper.
    run_forward(ddp, 1);
    at::Tensor output = open(ddp, model.params[0].tanh());
    output.zero_();
    CHECK(failing_backward(output.sum()).find("modified by an inplace operation") !=
          std::string::npos);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_long_graph_is_traversed_without_recursion, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    run_forward(ddp, 1);
    at::Tensor sum = model.params[1].sum();
    for (int i = 0; i < 100000; i++) {
        sum = sum + 1.0;
    }
    open(ddp, sum).backward();
    CHECK(all_are(model.params[1].grad(), 1.0));
    tddp_ddp_free(ddp);
    leave(group);
}

// --- static graphs ------------------------------------------------------------------------------

MULTI_TEST(a_static_graph_is_recorded_in_the_first_iteration, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(0, 1);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 4; step++) {
        run_forward(ddp, 1);
        CHECK_INT(tddp_ddp_wants_outputs(ddp), step == 0);
        at::Tensor loss = part(model, 0, rank + 1.0) + part(model, 5, 2.0);
        if (rank == 1) {
            loss = loss + part(model, 2, 6.0);
        }
        open(ddp, loss).backward();
        CHECK(all_are(model.params[0].grad(), 1.5));
        CHECK(all_are(model.params[2].grad(), 3.0));
        CHECK(all_are(model.params[5].grad(), 2.0));
        for (const size_t i : {1, 3, 4}) {
            CHECK(!model.params[i].grad().defined());
        }
        model.forget_grad();
    }
    CHECK(tddp_reducer_rebuilt(tddp_ddp_reducer(ddp)));
    // The graph changes.
    run_forward(ddp, 1);
    const std::string text = failing_backward(part(model, 0, 1.0) + part(model, 4, 1.0));
    CHECK_CONTAINS(text.c_str(), "l3.weight");
    tddp_ddp_free(ddp);
    leave(group);
}

// --- gradients after the averages -------------------------------------------------------------

namespace
{

std::atomic<int> warnings;
std::string warning;

void take_warning(tddp_log_level, const char *room, const char *text, void *)
{
    warnings++;
    warning = std::string(room) + ": " + text;
}

at::Tensor all_parts(const Model &model, double factor)
{
    at::Tensor loss = part(model, 0, factor);
    for (size_t i = 1; i < model.params.size(); i++) {
        loss = loss + part(model, i, factor);
    }
    return loss;
}

} // namespace

MULTI_TEST(an_extra_backward_is_warned_of_once, 2, 60)
{
    tddp_log_set_sink(take_warning, nullptr);
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(0, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    all_parts(model, 1.0).backward(); // before any forward
    model.forget_grad();
    run_forward(ddp, 0);
    all_parts(model, 1.0).backward();
    all_parts(model, 1.0).backward();
    model.forget_grad();
    run_forward(ddp, 1);
    all_parts(model, rank + 1.0).backward();
    CHECK_INT(warnings, 0);
    part(model, 3, rank + 1.0).backward();
    part(model, 2, rank + 1.0).backward();
    CHECK_INT(warnings, 1);
    const std::string expected = "ddp: rank " + std::to_string(rank) +
                                 ": a gradient of \"l2.bias\" was computed after the last "
                                 "forward's gradients were averaged, and is added on this rank "
                                 "only: run one forward for each backward";
    CHECK_CONTAINS(warning.c_str(), expected.c_str());
    CHECK(all_are(model.params[3].grad(), 1.5 + rank + 1.0));
    // Another wrapper of the same parameters has separate forwards.
    Model twin = model;
    tddp_ddp *second = wrap(group, twin, &opts);
    run_forward(second, 0);
    all_parts(model, 1.0).backward();
    run_forward(second, 1);
    all_parts(model, 1.0).backward();
    CHECK_INT(warnings, 1);
    run_forward(ddp, 0);
    all_parts(model, 1.0).backward();
    CHECK_INT(warnings, 1);
    tddp_ddp_free(second);
    tddp_ddp_free(ddp);
    leave(group);
    tddp_log_set_sink(nullptr, nullptr);
}
