// Norms of gradients on one rank and over several, and gradient clipping.
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <tddp/torch_nn.h>

#include "model.h"

using namespace model_test;

namespace
{

const tddp_tensor *handle(const at::Tensor &tensor)
{
    return reinterpret_cast<const tddp_tensor *>(&tensor);
}

std::vector<const tddp_tensor *> handles_of(const std::vector<at::Tensor> &tensors)
{
    std::vector<const tddp_tensor *> pointers;
    for (const at::Tensor &tensor : tensors) {
        pointers.push_back(handle(tensor));
    }
    return pointers;
}

std::vector<at::Tensor> some(at::ScalarType dtype, int seed = 0)
{
    return {spread({17, 5}, seed, dtype), spread({1}, seed + 1, dtype), spread({0}, 2, dtype),
            spread({131, 1009}, seed + 3, dtype), spread({6, 7}, seed + 4, dtype).t()};
}

double by_hand(const std::vector<at::Tensor> &tensors, double order)
{
    std::vector<at::Tensor> flat;
    for (const at::Tensor &tensor : tensors) {
        flat.push_back(tensor.to(at::kDouble).reshape({-1}));
    }
    return at::linalg_vector_norm(at::cat(flat), order).item<double>();
}

double norm(const std::vector<at::Tensor> &tensors, double order, tddp_group *group = nullptr)
{
    double value = -1;
    CHECK_OK(
        tddp_total_norm(handles_of(tensors).data(), tensors.size(), order, group, nullptr, &value));
    return value;
}

std::vector<at::Tensor> params_with(const std::vector<at::Tensor> &gradients)
{
    std::vector<at::Tensor> params;
    for (const at::Tensor &gradient : gradients) {
        params.push_back(at::zeros_like(gradient).requires_grad_());
        params.back().mutable_grad() = gradient.clone();
    }
    return params;
}

tddp_status clip(const std::vector<at::Tensor> &params, double max_norm, double order, double *out,
                 int error = 0, tddp_group *group = nullptr)
{
    return tddp_clip_grad_norm(handles_of(params).data(), params.size(), max_norm, order, error,
                               group, nullptr, out);
}

const double infinity = std::numeric_limits<double>::infinity();

} // namespace

TEST(norms_of_all_orders_and_dtypes)
{
    for (int threads : {1, 3}) {
        at::set_num_threads(threads);
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
            for (double order : {2.0, 1.0, 3.0, 0.5, infinity}) {
                const double expected = by_hand(some(dtype), order);
                CHECK_DOUBLE(norm(some(dtype), order) / expected, 1, 1e-12);
            }
        }
    }
    CHECK_DOUBLE(norm({}, 2), 0, 0);
    const at::Tensor pair = at::complex(at::full({2}, 3.0), at::full({2}, 4.0));
    CHECK_DOUBLE(norm({pair}, 2), std::sqrt(50.0), 1e-12);
    double value = 7;
    CHECK_STATUS(tddp_total_norm(nullptr, 0, 0.0, nullptr, nullptr, &value), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "norm_type 0: expected a number above 0, or infinity");
    CHECK_DOUBLE(value, 7, 0);
}

TEST(a_norm_is_independent_of_the_threads)
{
    std::vector<double> values;
    for (int threads : {1, 2, 3}) {
        at::set_num_threads(threads);
        values.push_back(norm(some(at::kFloat), 2));
    }
    CHECK(values[0] == values[1] && values[0] == values[2]);
}

