// Fully sharded models in C signatures: see <tddp/torch_fsdp.h>.
#include "torch/fsdp/model.h"

using tddp_torch::guard;

struct tddp_fsdp {
    std::shared_ptr<tddp_torch::ShardedModel> model;
};

namespace
{

std::vector<at::Tensor *> list(tddp_tensor *const *tensors, size_t count)
{
    std::vector<at::Tensor *> found;
    for (size_t i = 0; i < count; i++) {
        found.push_back(reinterpret_cast<at::Tensor *>(tensors[i]));
    }
    return found;
}

} // namespace

tddp_status tddp_fsdp_create(tddp_blocking_region region, tddp_fsdp **out)
{
    return guard([&] {
        auto made = std::make_unique<tddp_fsdp>();
        made->model = std::make_shared<tddp_torch::ShardedModel>(region);
        *out = made.release();
    });
}

void tddp_fsdp_free(tddp_fsdp *fsdp)
{
    delete fsdp;
}

tddp_status tddp_fsdp_add(tddp_fsdp *fsdp, const tddp_fsdp_unit_opts *opts, const tddp_wait *wait)
{
    return guard([&] { fsdp->model->add(*opts, wait); });
}

tddp_status tddp_fsdp_merge(tddp_fsdp *into, tddp_fsdp *from)
{
    return guard([&] { into->model->merge(*from->model); });
}

void tddp_fsdp_set_reshard(tddp_fsdp *fsdp, size_t unit, int after_forward)
{
    tddp_sharder_set_reshard(fsdp->model->sharder(), unit, after_forward);
}

void tddp_fsdp_set_sync(tddp_fsdp *fsdp, size_t unit, int sync)
{
    fsdp->model->unit(unit).sync = sync != 0;
}

tddp_status tddp_fsdp_begin_forward(tddp_fsdp *fsdp)
{
    return guard([&] { fsdp->model->begin_forward(); });
}

tddp_status tddp_fsdp_end_forward(tddp_fsdp *fsdp)
{
    return guard([&] { fsdp->model->end_forward(); });
}

tddp_status tddp_fsdp_before_forward(tddp_fsdp *fsdp, size_t unit, const tddp_wait *wait)
{
    return guard([&] { fsdp->model->before_forward(unit, wait); });
}

tddp_status tddp_fsdp_enter(tddp_fsdp *fsdp, size_t unit)
{
    return guard([&] { fsdp->model->enter(unit); });
}

tddp_status tddp_fsdp_leave(tddp_fsdp *fsdp, size_t unit, tddp_tensor *const *outputs, size_t count)
{
    return guard([&] { fsdp->model->leave(unit, list(outputs, count)); });
}

tddp_status tddp_fsdp_recompute(tddp_fsdp *fsdp, size_t unit)
{
    return guard([&] { fsdp->model->recompute(unit); });
}

void tddp_fsdp_abandon(tddp_fsdp *fsdp)
{
    fsdp->model->abandon();
}

int tddp_fsdp_in_graph(const tddp_fsdp *fsdp)
{
    return fsdp->model.use_count() > 1;
}

int tddp_fsdp_unfinished(const tddp_fsdp *fsdp)
{
    return fsdp->model->unfinished();
}

int tddp_fsdp_hidden(const tddp_fsdp *fsdp, size_t unit)
{
    return fsdp->model->unit(unit).hidden();
}

tddp_status tddp_fsdp_unshard(tddp_fsdp *fsdp, size_t unit, const tddp_wait *wait)
{
    return guard([&] {
        tddp_torch::check(tddp_sharder_unshard(fsdp->model->sharder(), unit, wait));
        fsdp->model->await_copies();
    });
}

void tddp_fsdp_expose(tddp_fsdp *fsdp, size_t unit)
{
    fsdp->model->unit(unit).expose();
}

void tddp_fsdp_reshard(tddp_fsdp *fsdp, size_t unit)
{
    fsdp->model->unit(unit).hide();
    tddp_sharder_reshard(fsdp->model->sharder(), unit);
}

tddp_status tddp_fsdp_shard(const tddp_fsdp *fsdp, size_t unit, tddp_tensor *into)
{
    return guard([&] { *reinterpret_cast<at::Tensor *>(into) = fsdp->model->unit(unit).shard(); });
}

tddp_status tddp_fsdp_show(tddp_fsdp *fsdp, size_t unit, const tddp_tensor *flat)
{
    return guard([&] { fsdp->model->unit(unit).show(tddp_torch::tensor_of(flat)); });
}

tddp_status tddp_fsdp_hide(tddp_fsdp *fsdp, size_t unit, int write)
{
    return guard([&] {
        tddp_torch::Unit &of = fsdp->model->unit(unit);
        if (write) {
            of.keep_shown();
        }
        of.hide();
    });
}

tddp_fsdp_piece tddp_fsdp_piece_of(const tddp_fsdp *fsdp, size_t unit, size_t param)
{
    const tddp_torch::ShardedParam &of = fsdp->model->unit(unit).params[param];
    return {of.offset, of.start, of.piece.numel(), of.sizes.data(), of.sizes.size()};
}

tddp_fsdp_copied tddp_fsdp_copied_bytes(const tddp_fsdp *fsdp)
{
    return fsdp->model->copied_bytes();
}

const tddp_sharder *tddp_fsdp_sharder(const tddp_fsdp *fsdp)
{
    return fsdp->model->sharder();
}
