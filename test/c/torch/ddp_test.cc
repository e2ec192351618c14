// DistributedDataParallel with real autograd: several processes compared with one, gradients as
// views, the broadcast of parameters and buffers.
#include "model.h"

using namespace model_test;

// `world_size` processes, each with its part of the batch, compared with one with all of it.
static void follow(int rank, int world_size, int port, at::ScalarType dtype, double tolerance,
                   bool set_to_none)
{
    constexpr int64_t per_rank = 4;
    tddp_group *group = join(rank, world_size, port);
    Model model(rank * 100, dtype); // rank 0's parameters are broadcast
    Model reference(0, dtype);
    const tddp_ddp_opts opts = small_buckets();
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 12; step++) {
        const at::Tensor batch = spread({per_rank * world_size, 5}, step, dtype);
        run_forward(ddp, 1);
        model.loss(batch.narrow(0, rank * per_rank, per_rank)).backward();
        reference.loss(batch).backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            check_close(model.params[i].grad(), reference.params[i].grad(), tolerance);
        }
        model.step(0.1);
        reference.step(0.1);
        if (set_to_none) {
            model.forget_grad();
        } else {
            model.zero_grad();
        }
        reference.zero_grad();
    }
    CHECK(tddp_reducer_bucket_count(tddp_ddp_reducer(ddp)) > 1);
    for (size_t i = 0; i < model.params.size(); i++) {
        check_close(model.params[i], reference.params[i], tolerance);
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(one_process_trains_as_without_ddp, 1, 60)
{
    follow(rank, world_size, port, at::kDouble, 1e-12, false);
}

MULTI_TEST(two_processes_train_as_one, 2, 60)
{
    follow(rank, world_size, port, at::kDouble, 1e-12, false);
}

MULTI_TEST(three_processes_train_as_one, 3, 60)
{
    follow(rank, world_size, port, at::kDouble, 1e-12, false);
}

MULTI_TEST(two_processes_train_as_one_in_single_precision, 2, 60)
{
    follow(rank, world_size, port, at::kFloat, 1e-5, false);
}

MULTI_TEST(gradients_may_be_set_to_none_each_step, 2, 60)
{
    follow(rank, world_size, port, at::kDouble, 1e-12, true);
}

MULTI_TEST(accumulating_under_no_sync_equals_a_larger_batch, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model reference(0);
    tddp_ddp *ddp = wrap(group, model);
    for (int step = 0; step < 4; step++) {
        // Micro-batches 2r and 2r + 1 are this rank's.
        const at::Tensor batch = spread({16, 5}, step);
        for (int part = 0; part < 2; part++) {
            run_forward(ddp, part == 1);
            model.loss(batch.narrow(0, (2 * rank + part) * 4, 4)).div(2).backward();
        }
        reference.loss(batch).backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            check_close(model.params[i].grad(), reference.params[i].grad(), 1e-12);
        }
        model.step(0.1);
        reference.step(0.1);
        model.zero_grad();
        reference.zero_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(gradients_are_views_into_the_buckets, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = small_buckets();
    tddp_ddp *ddp = wrap(group, model, &opts);
    auto *reducer = const_cast<tddp_reducer *>(tddp_ddp_reducer(ddp));
    const at::Tensor batch = spread({4, 5}, rank);
    for (const at::Tensor &param : model.params) {
        CHECK(!param.grad().defined()); // no gradient before the first backward
    }
    void *first = tddp_reducer_gradient(reducer, 0);
    for (int step = 0; step < 3; step++) {
        std::vector<at::Tensor> before;
        for (const at::Tensor &param : model.params) {
            before.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
        }
        run_forward(ddp, 1);
        CHECK((tddp_reducer_gradient(reducer, 0) == first) == (step == 0)); // rebuilt once
        for (size_t i = 0; i < model.params.size(); i++) {
            CHECK(!before[i].defined() || before[i].equal(model.params[i].grad()));
        }
        model.zero_grad();
        model.loss(batch).backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            at::Tensor grad = model.params[i].grad();
            CHECK(grad.data_ptr() == tddp_reducer_gradient(reducer, i));
            CHECK(!grad.is_view());
            CHECK(grad.sizes() == model.params[i].sizes());
            grad.detach_();
        }
    }
    // A gradient that the user replaced becomes a view again.
    run_forward(ddp, 1);
    const at::Tensor expected = model.params[2].grad().clone();
    model.zero_grad();
    model.params[2].mutable_grad() = at::zeros_like(expected);
    model.loss(batch).backward();
    CHECK(model.params[2].grad().data_ptr() == tddp_reducer_gradient(reducer, 2));
    check_close(model.params[2].grad(), expected, 1e-12);
    // The gradients outlive the wrapper and the group.
    const at::Tensor kept = model.params[4].grad();
    const at::Tensor copy = kept.clone();
    tddp_ddp_free(ddp);
    leave(group);
    CHECK(kept.equal(copy));
}

MULTI_TEST(parameters_and_buffers_are_broadcast_from_rank_0, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(10 * rank);
    const Model origin(0);
    const auto make_buffers = [](int seed) {
        return std::vector<at::Tensor>{spread({7}, seed, at::kFloat),
                                       at::full({}, 40 + seed, at::kLong),
                                       spread({3, 5}, seed, at::kDouble).t(),
                                       spread({11}, seed).gt(0),
                                       at::empty({0}),
                                       spread({5}, seed, at::kHalf)};
    };
    std::vector<at::Tensor> buffers = make_buffers(rank);
    const auto version = buffers[0]._version();
    const auto param_version = model.params[0]._version();
    tddp_ddp *ddp = nullptr;
    CHECK_OK(make(group, model, buffers, nullptr, &ddp));
    for (size_t i = 0; i < model.params.size(); i++) {
        CHECK(model.params[i].equal(origin.params[i]));
        CHECK(model.params[i].requires_grad() && model.params[i].is_leaf());
    }
    for (int root = 0; root < 3; root++) {
        const std::vector<at::Tensor> expected = make_buffers(root);
        if (root > 0) {
            CHECK_OK(tddp_ddp_sync_buffers(ddp, root, nullptr));
        }
        for (size_t i = 0; i < buffers.size(); i++) {
            CHECK(buffers[i].equal(expected[i]));
        }
        const std::vector<at::Tensor> own = make_buffers(rank);
        for (size_t i = 0; i < buffers.size(); i++) {
            buffers[i].variable_data().copy_(own[i]);
        }
    }
    CHECK_INT(buffers[0]._version(), version);
    CHECK_INT(model.params[0]._version(), param_version);
    CHECK_STATUS(tddp_ddp_sync_buffers(ddp, 3, nullptr), TDDP_INVALID_ARGUMENT);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(without_init_sync_parameters_are_unchanged, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(10 * rank);
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    opts.init_sync = 0;
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(model.params[0].equal(Model(10 * rank).params[0]));
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(an_undefined_gradient_counts_as_zero, 2, 60)
{
    // Rank 1 contributes zero for parameter 5, rank 0 two.
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    at::Tensor loss = model.params[5].sum() * (rank ? 0.0 : 2.0);
    for (size_t i = 0; i < 5; i++) {
        loss = loss + model.params[i].sum();
    }
    loss.backward();
    CHECK(model.params[5].grad().equal(at::full_like(model.params[5], 1.0)));
    tddp_ddp_free(ddp);
    leave(group);
}
