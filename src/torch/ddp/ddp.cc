// The handle of DistributedDataParallel, in C signatures: checks of the arguments, ownership, and
// the conversion of exceptions to statuses. Called by the thread that runs forward; core.h's files
// contain what runs in backward.
#include <string>
#include <unordered_map>

#include "torch/tensor/broadcast.h"
#include "torch/ddp/core.h"

namespace tddp_torch
{

namespace
{

constexpr size_t broadcast_chunk_bytes = size_t{250} << 20;

// A tensor's requires_grad at construction.
struct Watched {
    at::Tensor tensor;
    bool requires_grad;
};

} // namespace

} // namespace tddp_torch

struct tddp_ddp {
    std::shared_ptr<tddp_torch::Core> core;
    std::vector<tddp_torch::Hooked> hooks;
    std::vector<tddp_torch::Watched> watched;
    std::vector<at::Tensor> buffers;
    std::unique_ptr<tddp_torch::Broadcast> sync; // the buffers' pending broadcast
    tddp_group *group = nullptr;

    ~tddp_ddp()
    {
        if (core) {
            core->disarm();
        }
        for (const auto &hook : hooks) {
            hook.accumulator->del_post_hook(hook.key);
        }
        core.reset();
        tddp_group_release_async(group);
    }
};

namespace tddp_torch
{

namespace
{

void check_param(const at::Tensor &param, const char *name)
{
    const char *fault = !param.defined()                 ? "is undefined"
                        : !param.is_leaf()               ? "is not a leaf of the graph"
                        : !param.requires_grad()         ? "does not require a gradient"
                        : param.layout() != at::kStrided ? "is not dense"
                                                         : nullptr;
    if (fault) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "parameter \"%s\" %s: expected the model's own dense parameters "
                                "that require a gradient",
                                name, fault));
    }
}

std::vector<Param> read_params(const tddp_ddp_param *params, size_t count)
{
    std::vector<Param> taken;
    std::unordered_map<const c10::TensorImpl *, size_t> seen;
    for (size_t i = 0; i < count; i++) {
        const at::Tensor &param = tensor_of(params[i].tensor);
        taken.push_back({param, params[i].name ? params[i].name : "parameter " + std::to_string(i),
                         (params[i].flags & TDDP_DDP_SPARSE) != 0,
                         (params[i].flags & TDDP_DDP_DELAYED) != 0});
        check_param(param, taken[i].name.c_str());
        const auto first = seen.emplace(param.unsafeGetTensorImpl(), i);
        if (!first.second) {
            throw Failure(tddp_fail(
                TDDP_INVALID_ARGUMENT, "parameters \"%s\" and \"%s\" are one tensor: pass it once",
                taken[first.first->second].name.c_str(), taken[i].name.c_str()));
        }
    }
    return taken;
}

std::vector<at::Tensor> read_buffers(tddp_tensor *const *buffers, size_t count)
{
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < count; i++) {
        const at::Tensor &buffer = tensor_of(buffers[i]);
        if (!buffer.defined() || buffer.layout() != at::kStrided || buffer.is_quantized()) {
            throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                    "buffer number %zu is undefined, sparse or quantized: only "
                                    "dense buffers are broadcast",
                                    i));
        }
        tensors.push_back(buffer);
    }
    return tensors;
}

std::vector<Watched> read_watched(const tddp_ddp_opts &opts)
{
    std::vector<Watched> watched;
    for (size_t i = 0; i < opts.watched_count; i++) {
        const at::Tensor &tensor = tensor_of(opts.watched[i]);
        watched.push_back({tensor, tensor.requires_grad()});
    }
    return watched;
}

void broadcast_model(tddp_ddp *ddp, const tddp_wait *wait)
{
    // Buffers first: the parameters are compared already, so a difference is in a buffer, and the
    // description that ranks compare is truncated.
    std::vector<at::Tensor> all = ddp->buffers;
    for (const Param &param : ddp->core->params()) {
        all.push_back(param.tensor);
    }
    broadcast_tensors(ddp->group, all, 0, broadcast_chunk_bytes, wait);
}

const tddp_ddp_opts &check_opts(const tddp_ddp_opts &opts, const tddp_group *group)
{
    if (opts.size != sizeof opts) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "opts.size is %zu, expected %zu", opts.size,
                                sizeof opts));
    }
    if (!group) {
        throw Failure(
            tddp_fail(TDDP_INVALID_ARGUMENT, "no process group: call init_process_group first"));
    }
    return opts;
}

// A parameter whose dtype or device has changed has another accumulator.
bool stale(const tddp_ddp &ddp)
{
    const std::vector<Param> &params = ddp.core->params();
    for (size_t i = 0; i < params.size(); i++) {
        if (!params[i].tensor.requires_grad() ||
            torch::autograd::impl::try_get_grad_accumulator(params[i].tensor) !=
                ddp.hooks[i].accumulator) {
            return true;
        }
    }
    for (const Watched &each : ddp.watched) {
        if (each.tensor.requires_grad() != each.requires_grad) {
            return true;
        }
    }
    return false;
}

const Core &current_core(const tddp_bucket *bucket, size_t gradient)
{
    const Core *core = Core::current();
    if (!core) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "a bucket's tensors exist only while its hook is called, on the "
                                "thread that calls it"));
    }
    if (gradient >= bucket->gradient_count) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "gradient %zu: the bucket has %zu", gradient,
                                bucket->gradient_count));
    }
    return *core;
}