TEST(clipping_scales_only_larger_norms)
{
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
        const std::vector<at::Tensor> gradients = some(dtype);
        std::vector<at::Tensor> params = params_with(gradients);
        params.push_back(at::zeros({3}).requires_grad_()); // without a gradient
        double before = 0, after = 0;
        CHECK_OK(clip(params, 10.0, 2, &before));
        CHECK_DOUBLE(before / by_hand(gradients, 2), 1, 1e-12);
        for (size_t i = 0; i < gradients.size(); i++) {
            check_close(params[i].grad(), gradients[i] * (10.0 / (before + 1e-6)), 1e-6);
        }
        CHECK(!params.back().grad().defined());
        const std::vector<at::Tensor> kept{params[0].grad().clone()};
        CHECK_OK(clip(params, 11.0, 2, &after));
        CHECK_DOUBLE(after, 10.0, 1e-5);
        CHECK(params[0].grad().equal(kept[0]));
        CHECK_OK(tddp_scale_gradients(handles_of(params).data(), params.size(), 5.0, 10.0));
        CHECK_OK(clip(params, infinity, infinity, &after));
        CHECK_DOUBLE(after, by_hand(gradients, infinity) * 5 / before, 1e-5);
    }
}

TEST(a_repeated_parameter_counts_once)
{
    std::vector<at::Tensor> params = params_with({at::full({4}, 2.0)});
    params.push_back(params[0]);
    double value = 0;
    CHECK_OK(clip(params, 2.0, 2, &value));
    CHECK_DOUBLE(value, 4, 1e-12);
    CHECK_DOUBLE(params[0].grad()[0].item<double>(), 1, 1e-6);
}

TEST(nonfinite_norms)
{
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (double bad : {infinity, -infinity, nan}) {
        for (double order : {2.0, infinity, 1.0}) {
            at::Tensor gradient = at::ones({37}, at::kDouble);
            gradient[11] = bad;
            std::vector<at::Tensor> params = params_with({gradient, at::ones({5}, at::kDouble)});
            double value = 0;
            CHECK_STATUS(clip(params, 1, order, &value, 1), TDDP_INVALID_ARGUMENT);
            CHECK_CONTAINS(tddp_error_message(), "so they cannot be clipped to 1");
            CHECK(params[1].grad().equal(at::ones({5}, at::kDouble)));
            CHECK_OK(clip(params, 1, order, &value));
            CHECK(std::isnan(bad) ? std::isnan(value) : value == infinity);
            const double other = params[1].grad()[0].item<double>();
            CHECK(std::isnan(bad) ? std::isnan(other) : other == 0);
        }
    }
}

TEST(values_are_clipped)
{
    std::vector<at::Tensor> params = params_with(some(at::kFloat));
    CHECK_OK(tddp_clip_grad_value(handles_of(params).data(), params.size(), 0.25));
    for (size_t i = 0; i < params.size(); i++) {
        CHECK(params[i].grad().equal(some(at::kFloat)[i].clamp(-0.25, 0.25)));
    }
}

TEST(sparse_gradients_have_norms)
{
    const at::Tensor rows = at::tensor(std::vector<int64_t>{1, 3, 1}).view({1, 3});
    const at::Tensor sparse = at::sparse_coo_tensor(rows, at::ones({3, 3}, at::kDouble), {5, 3});
    at::Tensor param = at::zeros({5, 3}, at::kDouble).requires_grad_();
    param.mutable_grad() = sparse;
    double value = 0;
    CHECK_OK(clip({param}, 1.0, 2, &value));
    CHECK_DOUBLE(value, std::sqrt(15.0), 1e-12);
    CHECK_DOUBLE(param.grad().to_dense().norm().item<double>(), 1, 1e-5);
    CHECK_OK(tddp_clip_grad_value(std::vector<const tddp_tensor *>{handle(param)}.data(), 1, 0.1));
}

