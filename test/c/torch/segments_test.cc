// Checkpointed segments with real autograd: recomputed in backward, alone and under data parallel,
// where gradients are accumulated within a nested backward.
#include <functional>

#include <tddp/torch_checkpoint.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "modes.h"

using namespace modes_test;

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
    CHECK_INT(layer.freed, 1); // its inputs are released after backward
    at::linear(other * 2.0, plain.params[0], plain.params[1]).tanh().pow(2).sum().backward();
    check_close(input.grad(), other.grad(), 1e-12);
    check_close(model.params[0].grad(), plain.params[0].grad(), 1e-12);
    check_close(model.params[1].grad(), plain.params[1].grad(), 1e-12);
    // An input that requires no gradient doesn't affect the parameters'.
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

TEST(misuse_of_a_segment_fails)
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
                   "not with gradients of selected inputs");
    at::Tensor changed = input * 1.0;
    loss = layer.checkpointed(changed).sum();
    changed.zero_();
    CHECK_CONTAINS(text_of([&] { loss.backward(); }).c_str(), "modified by an inplace operation");
    loss = layer.checkpointed(input).sum();
    layer.fails = true;
    CHECK_CONTAINS(text_of([&] { loss.backward(); }).c_str(), "the layer fell over");
}

// Segments under data parallel: gradients are accumulated within a nested backward.
static void train_in_segments(int rank, int world_size, int port, int find_unused, int static_graph,
                              bool shared)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model reference(0);
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
        run_forward(ddp, 1);
        const at::Tensor hidden =
            second.checkpointed(first.checkpointed(batch.narrow(0, rank * 4, 4)));
        open(ddp, forward(model, hidden)).backward();
        const at::Tensor there = at::linear(batch, reference.params[0], reference.params[1]).tanh();
        forward(reference, at::linear(there, reference.params[2], reference.params[3]).tanh())
            .backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            check_close(model.params[i].grad(), reference.params[i].grad(), 1e-12);
        }
        model.step(0.1);
        reference.step(0.1);
        model.zero_grad();
        reference.zero_grad();
    }
    CHECK_INT(first.runs, 8);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(segments_under_data_parallel, 2, 60)
{
    train_in_segments(rank, world_size, port, 0, 0, false);
}

MULTI_TEST(segments_with_find_unused, 2, 60)
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
    run_forward(ddp, 1);
    at::Tensor loss = first.checkpointed(spread({4, 5}, 0)).sum() + part(model, 1, 1.0);
    for (const size_t i : {2, 3, 4, 5}) {
        loss = loss + part(model, i, 1.0);
    }
    const std::string text = failing_backward(loss);
    CHECK_CONTAINS(text.c_str(), "\"l1.bias\" was marked ready twice");
    CHECK_CONTAINS(text.c_str(),
                   "a layer that two checkpointed segments share, static_graph: true");
    tddp_ddp_free(ddp);
    leave(group);
}
