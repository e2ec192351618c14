// Modes of DistributedDataParallel with real autograd: separate gradients, delayed parameters,
// several dtypes and strides, on_caller hooks, joined ranks, stale parameters.
#include <atomic>
#include <thread>

#include "modes.h"

using namespace modes_test;

namespace
{

at::Tensor sum_of(const Model &model, double factor)
{
    at::Tensor loss = model.params[0].sum() * factor;
    for (size_t i = 1; i < model.params.size(); i++) {
        loss = loss + model.params[i].sum() * factor;
    }
    return loss;
}

} // namespace

MULTI_TEST(separate_gradients_are_copied_in_and_out, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model reference(0);
    tddp_ddp_opts opts = small_buckets();
    opts.gradients_apart = 1;
    tddp_ddp *ddp = wrap(group, model, &opts);
    auto *reducer = const_cast<tddp_reducer *>(tddp_ddp_reducer(ddp));
    for (int step = 0; step < 4; step++) {
        const at::Tensor batch = spread({4 * world_size, 5}, step);
        const void *memory =
            model.params[0].grad().defined() ? model.params[0].grad().data_ptr() : nullptr;
        run_forward(ddp, 1);
        model.loss(batch.narrow(0, rank * 4, 4)).backward();
        reference.loss(batch).backward();
        for (size_t i = 0; i < model.params.size(); i++) {
            const at::Tensor &grad = model.params[i].grad();
            check_close(grad, reference.params[i].grad(), 1e-12);
            CHECK(grad.data_ptr() != tddp_reducer_gradient(reducer, i));
        }
        CHECK(!memory || model.params[0].grad().data_ptr() == memory);
        model.step(0.1);
        reference.step(0.1);
        model.zero_grad();
        reference.zero_grad();
    }
    // Accumulated without synchronization, then averaged.
    run_forward(ddp, 0);
    sum_of(model, rank).backward();
    run_forward(ddp, 1);
    sum_of(model, 1.0).backward();
    CHECK(all_are(model.params[3].grad(), 2.0));
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(hooks_are_suspended_during_forward, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    const auto backward_gives = [&](double expected) {
        model.zero_grad();
        sum_of(model, rank + 1.0).backward();
        return all_are(model.params[0].grad(), expected);
    };
    for (int step = 0; step < 3; step++) {
        CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
        CHECK(backward_gives(rank + 1.0)); // inside forward
        CHECK(!tddp_ddp_round_open(ddp));
        tddp_ddp_arm(ddp, 1);
        CHECK(tddp_ddp_round_open(ddp));
        run_forward(ddp, 0);
        tddp_ddp_suspend(ddp); // a forward that failed
        CHECK(backward_gives(rank + 1.0));
        tddp_ddp_arm(ddp, 0);
        CHECK(backward_gives(1.5));
        CHECK(!tddp_ddp_round_open(ddp));
        CHECK(backward_gives(rank + 1.0));
    }
    CHECK_OK(tddp_ddp_prepare(ddp, 1, nullptr));
    tddp_ddp_arm(ddp, 0);
    CHECK(!tddp_ddp_round_open(ddp));
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(delayed_parameters_are_marked_ready_with_another, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    Model reference(0);
    model.flags = {0, 0, 0, 0, TDDP_DDP_DELAYED, TDDP_DDP_DELAYED};
    tddp_ddp_opts opts = small_buckets();
    opts.delayed_by = 0;
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 3; step++) {
        const at::Tensor batch = spread({8, 5}, step);
        run_forward(ddp, 1);
        model.loss(batch.narrow(0, rank * 4, 4)).backward();
        reference.loss(batch).backward();
        size_t order[6];
        CHECK_INT(tddp_reducer_order(tddp_ddp_reducer(ddp), order, 6), 6);
        size_t place[6];
        for (size_t i = 0; i < 6; i++) {
            place[order[i]] = i;
        }
        CHECK(place[4] > place[0] && place[5] > place[0]);
        for (size_t i = 0; i < model.params.size(); i++) {
            check_close(model.params[i].grad(), reference.params[i].grad(), 1e-12);
        }
        model.zero_grad();
        reference.zero_grad();
    }
    tddp_ddp_free(ddp);
    opts.delayed_by = 6;
    std::vector<at::Tensor> none;
    CHECK_STATUS(make(group, model, none, &opts, &ddp), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "opts.delayed_by is 6");
    leave(group);
}

MULTI_TEST(parameters_of_several_dtypes_and_strides, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    model.params = {spread({3, 5}, 0, at::kFloat).requires_grad_(),
                    spread({5, 3}, 1).t().detach().requires_grad_(),
                    spread({7}, 2, at::kBFloat16).requires_grad_(),
                    spread({4}, 3, at::kHalf).requires_grad_(),
                    at::complex(spread({3}, 4), spread({3}, 5)).requires_grad_(),
                    spread({}, 6).requires_grad_()};
    tddp_ddp_opts opts = small_buckets();
    for (int apart = 0; apart < 2; apart++) {
        opts.gradients_apart = apart;
        tddp_ddp *ddp = wrap(group, model, &opts);
        for (int step = 0; step < 3; step++) {
            run_forward(ddp, 1);
            at::Tensor loss = at::zeros({}, at::kDouble);
            for (const at::Tensor &param : model.params) {
                const at::Tensor real = param.is_complex() ? at::real(param * 2.0) : param * 2.0;
                loss = loss + (real * (rank + 1.0)).sum().to(at::kDouble);
            }
            const at::Tensor weights = spread({3, 5}, step + rank);
            (loss + (model.params[1] * weights).sum()).backward();
            for (const size_t i : {0, 2, 3, 4, 5}) {
                const at::Tensor &grad = model.params[i].grad();
                CHECK(grad.scalar_type() == model.params[i].scalar_type());
                check_close(i == 4 ? at::real(grad) : grad,
                            at::full(grad.sizes(), 3.0, at::kDouble), 1e-12);
            }
            const at::Tensor mean = (spread({3, 5}, step) + spread({3, 5}, step + 1)) / 2.0;
            check_close(model.params[1].grad(), mean + 3.0, 1e-12);
            model.forget_grad();
        }
        tddp_ddp_free(ddp);
    }
    leave(group);
}

MULTI_TEST(second_derivatives_are_refused, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    std::string text;
    try {
        model.loss(spread({4, 5}, 0)).backward({}, true, true);
    } catch (const std::exception &error) {
        text = error.what();
    }
    CHECK_CONTAINS(text.c_str(), "requires a gradient itself");
    CHECK_CONTAINS(text.c_str(), "\"l3.");
    model.forget_grad(); // the gradient and its parameter reference each other
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(changed_parameters_are_stale, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const at::Tensor frozen = spread({3}, 0);
    const auto *watched = reinterpret_cast<const tddp_tensor *>(&frozen);
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    opts.watched = &watched;
    opts.watched_count = 1;
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(!tddp_ddp_stale(ddp));
    frozen.requires_grad_();
    CHECK(tddp_ddp_stale(ddp));
    frozen.requires_grad_(false);
    CHECK(!tddp_ddp_stale(ddp));
    model.params[2].requires_grad_(false);
    CHECK(tddp_ddp_stale(ddp));
    model.params[2].requires_grad_();
    CHECK(!tddp_ddp_stale(ddp));
    model.params[3].set_data(model.params[3].to(at::kFloat));
    CHECK(tddp_ddp_stale(ddp));
    tddp_ddp_free(ddp);
    leave(group);
}

// --- hooks --------------------------------------------------------------------------------------

namespace
{

// Like a host's hook: on the caller's thread, with tensors; the second stage waits itself.
struct HostHook {
    int calls = 0;
    int freed = 0;
    bool fails = false;
    size_t gradients = 0;

    static tddp_status run(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                           tddp_work **, int *again)
    {
        auto *self = static_cast<HostHook *>(state);
        self->calls++;
        if (self->fails) {
            return tddp_fail(TDDP_INTERNAL, "the hook fell over");
        }
        if (stage == 0) {
            *again = 1;
            return TDDP_OK;
        }
        at::Tensor flat;
        CHECK_OK(tddp_ddp_bucket_tensor(bucket, reinterpret_cast<tddp_tensor *>(&flat)));
        CHECK_INT(flat.numel(), bucket->buffer.count);
        tddp_work *work = nullptr;
        CHECK_OK(tddp_all_reduce(group, bucket->buffer, TDDP_REDUCE_SUM, 1.0, &work));
        CHECK_OK(tddp_work_wait(work, nullptr));
        tddp_work_release(work);
        flat.mul_(10.0);
        at::Tensor grad;
        auto *into = reinterpret_cast<tddp_tensor *>(&grad);
        for (size_t i = 0; i < bucket->gradient_count; i++) {
            CHECK_OK(tddp_ddp_gradient_tensor(bucket, i, into));
            CHECK_INT(grad.numel(), bucket->gradients[i].count);
            CHECK(grad.dim() == static_cast<int64_t>(bucket->gradients[i].ndim));
            grad.add_(static_cast<double>(bucket->gradients[i].param));
            self->gradients++;
        }
        CHECK_STATUS(tddp_ddp_gradient_tensor(bucket, bucket->gradient_count, into),
                     TDDP_INVALID_ARGUMENT);
        return TDDP_OK;
    }
    static void free(void *state)
    {
        static_cast<HostHook *>(state)->freed++;
    }
};

std::atomic<int> here{1};

} // namespace

MULTI_TEST(on_caller_hooks_run_in_backward, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    HostHook state;
    const tddp_comm_hook_ops ops = {sizeof ops,
                                    "host",
                                    1,
                                    HostHook::run,
                                    HostHook::free,
                                    nullptr,
                                    1U << TDDP_CPU | 1U << TDDP_CUDA};
    tddp_comm_hook *hook = nullptr;
    CHECK_OK(tddp_comm_hook_make(&ops, &state, &hook));
    tddp_ddp_opts opts = small_buckets();
    opts.host_here = [] { return here.load(); };
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(!tddp_ddp_hook_here(ddp));
    CHECK_OK(tddp_ddp_set_hook(ddp, hook));
    CHECK(tddp_ddp_hook_here(ddp));
    tddp_comm_hook_release(hook);
    for (int step = 0; step < 4; step++) {
        here = step != 2; // in step 2 finish runs all stages
        run_forward(ddp, 1);
        const int before = state.calls;
        const auto backward = [&] { sum_of(model, rank + 1.0).backward(); };
        if (stands_in()) { // as with a device backward ends on another thread, without the hook
            std::thread(backward).join();
            CHECK_INT(state.calls, before);
        } else {
            backward();
        }
        CHECK_OK(tddp_ddp_finish_backward(ddp));
        CHECK_INT(state.calls - before, 2 * tddp_reducer_bucket_count(tddp_ddp_reducer(ddp)));
        for (size_t i = 0; i < model.params.size(); i++) {
            CHECK(all_are(model.params[i].grad(), 30.0 + static_cast<double>(i)));
        }
        model.zero_grad();
    }
    CHECK_INT(state.gradients, 24);
    tddp_bucket other_bucket{};
    at::Tensor flat;
    CHECK_STATUS(tddp_ddp_bucket_tensor(&other_bucket, reinterpret_cast<tddp_tensor *>(&flat)),
                 TDDP_INVALID_ARGUMENT);
    run_forward(ddp, 1);
    state.fails = true;
    if (stands_in()) {
        sum_of(model, 1.0).backward();
        CHECK_STATUS(tddp_ddp_prepare(ddp, 1, nullptr), TDDP_UNSUPPORTED);
        CHECK_CONTAINS(tddp_error_message(), "runs once backward has returned");
    } else {
        CHECK_CONTAINS(failing_backward(sum_of(model, 1.0)).c_str(), "the hook fell over");
    }
    CHECK_STATUS(tddp_ddp_prepare(ddp, 1, nullptr), TDDP_INTERNAL);
    tddp_ddp_free(ddp);
    CHECK_INT(state.freed, 1);
    leave(group);
}

// --- joined ranks -------------------------------------------------------------------------------

MULTI_TEST(a_joined_rank_shadows_the_others, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    const tddp_ddp_opts opts = small_buckets();
    tddp_ddp *ddp = wrap(group, model, &opts);
    for (int step = 0; step < 4; step++) {
        const int active = step < 2 ? 3 : 2; // rank 0 has only two batches
        CHECK_OK(tddp_ddp_set_divisor(ddp, active));
        run_forward(ddp, 1);
        if (rank == 0 && step >= 2) {
            CHECK_OK(tddp_ddp_shadow(ddp, nullptr));
        } else {
            sum_of(model, rank + 1.0).backward();
            CHECK(all_are(model.params[1].grad(), step < 2 ? 2.0 : 2.5));
        }
        model.zero_grad();
    }
    CHECK_STATUS(tddp_ddp_set_divisor(ddp, 4), TDDP_INVALID_ARGUMENT);
    tddp_ddp_free(ddp);
    leave(group);
}