at::Tensor &assigned(tddp_tensor *into)
{
    return *reinterpret_cast<at::Tensor *>(into);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_ddp_create(tddp_group *group, const tddp_ddp_param *params, size_t param_count,
                            tddp_tensor *const *buffers, size_t buffer_count,
                            const tddp_ddp_opts *opts, const tddp_wait *wait, tddp_ddp **out)
{
    using namespace tddp_torch;
    return guard([&] {
        const tddp_ddp_opts defaults = TDDP_DDP_OPTS_INIT;
        const tddp_ddp_opts &resolved = check_opts(opts ? *opts : defaults, group);
        auto ddp = std::make_unique<tddp_ddp>();
        ddp->group = tddp_group_retain(group);
        ddp->core = std::make_shared<Core>(read_params(params, param_count), resolved);
        ddp->buffers = read_buffers(buffers, buffer_count);
        ddp->watched = read_watched(resolved);
        ddp->core->open(group, resolved.reducer, wait);
        if (resolved.init_sync) {
            broadcast_model(ddp.get(), wait);
        }
        ddp->hooks = add_hooks(ddp->core);
        *out = ddp.release();
    });
}

void tddp_ddp_free(tddp_ddp *ddp)
{
    delete ddp;
}

int tddp_ddp_stale(const tddp_ddp *ddp)
{
    return tddp_torch::stale(*ddp);
}

tddp_status tddp_ddp_prepare(tddp_ddp *ddp, int sync, const tddp_wait *wait)
{
    return tddp_torch::guard([&] { ddp->core->prepare(sync != 0, wait); });
}

int tddp_ddp_prepare_waits(const tddp_ddp *ddp)
{
    return ddp->core->prepare_waits();
}

void tddp_ddp_suspend(tddp_ddp *ddp)
{
    ddp->core->suspend();
}

void tddp_ddp_arm(tddp_ddp *ddp, int completed)
{
    ddp->core->arm(completed != 0);
}

int tddp_ddp_round_open(const tddp_ddp *ddp)
{
    return ddp->core->iteration_open();
}

tddp_status tddp_ddp_finish_due(tddp_ddp *ddp, int sync, const tddp_wait *wait)
{
    return tddp_torch::guard([&] { ddp->core->finish_due(sync != 0, wait); });
}

int tddp_ddp_wants_outputs(const tddp_ddp *ddp)
{
    return ddp->core->wants_outputs();
}

tddp_status tddp_ddp_outputs(tddp_ddp *ddp, tddp_tensor *const *outputs, size_t count)
{
    using namespace tddp_torch;
    return guard([&] {
        std::vector<at::Tensor *> tensors;
        for (size_t i = 0; i < count; i++) {
            tensors.push_back(&assigned(outputs[i]));
        }
        ddp->core->hook_outputs(tensors);
    });
}

tddp_status tddp_ddp_set_hook(tddp_ddp *ddp, tddp_comm_hook *hook)
{
    return tddp_torch::guard([&] { ddp->core->set_hook(hook); });
}

int tddp_ddp_hook_here(const tddp_ddp *ddp)
{
    return ddp->core->hook_on_caller();
}

int tddp_ddp_on_devices(const tddp_ddp *ddp)
{
    return ddp->core->on_devices();
}

tddp_status tddp_ddp_finish_backward(tddp_ddp *ddp)
{
    return tddp_torch::guard([&] { ddp->core->finish_backward(); });
}

tddp_status tddp_ddp_set_divisor(tddp_ddp *ddp, int ranks)
{
    return tddp_torch::guard([&] { ddp->core->set_divisor(ranks); });
}

tddp_status tddp_ddp_shadow(tddp_ddp *ddp, const tddp_wait *wait)
{
    return tddp_torch::guard([&] { ddp->core->shadow(wait); });
}

tddp_status tddp_ddp_bucket_tensor(const tddp_bucket *bucket, tddp_tensor *into)
{
    using namespace tddp_torch;
    return guard([&] { assigned(into) = current_core(bucket, 0).bucket_tensor(*bucket); });
}

tddp_status tddp_ddp_gradient_tensor(const tddp_bucket *bucket, size_t i, tddp_tensor *into)
{
    using namespace tddp_torch;
    return guard([&] { assigned(into) = current_core(bucket, i).gradient_tensor(*bucket, i); });
}

tddp_status tddp_ddp_sync_buffers(tddp_ddp *ddp, int root, const tddp_wait *wait)
{
    using namespace tddp_torch;
    const tddp_status status = guard([&] {
        if (!ddp->sync || ddp->sync->root() != root) {
            ddp->sync =
                std::make_unique<Broadcast>(ddp->group, ddp->buffers, root, broadcast_chunk_bytes);
        }
        ddp->sync->run(wait);
    });
    // Only the wait ended, not the operation: the next call continues.
    const bool still_pending =
        status == TDDP_CANCELED || (status == TDDP_TIMEOUT && wait && wait->timeout_ms >= 0);
    if (!still_pending) {
        ddp->sync.reset();
    }
    return status;
}

const tddp_reducer *tddp_ddp_reducer(const tddp_ddp *ddp)
{
    return ddp->core->reducer();
}
