// DistributedDataParallel with real autograd: several, extra, interrupted and failed backwards, and
// invalid parameters.
#include <atomic>

#include "model.h"

using namespace model_test;

MULTI_TEST(different_parameters_are_a_mismatch_on_every_rank, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0, rank ? at::kFloat : at::kDouble);
    std::vector<at::Tensor> buffers;
    tddp_ddp *ddp = nullptr;
    CHECK_STATUS(make(group, model, buffers, nullptr, &ddp), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "parameter \"l1.weight\" (number 0) is float64 [17, 5] on "
                                         "rank 0, but float32 [17, 5] on rank 1");
    CHECK(ddp == nullptr);
    leave(group);
}

// The flat buffers have the same size.
MULTI_TEST(different_buffer_shapes_are_a_mismatch_on_every_rank, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    std::vector<at::Tensor> buffers{at::zeros({3}, at::kFloat), at::zeros({}, at::kLong)};
    tddp_ddp *ddp = nullptr;
    CHECK_OK(make(group, model, buffers, nullptr, &ddp));
    CHECK_OK(tddp_ddp_sync_buffers(ddp, 0, nullptr));
    tddp_ddp_free(ddp);
    ddp = nullptr;
    buffers[0] = at::zeros({3 + rank}, at::kFloat);
    CHECK_STATUS(make(group, model, buffers, nullptr, &ddp), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "8 tensors: float32 [3], int64 [], float64 [17, 5], ");
    CHECK_CONTAINS(tddp_error_message(), "8 tensors: float32 [4], int64 [], float64 [17, 5], ");
    CHECK(ddp == nullptr);
    tddp_group_release(group);
}

MULTI_TEST(different_buffers_before_forward_and_in_a_long_list, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    std::vector<at::Tensor> buffers(100, at::zeros({3, 1}, at::kFloat));
    buffers[90] = rank ? at::zeros({1, 3}, at::kFloat) : at::zeros({3, 1}, at::kFloat);
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    opts.init_sync = 0;
    tddp_ddp *ddp = nullptr;
    CHECK_OK(make(group, model, buffers, &opts, &ddp));
    CHECK_STATUS(tddp_ddp_sync_buffers(ddp, 0, nullptr), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "100 tensors: float32 [3, 1], float32 [3, 1], ");
    tddp_ddp_free(ddp);
    tddp_group_release(group);
}

