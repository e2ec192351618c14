// Sparse gradients under data parallel: averaged, undefined on some ranks, accumulated, in a model
// with no others, and contrary to their flag.
#include "modes.h"

using namespace modes_test;

namespace
{

constexpr int64_t rows = 11;

// Rows of a table, whose gradient is sparse.
at::Tensor look_up(const at::Tensor &table, const std::vector<int64_t> &indices)
{
    return at::embedding(table, at::tensor(indices), -1, false, true);
}

Model with_table()
{
    Model model(0);
    model.names.insert(model.names.begin() + 2, "table");
    model.params.insert(model.params.begin() + 2, spread({rows, 3}, 9).requires_grad_());
    model.flags = {0, 0, TDDP_DDP_SPARSE};
    return model;
}

} // namespace

static void average_rows(int rank, int world_size, int port, const tddp_ddp_opts &opts)
{
    tddp_group *group = join(rank, world_size, port);
    Model model = with_table();
    tddp_ddp *ddp = wrap(group, model, &opts);
    CHECK(tddp_reducer_gradient(const_cast<tddp_reducer *>(tddp_ddp_reducer(ddp)), 2) == nullptr);
    for (int step = 0; step < 4; step++) {
        run_forward(ddp, 1);
        // Each rank looks up as many rows as its number, some twice; rank 0 none at all.
        std::vector<int64_t> indices;
        for (int i = 0; i < rank; i++) {
            indices.push_back((step + i * i) % rows);
        }
        at::Tensor loss = look_up(model.params[2], indices).sum() * (rank + 1.0);
        for (size_t i = 0; i < model.params.size(); i++) {
            loss = i == 2 ? loss : loss + model.params[i].sum();
        }
        loss.backward();
        at::Tensor expected = at::zeros({rows, 3}, at::kDouble);
        for (int r = 0; r < world_size; r++) {
            for (int i = 0; i < r; i++) {
                expected[(step + i * i) % rows] += (r + 1.0) / world_size;
            }
        }
        const at::Tensor &grad = model.params[2].grad();
        CHECK(grad.is_sparse() && grad.is_coalesced());
        check_close(grad.to_dense(), expected, 1e-12);
        CHECK(all_are(model.params[5].grad(), 1.0));
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(sparse_gradients_are_gathered_and_averaged, 3, 60)
{
    average_rows(rank, world_size, port, small_buckets());
}

MULTI_TEST(sparse_gradients_of_one_rank, 1, 60)
{
    average_rows(rank, world_size, port, small_buckets());
}

MULTI_TEST(sparse_gradients_of_two_ranks_in_a_static_graph, 2, 60)
{
    tddp_ddp_opts opts = small_buckets();
    opts.reducer.static_graph = 1;
    average_rows(rank, world_size, port, opts);
}

MULTI_TEST(sparse_gradients_accumulate_and_may_be_undefined, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model = with_table();
    tddp_ddp_opts opts = small_buckets();
    opts.reducer.find_unused = 1;
    tddp_ddp *ddp = wrap(group, model, &opts);
    const auto backward = [&](at::Tensor loss) {
        auto *handle = reinterpret_cast<tddp_tensor *>(&loss);
        CHECK_OK(tddp_ddp_outputs(ddp, &handle, 1));
        loss.backward();
    };
    const auto row = [](int64_t index, double value) {
        const at::Tensor all = at::zeros({rows, 3}, at::kDouble);
        all[index].fill_(value);
        return all;
    };
    // No rank uses the table.
    run_forward(ddp, 1);
    backward(model.params[0].sum());
    CHECK(!model.params[2].grad().defined());
    // Only rank 1 uses it.
    run_forward(ddp, 1);
    backward(rank ? look_up(model.params[2], {4}).sum() : model.params[0].sum());
    check_close(model.params[2].grad().to_dense(), row(4, 0.5), 1e-12);
    // Both accumulate, rank 0 without synchronization first.
    run_forward(ddp, 0);
    if (rank == 0) {
        look_up(model.params[2], {7}).sum().backward();
    }
    run_forward(ddp, 1);
    backward(look_up(model.params[2], {4}).sum());
    check_close(model.params[2].grad().to_dense(), row(4, 1.5) + row(7, 0.5), 1e-12);
    // A zeroed gradient, all of whose dimensions are sparse, counts as undefined.
    model.zero_grad();
    run_forward(ddp, 1);
    backward(rank ? look_up(model.params[2], {5}).sum() : model.params[0].sum());
    check_close(model.params[2].grad().to_dense(), row(5, 0.5), 1e-12);
    // A joined rank participates.
    model.forget_grad();
    CHECK_OK(tddp_ddp_set_divisor(ddp, 1));
    run_forward(ddp, 1);
    if (rank == 0) {
        CHECK_OK(tddp_ddp_shadow(ddp, nullptr));
    } else {
        backward(look_up(model.params[2], {3, 3}).sum());
        check_close(model.params[2].grad().to_dense(), row(3, 2.0), 1e-12);
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_model_with_only_sparse_gradients, 2, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model(0);
    model.params = {spread({rows, 3}, 9).requires_grad_(),
                    spread({rows, 2}, 5, at::kFloat).requires_grad_()};
    model.flags = {TDDP_DDP_SPARSE, TDDP_DDP_SPARSE};
    tddp_ddp *ddp = wrap(group, model);
    for (int step = 0; step < 3; step++) {
        run_forward(ddp, 1);
        (look_up(model.params[0], {2 * rank}).sum() +
         look_up(model.params[1], {rank, rank, 5}).sum().to(at::kDouble))
            .backward();
        const at::Tensor first = model.params[0].grad().to_dense();
        const at::Tensor second = model.params[1].grad().to_dense();
        for (int64_t row = 0; row < rows; row++) {
            CHECK(all_are(first[row], row == 0 || row == 2 ? 0.5 : 0.0));
            CHECK(all_are(second[row], row < 2 || row == 5 ? 1.0 : 0.0));
        }
        model.forget_grad();
    }
    tddp_ddp_free(ddp);
    leave(group);
}

MULTI_TEST(a_gradient_that_contradicts_its_flag_fails, 1, 60)
{
    tddp_group *group = join(rank, world_size, port);
    Model model = with_table();
    tddp_ddp *ddp = wrap(group, model);
    run_forward(ddp, 1);
    CHECK_CONTAINS(failing_backward(model.params[2].sum()).c_str(),
                   "the gradient of \"table\" is dense, but it was declared as sparse");
    tddp_ddp_free(ddp);
    model.flags.clear();
    model.forget_grad();
    ddp = wrap(group, model);
    run_forward(ddp, 1);
    CHECK_CONTAINS(failing_backward(look_up(model.params[2], {1}).sum()).c_str(),
                   "the gradient of \"table\" is sparse");
    tddp_ddp_free(ddp);
    leave(group);
}
