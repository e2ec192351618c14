// Rounds in which not every parameter gets a gradient, with real autograd: parameters that a loss
// does not depend on, graphs that are the same each time, outputs of all kinds, segments that are
// computed again.
#include <tddp/torch_checkpoint.h>

#include <functional>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "model.h"

using namespace model_test;

namespace
{

tddp_ddp_opts with(int find_unused, int static_graph, int apart = 0)
{
    tddp_ddp_opts opts = small_buckets();
    opts.reducer.find_unused = find_unused;
    opts.reducer.static_graph = static_graph;
    opts.gradients_apart = apart;
    return opts;
}

// Passes outputs through the node that opens backward, as a wrapper does.
std::vector<at::Tensor> open(tddp_ddp *ddp, std::vector<at::Tensor> outputs)
{
    if (tddp_ddp_wants_outputs(ddp)) {
        CHECK_OK(tddp_ddp_outputs(ddp, handles(outputs).data(), outputs.size()));
    }
    return outputs;
}

at::Tensor open(tddp_ddp *ddp, const at::Tensor &output)
{
    return open(ddp, std::vector<at::Tensor>{output})[0];
}

// A loss of which parameter i's gradient is `factor` everywhere.
at::Tensor part(const Model &model, size_t i, double factor)
{
    return model.params[i].sum() * factor;
}

bool all_are(const at::Tensor &grad, double value)
{
    return grad.defined() && (grad - value).abs().max().item<double>() < 1e-12;
}

} // namespace