MULTI_TEST(norms_of_sharded_gradients, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    std::vector<at::Tensor> reference;
    for (int other = 0; other < world_size; other++) {
        if (other != 1) { // rank 1 has no shard
            const std::vector<at::Tensor> part = some(at::kFloat, other);
            reference.insert(reference.end(), part.begin(), part.end());
        }
    }
    const std::vector<at::Tensor> mine =
        rank == 1 ? std::vector<at::Tensor>() : some(at::kFloat, rank);
    for (double order : {2.0, 1.0, 3.0, infinity}) {
        const double expected = by_hand(reference, order);
        CHECK_DOUBLE(norm(mine, order, group) / expected, 1, 1e-12);
        double value = 0;
        std::vector<at::Tensor> params = params_with(mine);
        CHECK_OK(clip(params, 1.0, order, &value, 1, group));
        if (rank != 1) {
            check_close(params[0].grad(), mine[0] / (expected + 1e-6), 1e-6);
        }
    }
    // A NaN on one rank is a NaN on all ranks.
    at::Tensor bad = at::ones({4});
    bad[2] = rank == 2 ? std::numeric_limits<float>::quiet_NaN() : 1;
    for (double order : {2.0, infinity}) {
        CHECK(std::isnan(norm({bad}, order, group)));
    }
    leave(group);
}

static tddp_gradients unscale(const std::vector<at::Tensor> &params, double factor,
                              tddp_group *group = nullptr)
{
    tddp_gradients found = TDDP_GRADIENTS_NONE;
    CHECK_OK(tddp_unscale_gradients(handles_of(params).data(), params.size(), factor, group,
                                    nullptr, &found));
    return found;
}

TEST(gradients_are_unscaled_and_checked)
{
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
        const std::vector<at::Tensor> gradients = some(dtype);
        const std::vector<at::Tensor> params = params_with(gradients);
        CHECK_INT(unscale(params, 0.25), TDDP_GRADIENTS_FINITE);
        for (size_t i = 0; i < params.size(); i++) {
            CHECK(params[i].grad().equal(gradients[i] * 0.25));
        }
        // The last but one is dense and large, the last one is transposed.
        for (const size_t i : {params.size() - 2, params.size() - 1}) {
            for (const double bad : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
                const std::vector<at::Tensor> broken = params_with(gradients);
                broken[i].grad()[5][3].fill_(bad);
                CHECK_INT(unscale(broken, 0.25), TDDP_GRADIENTS_NONFINITE);
            }
        }
    }
    CHECK_INT(unscale({}, 0.25), TDDP_GRADIENTS_NONE);
    CHECK_INT(unscale({at::zeros({3})}, 0.25), TDDP_GRADIENTS_NONE);
}

TEST(sparse_gradients_are_unscaled)
{
    const at::Tensor param = at::zeros({4, 2}).requires_grad_();
    const at::Tensor rows = at::arange(2).mul(2).reshape({1, 2});
    param.mutable_grad() = at::sparse_coo_tensor(rows, at::ones({2, 2}) * 8, {4, 2});
    CHECK_INT(unscale({param}, 0.25), TDDP_GRADIENTS_FINITE);
    CHECK(param.grad()._values().equal(at::ones({2, 2}) * 2));
    param.grad()._values()[1][0].fill_(std::nan(""));
    CHECK_INT(unscale({param}, 0.25), TDDP_GRADIENTS_NONFINITE);
    const std::vector<at::Tensor> half = params_with({at::ones({2}, at::kHalf)});
    tddp_gradients found = TDDP_GRADIENTS_NONE;
    CHECK_STATUS(tddp_unscale_gradients(handles_of(half).data(), 1, 2, nullptr, nullptr, &found),
                 TDDP_UNSUPPORTED);
}

MULTI_TEST(ranks_agree_on_gradients, 3, 60)
{
    tddp_group *group = join(rank, world_size, port);
    const std::vector<at::Tensor> params = params_with({at::ones({5})});
    CHECK_INT(unscale(params, 0.5, group), TDDP_GRADIENTS_FINITE);
    CHECK_INT(unscale(rank == 1 ? params : std::vector<at::Tensor>(), 0.5, group),
              TDDP_GRADIENTS_FINITE);
    CHECK_INT(unscale({}, 0.5, group), TDDP_GRADIENTS_NONE);
    if (rank == 2) {
        params[0].grad()[1].fill_(HUGE_VAL);
    }
    CHECK_INT(unscale(params, 0.5, group), TDDP_GRADIENTS_NONFINITE);
    leave(group);
}