MULTI_TEST(the_next_forward_names_unused_parameters, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    at::linear(spread({4, 5}, 0), model.params[0], model.params[1]).sum().backward();
    CHECK_STATUS(tddp_ddp_prepare(ddp, 1, nullptr), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "4 of 6 parameters got no gradient");
    CHECK_CONTAINS(tddp_error_message(),
                   "\"l2.weight\", \"l2.bias\", \"l3.weight\", \"l3.bias\". ");
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(several_backwards_and_backward_without_forward, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    const auto part = [&](size_t i) {
        return model.params[i].mul(rank + 1.0).sum() + model.params[i + 1].mul(rank + 1.0).sum();
    };
    // Two losses over different parameters after one forward.
    run_forward(ddp, 1);
    (part(0) + part(2)).backward();
    part(4).backward();
    for (const at::Tensor &param : model.params) {
        CHECK(param.grad().equal(at::full_like(param, 1.5)));
    }
    // A backward without a forward is local, in the same memory.
    const void *memory = model.params[0].grad().data_ptr();
    part(0).backward();
    CHECK(model.params[0].grad().equal(at::full_like(model.params[0], 1.5 + rank + 1)));
    CHECK(model.params[0].grad().data_ptr() == memory);
    // The next synchronized backward averages the sum.
    run_forward(ddp, 1);
    (part(0) + part(2) + part(4)).backward();
    CHECK(model.params[0].grad().equal(at::full_like(model.params[0], 4.5)));
    CHECK(model.params[2].grad().equal(at::full_like(model.params[2], 3.0)));
    // The same part of a graph twice in an iteration.
    run_forward(ddp, 1);
    part(2).backward();
    CHECK(failing_backward(part(2)).find("was marked ready twice since forward") !=
          std::string::npos);
    CHECK_STATUS(tddp_ddp_prepare(ddp, 1, nullptr), TDDP_INVALID_ARGUMENT);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(gradients_are_local_after_free, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    const at::Tensor batch = spread({4, 5}, rank);
    run_forward(ddp, 1);
    model.loss(batch).backward();
    run_forward(ddp, 1); // freed while its hooks are armed
    tddp_ddp_free(ddp);
    model.zero_grad();
    model.loss(batch).backward();
    Model alone(0);
    alone.loss(batch).backward();
    for (size_t i = 0; i < model.params.size(); i++) {
        check_close(model.params[i].grad(), alone.params[i].grad(), 1e-12);
    }
    // Wrapped again, and freed after the group.
    ddp = wrap(group, model);
    run_forward(ddp, 1);
    model.zero_grad();
    model.loss(batch).backward();
    leave(group);
    run_forward(ddp, 0);
    CHECK_STATUS(tddp_ddp_sync_buffers(ddp, 0, nullptr), TDDP_OK); // there are none
    tddp_ddp_free(ddp);
    tddp_ddp_free(nullptr);
}

static std::atomic<int> waits_through;

static tddp_status count_waits(tddp_status (*body)(void *data, const tddp_wait *wait), void *data)
{
    waits_through++;
    return body(data, nullptr);
}

MULTI_TEST(backward_waits_in_the_hosts_blocking_region, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    opts.blocking_region = count_waits;
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 3; step++) {
        run_forward(ddp, 1);
        model.loss(spread({4, 5}, rank)).backward();
        CHECK_INT(waits_through, step + 1);
    }
    tddp_ddp_free(ddp);
    leave(group);
}

static tddp_status give_up(tddp_status (*body)(void *data, const tddp_wait *wait), void *data)
{
    tddp_cancel *cancel = nullptr;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait wait = {-1, cancel};
    const tddp_status status = body(data, &wait);
    tddp_cancel_free(cancel);
    return status;
}

MULTI_TEST(the_next_forward_finishes_an_interrupted_backward, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=200", 1);
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    opts.blocking_region = give_up;
    tddp_ddp *ddp = wrap(group, model, &opts);
    run_forward(ddp, 1);
    CHECK(failing_backward(model.params[0].sum() * (rank + 1.0) + model.loss(spread({4, 5}, 1)) -
                           model.loss(spread({4, 5}, 1)))
              .find("interrupted") != std::string::npos);
    run_forward(ddp, 1);
    CHECK(at::allclose(model.params[0].grad(), at::full_like(model.params[0], 1.5)));
    tddp_ddp_free(ddp);
    leave(group);
}

// Rank 0's second call continues the broadcast of its first one: rank 1 makes only one.
MULTI_TEST(an_interrupted_sync_buffers_continues, 2, 60)
{
    setenv("TDDP_FAKE", "delay_ms=200", 1);
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    std::vector<at::Tensor> buffers{spread({300}, 1), spread({2, 3}, 2)};
    tddp_ddp *ddp = nullptr;
    CHECK_OK(make(group, model, buffers, nullptr, &ddp));
    buffers[0].fill_(rank + 3.0);
    if (rank == 0) {
        tddp_cancel *cancel = nullptr;
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_cancel_trigger(cancel);
        const tddp_wait wait = {-1, cancel};
        CHECK_STATUS(tddp_ddp_sync_buffers(ddp, 0, &wait), TDDP_CANCELED);
        tddp_cancel_free(cancel);
    }
    CHECK_OK(tddp_ddp_sync_buffers(ddp, 0, nullptr));
    CHECK(buffers[0].equal(at::full({300}, 3.0, at::kDouble)));
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_failed_reduction_fails_backward_with_its_text, 2, 60)
{
    setenv("TDDP_FAKE", "fail_at=3", 1); // 1 compares, 2 broadcasts, 3 is the only bucket
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    const std::string text = failing_backward(model.loss(spread({4, 5}, rank)));
    // This rank's failure, or the other's if that was reported first.
    const tddp_status failed = tddp_ddp_prepare(ddp, 1, nullptr);
    CHECK(failed == TDDP_NETWORK || failed == TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), text.c_str());
    CHECK_CONTAINS(tddp_error_message(), "the gradients of an earlier step were not averaged (");
    // After the failure the model can still train locally.
    run_forward(ddp, 0);
    model.loss(spread({4, 5}, rank)).backward();
    tddp_ddp_free(ddp);
    tddp_group_release(group);
}

MULTI_TEST(sparse_gradients_are_refused, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    const at::Tensor rows =
        at::embedding(model.params[0], at::arange(3, at::kLong), -1, false, true);
    CHECK(failing_backward(rows.sum()).find("the gradient of \"l1.weight\" is sparse") !=
          std::string::npos);
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(parameters_must_be_leaves_that_require_grad, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    std::vector<at::Tensor> buffers;
    tddp_ddp *ddp = nullptr;
    const auto refused = [&](Model model, const char *text) {
        CHECK_STATUS(make(group, model, buffers, nullptr, &ddp), TDDP_INVALID_ARGUMENT);
        CHECK_CONTAINS(tddp_error_message(), text);
    };
    Model model(0);
    model.params[1] = model.params[1].mul(2);
    refused(model, "parameter \"l1.bias\" is not a leaf");
    model.params[1] = at::zeros({17});
    refused(model, "parameter \"l1.bias\" does not require a gradient");
    model.params[1] = at::Tensor();
    refused(model, "parameter \"l1.bias\" is undefined");
    model.params[1] = model.params[3];
    refused(model, "\"l1.bias\" and \"l2.bias\" are one tensor");
    buffers.push_back(at::eye(3).to_sparse());
    Model fresh(0);
    CHECK_STATUS(make(group, fresh, buffers, nullptr, &ddp), TDDP_UNSUPPORTED);
    CHECK(ddp == nullptr);
    leave(group);
}