static void leave_out(int rank, int world_size, int port, int apart, int skip)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp_opts opts = with(1, 0, apart);
    opts.reducer.skip_unused = skip;
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(!tddp_ddp_wants_outputs(ddp));
    for (int step = 0; step < 4; step++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        CHECK(tddp_ddp_wants_outputs(ddp));
        // Parameter 0 by all ranks, 2 by rank 0 alone, the others by nobody.
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
    // One that is left out keeps what it has, to the last bit; one that is used adds to it.
    for (const at::Tensor &param : model.params) {
        param.mutable_grad() = at::full_like(param, 0.1);
    }
    for (int step = 1; step < 4; step++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        open(ddp, part(model, rank == 0 ? 1 : 0, world_size)).backward();
        CHECK(all_are(model.params[1].grad(), 0.1 + step));
        CHECK(all_are(model.params[0].grad(), 0.1 + step * (world_size - 1)));
        CHECK(model.params[4].grad().equal(at::full_like(model.params[4], 0.1)));
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(parameters_that_nobody_uses_keep_their_gradients, 3, 60)
{
    leave_out(rank, world_size, port, 0, 0);
}

MULTI_TEST(also_where_gradients_are_apart, 2, 60)
{
    leave_out(rank, world_size, port, 1, 0);
}

MULTI_TEST(also_where_buckets_without_use_are_skipped, 2, 60)
{
    leave_out(rank, world_size, port, 0, 1);
}

MULTI_TEST(also_on_one_rank, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    open(ddp, part(model, 3, 2.0)).backward();
    CHECK(all_are(model.params[3].grad(), 2.0));
    CHECK(!model.params[0].grad().defined());
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(outputs_that_the_loss_leaves_out_use_nothing, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
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

MULTI_TEST(a_rank_that_uses_nothing_takes_part, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 3; step++) {
        const at::Tensor input = spread({4, 5}, step).requires_grad_();
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        open(ddp, rank ? input.sum() : input.sum() + part(model, 2, 4.0)).backward();
        CHECK(all_are(input.grad(), 1.0));
        CHECK(all_are(model.params[2].grad(), 2.0));
        CHECK(!model.params[0].grad().defined());
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_forward_without_backward_starts_nothing, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        open(ddp, part(model, 0, 1.0));
    }
    CHECK_INT(tddp_reducer_rounds(tddp_ddp_reducer(ddp)), 0);
    // Two forwards of one loss: what each reaches counts.
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    const at::Tensor first = open(ddp, part(model, 0, 1.0));
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    const at::Tensor second = open(ddp, part(model, 1, rank + 1.0));
    (first + second).backward();
    CHECK(all_are(model.params[0].grad(), 1.0));
    CHECK(all_are(model.params[1].grad(), 1.5));
    CHECK(!model.params[2].grad().defined());
    // The loss may also depend on a parameter beside the outputs, if that comes after them.
    model.forget_grad();
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    at::Tensor output = open(ddp, part(model, 0, 1.0));
    (output + part(model, 5, 3.0 * rank)).backward();
    CHECK(all_are(model.params[5].grad(), 1.5));
    CHECK(!model.params[2].grad().defined());
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    const at::Tensor beside = part(model, 5, 1.0);
    output = open(ddp, part(model, 0, 1.0));
    CHECK_CONTAINS(failing_backward(output + beside).c_str(), "\"l3.bias\" got a gradient");
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(what_was_accumulated_before_is_averaged_though_this_round_leaves_it_out, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 2; step++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 0, nullptr));
        CHECK(!tddp_ddp_wants_outputs(ddp));
        open(ddp, part(model, 4, 2.0 * rank)).backward();
        CHECK(all_are(model.params[4].grad(), 2.0 * rank));
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        open(ddp, part(model, 1, 1.0)).backward();
        CHECK(all_are(model.params[4].grad(), 1.0));
        CHECK(all_are(model.params[1].grad(), 1.0));
        CHECK(!model.params[0].grad().defined());
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(outputs_may_be_changed_in_place, 2, 60)
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
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    std::vector<at::Tensor> outputs = open(ddp, outputs_of(model));
    CHECK(outputs[0].grad_fn() == outputs[3].grad_fn());
    CHECK(!outputs[0].is_view() && outputs[4].sizes() == model.params[3].sizes());
    loss_of(outputs).backward();
    loss_of(outputs_of(alone)).backward();
    for (const size_t i : {0, 1, 2, 3, 4}) {
        check_close(model.params[i].grad(), alone.params[i].grad(), 1e-7);
    }
    CHECK(model.params[3].equal(alone.params[3]));
    // What backward needs and was changed is noticed, as without.
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    at::Tensor output = open(ddp, model.params[0].tanh());
    output.zero_();
    CHECK(failing_backward(output.sum()).find("modified by an inplace operation") !=
          std::string::npos);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_long_graph_is_walked_without_recursion, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(1, 0);
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    at::Tensor sum = model.params[1].sum();
    for (int i = 0; i < 100000; i++) {
        sum = sum + 1.0;
    }
    open(ddp, sum).backward();
    CHECK(all_are(model.params[1].grad(), 1.0));
    tddp_ddp_free(ddp);
    leave(group);
}

// --- the same graph in each round ---------------------------------------------------------------

MULTI_TEST(a_static_graph_is_learnt_in_its_first_round, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = with(0, 1);
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 4; step++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
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
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    const std::string text = failing_backward(part(model, 0, 1.0) + part(model, 4, 1.0));
    CHECK_CONTAINS(text.c_str(), "l3.weight");
    tddp_ddp_free(ddp);
    leave(group);
}

// --- segments -----------------------------------------------------------------------------------

namespace
{

// y = tanh(W x + b) by parameters `first` and `first` + 1.
struct Layer {
    const Model *model;
    size_t first;
    int runs = 0;
    int freed = 0;
    bool noisy = false;
    bool fails = false;

    at::Tensor run(const at::Tensor &input)
    {
        runs++;
        at::Tensor hidden =
            at::linear(input, model->params[first], model->params[first + 1]).tanh();
        return noisy ? hidden * at::rand_like(hidden) : hidden;
    }
    static tddp_status again(void *state, tddp_tensor *const *inputs, size_t input_count,
                             tddp_tensor *const *outputs, size_t output_count)
    {
        auto *layer = static_cast<Layer *>(state);
        CHECK_INT(input_count, 1);
        CHECK_INT(output_count, 1);
        if (layer->fails) {
            return tddp_fail(TDDP_INTERNAL, "the layer fell over");
        }
        const at::Tensor &input = *reinterpret_cast<const at::Tensor *>(inputs[0]);
        CHECK(input.is_leaf());
        const at::Tensor output = layer->run(input);
        return tddp_tensor_assign(outputs[0], reinterpret_cast<const tddp_tensor *>(&output));
    }
    static void free(void *state)
    {
        static_cast<Layer *>(state)->freed++;
    }
    at::Tensor checkpointed(at::Tensor input)
    {
        static const tddp_checkpoint_ops ops = {sizeof ops, again, free};
        auto *in = reinterpret_cast<tddp_tensor *>(&input);
        tddp_checkpoint *checkpoint = nullptr;
        CHECK_OK(tddp_checkpoint_begin(&in, 1, 1, &ops, this, &checkpoint));
        at::Tensor output;
        {
            const at::NoGradGuard no_grad;
            output = run(input);
        }
        auto *out = reinterpret_cast<tddp_tensor *>(&output);
        CHECK_OK(tddp_checkpoint_outputs(checkpoint, &out, 1));
        tddp_checkpoint_free(checkpoint);
        return output;
    }
};

} // namespace

TEST(a_checkpointed_segment_gives_the_same_gradients)
{
    at::set_num_threads(1);
    Model model(0);
    Model plain(0);
    Layer layer{&model, 0};
    const at::Tensor input = spread({4, 5}, 3).requires_grad_();
    const at::Tensor other = spread({4, 5}, 3).requires_grad_();
    const at::Tensor output = layer.checkpointed(input * 2.0);
    CHECK_INT(layer.runs, 1);
    CHECK_TEXT(output.grad_fn()->name().c_str(), "CheckpointBackward");
    output.pow(2).sum().backward();
    CHECK_INT(layer.runs, 2);
    CHECK_INT(layer.freed, 1); // its inputs are let go as soon as they are not needed
    at::linear(other * 2.0, plain.params[0], plain.params[1]).tanh().pow(2).sum().backward();
    check_close(input.grad(), other.grad(), 1e-12);
    check_close(model.params[0].grad(), plain.params[0].grad(), 1e-12);
    check_close(model.params[1].grad(), plain.params[1].grad(), 1e-12);
    // An input without a gradient does no harm to the parameters'.
    model.forget_grad();
    layer.checkpointed(spread({4, 5}, 3) * 2.0).pow(2).sum().backward();
    check_close(model.params[0].grad(), plain.params[0].grad(), 1e-12);
}

TEST(a_segment_draws_the_same_random_numbers_again)
{
    at::set_num_threads(1);
    at::manual_seed(5);
    Model model(0);
    Layer layer{&model, 0};
    layer.noisy = true;
    const at::Tensor input = spread({4, 5}, 3).requires_grad_();
    const at::Tensor output = layer.checkpointed(input);
    const at::Tensor before = at::rand({3});
    output.sum().backward();
    const at::Tensor after = at::rand({3});
    // The same draws without a checkpoint.
    at::manual_seed(5);
    Model plain(0);
    Layer twin{&plain, 0};
    twin.noisy = true;
    const at::Tensor other = spread({4, 5}, 3).requires_grad_();
    twin.run(other).sum().backward();
    CHECK(at::rand({3}).equal(before));
    CHECK(at::rand({3}).equal(after));
    check_close(input.grad(), other.grad(), 1e-12);
    check_close(model.params[0].grad(), plain.params[0].grad(), 1e-12);
}

TEST(misuse_of_a_segment_is_told)
{
    at::set_num_threads(1);
    Model model(0);
    Layer layer{&model, 0};
    const at::Tensor input = spread({4, 5}, 3).requires_grad_();
    const auto text_of = [](const std::function<void()> &body) {
        try {
            body();
        } catch (const std::exception &error) {
            return std::string(error.what());
        }
        return std::string("nothing was thrown");
    };
    at::Tensor loss = layer.checkpointed(input).sum();
    CHECK_CONTAINS(text_of([&] { loss.backward({}, true, true); }).c_str(),
                   "has no second derivatives");
    loss.backward({}, true);
    loss.backward();
    CHECK_CONTAINS(text_of([&] { loss.backward(); }).c_str(), "second time");
    loss = layer.checkpointed(input).sum();
    CHECK_CONTAINS(text_of([&] { torch::autograd::grad({loss}, {input}); }).c_str(),
                   "not with gradients of chosen inputs");
    at::Tensor changed = input * 1.0;
    loss = layer.checkpointed(changed).sum();
    changed.zero_();
    CHECK_CONTAINS(text_of([&] { loss.backward(); }).c_str(), "modified by an inplace operation");
    loss = layer.checkpointed(input).sum();
    layer.fails = true;
    CHECK_CONTAINS(text_of([&] { loss.backward(); }).c_str(), "the layer fell over");
}

// Segments under data parallel: gradients arrive within an inner backward.
static void train_in_segments(int rank, int world_size, int port, int find_unused, int static_graph,
                              bool shared)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model whole(0);
    const tddp_ddp_opts opts = with(find_unused, static_graph);
    tddp_ddp *ddp = wrap(group, model, &opts);
    Layer first{&model, 0};
    Layer second{&model, 2};
    const auto forward = [shared](const Model &of, const at::Tensor &hidden) {
        const at::Tensor output = at::linear(hidden, of.params[4], of.params[5]).pow(2).mean();
        return shared ? output + of.params[1].sum() : output;
    };
    for (int step = 0; step < 4; step++) {
        const at::Tensor batch = spread({4 * world_size, 5}, step);
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        const at::Tensor hidden =
            second.checkpointed(first.checkpointed(batch.narrow(0, rank * 4, 4)));
        open(ddp, forward(model, hidden)).backward();
        const at::Tensor there = at::linear(batch, whole.params[0], whole.params[1]).tanh();
        forward(whole, at::linear(there, whole.params[2], whole.params[3]).tanh()).backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            check_close(model.params[i].grad(), whole.params[i].grad(), 1e-12);
        }
        model.step(0.1);
        whole.step(0.1);
        model.zero_grad();
        whole.zero_grad();
    }
    CHECK_INT(first.runs, 8);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(segments_under_data_parallel, 2, 60)
{
    train_in_segments(rank, world_size, port, 0, 0, false);
}

MULTI_TEST(segments_where_unused_parameters_are_looked_for, 2, 60)
{
    train_in_segments(rank, world_size, port, 1, 0, false);
}

MULTI_TEST(segments_in_a_static_graph_may_share_parameters, 3, 60)
{
    train_in_segments(rank, world_size, port, 0, 1, true);
}

MULTI_TEST(a_parameter_shared_with_a_segment_is_named, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    Layer first{&model, 0};
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    at::Tensor loss = first.checkpointed(spread({4, 5}, 0)).sum() + part(model, 1, 1.0);
    for (const size_t i : {2, 3, 4, 5}) {
        loss = loss + part(model, i, 1.0);
    }
    CHECK_CONTAINS(failing_backward(loss).c_str(), "\"l1.bias\" became ready twice");
    tddp_ddp_free(ddp);
    leave(group);
}
