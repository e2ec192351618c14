// Helpers of the tests of DistributedDataParallel: a group over the runner's store and the fake
// backend, a model of odd sizes, and comparisons. With TDDP_TEST_BACKEND=nccl they run over
// stand-ins for CUDA and NCCL, where host memory counts as a device's.
#ifndef TDDP_TEST_TORCH_MODEL_H
#define TDDP_TEST_TORCH_MODEL_H

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <tddp/torch.h>

#undef CHECK // libtorch has one too
#include "hosted_store.h"

namespace model_test
{

inline bool stands_in()
{
    const char *backend = std::getenv("TDDP_TEST_BACKEND");
    return backend && std::string(backend) == "nccl";
}

inline tddp_group *join(int rank, int world_size, int port)
{
    at::set_num_threads(1);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = nullptr;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = stands_in() ? "nccl" : "fake";
    opts.device_index = stands_in() ? 0 : opts.device_index;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 20000;
    CHECK_OK(tddp_group_create(&opts, nullptr, &group));
    tddp_store_release(store);
    return group;
}

inline void leave(tddp_group *group)
{
    CHECK_OK(tddp_barrier(group, nullptr));
    tddp_group_shutdown(group, 5000);
    tddp_group_release(group);
}

// Pseudorandom values, equal on all ranks.
inline at::Tensor spread(at::IntArrayRef shape, int seed, at::ScalarType dtype = at::kDouble)
{
    int64_t count = 1;
    for (int64_t size : shape) {
        count *= size;
    }
    return at::arange(count, at::kDouble).mul(0.7391).add(seed).sin().view(shape).to(dtype);
}

// Three layers of odd sizes.
struct Model {
    std::vector<std::string> names{"l1.weight", "l1.bias",   "l2.weight",
                                   "l2.bias",   "l3.weight", "l3.bias"};
    std::vector<at::Tensor> params;
    std::vector<unsigned> flags; // by parameter; missing ones are 0

    explicit Model(int seed, at::ScalarType dtype = at::kDouble)
    {
        const std::vector<int64_t> shapes[] = {{17, 5}, {17}, {13, 17}, {13}, {3, 13}, {3}};
        for (const auto &shape : shapes) {
            params.push_back(spread(shape, seed++, dtype).mul_(0.3).requires_grad_());
        }
    }
    at::Tensor forward(const at::Tensor &input) const
    {
        at::Tensor hidden = at::linear(input, params[0], params[1]).tanh();
        hidden = at::linear(hidden, params[2], params[3]).tanh();
        return at::linear(hidden, params[4], params[5]);
    }
    at::Tensor loss(const at::Tensor &input) const
    {
        return forward(input).pow(2).mean();
    }
    void step(double rate) const
    {
        const at::NoGradGuard no_grad;
        for (const at::Tensor &param : params) {
            param.sub_(param.grad() * rate);
        }
    }
    // As in torch-rb.
    void zero_grad() const
    {
        for (const at::Tensor &param : params) {
            if (param.grad().defined()) {
                param.grad().detach_();
                param.grad().zero_();
            }
        }
    }
    void forget_grad() const
    {
        for (const at::Tensor &param : params) {
            param.mutable_grad().reset();
        }
    }
};

inline std::vector<tddp_tensor *> handles(std::vector<at::Tensor> &tensors)
{
    std::vector<tddp_tensor *> pointers;
    for (at::Tensor &tensor : tensors) {
        pointers.push_back(reinterpret_cast<tddp_tensor *>(&tensor));
    }
    return pointers;
}

inline tddp_status make(tddp_group *group, Model &model, std::vector<at::Tensor> &buffers,
                        const tddp_ddp_opts *opts, tddp_ddp **out)
{
    std::vector<tddp_ddp_param> params;
    for (size_t i = 0; i < model.params.size(); i++) {
        params.push_back({handles(model.params)[i], model.names[i].c_str(),
                          i < model.flags.size() ? model.flags[i] : 0});
    }
    return tddp_ddp_create(group, params.data(), params.size(), handles(buffers).data(),
                           buffers.size(), opts, nullptr, out);
}

inline tddp_ddp *wrap(tddp_group *group, Model &model, const tddp_ddp_opts *opts = nullptr)
{
    std::vector<at::Tensor> buffers;
    tddp_ddp *ddp = nullptr;
    CHECK_OK(make(group, model, buffers, opts, &ddp));
    return ddp;
}

// A wrapper's calls around forward.
inline void run_forward(tddp_ddp *ddp, int sync)
{
    CHECK_OK(tddp_ddp_prepare(ddp, sync, nullptr));
    tddp_ddp_arm(ddp, 1);
}

inline tddp_ddp_opts small_buckets()
{
    tddp_ddp_opts opts = TDDP_DDP_OPTS_INIT;
    static const size_t limits[] = {200, 1000};
    opts.reducer.limits = limits;
    opts.reducer.limit_count = 2;
    return opts;
}

inline void check_close(const at::Tensor &got, const at::Tensor &expected, double tolerance)
{
    CHECK_DOUBLE((got.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>() /
                     (expected.to(at::kDouble).norm().item<double>() + 1e-30),
                 0.0, tolerance);
}

// The text of the exception that backward throws.
inline std::string failing_backward(const at::Tensor &loss)
{
    try {
        loss.backward();
    } catch (const std::exception &error) {
        return error.what();
    }
    return "backward did not fail";
}

} // namespace model_test

#endif
